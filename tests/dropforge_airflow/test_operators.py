"""A job that the recipe does not ask for ends well and starts nothing."""

from __future__ import annotations

from typing import Any

import pytest
from dropforge_airflow.operators import OptionalJobOperator
from kubeflow_training.exceptions import JobFailedForGood


def test_without_a_manifest_nothing_is_started_and_with_one_it_is_read() -> None:
    context: Any = {}
    assert OptionalJobOperator(task_id="tokenise", manifest={}, backend="nowhere").execute(context) == {}
    with pytest.raises((JobFailedForGood, KeyError)):
        OptionalJobOperator(task_id="tokenise", manifest={"kind": "PyTorchJob"}).execute(context)
