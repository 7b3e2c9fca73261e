"""What stands for the forward methods of blocks, and can be switched off for a while."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol


class Switched(Protocol):
    """:ivar on: whether it does more than the method that it stands for."""

    on: bool


@contextmanager
def switched_off(forwards: Sequence[Switched]) -> Iterator[None]:
    """Within it, they do what the methods do that they stand for."""
    for forward in forwards:
        forward.on = False
    try:
        yield
    finally:
        for forward in forwards:
            forward.on = True
