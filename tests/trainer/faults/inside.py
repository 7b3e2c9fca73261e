"""What runs inside the processes of a disturbed run: the trace of its rows, and the points where a fault strikes.

It knows no trainer: `ours` and the peer call `reach` where they are, and `seen` with what they trained on. A process
learns from its environment where to strike; one without `FAULT` only writes its trace.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

FOLDER: Final = "FAULT_FOLDER"
ATTEMPT: Final = "FAULT_ATTEMPT"
POINT: Final = "FAULT"
_LONGEST: Final = 300.0  # seconds; nobody waits for a driver that is gone
_LOOK: Final = 0.01


@dataclass(frozen=True)
class Point:
    """Where a fault strikes.

    :param phase: one of `prepare`, `step`, `loss`, `evaluation`, `save`, `seal`, `export`.
    :param step: optimizer steps done by then; -1 for any. :param rank: who gets there; -1 for every rank.
    :param act: `hold` waits for the driver, which does the rest from outside; the others are done here.
    :param times: for how many steps in a row.
    """

    phase: str
    step: int = -1
    rank: int = -1
    act: str = "hold"
    times: int = 1

    def env(self) -> dict[str, str]:
        return {POINT: json.dumps(asdict(self))}


def rank() -> int:
    return int(os.environ.get("RANK", "0"))


def folder() -> Path:
    return Path(os.environ[FOLDER])


def act(phase: str, step: int = -1) -> str:
    """What is to be done here; empty for nothing."""
    text = os.environ.get(POINT)
    if not text:
        return ""
    point = Point(**json.loads(text))
    here = point.phase == phase and point.rank in (-1, rank())
    return point.act if here and (point.step < 0 or point.step <= step < point.step + point.times) else ""


def reach(phase: str, step: int = -1) -> None:
    """Strike, if this is the point: wait for the driver, or for ever."""
    found = act(phase, step)
    if found == "hold":
        (folder() / f"reached-{rank()}").touch()
        _wait_for(folder() / "released")
    elif found == "sleep":
        fall_asleep()


def fall_asleep() -> None:
    time.sleep(_LONGEST)


def _wait_for(path: Path) -> None:
    end = time.monotonic() + _LONGEST
    while not path.exists() and time.monotonic() < end:
        time.sleep(_LOOK)


def here() -> None:
    """Tell the driver which process this rank is."""
    (folder() / f"pid-{rank()}").write_text(str(os.getpid()))


def seen(step: int, rows: list[str], applied: bool) -> None:
    """Note what this rank trained on in one step. :param step: its number, from 1. :param applied: not skipped."""
    line = json.dumps({"step": step, "rank": rank(), "rows": rows, "applied": applied})
    path = folder() / f"trace-{os.environ[ATTEMPT]}-{rank()}.jsonl"
    with path.open("a") as stream:
        stream.write(f"{line}\n")
