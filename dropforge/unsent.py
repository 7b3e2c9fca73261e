"""What a training kept in the run's folder because MLflow was away when it ended: the DAG sends it afterwards.

A training does not wait for MLflow, as GPUs would idle. Its folder is its own, and what is sent has Airflow's rights:
tags that no training may set are left out. Checkpoints as logged models stay in their file: the tag
`dropforge.checkpoints` that is sent has them.
"""

from __future__ import annotations

import json
import logging
import re
from dataclasses import dataclass
from itertools import islice
from typing import Any, Final

from dropforge import layout, tracking
from dropforge.json_objects import UNREADABLE, brackets, parse_value
from dropforge.store import Store, read_bounded
from dropforge.text import escape, read_count
from dropforge.training_tags import may_set

log = logging.getLogger(__name__)

_METRICS: Final = 900  # of one request; the server takes 1000
_TAGS: Final = 90
_LARGEST: Final = 64 << 20  # bytes of a file; a training keeps 50,000 metrics
_BRACKETS: Final = 100_000  # each metric has one
_FILES: Final = 1000  # of a run: an attempt that ends without MLflow keeps two
_REFUSED: Final = ("INVALID_PARAMETER_VALUE", "BAD_REQUEST")  # by MLflow, of what a file holds
_NAME: Final = re.compile(r"(\d{1,9})-(\d{1,20})\.json", re.ASCII)  # an attempt, and when it ended


@dataclass(frozen=True)
class _Kept:
    """What one file keeps. :param whole: the file, where it has checkpoints, which stay in it."""

    attempt: int
    metrics: list[Any]
    tags: dict[str, str]
    whole: dict[str, Any] | None


def send(store: Store, run: str, tracking_uri: str, run_id: str) -> int:
    """Send what MLflow did not take, and remove what it has taken then; the number of metrics and tags.

    It may be repeated: MLflow keeps one of equal points. Tags of an attempt that another one followed are old. A file
    that cannot be read, or that MLflow refuses, stays and holds up no other.
    """
    from mlflow.exceptions import MlflowException

    folder = layout.run_prefix(run)
    listed = (info.key for name in ("unsent-metrics/", "unsent-tags/") for info in store.list(folder + name))
    kept = list(islice(listed, _FILES))
    if not kept:
        return 0
    mlflow = tracking.client(tracking_uri)
    newest = read_count(mlflow.get_run(run_id).data.tags.get(tracking.TAG_ATTEMPT, "")) or 0
    sent = 0
    for key in kept:
        try:
            found = _read(store, key)
            tags = _allowed(found.tags, f"{store.uri}/{key}") if found.attempt >= newest else {}
            _log(mlflow, run_id, found.metrics, tags)
        except UNREADABLE as error:
            log.warning("%s/%s cannot be read and stays: %s", store.uri, escape(key), escape(str(error)[:500]))
            continue
        except MlflowException as error:
            if error.error_code not in _REFUSED:  # it is away, or has the run no more
                raise
            log.warning("MLflow refuses %s/%s, which stays: %s", store.uri, escape(key), escape(str(error)[:500]))
            continue
        sent += len(found.metrics) + len(tags)
        if found.whole is not None:
            store.put(key, json.dumps({**found.whole, "tags": {}}).encode())
        else:
            store.delete(key)
    return sent


def _read(store: Store, key: str) -> _Kept:
    """What a file keeps. :raises UNREADABLE: if it is none that a training writes."""
    from mlflow.entities import Metric

    name = _NAME.fullmatch(key.rpartition("/")[2])
    if name is None:
        raise ValueError("its name is not ATTEMPT-SECONDS.json")
    data = read_bounded(store, key, _LARGEST)
    if brackets(data) > _BRACKETS:  # before they take memory
        raise ValueError(f"it has more than {_BRACKETS:,} brackets")
    found = parse_value(data, f"object {store.uri}/{key}")
    if isinstance(found, list):
        return _Kept(int(name[1]), [Metric(**row) for row in found], {}, None)
    tags = found["tags"]
    if not all(isinstance(value, str) for value in tags.values()):
        raise TypeError("a tag is no text")
    return _Kept(int(name[1]), [], tags, found if found.get("checkpoints") else None)


def _allowed(tags: dict[str, str], thing: str) -> dict[str, str]:
    """The tags that a training may set; the others are told."""
    if strange := sorted(key for key in tags if not may_set(key)):
        log.warning("%s: tags that no training may set are left out: %s", thing, escape(str(strange)[:500]))
    return {key: value for key, value in tags.items() if key not in strange}


def _log(mlflow: Any, run_id: str, metrics: list[Any], tags: dict[str, str]) -> None:
    from mlflow.entities import RunTag

    words = [RunTag(*pair) for pair in tags.items()]
    for start in range(0, len(metrics), _METRICS):
        mlflow.log_batch(run_id, metrics=metrics[start : start + _METRICS])
    for start in range(0, len(words), _TAGS):
        mlflow.log_batch(run_id, tags=words[start : start + _TAGS])
