"""How fast earlier runs like this one trained, from MLflow."""

from __future__ import annotations

from collections.abc import Mapping
from statistics import median
from typing import TYPE_CHECKING, Final

from dropforge import tracking
from dropforge.forecast import Speed
from dropforge.recipe import Recipe
from dropforge.recipe_params import with_defaults

if TYPE_CHECKING:
    from mlflow.entities import Run

METRIC: Final = "train/tokens_per_second_per_device"
_LATELY: Final = 200  # runs of the family that are looked through
_MOST: Final = 5  # of those like this one that count
#: Recipe keys, and sections, on which the speed of a rank depends.
_ALIKE: Final = (
    "task",
    "base.model",
    "base.scratch",
    *(
        f"train.{key}"
        for key in (
            "method",
            "lora",
            "prefix",
            "freeze",
            "sequence_length",
            "packing",
            "attention",
            "micro_batch",
            "tokens_per_step",
            "rows_per_step",
            "activation_checkpointing",
            "compile",
            "offload",
            "optimizer",
            "precision",
            "deterministic",
        )
    ),
    *(
        f"compute.{key}"
        for key in (
            "backend",
            "instance",
            "nodes",
            "processes_per_node",
            "cpus",
            "gpus",
            "gpu_memory_gb",
            "gpu_tflops",
            "parallel",
        )
    ),
)


def measured(tracking_uri: str, family: str, recipe: Recipe) -> Speed | None:
    """The median speed of a rank over the family's newest runs that have the same model and compute; None without one.

    :raises MlflowException: if MLflow does not answer.
    """
    mlflow = tracking.client(tracking_uri)
    experiment = mlflow.get_experiment_by_name(family)
    if experiment is None:
        return None
    runs = mlflow.search_runs(
        [experiment.experiment_id],
        f"metrics.`{METRIC}` > 0",
        max_results=_LATELY,
        order_by=["attributes.start_time DESC"],
    )
    wanted = alike(recipe.flat())
    same: list[Run] = [run for run in runs if alike(with_defaults(run.data.params)) == wanted][:_MOST]
    if not same:
        return None
    name = same[0].data.tags.get(tracking.TAG_RUN, same[0].info.run_id)
    count = f"the median of {len(same)} runs" if len(same) > 1 else "measured by a run"
    speed = median(run.data.metrics[METRIC] for run in same)
    source = f"{speed:,.0f} tokens a second and rank, {count} of the family with this model and compute ({name})"
    return Speed(speed, source)


def alike(params: Mapping[str, str]) -> dict[str, str]:
    """Of a flat recipe what must be the same; a key that a run of an older version lacks counts as not set."""
    return {
        key: str(value)[:6000]
        for key, value in params.items()
        if str(value) != "None" and any(key == one or key.startswith(f"{one}.") for one in _ALIKE)
    }
