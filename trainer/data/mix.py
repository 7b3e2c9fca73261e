"""Sources of the training rows, and how often an epoch goes through each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from dropforge.errors import DataError
from dropforge.text import escape

_NAMED: Final = 20  # sources that a message names
_NEAR: Final = 0.1  # of the passes asked for, by which those of whole packs may differ untold


@dataclass(frozen=True)
class Mix:
    """Sources and how often an epoch goes through each.

    :param source: (N,) the source of each document, an index into `names`.
    :param passes: for each source its passes in an epoch, as the recipe asks.
    """

    source: NDArray[np.int32]
    names: tuple[str, ...]
    passes: tuple[float, ...]


def make_mix(
    asked: Mapping[str, float] | None, names: tuple[str, ...], source: NDArray[np.int32], counts: NDArray[np.int64]
) -> Mix | None:
    """The recipe's `data.mix` for the sources that there are; one that it does not name is passed once.

    :param counts: documents of each source.
    :raises DataError: if it names a source that is not there or has nothing to learn from, or leaves nothing.
    """
    if asked is None:
        return None
    there = sorted(name for name, count in zip(names, counts.tolist(), strict=True) if count)
    told = ", ".join(map(repr, there[:_NAMED])) + (f" and {len(there) - _NAMED} more" if len(there) > _NAMED else "")
    for name in asked:
        if name not in there:
            cause = (
                "none of its rows that are used has a token to learn from"
                if name in names
                else "there is no such source"
            )
            raise DataError(f"recipe key `data.mix`, source {name!r}", cause, f"The sources are: {told}")
    passes = tuple(float(asked.get(name, 1.0)) for name in names)
    if not any(passed and count for passed, count in zip(passes, counts.tolist(), strict=True)):
        raise DataError("recipe key `data.mix`", "it leaves nothing to learn from", f"The sources are: {told}")
    return Mix(source, names, passes)


def unlike_asked(mixture: Mapping[str, Mapping[str, float]]) -> list[str]:
    """What is told of sources that an epoch goes through otherwise than asked. :param mixture: of the plan."""
    return [
        f"source {escape(name)}: an epoch goes {one['passes']:g} times through it, and {one['passes_asked']:g} were "
        "asked: it takes whole packs of a source, and at least one; without packing (train.packing) it is as asked"
        for name, one in sorted(mixture.items())
        if abs(one["passes"] - one["passes_asked"]) > _NEAR * one["passes_asked"]
    ]
