"""How a task of this provider fails."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from kubeflow_training.jobs.observation import Observation


class JobFailed(AirflowException):
    """The job ended badly; a new attempt may end better, so Airflow's retries and the task's retry policy apply.

    :param observation: what was seen of the job's end.
    :param job: its name, namespace, uid and `gang`.
    """

    def __init__(
        self, text: str = "", observation: Observation | None = None, job: Mapping[str, Any] | None = None
    ) -> None:
        super().__init__(text)
        self.observation, self.job = observation, dict(job or {})


class JobFailedForGood(JobFailed, AirflowFailException):
    """The job ended badly and would do so again (wrong code or data, for example): no retry, no policy is asked."""


class JobNotReached(AirflowException):
    """The job could not be started or asked about, which says nothing about how it would end; retries apply."""


class TaskStopped(AirflowException):
    """This process had to stop. Returning instead would count as success."""
