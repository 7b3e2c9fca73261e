"""What a run leaves behind besides the model: its attempts and `report.json`, the last thing that is written."""

from __future__ import annotations

import json
import os
import platform
import re
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeGuard

import torch

from dropforge.json_objects import find_object
from dropforge.run import RunSpec
from dropforge.store import Store
from trainer.compat import versions
from trainer.gang import Gang
from trainer.model.export import Exported
from trainer.report.wall import BEGAN_KEY, Wall
from trainer.state.checkpoint import Seal

REPORT = "report.json"
_ATTEMPTS = "attempts/"
_ATTEMPT = re.compile(r"attempts/([1-9][0-9]{0,8})\.json")
_END_OF_TIME = 1e12  # seconds, and no NaN is below it
_TAG_LIMIT = 5000  # characters of a tag's value that MLflow keeps


def begin_attempt(store: Store, gang: Gang, resumed_from: int | None, began: float) -> int:
    """Write `attempts/N.json` under the first free number; return the number.

    :param began: Unix time at which the launcher of this attempt started.
    """
    number = 1
    while True:
        body = {
            "attempt": number,
            "resumed_from": resumed_from,
            "ranks": gang.world,
            "host": os.environ.get("POD_NAME") or socket.gethostname(),
            "began": round(began, 3),
            "at": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        if store.put_if_absent(f"{_ATTEMPTS}{number}.json", json.dumps(body).encode()):
            return number
        number += 1


def first_began(store: Store) -> float | None:
    """When the run's first launcher started, else that of its first attempt; None if neither told, or in no number."""
    told = [find_object(store, key).get("began") for key in (BEGAN_KEY, f"{_ATTEMPTS}1.json")]
    return min((float(moment) for moment in told if _is_moment(moment)), default=None)


def _is_moment(value: Any) -> TypeGuard[float]:
    return type(value) in {int, float} and abs(value) < _END_OF_TIME


def wall_rows(wall: Wall, first: float | None) -> dict[str, float]:
    """The run's time from the start of its first launcher until now, in all and by phase."""
    began = wall.began if first is None else first
    return {"began": began, "seconds": round(wall.now() - began, 3), **wall.totals()}


def checkpoint_rows(store: Store, seals: Sequence[Seal]) -> list[dict[str, Any]]:
    """The checkpoints that exist, oldest first."""
    return [
        {
            "step": seal.step,
            "uri": f"{store.uri}/checkpoints/step-{seal.step}",
            "digest": seal.digest,
            "bytes": seal.bytes,
            "eval_loss": seal.eval_loss,
        }
        for seal in seals
    ]


def checkpoint_tag(rows: Sequence[Mapping[str, Any]]) -> str:
    """The newest checkpoints as the value of one tag."""
    kept = list(rows)
    while len(text := json.dumps(kept)) > _TAG_LIMIT:
        kept = kept[1:]
    return text


def attempts_of(store: Store) -> list[dict[str, Any]]:
    """The attempts in their order. Of one whose object cannot be read the number alone is known: it ends no run."""
    named = ((_ATTEMPT.fullmatch(item.key), item.key) for item in store.list(_ATTEMPTS))
    found = {int(name[1]): key for name, key in named if name is not None}
    return [find_object(store, found[number]) | {"attempt": number} for number in sorted(found)]


def make_report(
    store: Store,
    spec: RunSpec,
    gang: Gang,
    *,
    resumed_from: int | None,
    figures: Mapping[str, Any],
    wall: Mapping[str, float],
    packing: Mapping[str, Any],
    checkpoints: Sequence[Mapping[str, Any]],
    model: Exported,
    date: str,
) -> dict[str, Any]:
    """The content of `report.json`. :param date: what the chat template was told; "" if it does not ask."""
    return {
        "run": spec.run,
        "status": "succeeded",
        **figures,
        "wall": dict(wall),
        "checkpoints": list(checkpoints),
        "model": model.plain() | {"files": dict(model.files)},
        "attempts": attempts_of(store),
        "resumed_from": resumed_from,
        "packing": dict(packing),
        "dataset": spec.dataset_digest,
        "date": date or None,
        "start": None if spec.start is None else asdict(spec.start),
        "code": spec.code,
        "image": spec.image,
        "environment": {
            **versions(),
            "python": platform.python_version(),
            "machine": platform.machine(),
            "device": gang.device_name,
            "ranks": gang.world,
            "threads": torch.get_num_threads(),
        },
    }
