"""`python -m trainer.launch ADDRESS_OF_RUN_JSON`: the container's command.

Starts this node's ranks under torch's elastic agent, passes a SIGTERM on to them, and ends with the code of the rank
that failed first. The reason goes into the pod's termination message.
"""

from __future__ import annotations

import json
import logging
import math
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.placement.fabrics import PREFLIGHT
from dropforge.run import ExitCode, RunSpec, termination_message
from dropforge.signals import signal_name
from dropforge.store import Store, open_store, split_uri, wait_for_s3
from trainer.report.archive import EVERY, Archive
from trainer.report.console import warn
from trainer.report.system import start_system_metrics
from trainer.report.tracking import tag_run
from trainer.report.wall import BEGAN_KEY

_MARGIN: Final = 3.0  # seconds of the grace that are left for the termination message and the last of the log
_ARCHIVE: Final = 10.0  # seconds that the end waits for the store to take the rest of the log
_EVIDENCE: Final = ("stacks-*", "flight-*", "hang.json")
_LARGEST: Final = 32 << 20  # bytes of a file
IDLE_TAG: Final = "dropforge.idle"
_BEGAN: Final = time.time()
# Whoever has a reason of his own comes before those who only lost a peer.
_CAUSES: Final = (ExitCode.BAD_RECIPE, ExitCode.BAD_DATA, ExitCode.DIVERGED, ExitCode.NODE)


@dataclass(frozen=True)
class Ended:
    """How a rank ended.

    :param code: as `Popen.returncode`: negative for a signal.
    :param closed: it still ran when the agent began to end all ranks: its end is a consequence of another's.
    """

    rank: int
    code: int
    message: str = ""
    closed: bool = False


@dataclass(frozen=True)
class Verdict:
    """How the node ended, for its exit code and termination message.

    :param signal: name of the one that ended the rank that failed first.
    """

    code: int
    message: str
    rank: int | None = None
    signal: str | None = None
    step: int | None = None
    steps: int | None = None


def judge(ends: list[Ended], stopped: bool) -> Verdict:
    """Which rank failed first, and what that means; a pure function.

    A rank killed by a signal leaves no word; the ranks that the agent ended afterwards die of SIGTERM or report a lost
    peer, so they are looked at last.

    :param ends: the ranks that did not end well. :param stopped: a SIGTERM was passed on to them.
    """
    if not ends:
        return Verdict(ExitCode.DONE, "done")
    first = [end for end in ends if not end.closed] or ends
    killed = [end for end in first if end.code < 0 and end.code != -signal.SIGTERM]
    own = [end for end in ends if end.code in _CAUSES]
    others = [end for end in ends if end.code > 0 and end.code not in (*_CAUSES, ExitCode.PREEMPTED, ExitCode.HARDWARE)]
    saved = [end for end in ends if end.code == ExitCode.PREEMPTED]
    lost = [end for end in ends if end.code == ExitCode.HARDWARE]
    if own:
        return Verdict(own[0].code, own[0].message, own[0].rank)
    if stopped and not others and (saved or not lost):
        # Killed at the end of the grace, or before they could listen: preempted all the same.
        message = (
            saved[0].message
            if saved
            else ("asked to stop, and killed at the end of the grace: the checkpoint of this step may be whole")
        )
        if all(end.code == -signal.SIGTERM for end in ends):
            message = "asked to stop before the ranks could listen"
        return Verdict(ExitCode.PREEMPTED, message, (saved or ends)[0].rank)
    if killed:
        end = killed[0]
        name = signal_name(-end.code)
        hint = " (out of memory, or killed from outside)" if name == "SIGKILL" else ""
        tail = f". Last line: {end.message}" if end.message else ""
        return Verdict(ExitCode.HARDWARE, f"rank {end.rank} was ended by {name}{hint}{tail}", end.rank, name)
    for group in (others, [end for end in saved if end in first], lost):
        if group:
            return Verdict(
                group[0].code, group[0].message or f"rank {group[0].rank} ended with {group[0].code}", group[0].rank
            )
    return Verdict(ExitCode.HARDWARE, f"rank {ends[0].rank} was ended by SIGTERM from outside", ends[0].rank)


class Terminator:
    """Passes SIGTERM on to the ranks, and ends them just before the grace does.

    :param over: the ranks have ended, and a SIGTERM only makes the rest short.
    :param idle: why the GPUs count as idle, if that is the reason of the stop.
    """

    def __init__(self) -> None:
        self.grace = 60.0
        self.stopped = self.over = False
        self.idle = ""
        self.agent: Any = None
        self._end = math.inf

    def install(self) -> None:
        signal.signal(signal.SIGTERM, self._pass_on)

    def stop_idle(self, why: str) -> None:
        """Stop as a SIGTERM does: with a checkpoint, on all nodes, within the grace."""
        self.idle = why
        os.kill(os.getpid(), signal.SIGTERM)

    def left(self) -> float:
        """Seconds until this pod is killed."""
        return self._end - time.monotonic()

    def _pass_on(self, number: int, frame: FrameType | None) -> None:
        del number, frame
        first, self.stopped = not self.stopped, True
        if first:
            self._end = time.monotonic() + self.grace
        if self.over:
            return
        if self.agent is None or not self.agent.signal_ranks(signal.SIGTERM):
            raise SystemExit(ExitCode.PREEMPTED)
        if first:
            timer = threading.Timer(max(1.0, self.grace - _MARGIN), self.agent.signal_ranks, (signal.SIGKILL,))
            timer.daemon = True
            timer.start()


def launch(uri: str, env: Mapping[str, str], terminator: Terminator, archive: Archive) -> Verdict:
    """Run this node's ranks to their end."""
    try:
        terminator.install()  # first: the kernel drops a SIGTERM that process 1 of a container has no handler for
        root, key = split_uri(uri)
        spec = RunSpec.read(open_store(root), key)
        terminator.grace = _grace(spec)
        archive.open(spec.root)
        return _run(uri, spec, env, terminator, archive)
    except SystemExit:
        return Verdict(ExitCode.PREEMPTED, "asked to stop before the ranks were started")
    finally:
        terminator.over = True


def _run(uri: str, spec: RunSpec, env: Mapping[str, str], terminator: Terminator, archive: Archive) -> Verdict:
    from torch.distributed.elastic.multiprocessing.api import SignalException

    from trainer.compat import flight_recorder
    from trainer.config import read_settings
    from trainer.model.deterministic import environment
    from trainer.node.agent import Output, make_agent, place_from_env
    from trainer.node.heart import STACK_SIGNAL
    from trainer.node.idle import IdleWatch, Policy
    from trainer.node.scratch import scratch as make_scratch
    from trainer.node.system import find_gpus
    from trainer.node.watchdog import Watchdog
    from trainer.preflight.node import check_node
    from trainer.preflight.verdict import PreflightError

    logging.getLogger("torch.distributed").setLevel(logging.CRITICAL)  # what matters is said by this module
    place, visible = place_from_env(env), env.get("CUDA_VISIBLE_DEVICES")
    if PREFLIGHT in env:
        try:
            print(f"this node: {check_node(read_settings(spec.recipe).gpus, find_gpus(), visible)}", flush=True)
        except PreflightError as error:
            return Verdict(int(error.code), str(error))
    if place.node == 0:
        leave_began(open_store(spec.root), _BEGAN)
    with make_scratch() as scratch:
        os.environ["DROPFORGE_BEGAN"] = str(_BEGAN)
        set_environment(scratch, place.ranks, {**flight_recorder(str(scratch)), **environment(spec.recipe)})
        output = Output(scratch, place.first_rank, archive.keep)
        command = [sys.executable, "-m", "trainer.rank", uri]
        agent = make_agent(place, command, output)
        terminator.agent = agent
        ranks = range(place.first_rank, place.first_rank + place.ranks)
        watchdog = Watchdog(
            scratch,
            ranks,
            place.nodes * place.ranks,
            signal_stacks=lambda: agent.signal_ranks(STACK_SIGNAL),
            kill=lambda: agent.signal_ranks(signal.SIGKILL),
            tell=output.tell,
            store=agent.store if place.nodes > 1 else None,
        )
        watchdog.start()
        policy = Policy.of(spec.recipe)
        idle = None
        if policy is not None:
            idle = IdleWatch(policy, scratch, ranks, stop=terminator.stop_idle, tell=output.tell, visible=visible)
        system = start_system_metrics(spec.tracking, env, place.node, place.nodes)
        try:
            result = agent.run()
        except SignalException:
            return Verdict(130, "interrupted from the keyboard")
        except (RuntimeError, OSError) as error:
            where = f"{place.address}:{place.port}"
            return Verdict(
                ExitCode.HARDWARE, f"the nodes could not meet at {where}: {' '.join(str(error).split())[:500]}"
            )
        finally:
            if idle is not None:
                idle.close()
            agent.signal_ranks(signal.SIGKILL)
            hung = watchdog.close()
            output.close()
            if system is not None:
                system.close(max(0.0, min(1.0, terminator.left() - 2 * _MARGIN)))
        ends = ends_of(result, output, scratch, agent.closed)
        verdict = Verdict(ExitCode.HARDWARE, hung[1], hung[0]) if hung else judge(ends, terminator.stopped)
        if terminator.idle and verdict.code == ExitCode.PREEMPTED:
            verdict = replace(verdict, code=ExitCode.IDLE, message=f"{terminator.idle}: {verdict.message}")
            tag_run(spec.tracking, {IDLE_TAG: terminator.idle}, terminator.left() - _MARGIN)
        verdict = replace(verdict, step=output.progress.get("step"), steps=output.progress.get("steps"))
        if verdict.code not in (ExitCode.DONE, ExitCode.PREEMPTED, ExitCode.IDLE):
            kept = keep_evidence(scratch, spec.root, archive.folder, terminator.left)
            if kept and hung:
                verdict = replace(verdict, message=f"{verdict.message}. Stacks: {kept}")
        return verdict


def set_environment(scratch: Path, ranks: int, more: Mapping[str, str]) -> None:
    """Set what the ranks of this node find: their folder and launcher, and defaults for what nobody has set.

    :param ranks: how many they are. :param more: further defaults.
    """
    from trainer.node.machine import allocator, available_cores

    os.environ["DROPFORGE_SCRATCH"] = str(scratch)
    os.environ["DROPFORGE_LAUNCHER"] = str(os.getpid())
    defaults = {
        **more,
        **allocator(os.environ),
        # torchrun would set one thread per rank, whatever the machine has.
        "OMP_NUM_THREADS": str(max(1, available_cores() // ranks)),
        # Threads that spin while they wait make a shared machine many times slower.
        "OMP_WAIT_POLICY": "PASSIVE",
    }
    for key, value in defaults.items():
        os.environ.setdefault(key, value)


def ends_of(result: Any, output: Any, scratch: Path, closed: frozenset[int]) -> list[Ended]:
    """The ranks that did not end well, each with its last word."""
    ends = []
    for rank, failure in sorted(result.failures.items()):
        lines = [line for line in output.last.get(rank, ()) if line.strip()]
        word = word_of(scratch, rank) or (lines[-1] if lines else "")
        ends.append(Ended(rank, failure.exitcode, word, rank in closed))
    return ends


def leave_began(store: Store, began: float) -> None:
    """Write down when the first launcher of a run started: the first attempt may end before its ranks have a number."""
    with suppress(Exception):  # stores raise many kinds; the attempts tell as well
        store.put_if_absent(BEGAN_KEY, json.dumps({"began": round(began, 3)}).encode())


def keep_evidence(scratch: Path, root: str, folder: str, left: Callable[[], float]) -> str:
    """Copy stacks, flight records and the standing of ranks into the run's folder; the address, or nothing.

    :param left: seconds until this pod is killed. A store that is away costs a few seconds and nothing else.
    """
    files = [path for pattern in _EVIDENCE for path in scratch.glob(pattern) if 0 < path.stat().st_size <= _LARGEST]
    if not files:
        return ""
    stored = threading.Event()

    def copy() -> None:
        with suppress(Exception):  # stores raise many kinds
            store = open_store(root, hurried=True)
            for path in files:
                store.put(f"{folder}{path.name}", path.read_bytes())
            stored.set()

    thread = threading.Thread(target=copy, name="evidence", daemon=True)
    thread.start()
    thread.join(max(0.0, min(_ARCHIVE, left() - _MARGIN)))
    return f"{root}/{folder}" if stored.is_set() else ""


def word_of(scratch: Path, rank: int) -> str:
    try:
        return str(json.loads((scratch / f"outcome-{rank}.json").read_text())["message"])
    except (OSError, ValueError, KeyError):
        return ""


def _grace(spec: RunSpec) -> float:
    try:
        return float(spec.recipe["compute"]["grace_seconds"])
    except (KeyError, TypeError, ValueError):
        return 60.0  # the ranks will say what is wrong with the recipe


def write_termination_message(verdict: Verdict, env: Mapping[str, str]) -> None:
    """Leave word for the kubelet; outside a pod there is nobody to read it, and that is fine."""
    path = Path(env.get("TERMINATION_LOG") or "/dev/termination-log")
    if path.parent == Path("/dev") and not path.exists():
        return  # no pod: the kubelet makes this file
    try:
        path.write_bytes(
            termination_message(
                verdict.code,
                verdict.message,
                rank=verdict.rank,
                signal=verdict.signal,
                step=verdict.step,
                steps=verdict.steps,
            )
        )
    except OSError:
        return


def main(argv: list[str] | None = None, archive_every: float = EVERY) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        warn("usage: python -m trainer.launch ADDRESS_OF_RUN_JSON")
        return 2
    terminator, archive = Terminator(), Archive(os.environ.get("POD_NAME") or socket.gethostname(), archive_every)
    try:
        verdict = launch(arguments[0], os.environ, terminator, archive)
    except (DropforgeError, ValueError) as error:
        verdict = Verdict(ExitCode.BAD_RECIPE, str(error))
    except Exception as error:  # a store that is away raises many kinds; whoever waits for the pod needs a word
        traceback.print_exc()
        verdict = Verdict(1, f"{type(error).__name__}: {' '.join(str(error).split())[:1000]}")
    if verdict.code:
        warn(f"run failed with exit code {verdict.code}: {verdict.message}")
    write_termination_message(verdict, os.environ)
    archive.close(_ARCHIVE, terminator.left)
    return int(verdict.code)


if __name__ == "__main__":
    wait_for_s3()
    code = main()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)  # an ordinary exit would end with 120 where the last lines cannot be written
