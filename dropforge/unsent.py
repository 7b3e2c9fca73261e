"""What a training kept in the run's folder because MLflow was away when it ended: the DAG sends it afterwards.

A training does not wait for MLflow, as GPUs would idle. Its folder is its own, and what is sent has Airflow's rights:
tags that no training may set are left out. Checkpoints as logged models stay in their file: the tag
`dropforge.checkpoints` has them.
"""

from __future__ import annotations

import json
import logging
from typing import Any, Final

from dropforge import layout, tracking
from dropforge.store import Store, read_bounded
from dropforge.text import escape, read_count
from dropforge.training_tags import may_set

log = logging.getLogger(__name__)

_METRICS: Final = 900  # of one request; the server takes 1000
_TAGS: Final = 90
_LARGEST: Final = 64 << 20  # bytes of a file; a training keeps 50,000 metrics


def send(store: Store, run: str, tracking_uri: str, run_id: str) -> int:
    """Send what MLflow did not take, and remove what it has taken then; the number of metrics and tags.

    It may be repeated: MLflow keeps one of equal points. Tags of an attempt that another one followed are old.
    """
    folder = layout.run_prefix(run)
    kept = [info.key for name in ("unsent-metrics/", "unsent-tags/") for info in store.list(folder + name)]
    if not kept:
        return 0
    mlflow = tracking.client(tracking_uri)
    newest = read_count(mlflow.get_run(run_id).data.tags.get(tracking.TAG_ATTEMPT, "")) or 0
    sent = 0
    for key in kept:
        found, attempt = json.loads(read_bounded(store, key, _LARGEST)), int(key.rpartition("/")[2].partition("-")[0])
        rows, tags = (found, {}) if isinstance(found, list) else ([], found["tags"] if attempt >= newest else {})
        if strange := sorted(key for key in tags if not may_set(key)):
            log.warning(
                "%s/%s: tags that no training may set are left out: %s", store.uri, key, escape(str(strange)[:500])
            )
            tags = {key: value for key, value in tags.items() if key not in strange}
        _log(mlflow, run_id, rows, tags)
        sent += len(rows) + len(tags)
        if isinstance(found, dict) and found.get("checkpoints"):
            store.put(key, json.dumps({**found, "tags": {}}).encode())
        else:
            store.delete(key)
    return sent


def _log(mlflow: Any, run_id: str, rows: list[dict[str, Any]], tags: dict[str, str]) -> None:
    from mlflow.entities import Metric, RunTag

    metrics, words = [Metric(**row) for row in rows], [RunTag(*pair) for pair in tags.items()]
    for start in range(0, len(metrics), _METRICS):
        mlflow.log_batch(run_id, metrics=metrics[start : start + _METRICS])
    for start in range(0, len(words), _TAGS):
        mlflow.log_batch(run_id, tags=words[start : start + _TAGS])
