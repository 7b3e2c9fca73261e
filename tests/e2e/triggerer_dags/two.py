"""Three tasks that wait for years, and a DAG that a watcher starts."""

from __future__ import annotations

import os
from datetime import UTC, datetime

from airflow.providers.standard.triggers.file import FileDeleteTrigger
from airflow.providers.standard.triggers.temporal import DateTimeTrigger
from airflow.sdk import DAG, Asset, AssetWatcher, BaseOperator, task


class Waits(BaseOperator):
    def execute(self, context: object) -> None:
        self.defer(trigger=DateTimeTrigger(moment=datetime(2199, 1, 1, tzinfo=UTC)), method_name="done")

    def done(self, context: object, event: object) -> None:
        pass


with DAG("jobs", schedule=None):
    for number in range(3):
        Waits(task_id=f"job{number}")

watcher = AssetWatcher(name="file", trigger=FileDeleteTrigger(filepath=os.environ["TEST_DROP"], poke_interval=0.5))
with DAG("drops", schedule=Asset("drop", watchers=[watcher])):

    @task
    def seen() -> None:
        pass

    seen()
