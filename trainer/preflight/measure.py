"""`python -m trainer.preflight.measure`: one rank's process that meets the others and measures all-reduces with them.

It tells by a file how far it is, and how it ended; `trainer.preflight.ranks` starts it, reads that, and may end it.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from dropforge.errors import RecipeError
from dropforge.network_bench import Figure, bus, culprit
from dropforge.placement.fabrics import Preflight
from trainer.node.device_errors import NodeError
from trainer.preflight.collectives import links, timed
from trainer.preflight.meeting import AbsentError, join
from trainer.preflight.transport import carried, wrong
from trainer.preflight.verdict import Figures, told, too_slow
from trainer.state.stop import die_with_parent

if TYPE_CHECKING:
    from trainer.gang import Gang

_TRIES: Final = 5
_SMALL_TRIES: Final = 20
_SMALLEST: Final = 4  # bytes
_PROBE: Final = 1 << 20  # bytes that tell how many can be measured in time
_MOST: Final = {"cuda": 256 << 20, "cpu": 16 << 20}
_BUDGET: Final = 0.2  # share of the time that the large all-reduces may take


class _Word:
    """What this process leaves for its rank, replaced as a whole."""

    def __init__(self, path: str) -> None:
        self._path, self._said = Path(path), {"stage": "importing torch"}
        self.say()

    def say(self, **more: Any) -> None:
        self._said |= more
        temporary = self._path.with_suffix(".part")
        temporary.write_text(json.dumps(self._said))
        temporary.rename(self._path)


def measure(held: Preflight, gang: Gang, log: Path, end: float, word: _Word) -> Figures | tuple[str, str]:
    """Meet, join and measure: the figures, or whose fault it is and why.

    :param end: when it has to be done, by the monotonic clock.
    """
    began = end - held.seconds
    word.say(stage="connecting to the first node")
    join(
        gang,
        end,
        came=lambda: word.say(stage="waiting for the other ranks", came=True),
        joining=lambda: word.say(stage="joining the process group"),
    )
    word.say(stage="in an all-reduce")
    milliseconds = 1000 * timed(gang, "all_reduce", _SMALLEST, _SMALL_TRIES)
    slowest = timed(gang, "all_reduce", _PROBE, 1)
    size = _PROBE
    while size < _MOST[gang.device.type] and 2 * size / _PROBE * slowest * _TRIES < _BUDGET * held.seconds:
        size *= 2
    speed = bus(Figure("all_reduce", size, timed(gang, "all_reduce", size, _TRIES)), gang.world)
    nodes = gang.world // gang.local_world
    text = log.read_text(errors="replace") if log.exists() else ""
    cuda = gang.device.type == "cuda"
    other = wrong(held.fabric, text, Path("/dev/infiniband").exists()) if cuda and nodes > 1 else None
    if other is not None:
        return other
    slow = too_slow(held, speed, milliseconds)
    if slow is not None:
        word.say(stage="measuring node by node")
        return _blame(gang, slow, nodes, size)
    took = time.monotonic() - began
    return Figures(
        gang.world, nodes, round(speed, 4), round(milliseconds, 4), round(took, 2), carried(text, cuda, nodes)
    )


def _blame(gang: Gang, slow: str, nodes: int, size: int) -> tuple[str, str]:
    """Whether a node of its own is slow: the first ranks of nodes send to each other, around the ring."""
    if nodes == 1:
        return "node", f"{slow}. Look at the links of this node's GPUs, or lower the floor in `compute.preflight`"
    found = links(gang, size)
    guilty, mine = culprit(found), gang.rank // gang.local_world
    if guilty is not None:
        who = f"{slow}. Node {guilty} is slow to all others ({told(found)})"
        return ("node" if guilty == mine else "peers"), f"{who}. Look at it, or lower the floor in `compute.preflight`"
    mend = "Look at the network (placement group, zone, other tenants), or lower the floor in `compute.preflight`"
    return "peers", f"{slow} ({told(found)}). {mend}"


def main(order: dict[str, Any], parent: int) -> int:
    """Entry point; returns the exit code."""
    die_with_parent(parent)
    held = Preflight(order["fabric"], order["gb_per_second"], order["milliseconds"], order["seconds"])
    word = _Word(order["result"])
    from trainer.gang import CollectiveError, collective, gang_from_env

    end = time.monotonic() + held.seconds
    word.say(stage="opening its GPU" if order["gpus"] else "connecting to the first node", ready=True)
    failure: tuple[str, str]
    try:
        gang = gang_from_env(order["gpus"])
        with collective():
            found = measure(held, gang, Path(order["log"]), end, word)
        if isinstance(found, Figures):
            word.say(figures=vars(found))
            return 0
        failure = found
    except RecipeError as error:
        failure = "recipe", str(error)
    except NodeError as error:
        failure = "node", str(error)
    except AbsentError as error:
        failure = (
            "peers",
            f"these ranks did not come within {held.seconds:g} s: {error}. Look at the last lines of their pods, or "
            "raise `compute.preflight.seconds`",
        )
    except CollectiveError as error:
        failure = "peers", f"the ranks lost each other ({error}). Look for a rank that ended first"
    except Exception as error:
        text = " ".join(str(error).split())[:500]
        failure = "node", f"rank {os.environ.get('RANK')} failed: {type(error).__name__}: {text}. Look at its node"
    word.say(kind=failure[0], failure=failure[1])
    return 1


if __name__ == "__main__":
    code = main(json.loads(sys.argv[1]), int(sys.argv[2]))
    sys.stdout.flush()
    os._exit(code)  # threads of collectives may hang in an ordinary exit once a peer is gone
