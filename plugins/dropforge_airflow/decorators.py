"""Airflow's `@task` for the pipeline's bodies: plain functions that become tasks with links, and without noise."""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Any

from airflow.providers.standard.decorators.python import _PythonDecoratedOperator
from airflow.sdk import BaseOperatorLink, task
from airflow.sdk.bases.decorator import task_decorator_factory

from dropforge_airflow.links import ModelVersionLink, OpenedRunLink, VerdictLink


class RunTask(_PythonDecoratedOperator):
    """A step of an opened run, which is its first argument."""

    operator_extra_links: Collection[BaseOperatorLink] = (OpenedRunLink(),)


class DecideTask(RunTask):
    """The step that judges."""

    operator_extra_links = (OpenedRunLink(), VerdictLink())


class RegisterTask(RunTask):
    """The step that registers."""

    operator_extra_links = (OpenedRunLink(), ModelVersionLink())


def step(body: Callable[..., Any], kind: type[_PythonDecoratedOperator] = _PythonDecoratedOperator, **more: Any) -> Any:
    """Make a task of this body and with its name; what it returns is not printed, for some of it is long."""
    return task_decorator_factory(
        body, multiple_outputs=False, decorated_operator_class=kind, show_return_value_in_logs=False, **more
    )


def wait(body: Callable[..., Any], **more: Any) -> Any:
    """Make a task that looks now and then, and occupies no worker in between."""
    return task.sensor(mode="reschedule", **more)(body)
