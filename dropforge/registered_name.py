"""A family's name in MLflow: in the registry, which models and prompts share, and among experiments it is free, or the
family's own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final
from urllib.parse import quote

from dropforge.descriptions import of_family
from dropforge.errors import DataError
from dropforge.rest import MissingError, Rest

#: On each registered model and experiment of a family; its value is the family's name.
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


def check_names(tracking_uri: str, family: str) -> None:
    """`check_name` and `check_experiment`: what is seen to before a family trains."""
    check_experiment(tracking_uri, family)
    check_name(tracking_uri, family)


def check_experiment(tracking_uri: str, family: str) -> None:
    """See that an experiment with a family's name is the family's, before it trains.

    :raises DataError: if it is somebody else's. :raises OSError, ValueError: if the server does not answer.
    """
    rest = Rest(tracking_uri)
    try:
        found = rest.call("GET", f"experiments/get-by-name?experiment_name={quote(family)}")["experiment"]
    except MissingError:
        return
    tags = {tag["key"]: tag.get("value", "") for tag in found.get("tags", ())}
    if is_marked(tags, family):
        return
    asked = {
        "experiment_ids": [found["experiment_id"]],
        "filter": "tags.`dropforge.run` LIKE '%'",  # of earlier versions, which marked runs alone
        "run_view_type": "ALL",
        "max_results": 1,
    }
    if not rest.call("POST", "runs/search", asked).get("runs"):
        raise DataError(
            f"family {family}",
            "an experiment in MLflow has its name, and was not made for it (it may be among the deleted ones)",
            "Take a family of another name, or rename the experiment; if the family's runs are to be in it, set its "
            f"tag `{TAG_FAMILY}` to {family}",
        )


def is_marked(tags: Mapping[str, str], family: str) -> bool:
    """Whether an experiment with these tags is the family's; those of earlier versions have its description alone."""
    return tags.get(TAG_FAMILY) == family or tags.get("mlflow.note.content") == of_family(family)
