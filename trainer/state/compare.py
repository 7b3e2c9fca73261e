"""Whether a run may go on from a checkpoint of another recipe: which keys changed, and which of these are harmless."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Final

# The order of the samples is held by the plan's digest, the rows by the dataset's; these keys change neither them, nor
# the arithmetic of a step beyond the order of its sums.
SAFE: Final = (
    "code.wheel",  # where it lies; its digest may not change
    "compute.*",
    "curation.*",
    "data.eval_fraction",
    "data.max_left_out",
    "data.max_row_bytes",
    "data.split_salt",
    "data.text_column",
    "data.columns*",
    "data.prompt_template",
    "evaluate.generation.batch",
    "promote.*",
    "train.micro_batch",
    "train.activation_checkpointing",
    "train.compile",
    "train.offload",
    "train.attention",
    "train.deterministic",
    "train.eval_every",
    "train.checkpoint_every",
    "train.checkpoints",
    "train.early_stopping*",
    "train.fast_checkpoints*",
    "train.keep_*",
    "train.log_*",
    "train.max_skipped_steps",
    "train.profile",
    "train.tensorboard",
)
# Weights of the best evaluation are kept only while they are asked for.
_SAFE_VALUES: Final = {"train.export": "'last'"}
_NONE: Final = "nothing"


@dataclass(frozen=True)
class Change:
    """A key that differs. :param old, new: its values as text. :param safe: whether a resume may go on."""

    key: str
    old: str
    new: str
    safe: bool

    def __str__(self) -> str:
        return f"{self.key}: {self.old} -> {self.new}"


def facts(recipe: Mapping[str, Any], **more: str) -> dict[str, str]:
    """A recipe as dotted keys with text values, and other facts that a resume must share."""
    return {**_flat(recipe, ""), **more}


def changes(old: Mapping[str, str], new: Mapping[str, str]) -> list[Change]:
    """The keys that differ, in order."""
    return [
        Change(key, old.get(key, _NONE), new.get(key, _NONE), _safe(key, new))
        for key in sorted({*old, *new})
        if old.get(key) != new.get(key)
    ]


def free(changed: Collection[Change]) -> list[str]:
    """Patterns of the keys that may change where these did."""
    unsafe = [change.key for change in changed if not change.safe]
    return [pattern for pattern in SAFE if not any(fnmatchcase(key, pattern) for key in unsafe)]


def _safe(key: str, recipe: Mapping[str, str]) -> bool:
    if key == "train.eval_every" and recipe.get("train.schedule") == "'plateau'":
        return False  # the rate follows from the evaluations
    return any(fnmatchcase(key, pattern) for pattern in SAFE) or _SAFE_VALUES.get(key) == recipe.get(key, _NONE)


def _flat(values: Mapping[str, Any], prefix: str) -> dict[str, str]:
    found: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping):
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = repr(value)
    return found
