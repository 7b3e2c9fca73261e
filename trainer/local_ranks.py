"""The ranks of one machine, for what a single pod does with all of its GPUs: started together, and ended together."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropforge.run import ExitCode
from trainer.launch import Ended, Terminator, Verdict, judge, word_of
from trainer.state.stop import die_with_parent


def ranks_of_node(env: Mapping[str, str]) -> int:
    """How many processes the job wants on each node. :raises ValueError: if that is no number."""
    said = env.get("PET_NPROC_PER_NODE") or "1"
    if said == "1":
        return 1
    from trainer.node.agent import place_from_env

    return place_from_env(env).ranks


def run_ranks(module: str, uri: str, ranks: int) -> Verdict:
    """Run `python -m module uri` once for each rank, and tell how that ended; a SIGTERM is passed on to them."""
    terminator = Terminator()
    terminator.install()
    try:
        return _run(module, uri, ranks, terminator)
    except SystemExit:
        return Verdict(ExitCode.PREEMPTED, "asked to stop before the ranks were started")
    finally:
        terminator.over = True


def begin_rank() -> None:
    """What a rank does first: it ends with its launcher, and its files go with the launcher's folder."""
    die_with_parent(int(os.environ["DROPFORGE_LAUNCHER"]))
    tempfile.tempdir = os.environ["DROPFORGE_SCRATCH"]


def leave_process(code: int) -> None:
    """End this rank: threads of collectives may hang in an ordinary exit once a peer is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _run(module: str, uri: str, ranks: int, terminator: Terminator) -> Verdict:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainer.node.agent import Output, Place, make_agent
    from trainer.node.machine import allocator, available_cores
    from trainer.node.scratch import scratch as make_scratch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what matters is said here
    with make_scratch() as scratch:
        os.environ["DROPFORGE_SCRATCH"] = str(scratch)
        os.environ["DROPFORGE_LAUNCHER"] = str(os.getpid())
        defaults = {
            "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
            "OMP_WAIT_POLICY": "PASSIVE",  # threads that spin while they wait take the others' cores
            **allocator(os.environ),
        }
        for key, value in defaults.items():
            os.environ.setdefault(key, value)
        output = Output(scratch, 0, lambda _: None)
        agent = make_agent(Place(1, 0, ranks, "127.0.0.1", 0), [sys.executable, "-m", module, uri], output)
        terminator.agent = agent
        try:
            result = agent.run()
        except SignalException:
            return Verdict(130, "interrupted from the keyboard")
        except (RuntimeError, OSError) as error:
            return Verdict(ExitCode.HARDWARE, f"the ranks could not meet: {' '.join(str(error).split())[:500]}")
        finally:
            output.close()
        return judge(ends_of(result, output, scratch, agent.closed), terminator.stopped)


def ends_of(result: Any, output: Any, scratch: Path, closed: frozenset[int]) -> list[Ended]:
    """The ranks that did not end well, each with its last word."""
    ends = []
    for rank, failure in sorted(result.failures.items()):
        lines = [line for line in output.last.get(rank, ()) if line.strip()]
        word = word_of(scratch, rank) or (lines[-1] if lines else "")
        ends.append(Ended(rank, failure.exitcode, word, rank in closed))
    return ends
