"""What may be asked of the profiler: a span of steps in a recipe, or the next steps of a run that goes on.

Standard library only, because the trainer reads it as well.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from typing import Final

from dropforge.json_objects import parse_object

MOST: Final = 50  # steps; traces of more are too large to be opened
_SPAN: Final = re.compile(r"([1-9][0-9]{0,8})(?:-([1-9][0-9]{0,8}))?")


@dataclass(frozen=True)
class Span:
    """Steps `first` to `last`, both included; the first step of a training is 1."""

    first: int
    last: int

    @classmethod
    def parse(cls, text: str) -> Span:
        """From `100-103` or `100`. :raises ValueError: if these steps cannot be profiled."""
        found = _SPAN.fullmatch(text)
        if not found:
            raise ValueError(f"{text!r} is neither a step nor steps as in '100-103'")
        span = cls(int(found[1]), int(found[2] or found[1]))
        if span.first < 2:
            raise ValueError("the first step is like no other: begin with the second at the earliest")
        if not 0 < span.steps <= MOST:
            raise ValueError(f"{text!r} are {span.steps} steps, 1 to {MOST} can be profiled")
        return span

    @property
    def steps(self) -> int:
        return self.last - self.first + 1

    def __str__(self) -> str:
        return f"{self.first}-{self.last}"


def request(steps: int) -> bytes:
    """The object that asks a run to profile its next steps."""
    return json.dumps({"steps": steps}).encode()


def read_request(data: bytes) -> int:
    """Steps that such an object asks for. :raises ValueError: if it asks for none that can be."""
    steps = parse_object(data, "the request for a profile").get("steps")
    if not isinstance(steps, int) or isinstance(steps, bool) or not 1 <= steps <= MOST:
        raise ValueError(f"`steps` must be a number from 1 to {MOST}")
    return steps
