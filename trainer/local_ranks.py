"""The ranks of one machine, for what a single pod does with all of its GPUs: started together, and ended together."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
from collections.abc import Mapping

from dropforge.run import ExitCode
from trainer.launch import Terminator, Verdict, ends_of, judge, set_environment
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


def _run(module: str, uri: str, ranks: int, terminator: Terminator) -> Verdict:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainer.node.agent import Output, Place, make_agent
    from trainer.node.scratch import scratch as make_scratch

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what matters is said here
    with make_scratch() as scratch:
        set_environment(scratch, ranks, {})
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
