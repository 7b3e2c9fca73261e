"""The consumer of `bench.burst`: one task that takes its drop as `plan` does and leaves a mark of it."""

from __future__ import annotations

import time

from airflow.sdk import DAG, PartitionedAssetTimetable, task
from airflow.sdk.exceptions import AirflowSkipException
from dropforge_airflow.assets import DROPS, FINETUNE_DAG

with DAG(FINETUNE_DAG, schedule=PartitionedAssetTimetable(assets=DROPS), catchup=False, default_args={"retries": 2}):

    @task
    def plan(partition_key: str | None = None, run_id: str | None = None) -> None:
        from dropforge_airflow import connection

        from dropforge import in_flight, ledger
        from dropforge.drop import parse_partition_key
        from dropforge.settings import from_env

        assert partition_key is not None
        assert run_id is not None
        store, named = connection.open_store(from_env().bucket), parse_partition_key(partition_key)
        if ledger.claim(store, named["family"], named["id"], run_id) is None:
            raise AirflowSkipException("another run has it")
        # A try that is repeated writes the same mark; another run would leave a second one.
        store.put(f"burst/{named['drop']}/{run_id.replace('/', '_')}", str(time.time()).encode())
        in_flight.run_ended(store, partition_key, run_id)  # as the teardown of a run does

    plan()
