"""What a command costs: wall seconds, CPU seconds and peak memory of its process and all below it."""

from __future__ import annotations

import os
import resource
import subprocess
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import psutil

_EVERY = 0.02  # seconds between two looks
_EVERY_SHARE = 0.25  # the kernel takes milliseconds to tell shares of pages


@dataclass(frozen=True)
class Cost:
    """:param cpu: user and system seconds. :param peak: bytes resident, summed over the tree at one time; pages that
    its processes share count in each. :param share: the same with shared pages divided by those that share them,
    looked at less often."""

    wall: float
    cpu: float
    peak: int
    output: str
    share: int = 0


def run(command: Sequence[str], env: Mapping[str, str] | None = None, limit: float = 600) -> Cost:
    """Run it to its end and look at its tree meanwhile.

    :param limit: seconds.
    :raises TimeoutError: if it takes longer; it is killed then, with all below it.
    :raises RuntimeError: with the end of what it said, if it fails.
    """
    before, start, peak = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter(), 0
    share, looked = 0, start
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(
            command, stdout=said, stderr=subprocess.STDOUT, env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
        ) as process,
    ):
        root = psutil.Process(process.pid)
        while process.poll() is None:
            peak = max(peak, _resident(root))
            if time.perf_counter() - looked > _EVERY_SHARE:
                share, looked = max(share, _resident(root, "pss")), time.perf_counter()
            if time.perf_counter() - start > limit:
                for part in [*_below(root), root]:
                    part.kill()
                raise TimeoutError(f"{' '.join(command)}: not done after {limit:.0f} s")
            time.sleep(_EVERY)
        wall = time.perf_counter() - start
        said.seek(0)
        output = said.read()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    if process.returncode:
        raise RuntimeError(f"{' '.join(command)} ended with {process.returncode}:\n{output[-2000:]}")
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return Cost(wall, cpu, peak, output, share)


def _below(root: psutil.Process) -> list[psutil.Process]:
    try:
        return root.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def _resident(root: psutil.Process, what: str = "rss") -> int:
    total = 0
    for part in [root, *_below(root)]:
        try:
            total += getattr(part.memory_info() if what == "rss" else part.memory_full_info(), what)
        except psutil.NoSuchProcess:
            continue
    return total
