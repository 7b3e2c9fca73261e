"""Which Airflow is this? A name that is written on its jobs, so that its reaper leaves those of all others alone."""

from __future__ import annotations

import logging
import os
import uuid
from typing import Final

INSTANCE_VARIABLE: Final = "KUBEFLOW_TRAINING_INSTANCE"
"""Environment variable with the name, should a person wish to choose it."""
STORED_NAME: Final = "kubeflow_training_instance"
"""Airflow Variable with the name that was drawn otherwise: it lies in the database, which is what makes an Airflow."""

log = logging.getLogger(__name__)


def this_instance(*, draw: bool = True) -> str | None:
    """The name of this Airflow, for a task or trigger of it.

    :param draw: whether to draw a name if there is none yet.
    :returns: None if there is none, or if Airflow does not answer: then no reaper touches the job, which is safe.
    """
    if name := os.environ.get(INSTANCE_VARIABLE):
        return name
    try:
        if name := _stored():
            return name
        if not draw:
            return None
        _store(uuid.uuid4().hex)
        # Two tasks may have drawn at once: what is stored now counts.
        return _stored()
    except Exception as error:
        log.warning("this Airflow's name is not known, so no reaper will look after the job: %r", error)
        return None


def _stored() -> str | None:
    from airflow.sdk import Variable
    from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType

    try:
        return str(Variable.get(STORED_NAME)) or None
    except AirflowRuntimeError as error:
        if error.error.error == ErrorType.VARIABLE_NOT_FOUND:
            return None
        raise


def _store(name: str) -> None:
    from airflow.sdk import Variable

    Variable.set(STORED_NAME, name, description="Written on the training jobs of this Airflow; leave it as it is")
