"""Which engine takes a drop, and why."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from curation.engines.duck import Embedded, Memory, processes
from curation.engines.estimate import seconds
from curation.engines.tables import Engine
from curation.pace import duration
from dropforge.errors import DropforgeError
from dropforge.recipe_data import Curation
from dropforge.spark import find_spark

#: From here on `auto` takes Spark whatever the deadline: 25 GB of keys to sort are no work for one process.
AUTO_SPARK_BYTES: Final = 200 * 10**9
#: Up to here a drop is one split, which one process reads.
SMALL_BYTES: Final = 32 << 20


@dataclass(frozen=True)
class Choice:
    """An engine, and the reason in words."""

    engine: Literal["embedded", "spark"]
    why: str


def choose(
    asked: Curation, planned: int, find: Callable[[], str] = find_spark, spark_cores: int | None = None
) -> Choice:
    """Decide, and estimate how long it takes.

    `auto` takes Spark from `AUTO_SPARK_BYTES` on, and below where the embedded engine would miss the deadline and Spark
    has the cores to be sooner.

    :param planned: bytes of the drop's files as they lie there, compressed or not.
    :param spark_cores: that Spark has, if not those of this machine.
    :raises DropforgeError: if Spark is asked for and cannot run here.
    """
    machine = len(os.sched_getaffinity(0))
    cores = min(processes(asked.workers, planned), machine)
    spark_cores = spark_cores or min(asked.workers or machine, machine)
    here, there = seconds(asked, planned, cores), seconds(asked, planned, spark_cores, shared=True)
    deadline = None if asked.deadline_minutes is None else 60.0 * asked.deadline_minutes
    embedded, spark = _told(here, cores, deadline), _told(there, spark_cores, deadline)
    if asked.engine == "embedded":
        return Choice("embedded", f"the recipe asks for it; {embedded}")
    if asked.engine == "spark":
        return Choice("spark", f"the recipe asks for it ({find()}); {spark}")
    sizes = f"{planned / 1e9:,.1f} GB planned, Spark from {AUTO_SPARK_BYTES / 1e9:,.0f} GB on"
    late = deadline is not None and here > deadline
    if planned < AUTO_SPARK_BYTES:
        if not late:
            return Choice("embedded", f"{sizes}; {embedded}")
        if there >= here:
            return Choice("embedded", f"{sizes}; {embedded}, and Spark is not sooner")
    sizes = f"{sizes}; embedded {embedded}"
    try:
        return Choice("spark", f"{sizes}; Spark {spark} ({find()})")
    except DropforgeError as error:
        return Choice("embedded", f"{sizes}, but {error.cause.rstrip('.')}")


def _told(took: float, cores: int, deadline: float | None) -> str:
    about = f"about {duration(max(1.0, took))} on {cores} {'core' if cores == 1 else 'cores'}"
    if deadline is None:
        return about
    return f"{about}, {'within' if took <= deadline else 'beyond'} the deadline of {duration(deadline)}"


def _memory(asked: Curation, planned: int | None) -> Memory:
    # A small drop is settled in seconds: a second thread saves half of one, and takes a tenth of the memory.
    small = planned is not None and planned <= SMALL_BYTES and asked.scope == "drop"
    return Memory(asked.memory, 1) if small else Memory(asked.memory)


@contextmanager
def opened(
    choice: Choice, asked: Curation, folder: Path, planned: int | None = None, memory: Memory | None = None
) -> Iterator[Engine]:
    """The engine, started and ended.

    :param folder: local folder for everything that it writes of its own accord.
    :param planned: bytes of the drop's files; None if nobody knows what is to be settled.
    """
    if choice.engine == "embedded":
        yield Embedded(asked.workers, memory or _memory(asked, planned))
        return
    from curation.engines.spark import SparkEngine, session  # PySpark is an extra

    with session(folder, asked.workers, asked.spark.driver_memory) as started:
        yield SparkEngine(started)
