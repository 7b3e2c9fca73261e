"""Compiled blocks in a training: their code is made and compared before the first step, and counted after it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Final

from trainer.compat import compiler_counts
from trainer.data.batch import Batch
from trainer.data.tokens import Tokens
from trainer.model.fit import rehearsal

_LENGTH: Final = 512  # tokens of the rows that code is made for at first; it takes any other number too


@dataclass
class Compiled:
    """What was compiled. :param blocks: of the model.

    :param graphs: made before the first step, and :param cached: how many of their parts the cache had. :param more:
        made after it, because rows were of another kind than those before.
    :param seconds: until the first step. :param difference: largest, of a gradient from that of the model's own code.
    """

    blocks: int
    graphs: int = 0
    cached: int = 0
    more: int = 0
    seconds: float = 0.0
    difference: float = 0.0
    _before: tuple[int, int] = field(default_factory=compiler_counts)
    _began: float = field(default_factory=time.perf_counter)

    def ready(self) -> None:
        """All that is known to come is compiled."""
        graphs, cached = compiler_counts()
        self.graphs, self.cached = graphs - self._before[0], cached - self._before[1]
        self.seconds = time.perf_counter() - self._began

    def step(self) -> int:
        """Graphs that were made since `ready` or the last call."""
        more = compiler_counts()[0] - self._before[0] - self.graphs
        new, self.more = more - self.more, more
        return new

    def plain(self) -> dict[str, Any]:
        """For the report, as JSON values."""
        return {key: value for key, value in asdict(self).items() if not key.startswith("_")}

    def __str__(self) -> str:
        cached = f", {self.cached} of their parts from the cache," if self.cached else ""
        return (
            f"compiled: {self.blocks} blocks share {self.graphs} graphs, made{cached} in {self.seconds:.1f} s; "
            f"gradients differ by {self.difference:.1e} of their norm from those of the model's own code"
        )


def kinds(data: Tokens, length: int, packed: bool, rows: int) -> Iterator[Batch]:
    """Micro-batches of all the kinds that code is made for: one row and several, and what their masks differ by.

    They are the same at every start, so that code is made for the same sizes first.

    :param length: longest row in tokens. :param packed: whether rows hold several documents. :param rows: of a
        micro-batch, at most.
    """
    length = min(_LENGTH, length)
    for count in sorted({1, min(2, rows)}):
        whole = rehearsal(data, length, 0.5, False, count)
        yield whole
        if whole.labelled:
            yield replace(whole, places=whole.places - length // 2)  # what stands behind a row's place is padding
        elif packed:
            yield rehearsal(data, length, 0.5, True, count)
