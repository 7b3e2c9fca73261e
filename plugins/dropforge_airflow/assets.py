"""The assets that tie the DAGs together."""

from __future__ import annotations

from airflow.sdk import Asset, AssetWatcher

from dropforge_airflow.triggers.asks import AskTrigger
from dropforge_airflow.triggers.drops import DropTrigger

INTAKE_DAG = "dropforge_intake"
FINETUNE_DAG = "dropforge_finetune"
REAP_DAG = "dropforge_reap"
CHECKPOINTS_DAG = "dropforge_checkpoints"
ROLLBACK_DAG = "dropforge_rollback"
SWEEP_DAG = "dropforge_sweep"
RETRAIN_DAG = "dropforge_retrain"
ALERTS_DAG = "dropforge_alerts"

# Names only: a URI with a scheme makes Airflow import every provider that handles one, boto3 among them.
INBOX = Asset(
    name="dropforge_inbox",
    group="dropforge",
    watchers=[AssetWatcher(name="dropforge_drops", trigger=DropTrigger())],
)
"""Something arrived, or waits too long: events only wake."""

ASKS = Asset(
    name="dropforge_asks",
    group="dropforge",
    watchers=[AssetWatcher(name="dropforge_asks", trigger=AskTrigger())],
)
"""Somebody asks in MLflow for something to be done with a checkpoint."""

DROPS = Asset(name="dropforge_drops", group="dropforge")
"""One partition event per complete drop; the key is `dropforge.drop.partition_key`."""

MODELS = Asset(name="dropforge_models", group="dropforge")
"""A model version was registered; the event says which, and whether it became champion."""
