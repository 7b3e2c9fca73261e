"""Lines for people and for the job library: rank 0 speaks, the others keep quiet."""

from __future__ import annotations

import json
import math
import sys
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from dropforge.text import escape


@dataclass
class Console:
    """Writes to stdout, a line at a time. :param quiet: nothing is written (all ranks but 0)."""

    quiet: bool = False
    steps: int | None = None

    def say(self, text: str) -> None:
        """A line for people."""
        if not self.quiet:
            print(escape(text), flush=True)

    def progress(self, step: int, **facts: Any) -> None:
        """A line for the job library: `@progress {...}`, plain finite values only."""
        body = {"step": step, "steps": self.steps, **facts}
        self.say(f"@progress {json.dumps({key: value for key, value in body.items() if _tellable(value)})}")

    def phase(self, text: str, step: int = 0) -> None:
        """What is being done outside the steps."""
        self.say(text)
        self.progress(step, text=text)


def _tellable(value: Any) -> bool:
    """JSON has no word for NaN and infinity."""
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def warn(text: str) -> None:
    """A line on stderr, from any rank."""
    with suppress(OSError):  # what cannot be told must not change how the process ends
        print(escape(text), file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """`1:02:03` or `2:03`."""
    whole = round(seconds)
    hours, rest = divmod(whole, 3600)
    minutes, left = divmod(rest, 60)
    return f"{hours}:{minutes:02d}:{left:02d}" if hours else f"{minutes}:{left:02d}"
