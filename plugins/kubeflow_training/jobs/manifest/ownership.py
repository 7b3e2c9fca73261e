"""Whose job it is, written on the job: labels to find it by, annotations with the whole truth. Pure."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.manifest.words import GANG_ANNOTATION, GENERATION_ANNOTATION, OWNER_ANNOTATION

DAG_KEY: Final = "kubeflow-training/dag"
RUN_KEY: Final = "kubeflow-training/run"
TASK_KEY: Final = "kubeflow-training/task"
MAP_INDEX_KEY: Final = "kubeflow-training/map-index"
"""Labels, where the text may be bent, and annotations, where it never is."""
OWNER_LABEL: Final = "kubeflow-training/owner-hash"
"""Label that all gangs of one task instance share."""
_LONGEST: Final = 63


@dataclass(frozen=True)
class Owner:
    """The task instance that a job belongs to; `map_index` is -1 for a task that is not mapped."""

    dag_id: str
    run_id: str
    task_id: str
    map_index: int = -1

    def __str__(self) -> str:
        return f"{self.dag_id}/{self.run_id}/{self.task_id}/{self.map_index}"

    @property
    def digest(self) -> str:
        """The value of `OWNER_LABEL`."""
        return hashlib.sha256(str(self).encode()).hexdigest()[:32]

    @classmethod
    def of(cls, job: Mapping[str, Any]) -> Owner | None:
        """Whose job it is; None if it says nothing, or not all."""
        notes = (job.get("metadata") or {}).get("annotations") or {}
        try:
            return cls(notes[DAG_KEY], notes[RUN_KEY], notes[TASK_KEY], int(notes[MAP_INDEX_KEY]))
        except (KeyError, TypeError, ValueError):
            return None

    def labels(self, generation: str, gang: int) -> dict[str, str]:
        return {
            DAG_KEY: label_value(self.dag_id),
            RUN_KEY: label_value(self.run_id),
            TASK_KEY: label_value(self.task_id),
            MAP_INDEX_KEY: label_value(str(self.map_index).replace("-1", "none")),
            GENERATION_ANNOTATION: label_value(generation),
            GANG_ANNOTATION: str(gang),
            OWNER_LABEL: self.digest,
        }

    def annotations(self, generation: str, gang: int) -> dict[str, str]:
        return {
            OWNER_ANNOTATION: str(self),
            DAG_KEY: self.dag_id,
            RUN_KEY: self.run_id,
            TASK_KEY: self.task_id,
            MAP_INDEX_KEY: str(self.map_index),
            GENERATION_ANNOTATION: generation,
            GANG_ANNOTATION: str(gang),
        }


def label_value(text: str) -> str:
    """The text as a label's value: itself if it can be, else bent, and told apart by eight characters of its hash."""
    bent = re.sub(r"[^A-Za-z0-9_.-]+", "_", text).strip("_.-")
    if bent == text and len(bent) <= _LONGEST:
        return bent
    digest = hashlib.sha256(text.encode()).hexdigest()[:8]
    return f"{bent[: _LONGEST - 9].rstrip('_.-')}-{digest}".lstrip("-")
