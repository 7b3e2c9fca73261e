"""How long from a `_SUCCESS` that is written to the intake run: ours, the bare chain of events, and Airflow's sensors.

    python -m bench.latency [--rounds 15] [--state FOLDER]

One stack, each way with a bucket and a queue of its own, one drop at a time in turn, each after all runs have ended.
Ours works on the S3 and SQS of the stack, which writes everything to disk; the others on those of moto, in memory:

    ours         DropTrigger and the real intake DAG
    bare         an event trigger that acknowledges, and a DAG that announces a partition (`bench/bare_chain.py`)
    sqs-sensor   Airflow's SqsSensorTrigger, which deletes messages before it emits its event; long polls as ours
    polled       DropTrigger without a queue, which looks at the prefix once a second
    key-sensor   Airflow's S3KeySensor, deferred, which looks for one known key once a second; its run is there before

Of the runs counts `start_date`, and so of the first task in them; a sensor's run starts before, so of it the task after
the sensor counts alone. Airflow's two need `aiobotocore`, and are left out without it.
"""

from __future__ import annotations

import importlib.util
import json
import logging
import os
import random
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from bench.bare_chain import CONNECTION
from bench.stack import REPOSITORY, ask, stack
from dropforge import layout
from dropforge.client.airflow import INTAKE
from dropforge.client.connection import Connection
from dropforge.stack.state import REGION
from dropforge.store import S3Store, Store

DAGS = {
    "intake.py": REPOSITORY / "dags/intake.py",
    "finetune.py": REPOSITORY / "bench/dags/burst.py",
    "latency.py": REPOSITORY / "bench/dags/latency.py",
}
FAMILY = "bench-latency"
SENSOR = "key-sensor"
WARM = 2  # rounds that do not count


def main(
    rounds: Annotated[int, typer.Option(help="Drops of each way.", min=1)] = 15,
    state: Annotated[Path | None, typer.Option(help="Folder of the stack, which stays; else a temporary one.")] = None,
) -> None:
    """Measure, and tell."""
    ways = ["ours", "bare", "sqs-sensor", "polled", SENSOR]
    if importlib.util.find_spec("aiobotocore") is None:
        ways = [way for way in ways if way not in {"sqs-sensor", SENSOR}]
        print("aiobotocore is not installed: Airflow's sensors are left out")
    else:
        os.environ["BENCH_PEERS"] = "1"
    with moto() as others, stack(DAGS, state) as connection:
        assert connection.stack is not None
        bench = Bench(connection, connection.stack, ways)
        bench.stores = {"ours": connection.store, **others}
        bench.prepare()
        for number in range(WARM + rounds):
            for way in random.sample(ways, len(ways)):
                bench.measure(way, counts=number >= WARM)
        bench.tell()


@contextmanager
def moto() -> Iterator[dict[str, Store]]:
    """The buckets of all ways but ours, those with a queue notifying it; their addresses are in the environment."""
    import boto3
    from moto.server import ThreadedMotoServer

    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    url = os.environ["BENCH_S3"] = f"http://{host}:{port}"
    here: Any = {"endpoint_url": url, "region_name": REGION, "aws_access_key_id": "test"}
    here["aws_secret_access_key"] = "test"
    s3, sqs = boto3.client("s3", **here), boto3.client("sqs", **here)
    stores: dict[str, Store] = {}
    for way in ("bare", "sqs-sensor", "polled", SENSOR):
        bucket = f"bench-{way}"
        s3.create_bucket(Bucket=bucket)
        stores[way] = S3Store(bucket, client=s3)
        if way in {"polled", SENSOR}:
            continue
        queue = sqs.create_queue(QueueName=bucket)["QueueUrl"]
        arn = sqs.get_queue_attributes(QueueUrl=queue, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        only: Any = {"Key": {"FilterRules": [{"Name": "suffix", "Value": layout.SUCCESS}]}}
        told: Any = [{"QueueArn": arn, "Events": ["s3:ObjectCreated:*"], "Filter": only}]
        s3.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration={"QueueConfigurations": told})
        sqs.purge_queue(QueueUrl=queue)  # of the test event
        if way == "sqs-sensor":
            os.environ["BENCH_SQS"] = queue
    try:
        yield stores
    finally:
        server.stop()


class Bench:
    """One stack and what was measured on it."""

    def __init__(self, connection: Connection, folder: Path, ways: list[str]) -> None:
        self.connection, self.folder, self.ways = connection, folder, ways
        self.stores: dict[str, Store] = {}
        self.runs: dict[str, list[float]] = {way: [] for way in ways}
        self.tasks: dict[str, list[float]] = {way: [] for way in ways}

    def prepare(self) -> None:
        """Tell Airflow where the others' S3 is, and wait for the DAGs."""
        address = {"conn_type": "aws", "login": "test", "password": "test", "connection_id": CONNECTION}
        extra = json.dumps({"endpoint_url": os.environ["BENCH_S3"], "region_name": REGION})
        self.connection.airflow._call("POST", "/api/v2/connections", json={**address, "extra": extra})
        dags = [_dag(way) for way in self.ways]
        self._until("DAGs", lambda: all(ask(self.folder, "select 1 from dag where dag_id = %s", dag) for dag in dags))

    def measure(self, way: str, *, counts: bool) -> None:
        """Write one drop, and wait for its run."""
        name = f"d{time.time_ns()}"
        key = layout.success_key(FAMILY, name)
        if way == SENSOR:
            run = self.connection.airflow.trigger(_dag(way), {"key": key})
            deferred = "select 1 from task_instance where dag_id = %s and run_id = %s and state = 'deferred'"
            self._until("a deferred sensor", lambda: ask(self.folder, deferred, _dag(way), run))
        time.sleep(random.random() * 2)  # whatever beats in Airflow, the drop comes at any moment of it
        store = self.stores[way]
        store.put(f"{layout.drop_prefix(FAMILY, name)}rows.jsonl", f'{{"text": "{name}"}}\n'.encode())
        store.put(key, b"")
        written = time.time()
        run_at, task_at = self._until(f"a run of {way}", lambda: self._started(way, written))
        if counts:
            self.tasks[way].append(task_at - written)
            if way != SENSOR:
                self.runs[way].append(run_at - written)
        print(f"{way:12} run {run_at - written:6.2f} s   task {task_at - written:6.2f} s", flush=True)
        self._until("an end of all runs", lambda: not self._going())

    def _started(self, way: str, since: float) -> tuple[float, float] | None:
        """When the first run that took something in began, and its task; a run that was merely woken ends skipped."""
        rows = ask(
            self.folder,
            "select r.start_date, t.start_date from task_instance t join dag_run r using (dag_id, run_id)"
            " where dag_id = %s and task_id = 'take_in' and t.state = 'success' order by t.start_date desc limit 1",
            _dag(way),
        )
        found = [(run.timestamp(), task.timestamp()) for run, task in rows]
        return next((pair for pair in found if pair[1] > since), None)

    def _going(self) -> bool:
        going = "select 1 from dag_run where state in ('queued', 'running') limit 1"
        pending = "select 1 from asset_partition_dag_run where created_dag_run_id is null limit 1"
        return bool(ask(self.folder, going) or ask(self.folder, pending))

    def _until(self, what: str, condition: Callable[[], Any], seconds: float = 180) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            if value := condition():
                return value
            time.sleep(0.05)
        raise SystemExit(f"waited {seconds:g} s for {what}")

    def tell(self) -> None:
        print(f"\n{'':12} {'run started, s':>26} {'first task started, s':>34}")
        print(
            f"{'':12} {'median':>8} {'p95':>8} {'- bare':>8} {'median':>12} {'p95':>8} {'- bare':>8}   {'of ours':>8}"
        )
        for way in self.ways:
            cells = [self._cells(self.runs, way), self._cells(self.tasks, way)]
            ratio = statistics.median(self.tasks[way]) / statistics.median(self.tasks["ours"])
            print(f"{way:12} {cells[0]}     {cells[1]}   {ratio:8.2f}")
        print(json.dumps({"runs": self.runs, "tasks": self.tasks}))

    def _cells(self, values: dict[str, list[float]], way: str) -> str:
        if not values[way]:
            return f"{'':26}"
        ordered, middle = sorted(values[way]), statistics.median(values[way])
        p95 = ordered[min(len(ordered) - 1, int(len(ordered) * 0.95))]
        return f"{middle:8.2f} {p95:8.2f} {middle - statistics.median(values['bare']):8.2f}"


def _dag(way: str) -> str:
    return INTAKE if way == "ours" else f"bench_{way}"


if __name__ == "__main__":
    typer.run(main)
