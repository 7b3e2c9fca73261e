"""The model version that a run registered, and whether it was promoted."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from dropforge import tracking
from dropforge.text import read_count

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run


class Version(NamedTuple):
    """What a run registered. :param alias: who holds it now, in words. :param address: by which MLflow loads it."""

    family: str
    number: str
    promoted: bool
    alias: str
    address: str


def registered(mlflow: MlflowClient, run: Run) -> Version | None:
    """The version that a run registered; None if it registered none, or that was deleted since."""
    from mlflow.exceptions import MlflowException

    family, number = run.data.tags.get(tracking.TAG_FAMILY, ""), run.data.tags.get(tracking.TAG_VERSION, "")
    if not family or read_count(number) is None:
        return None
    try:
        tags = mlflow.get_model_version(family, number).tags
    except MlflowException as error:
        if error.error_code not in tracking.NOT_THERE:
            raise
        return None  # deleted since
    alias = run.data.params.get("promote.alias", "champion")
    holder = tracking.by_alias(mlflow, family, alias)
    if holder is not None and str(holder.version) == number:
        return Version(family, number, True, alias, f"models:/{family}@{alias}")
    told = f"{alias} is version {holder.version}" if holder else f"there is no {alias}"
    # The tag tells whom it followed, from the promotion on.
    held = tracking.previous_holder(mlflow, family, tags, alias) is not None
    return Version(family, number, held, told, f"models:/{family}/{number}")
