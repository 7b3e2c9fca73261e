"""How a task of this provider fails."""

from __future__ import annotations

from airflow.sdk.exceptions import AirflowException, AirflowFailException


class JobFailed(AirflowException):
    """The job ended badly; a new gang may end better, so Airflow's retries apply."""


class JobFailedForGood(JobFailed, AirflowFailException):
    """The job ended badly and would do so again (wrong code or data, for example): no retry."""


class JobNotReached(AirflowException):
    """The job could not be started or asked about, which says nothing about how it would end; retries apply."""


class TaskStopped(AirflowException):
    """This process was told to stop. Returning instead would count as success."""
