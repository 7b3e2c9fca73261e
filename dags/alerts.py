"""Tries the notifiers of `DROPFORGE_NOTIFY` or of the Variable `dropforge_notify`: each gets a message.

Whatever occasions it wants. One that does not take it fails the task, whose log says why. See docs/how-to/alerts.md.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import DAG, Param, task
from dropforge_airflow.alerts import trial
from dropforge_airflow.assets import ALERTS_DAG

with DAG(
    ALERTS_DAG,
    dag_display_name="Dropforge: try alerts",
    description="Sends a message through each configured notifier.",
    schedule=None,
    catchup=False,
    params={
        "text": Param("If you read this, alerts reach you.", type="string", title="Text", minLength=1, maxLength=500)
    },
    tags=["dropforge", "maintenance"],
    doc_md=__doc__,
    default_args={"owner": "dropforge", "retries": 0},
):
    tried: Any = task(trial.send_all)()
