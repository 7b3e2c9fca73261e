"""The task that tries every notifier."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowFailException

from dropforge.errors import DropforgeError
from dropforge_airflow.alerts import telling, texts, wanted
from dropforge_airflow.tasks.failure import no_retry


def send_all(params: Mapping[str, Any] | None = None, run_id: str | None = None) -> list[str]:
    """The task: send the text through every notifier. :returns: their classes."""
    assert params is not None
    with no_retry():
        found = telling.configured()
        if not found:
            raise DropforgeError(
                "alerts",
                f"neither the environment's {wanted.ENVIRONMENT} nor the Variable {wanted.VARIABLE} names a notifier",
                "Set one of them, as docs/how-to/alerts.md shows",
            )
    alert = texts.trial(str(params["text"]), str(run_id))
    troubles = [f"{one.notifier}: {said}" for one in found if (said := telling.send(one, alert))]
    if troubles:
        raise AirflowFailException("; ".join(troubles))
    return [one.notifier for one in found]
