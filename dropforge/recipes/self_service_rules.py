"""What the recipe of a family's first drop may not say, where the installation lets that recipe become the family's.

Whoever may upload the first drop decides what the family learns and when a model of it is promoted, but not what code
runs, where, with how much it is curated, with which of the environment's values, nor that the installation's masks and
gate do not count.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, Final

from dropforge import holdout
from dropforge.errors import RecipeError
from dropforge.recipe import Evaluate
from dropforge.recipe_promote import Promote
from dropforge.recipes.drop_rules import EITHER, STRICTER

_METRIC: Final = "promote.metric"
_HOLDOUT: Final = "evaluate.holdout"
_MAX_ROWS: Final = "evaluate.max_rows"
_GUARDS: Final = "promote.guards"
#: What a preset sets of these is not taken away either, as `curation: none` would.
WHERE_CURATED: Final = (
    "curation.engine",
    "curation.deadline_minutes",
    "curation.spark",
    "curation.workers",
    "curation.memory",
)
#: Keys that only the form and presets have, those that a drop's recipe extends among them.
NOT_ITS_OWN: Final = (
    "code",
    "compute.image",
    "compute.namespace",
    "compute.kind",
    "compute.min_nodes",
    "compute.service_account",
    "compute.backend",
    "compute.instance",
    "compute.node_selector",
    "compute.tolerations",
    "compute.annotations",
    "compute.env",
    "compute.image_pull_secrets",
    "compute.priority_class",
    "compute.ephemeral_storage_gb",
    "compute.shared_memory_gb",
    "compute.queue_timeout_minutes",
    "compute.volumes",
    "compute.run_as",
    "compute.queue",
    "compute.priority",
    "compute.topology",
    "compute.topology_required",
    "compute.compile_cache",
    "compute.data_cache",
    "compute.data_cache_gb",
    "compute.fabric",
    "compute.network_env",
    "compute.preflight",
    "compute.gpu_tflops",
    "compute.price",
    *WHERE_CURATED,
    "curation.pii.key_env",
    "curation.gate.override",
    "promote.alias",
    "promote.stale",
    "train.checkpoints",
    "train.fast_checkpoints",
)
#: What a preset sets of these stays as it is, whatever the drop's recipe replaces or extends.
KEPT: Final = (
    "curation.pii",
    "curation.decontaminate",
    _METRIC,
    _HOLDOUT,
    _GUARDS,
    "promote.slices",
    "promote.approval",
    "compute.fabric",
    "compute.network_env",
    "compute.preflight",
    "compute.gpu_tflops",
    "compute.price",
    "compute.limits",
    "compute.idle",
    "drops.bounds",
)
#: What a preset switches off or on, a drop does not switch back.
SWITCHED: Final = {
    "promote.input_example": False,
    "promote.better_than_base": True,
    "curation.unknown_keys": "refuse",
}
#: Limits of a preset that a drop may make closer, and which way that is.
CLOSER: Final = STRICTER | {"data.max_row_bytes": -1, "promote.min_improvement": 1, "promote.confidence": 1}
#: What a preset says in fractions of the deciding metric, so that a drop chooses no other one either.
_OF_THE_METRIC: Final = ("promote.min_improvement", "promote.confidence", "promote.stale")
_GATE: Final = "curation.gate"  # a drop may add limits to those of the preset


def check_chosen(values: Mapping[str, Any]) -> None:
    """Refuse keys of the installation.

    :param values: the drop's recipe, `extends` not resolved.

    :raises RecipeError: for a key that is not the drop's to choose.
    """
    for path in NOT_ITS_OWN:
        section, _, key = path.rpartition(".")
        found = at_path(values, section) if section else values
        if isinstance(found, Mapping) and key in found:
            mend = "Set it in the form or the preset"
            raise RecipeError(f"recipe key `{path}`", "a recipe in a drop may not choose it", mend)


def check_kept(under: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """Refuse what loosens the preset.

    :param under: the preset. :param merged: the same with the drop's recipe over it.

    :raises RecipeError: if masks or limits of the preset are lost or loosened, or where it computes is lost.
    """
    for path in KEPT:
        if at_path(under, path) is not None and at_path(merged, path) != at_path(under, path):
            raise _taken(path)
    for path, state in SWITCHED.items():
        if at_path(under, path) == state and at_path(merged, path) != state:
            raise _taken(path)
    if any(at_path(under, path) is not None for path in _OF_THE_METRIC) and at_path(merged, _METRIC) not in (
        at_path(under, _METRIC),
        Promote.model_fields["metric"].default,
    ):
        raise _taken(_METRIC)
    limits = at_path(under, _GATE)
    if limits is not None:
        for path in _leaves(_GATE, limits):
            if at_path(merged, path) != at_path(under, path):
                raise _taken(path)
    for path, way in CLOSER.items():
        limit, now = at_path(under, path), at_path(merged, path)
        numbers = isinstance(now, int | float) and isinstance(limit, int | float)
        if limit is not None and (now is None or (numbers and not way * (now - limit) >= 0)):
            raise _taken(path)
    for path, (low, high) in (at_path(under, "drops.bounds") or {}).items():
        number, other = at_path(merged, path), EITHER.get(path)
        instead = other is not None and at_path(under, other) is None and at_path(merged, other) is not None
        if number is None and (instead or at_path(under, path) is not None):
            raise _taken(path)
        if isinstance(number, int | float) and not low <= number <= high:
            raise _taken(path)
    if at_path(under, _HOLDOUT) is not None:
        _check_holdout(under, merged)
    for path in WHERE_CURATED:
        if at_path(under, path) is not None and at_path(merged, path) is None:
            raise _taken(path)


def _check_holdout(under: Mapping[str, Any], merged: Mapping[str, Any]) -> None:
    """:raises RecipeError: if the preset's evaluation set would say less than the preset has it say."""
    least, rows = at_path(under, _MAX_ROWS) or Evaluate.model_fields["max_rows"].default, at_path(merged, _MAX_ROWS)
    if isinstance(rows, int) and rows < least:
        raise _taken(_MAX_ROWS)
    guards = at_path(merged, _GUARDS) if at_path(under, _GUARDS) is None else None
    for guard in guards if isinstance(guards, list | tuple) else ():
        # With such a guard a candidate need not be as good as the champion there any more.
        of_holdout = isinstance(guard, Mapping) and str(guard.get("metric")).startswith(holdout.PREFIX)
        if of_holdout and guard.get("max_regression") is not None:
            raise _taken(_GUARDS)


def _taken(path: str) -> RecipeError:
    return RecipeError(
        f"recipe key `{path}`",
        "the preset decides it, and a recipe in a drop may not change it or take it away",
        "Leave it out, and no `curation: none` in its place; the form and the preset may",
    )


def at_path(values: Any, path: str) -> Any:
    """The value at a path; None where there is none."""
    for key in path.split("."):
        values = values.get(key) if isinstance(values, Mapping) else None
    return values


def _leaves(path: str, value: Any) -> Iterator[str]:
    """Paths of the values in a section."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield from _leaves(f"{path}.{key}", inner)
    else:
        yield path
