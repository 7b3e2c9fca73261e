"""`python -m trainer.network ORDER`: the container's command of `dropforge bench network`.

It starts this node's ranks as a training's are started, and each measures with all others. What they find are lines of
the first rank's log; nothing is fetched and nothing is stored.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dropforge.network_bench import MARK, Figure, Order
from dropforge.run import ExitCode
from trainer.launch import Ended, Verdict, judge, word_of, write_termination_message
from trainer.report.console import warn

_RANK: Final = "--rank"
_STOPPED: Final = 128 + signal.SIGTERM  # nothing is saved, so that this is what a peer's death does, and no preemption
_PEER_FIRST: Final = 1.0  # seconds; whoever caused a failure is to be seen to end first


def launch(text: str) -> Verdict:
    """Run this node's ranks to their end."""
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainer.node.agent import Output, make_agent, place_from_env
    from trainer.node.machine import available_cores
    from trainer.node.scratch import scratch as make_scratch
    from trainer.node.system import find_gpus
    from trainer.preflight.node import check_node
    from trainer.preflight.verdict import PreflightError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what matters is said by this module
    order, place = Order.from_json(text), place_from_env(os.environ)
    try:
        print(f"this node: {check_node(order.gpus, find_gpus(), os.environ.get('CUDA_VISIBLE_DEVICES'))}", flush=True)
    except PreflightError as error:
        return Verdict(int(error.code), str(error))
    with make_scratch() as scratch:
        os.environ["DROPFORGE_SCRATCH"] = str(scratch)
        os.environ["DROPFORGE_LAUNCHER"] = str(os.getpid())
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, available_cores() // place.ranks)))
        output = Output(scratch, place.first_rank, lambda _: None)
        agent = make_agent(place, [sys.executable, "-m", "trainer.network", _RANK, text], output, order.joining)
        stopped: list[int] = []

        def stop(number: int, frame: FrameType | None) -> None:
            del frame
            stopped.append(number)
            if not agent.signal_ranks(signal.SIGKILL):  # nothing is lost, and there are none yet
                raise SystemExit(_STOPPED)

        signal.signal(signal.SIGTERM, stop)
        try:
            failures = agent.run().failures
        except SignalException:
            return Verdict(130, "interrupted from the keyboard")
        except SystemExit:
            return Verdict(_STOPPED, "asked to stop before the ranks were started")
        except (RuntimeError, OSError) as error:
            text = " ".join(str(error).split())[:500]
            return Verdict(ExitCode.HARDWARE, f"the nodes could not meet at {place.address}:{place.port}: {text}")
        finally:
            agent.signal_ranks(signal.SIGKILL)
            output.close()
        ends = []
        for rank, failure in sorted(failures.items()):
            lines = [line for line in output.last.get(rank, ()) if line.strip()]
            word = word_of(scratch, rank) or (lines[-1] if lines else "")
            ends.append(Ended(rank, failure.exitcode, word, rank in agent.closed))
        if stopped and all(end.code == -signal.SIGKILL for end in ends):
            return Verdict(_STOPPED, "asked to stop")
        return judge(ends, stopped=False)  # what failed before it was asked is the reason


def measure(text: str) -> int:
    """A rank's process; its exit code."""
    from trainer.preflight.transport import DEBUG
    from trainer.rank import ending, leave_word
    from trainer.state.stop import die_with_parent

    die_with_parent(int(os.environ["DROPFORGE_LAUNCHER"]))
    order, rank = Order.from_json(text), int(os.environ["RANK"])
    log = Path(os.environ.get("DROPFORGE_SCRATCH") or tempfile.gettempdir()) / f"nccl-{rank}.log"
    if order.gpus:
        os.environ.update(DEBUG, NCCL_DEBUG_FILE=str(log))  # before torch looks

    def say(figure: Figure) -> None:
        if rank == 0:
            _tell(vars(figure))

    try:
        from trainer.gang import collective, gang_from_env, set_threads
        from trainer.preflight.sweep import sweep

        gang = gang_from_env(order.gpus)
        set_threads(gang.local_world)
        with collective():
            found = sweep(order, gang, log, say)
        if rank == 0:
            _tell({key: value for key, value in found.plain().items() if key != "figures"})
    except BaseException as error:
        code, message = ending(error)
        leave_word(rank, int(code), message)
        warn(message)
        if code == ExitCode.HARDWARE:
            time.sleep(_PEER_FIRST)
        return int(code)
    leave_word(rank, 0, "done")
    return 0


def _tell(values: dict[str, Any]) -> None:
    print(f"{MARK}{json.dumps(values)}", flush=True)


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] == [_RANK] and len(arguments) == 2:
        return measure(arguments[1])
    if len(arguments) != 1:
        warn("usage: python -m trainer.network ORDER")
        return 2
    try:
        verdict = launch(arguments[0])
    except ValueError as error:
        verdict = Verdict(ExitCode.BAD_RECIPE, str(error))
    except Exception as error:  # whoever waits for the pod needs a word
        verdict = Verdict(1, f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}")
    if verdict.code:
        warn(f"the measurement failed with exit code {verdict.code}: {verdict.message}")
    write_termination_message(verdict, os.environ)
    return int(verdict.code)


if __name__ == "__main__":
    ended = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(ended)  # threads of collectives may hang in an ordinary exit once a peer is gone
