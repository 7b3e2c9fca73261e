"""A family's name in MLflow's registry, which models and prompts share: it is free, or the family's own."""

from __future__ import annotations

from typing import Final
from urllib.parse import quote

from dropforge.errors import DataError
from dropforge.rest import MissingError, Rest

#: On each registered model of a family; its value is the family's name.
TAG_FAMILY: Final = "dropforge.family"
_IS_PROMPT: Final = "mlflow.prompt.is_prompt"


def check_name(tracking_uri: str, family: str) -> None:
    """See that nothing of somebody else has a family's name: before it trains, and before a version or an alias is
    written.

    :raises DataError: for a prompt, or a model that is not marked as the family's.
    :raises OSError, ValueError: if the server does not answer.
    """
    try:
        found = Rest(tracking_uri).call("GET", f"registered-models/get?name={quote(family)}")["registered_model"]
    except MissingError:
        return
    tags = {tag["key"]: tag.get("value", "") for tag in found.get("tags", ())}
    if tags.get(_IS_PROMPT) == "true":
        raise DataError(
            f"family {family}",
            "a prompt in MLflow's registry has its name, and no model can have the same",
            "Take a family of another name, or register the prompt under another and delete this one",
        )
    if tags.get(TAG_FAMILY) != family:
        raise DataError(
            f"family {family}",
            "a model in MLflow's registry has its name, and was not made for it",
            "Take a family of another name; if the model's versions are to be this family's, set its tag "
            f"`{TAG_FAMILY}` to {family}",
        )
