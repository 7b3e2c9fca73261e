"""What a task remembers from try to try, in Airflow's task state store. Nothing of it expires."""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING, Any, Final

from kubeflow_training.gangs.reattach import Identity

if TYPE_CHECKING:
    from airflow.sdk import Context

STATE_KEY: Final = "pytorch_job"
"""Key of the newest gang's identity."""
END_KEY: Final = "pytorch_job_end"
"""Key of the last result that was seen: the job may be removed before it is told."""
TIME_KEY: Final = "pytorch_job_until"
"""Key of the try's end by `execution_timeout`."""
SIZE_KEY: Final = "pytorch_job_size"
"""Key of the number of nodes with which one gang is to start, and which gang that is."""
FAILURES_KEY: Final = "pytorch_job_trigger_failures"
"""Key of how often this try's trigger broke."""


class Memory:
    """The task state store in the operator's own words."""

    def __init__(self, context: Context) -> None:
        self._store: Any = context["task_state_store"]
        self._try = context["ti"].try_number

    @property
    def job(self) -> Identity | None:
        """The newest gang."""
        return Identity.from_dict(self._store.get(STATE_KEY))

    @job.setter
    def job(self, job: Identity) -> None:
        self._keep(STATE_KEY, job.to_dict())

    def result(self, uid: str | None) -> dict[str, Any] | None:
        """The result of the job that has this uid."""
        found = self._store.get(END_KEY)
        return found["result"] if isinstance(found, dict) and uid and found.get("uid") == uid else None

    def keep_result(self, uid: str, result: dict[str, Any]) -> None:
        self._keep(END_KEY, {"uid": uid, "result": result})

    def size(self, gang: Identity) -> int | None:
        """With how many nodes this gang starts, if not with all of its manifest."""
        found = self._store.get(SIZE_KEY)
        return int(found["nodes"]) if isinstance(found, dict) and found.get("of") == _size_of(gang, gang.gang) else None

    def keep_size(self, failed: Identity, nodes: int) -> None:
        """For the gang after the failed one and no other: those after it start whole again."""
        self._keep(SIZE_KEY, {"of": _size_of(failed, failed.gang + 1), "nodes": nodes})

    def until(self, timeout: timedelta | None) -> float | None:
        """Unix time at which this try's time is over; a deferral does not move it."""
        if timeout is None:
            return None
        latest = time.time() + timeout.total_seconds()
        stored = self._of_this_try(TIME_KEY)
        if stored is None:
            stored = {"try": self._try, "until": latest}
            self._keep(TIME_KEY, stored)
        return min(float(stored["until"]), latest)  # the clock may have been set back

    @property
    def failures(self) -> int:
        """How often this try's trigger broke."""
        return int((self._of_this_try(FAILURES_KEY) or {"count": 0})["count"])

    def count_failure(self) -> int:
        count = self.failures + 1
        self._keep(FAILURES_KEY, {"try": self._try, "count": count})
        return count

    def _of_this_try(self, key: str) -> dict[str, Any] | None:
        found = self._store.get(key)
        return found if isinstance(found, dict) and found.get("try") == self._try else None

    def _keep(self, key: str, value: Any) -> None:
        keep(self._store, key, value)


def keep(store: Any, key: str, value: Any) -> None:
    """Write into Airflow's task state store for good. :param store: `context["task_state_store"]`."""
    from airflow.sdk.execution_time.context import NEVER_EXPIRE

    store.set(key, value, retention=NEVER_EXPIRE)


def _size_of(job: Identity, gang: int) -> list[str | int]:
    # A clear or another spec makes another job of it, also if the number is the same.
    return [job.generation, job.fingerprint, gang]
