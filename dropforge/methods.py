"""Methods and precisions of training by name: those that add adapters, those that are not done here, and why a rank
reads a whole base model."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

from dropforge.errors import RecipeError

LOW_RANK: Final = ("lora", "dora", "qlora")  # adapters that can be merged into their base
ADAPTERS: Final = (*LOW_RANK, "prefix")  # methods that leave the base's own weights alone
NF4_BLOCK: Final = 64  # values of `qlora` that share a scale, and
NF4_SCALES: Final = 256  # scales that share one of their own


def why_whole(
    *, task: str, model: str | None, new_tokens: bool, method: str, offload: str, sharded: bool
) -> str | None:
    """Why each rank holds the whole base model before it keeps its part; None where it reads only its shard.

    :param model: None for a new one. :param new_tokens: whether it gets any.
    :param sharded: whether ranks share its weights.
    """
    if not sharded or model is None:
        return "each keeps it, or makes it"
    if task != "causal-lm":
        return f"`task: {task}` gives it a head that its files do not have"
    if method not in ("full", "lora"):
        return f"`train.method: {method}` looks at its weights"
    if offload in ("states", "all"):
        return f"`train.offload: {offload}` keeps shards elsewhere than where they are read to"
    if new_tokens:
        return "rows of new tokens are the mean of all others"
    return None


_IN_TRL: Final = {
    "cpo": "CPOTrainer",
    "dpo": "DPOTrainer",
    "grpo": "GRPOTrainer",
    "ipo": "DPOTrainer",
    "kto": "KTOTrainer",
    "online-dpo": "OnlineDPOTrainer",
    "orpo": "ORPOTrainer",
    "ppo": "PPOTrainer",
    "reward": "RewardTrainer",
    "rloo": "RLOOTrainer",
    "simpo": "CPOTrainer",
}


def check_done(recipe: Mapping[str, Any]) -> None:
    """Refuse what has a name and is not done here, before anything else is said of the recipe.

    :raises RecipeError: with the key, the cause and the mend.
    """
    for section, key, refusal in (
        ("train", "method", _of_method),
        ("train", "precision", _of_precision),
        ("evaluate", "precision", _of_precision),
    ):
        values = recipe.get(section)
        if isinstance(values, Mapping) and (refused := refusal(values.get(key))) is not None:
            raise RecipeError(f"recipe key `{section}.{key}`", *refused)


def _of_method(method: object) -> tuple[str, str] | None:
    """Cause and mend for a method that learns from preferences or rewards; None for any other value."""
    trainer = _IN_TRL.get(method.lower().replace("_", "-")) if isinstance(method, str) else None
    if trainer is None:
        return None
    return (
        f"`{method}` learns from preferences or rewards, and here models learn from what rows say",
        f"Fine-tune with `full` or `lora`, and give the model that the run exports to TRL's {trainer}",
    )


_NARROW: Final = re.compile(r"(mx|nv)?-?(fp|float)-?[48](-.*)?")


def _of_precision(precision: object) -> tuple[str, str] | None:
    """Cause and mend for arithmetic in 8 bits or fewer; None for any other value."""
    if not isinstance(precision, str) or not _NARROW.fullmatch(precision.lower().replace("_", "-")):
        return None
    return (
        f"`{precision}` is not done: its usual scales are taken over a whole micro-batch, so that what a row teaches "
        "would depend on the rows beside it",
        "Use `bf16`; `method: qlora` and `optimizer: adamw-8bit` save memory",
    )


def nf4_bytes(values: int) -> int:
    """Bytes of a matrix in NF4 with double quantisation (https://arxiv.org/abs/2305.14314, section 3).

    Half a byte a value, a byte of scale for each block of 64 of them, four for each 256 scales, and the scales' mean.
    """
    blocks = -(-values // NF4_BLOCK)
    return -(-values // 2) + blocks + 4 * -(-blocks // NF4_SCALES) + 4
