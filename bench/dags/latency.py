"""The ways from a `_SUCCESS` to a run that `bench.latency` measures, less our own, which is the real intake DAG."""

from __future__ import annotations

import os

from airflow.sdk import DAG, Asset, AssetWatcher, Param, PartitionedAssetTimetable, task
from dropforge_airflow.triggers.drops import DropTrigger

from bench.bare_chain import CONNECTION, WAIT, BareTrigger

POLL = 1  # second

DONE = Asset(name="bench_done", group="bench")
watched = {
    "bare": BareTrigger(queue="bench-bare"),
    "polled": DropTrigger(
        queue_url="", bucket="bench-polled", aws_conn_id=CONNECTION, poll_every=POLL, nudge_after=3600
    ),
}
if os.environ.get("BENCH_PEERS"):
    from airflow.providers.amazon.aws.triggers.sqs import SqsSensorTrigger

    watched["sqs-sensor"] = SqsSensorTrigger(
        os.environ["BENCH_SQS"], CONNECTION, max_messages=10, wait_time_seconds=WAIT, waiter_delay=0
    )

for name, trigger in watched.items():
    asset = Asset(name=f"bench_{name}", group="bench", watchers=[AssetWatcher(name=f"bench_{name}", trigger=trigger)])
    with DAG(f"bench_{name}", schedule=asset, catchup=False, max_active_runs=1):

        @task(outlets=[DONE])
        def take_in(run_id: str | None = None, **context: object) -> None:
            context["outlet_events"][DONE].add_partitions([run_id])  # type: ignore[index]

        take_in()

with DAG("bench_consumer", schedule=PartitionedAssetTimetable(assets=DONE), catchup=False):

    @task
    def consume() -> None:
        pass

    consume()

if os.environ.get("BENCH_PEERS"):
    from airflow.providers.amazon.aws.sensors.s3 import S3KeySensor

    with DAG("bench_key-sensor", schedule=None, params={"key": Param("", type="string")}):

        @task(task_id="take_in")
        def after() -> None:
            pass

        (
            S3KeySensor(
                task_id="sensor",
                bucket_name="bench-key-sensor",
                bucket_key="{{ params.key }}",
                aws_conn_id=CONNECTION,
                deferrable=True,
                poke_interval=POLL,
            )
            >> after()
        )
