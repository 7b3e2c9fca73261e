"""Which engine takes a drop, and why."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

from curation.engines.duck import Embedded, Memory
from curation.engines.tables import Engine
from dropforge.errors import DropforgeError
from dropforge.recipe_data import Curation
from dropforge.spark import find_spark

#: From here on `auto` takes Spark: a night's work for 16 cores, at 5 MB/s a core about 40 minutes for the rows alone
#: and 25 GB of keys to sort.
AUTO_SPARK_BYTES: Final = 200 * 10**9


@dataclass(frozen=True)
class Choice:
    """An engine, and the reason in words."""

    engine: Literal["embedded", "spark"]
    why: str


def choose(asked: Literal["embedded", "spark", "auto"], planned: int, find: Callable[[], str] = find_spark) -> Choice:
    """Decide. :param planned: bytes of the drop's files as they lie there, compressed or not.

    :raises DropforgeError: if Spark is asked for and cannot run here.
    """
    if asked == "embedded":
        return Choice("embedded", "the recipe asks for it")
    if asked == "spark":
        return Choice("spark", f"the recipe asks for it ({find()})")
    sizes = f"{planned / 1e9:,.1f} GB planned, Spark from {AUTO_SPARK_BYTES / 1e9:,.0f} GB on"
    if planned < AUTO_SPARK_BYTES:
        return Choice("embedded", sizes)
    try:
        return Choice("spark", f"{sizes} ({find()})")
    except DropforgeError as error:
        return Choice("embedded", f"{sizes}, but {error.cause.rstrip('.')}")


@contextmanager
def opened(choice: Choice, asked: Curation, folder: Path, memory: Memory | None = None) -> Iterator[Engine]:
    """The engine, started and ended. :param folder: local folder for everything that it writes of its own accord."""
    if choice.engine == "embedded":
        yield Embedded(asked.workers, memory or Memory(asked.memory))
        return
    from curation.engines.spark import SparkEngine, session  # PySpark is an extra

    with session(folder, asked.workers, asked.spark.driver_memory) as started:
        yield SparkEngine(started)
