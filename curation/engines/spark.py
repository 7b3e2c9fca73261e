"""Spark, on this machine or on a cluster: the same kernels through `mapInArrow`, the same statements as Spark SQL.

Each statement that makes a table writes it as Parquet, so that no plan grows with the rounds of a loop. Everything that
Spark writes lies in the work folder, which driver and executors share; on this machine it listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import uuid
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, Final

import pyarrow as pa
import pyarrow.parquet as pq
from py4j.protocol import Py4JError
from pyspark import Broadcast, SparkConf, SparkContext
from pyspark.errors import PySparkException
from pyspark.java_gateway import launch_gateway
from pyspark.sql import Row, SparkSession

from curation.columns import binaries, integers
from curation.kernel import run
from curation.task import Report, Task
from dropforge.errors import DropforgeError

_ANSWERS: Final = pa.schema([("number", pa.int64()), ("answer", pa.binary())])
_TRIES: Final = 2
#: A statement, a worker or the Java process failed.
_FAILURES: Final = (PySparkException, Py4JError, ConnectionError)
#: What Hadoop takes for a pattern or a separator in a path.
_UNSAFE: Final = frozenset("*?[]{}\\'\",")
_LOOK_SECONDS: Final = 1.0
#: Splits up to which they are smaller than the largest (`curation.plan.split_size`).
_FEW: Final = 64
_PARTITIONS_PER_CORE: Final = 8


@contextmanager
def session(folder: Path, workers: int = 0, memory: str = "2g") -> Iterator[SparkSession]:
    """A session of this process, and its Java process, which ends with it in any case.

    :param folder: its scratch files and log; emptied first and removed at the end.
    :param workers: tasks at a time; 0 takes what the machine has.
    :param memory: heap of the Java process, as `512m` or `2g`.
    :raises DropforgeError: if it does not start, or one runs in this process already.
    """
    # PySpark says so at every turn; nothing of pandas is used here.
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    if bad := _UNSAFE.intersection(str(folder.absolute())):
        cause = f"Spark cannot use a path with {' '.join(sorted(bad))}"
        raise DropforgeError(f"work folder {folder}", cause, "Choose another folder")
    if SparkContext._active_spark_context is not None:
        raise DropforgeError("Spark", "a session runs in this process already", "Stop it first")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    conf = SparkConf(loadDefaults=False).setAll(_settings(folder.absolute(), workers, memory).items())
    log = folder / "spark.log"
    try:
        with _environment(), log.open("wb") as told:
            try:
                gateway = launch_gateway(conf, {"stdout": told, "stderr": subprocess.STDOUT})
            except (*_FAILURES, OSError) as error:
                raise _unstarted(error, log) from error
            try:
                context = SparkContext(conf=conf, gateway=gateway)
            except _FAILURES as error:
                _end(gateway)
                raise _unstarted(error, log) from error
        try:
            context.pythonExec = sys.executable
            yield SparkSession(context)
        finally:
            with suppress(*_FAILURES):  # of a Java process that died before
                context.stop()
            _end(gateway)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def submitted(folder: Path, settings: Mapping[str, str]) -> Iterator[SparkSession]:
    """The session of a driver that `spark-submit` started: master, executors and memory are as it was told.

    :param folder: for warehouse files; driver and executors must see it under this path, as it is for the work folder.
    :param settings: Spark's, that only this process knows.
    :raises DropforgeError: if `spark-submit` did not start this process, or the session does not start.
    """
    if "PYSPARK_GATEWAY_PORT" not in os.environ:
        raise DropforgeError("Spark", "`spark-submit` did not start this process", "Submit it, or take `session`")
    warnings.filterwarnings("ignore", "PySpark does not yet fully support pandas", FutureWarning)
    try:
        told = _shared_settings(folder.absolute()) | dict(settings)
        context = SparkContext(conf=SparkConf().setAll(told.items()))
    except (*_FAILURES, OSError) as error:
        mend = "Look at the driver's log"
        raise DropforgeError("Spark", f"it did not start: {_line(error)}", mend) from error
    try:
        yield SparkSession(context)
    finally:
        with suppress(*_FAILURES):
            context.stop()


def _shared_settings(folder: Path) -> dict[str, str]:
    """What the statements rely on, wherever Spark runs."""
    return {
        "spark.sql.warehouse.dir": (folder / "warehouse").as_uri(),
        "spark.sql.catalogImplementation": "in-memory",
        "spark.ui.enabled": "false",
        "spark.ui.showConsoleProgress": "false",
        # Spark makes a secret for this application alone, so that nobody else reads its blocks.
        "spark.authenticate": "true",
        "spark.log.level": "ERROR",
        "spark.sql.ansi.enabled": "true",
        "spark.sql.ansi.doubleQuotedIdentifiers": "true",
        "spark.sql.session.timeZone": "UTC",
        "spark.hadoop.parquet.block.size": str(16 << 20),
    }


def _settings(folder: Path, workers: int, memory: str) -> dict[str, str]:
    return {
        **_shared_settings(folder),
        "spark.master": f"local[{workers or '*'},{_TRIES}]",
        "spark.app.name": "dropforge-curation",
        "spark.driver.memory": memory,
        "spark.driver.extraJavaOptions": f'-Djava.io.tmpdir="{folder}" -XX:-UsePerfData',
        "spark.local.dir": str(folder),
        "spark.driver.bindAddress": "127.0.0.1",
        "spark.driver.host": "127.0.0.1",
        "spark.executorEnv.PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
    }


@contextmanager
def _environment() -> Iterator[None]:
    """For the start of the Java process: PySpark's own Spark, without what others put into its way."""
    kept = dict(os.environ)
    for name in ("SPARK_HOME", "SPARK_CONF_DIR", "PYSPARK_SUBMIT_ARGS", "SPARK_LOCAL_DIRS", "PYSPARK_GATEWAY_PORT"):
        os.environ.pop(name, None)
    os.environ["SPARK_LOCAL_IP"] = "127.0.0.1"
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(kept)


def _end(gateway: Any) -> None:
    """End the Java process, which `stop` leaves behind for the next session."""
    with suppress(*_FAILURES):
        gateway.shutdown()
    SparkContext._gateway = SparkContext._jvm = None
    gateway.proc.stdin.close()  # it ends when nobody can write to it any more
    try:
        gateway.proc.wait(10)
    except subprocess.TimeoutExpired:
        gateway.proc.kill()
        gateway.proc.wait()


def _unstarted(error: Exception, log: Path) -> DropforgeError:
    lines = log.read_text("utf-8", "replace").split("\n")
    told = next((line for line in lines if "rror" in line), "")
    return DropforgeError(
        "Spark", f"it did not start: {_line(error)} {told}".strip(), "Look at `dropforge doctor`, and at the memory"
    )


class SparkEngine:
    """A session's workers and tables."""

    def __init__(self, session: SparkSession) -> None:
        self.session = session

    def run(self, tasks: Sequence[Task], planned: int) -> Iterator[tuple[Task, Report]]:  # noqa: ARG002
        """A task is a split. Reports come as rows at the end; who watches hears of each as soon as it is written."""
        context = self.session.sparkContext
        shared = context.broadcast(list(tasks))
        numbers = self.session.range(0, len(tasks), 1, max(1, len(tasks)))
        answers = numbers.mapInArrow(partial(_work, shared), "number long, answer binary")
        waiting = dict(enumerate(tasks))
        with ThreadPoolExecutor(1) as pool:
            job = pool.submit(answers.collect)
            try:
                while not job.done():
                    wait([job], _LOOK_SECONDS)
                    for number in [number for number, task in waiting.items() if task.report.is_file()]:
                        task = waiting.pop(number)
                        yield task, run(task)
                found = job.result()
            except _FAILURES as error:
                raise _explain(error) from error
            finally:
                with suppress(*_FAILURES):
                    context.cancelAllJobs()
        for number, answer in found:
            result = pickle.loads(answer)  # noqa: S301 - written by our own worker
            if isinstance(result, BaseException):
                raise result
            if number in waiting:
                yield waiting.pop(number), result
        shared.destroy()

    def tables(self, scratch: Path) -> SparkTables:
        return SparkTables(self.session, scratch)


def _work(shared: Broadcast[list[Task]], batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
    """In a worker: splits by number to their reports, or to the errors that ended them."""
    for batch in batches:
        for number in batch.column(0).to_pylist():
            answer: Report | Exception
            try:
                answer = run(shared.value[number])
            except Exception as error:  # The driver raises it as it is, not as a text about it.
                answer = error
            yield pa.RecordBatch.from_arrays([integers([number]), binaries([pickle.dumps(answer)])], schema=_ANSWERS)


class SparkTables:
    """`Tables` as a database of its own, with its files in `scratch`."""

    def __init__(self, session: SparkSession, scratch: Path) -> None:
        self.session = session.newSession()
        self.scratch = scratch.absolute()
        self.name = f"curation_{uuid.uuid4().hex}"
        self.partitions = session.sparkContext.defaultParallelism

    def __enter__(self) -> SparkTables:
        shutil.rmtree(self.scratch, ignore_errors=True)
        self.scratch.mkdir(parents=True)
        self.do(f"create database {self.name} location '{self.scratch / 'tables'}'")
        self.do(f"use {self.name}")
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(DropforgeError):  # the error that led here is the one to tell
            self.do(f"drop database {self.name} cascade")
        shutil.rmtree(self.scratch, ignore_errors=True)

    def view(self, name: str, paths: Sequence[Path]) -> None:
        # A split's worth to each: 200, as is the default, cost more than they bring with a few files. Those of a small
        # drop are small themselves.
        few = len(paths) <= _FEW
        most = self.session.sparkContext.defaultParallelism * _PARTITIONS_PER_CORE if few else len(paths)
        self.partitions = max(self.partitions, min(len(paths), most))
        try:
            self.session.conf.set("spark.sql.shuffle.partitions", self.partitions)
            self.session.read.parquet(*map(str, paths)).createOrReplaceTempView(name)
        except _FAILURES as error:
            raise _explain(error) from error

    def do(self, statement: str) -> None:
        try:
            self.session.sql(statement)
        except _FAILURES as error:
            raise _explain(error) from error

    def one(self, statement: str) -> tuple[Any, ...]:
        return self.all(statement)[0]

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        try:
            return [tuple(map(_plain, row)) for row in self.session.sql(statement).collect()]
        except _FAILURES as error:
            raise _explain(error) from error

    def batches(self, statement: str, rows: int = 4096) -> Iterator[pa.RecordBatch]:
        """The result goes to disk first: its files lie in the order of the rows, and are read one after the other."""
        folder = self.scratch / f"result-{uuid.uuid4().hex}"
        try:
            self.session.sql(statement).write.parquet(str(folder))
        except _FAILURES as error:
            raise _explain(error) from error
        try:
            for path in sorted(folder.glob("part-*.parquet")):
                with pq.ParquetFile(path, pre_buffer=False) as file:
                    yield from file.iter_batches(rows)
        finally:
            shutil.rmtree(folder, ignore_errors=True)


def _plain(value: Any) -> Any:
    """Values as DuckDB gives them."""
    if isinstance(value, Row):
        return {name: _plain(inner) for name, inner in value.asDict().items()}
    if isinstance(value, list):
        return [_plain(inner) for inner in value]
    return bytes(value) if isinstance(value, bytearray) else value


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _explain(error: Exception) -> DropforgeError:
    cause = _line(error)
    if "No space left" in str(error):
        mend = "Free space in the work folder"
    else:
        # As `submitted`: a driver on a cluster does not have the memory of this machine's Spark.
        key = "cluster.memory" if "PYSPARK_GATEWAY_PORT" in os.environ else "driver_memory"
        mend = f"Give it more memory with `curation.spark.{key}`, or take `curation.engine: embedded`"
    return DropforgeError("curation on Spark", f"Spark stopped: {cause}", mend)
