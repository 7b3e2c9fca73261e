"""What the library's hooks hear of a block while it computes, as a router's logits, kept from the code of the block.

The hooks append to one list for all blocks. A list's length becomes a part of the code that `torch.compile` makes: each
block would have code of its own, and other code still where activation checkpointing computes it again, when nobody
listens any more.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Listening:
    """Of one block. :ivar heard: what was listened for when it last computed on the way forward."""

    def __init__(self) -> None:
        self.heard: tuple[str, ...] = ()

    @contextmanager
    def afresh(self) -> Iterator[None]:
        """Within it the lists are empty at first; what they have at the end is handed on, if anybody listens."""
        lists = _lists()
        outer = None if lists is None else lists.get()
        if outer is not None:
            self.heard = tuple(name for name, found in outer.items() if isinstance(found, list))
        if not self.heard:
            yield
            return
        own: dict[str, Any] = {**(outer or {}), **{name: [] for name in self.heard}}
        token = lists.set(own)
        try:
            yield
        finally:
            lists.reset(token)
        if outer is not None:
            for name in self.heard:
                outer[name] += own[name]


def _lists() -> Any:
    """Where the library keeps the lists, by what is heard; None if it has none."""
    return getattr(sys.modules.get("transformers.utils.output_capturing"), "_active_collector", None)
