"""The embedded stack at rest: start time, proportional memory (PSS) and CPU of every service.

    python bench/rest.py [--seconds 30]

PSS is read from /proc/PID/smaps_rollup and counts a page that n processes share as 1/n in each.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import Annotated

import psutil
import typer

from dropforge.stack import control
from dropforge.stack.state import StackState

OURS = ("objects", "cluster", "supervisor")


def main(seconds: Annotated[float, typer.Option(help="How long to watch.", min=1)] = 30.0) -> None:
    """Start a new stack twice, watch it at rest, print what it takes."""
    folder = Path(tempfile.mkdtemp(prefix="dropforge-bench-"))
    try:
        starts = []
        for _ in range(2):
            control.stop(folder)
            began = time.monotonic()
            control.start(folder)
            state = control.wait_ready(folder)
            starts.append(time.monotonic() - began)
        time.sleep(20)  # the first minute's loading of DAGs is not rest
        before = _cpu(state)
        time.sleep(seconds)
        after = _cpu(state)
        memory = {name: sum(_pss(process) for process in found) for name, found in _processes(state).items()}
    finally:
        control.stop(folder)
    print(f"first start {starts[0]:.1f} s, second start {starts[1]:.1f} s")
    for name in sorted(memory, key=lambda name: -memory[name]):
        share = 100 * (after[name] - before[name]) / seconds
        print(f"{name:24} {memory[name] / 1e6:7.0f} MB PSS {share:6.2f} % of a core")
    ours = sum(100 * (after[name] - before[name]) / seconds for name in OURS)
    print(f"{'in all':24} {sum(memory.values()) / 1e6:7.0f} MB PSS  bar 2000 MB")
    print(f"{'what is ours':24} {ours:18.2f} % of a core  bar 10 %")


def _processes(state: StackState) -> dict[str, list[psutil.Process]]:
    """The processes of each service with their descendants, and the supervisor itself."""
    roots = {name: service.pid for name, service in state.services.items() if service.pid}
    found: dict[str, list[psutil.Process]] = defaultdict(list)
    for name, pid in roots.items():
        try:
            process = psutil.Process(pid)
            found[name] = [process, *process.children(recursive=True)]
        except psutil.NoSuchProcess:
            continue
    known = {process.pid for processes in found.values() for process in processes}
    supervisor = psutil.Process(state.supervisor[0])
    rest = [process for process in supervisor.children(recursive=True) if process.pid not in known]
    found["supervisor"] = [supervisor, *rest]
    return found


def _cpu(state: StackState) -> dict[str, float]:
    """CPU seconds so far, by service."""
    return {
        name: sum(sum(process.cpu_times()[:2]) for process in processes if process.is_running())
        for name, processes in _processes(state).items()
    }


def _pss(process: psutil.Process) -> int:
    try:
        lines = Path(f"/proc/{process.pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0
    return next((int(line.split()[1]) * 1024 for line in lines if line.startswith("Pss:")), 0)


if __name__ == "__main__":
    typer.run(main)
