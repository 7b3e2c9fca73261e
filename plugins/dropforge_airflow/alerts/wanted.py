"""Who wants to be told what: a JSON list in `DROPFORGE_NOTIFY`, else in Airflow's Variable `dropforge_notify`."""

from __future__ import annotations

from typing import Any, Final

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, field_validator

from dropforge.errors import DropforgeError
from dropforge.secret_looks import looks_secret
from dropforge.validation_errors import cause
from dropforge_airflow.alerts.texts import OCCASIONS, Alert, Occasion

VARIABLE: Final = "dropforge_notify"
ENVIRONMENT: Final = "DROPFORGE_NOTIFY"


class Wanted(BaseModel):
    """One notifier, and what it is to tell.

    :param notifier: dotted name of a class of Airflow's `BaseNotifier`.
    :param arguments: what it is made with; `{subject}`, `{body}` and the other words stand for the alert.
    :param occasions: which alerts it gets. :param families: of which families; None for all, and for what has none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    notifier: str = Field(pattern=r"^[A-Za-z_][A-Za-z0-9_]*(\.[A-Za-z_][A-Za-z0-9_]*)+$", max_length=300)
    arguments: dict[str, Any] = {}
    occasions: list[Occasion] = list(OCCASIONS)
    families: list[str] | None = None

    @field_validator("arguments")
    @classmethod
    def _no_secret_and_some_text(cls, arguments: dict[str, Any]) -> dict[str, Any]:
        texts = list(_texts(arguments))
        for key, text in texts:
            if looks_secret("" if key.endswith("conn_id") else key, text):
                raise ValueError(f"`{key}` looks like a secret: put it into a connection, and name that")
        if not any("{body" in text or "{subject" in text for _, text in texts):
            raise ValueError("no argument holds `{body}` or `{subject}`, so nothing would be sent")
        return arguments

    def wants(self, alert: Alert) -> bool:
        return bool(set(alert.occasions) & set(self.occasions)) and (
            self.families is None or alert.family in self.families
        )


_LIST: Final = TypeAdapter(list[Wanted])


def parse(text: str, where: str) -> list[Wanted]:
    """:raises DropforgeError: naming the entry and the mend; it repeats no value, which may be a secret."""
    if not text.strip():
        return []
    try:
        return _LIST.validate_json(text)
    except ValidationError as error:
        first = error.errors(include_input=False, include_url=False)[0]
        place = ".".join(str(part) for part in first["loc"])
        said = f"{f'`{place}`: ' if place else ''}{cause(first, shown=False)}"
        raise DropforgeError(
            where, said, "Fix it as docs/how-to/alerts.md shows, and try it with the DAG `dropforge_alerts`"
        ) from None


def _texts(value: Any, key: str = "") -> list[tuple[str, str]]:
    """All strings within, with the nearest key."""
    if isinstance(value, dict):
        return [item for name, inner in value.items() for item in _texts(inner, str(name))]
    if isinstance(value, list):
        return [item for inner in value for item in _texts(inner, key)]
    return [(key, value)] if isinstance(value, str) else []
