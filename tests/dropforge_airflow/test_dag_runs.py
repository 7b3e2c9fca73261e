"""States of other runs, as the supervisor of a task tells them."""

from __future__ import annotations

import asyncio
import time
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowRuntimeError, ErrorType
from airflow.sdk.execution_time.comms import DagRunStateResult, ErrorResponse
from dropforge_airflow.dag_runs import state_of
from dropforge_airflow.triggers.runs import RunEndTrigger


class Task:
    """A task instance whose supervisor gives these answers."""

    def __init__(self, answer: DagRunStateResult | ErrorResponse) -> None:
        self.answer = answer

    def get_dagrun_state(self, dag_id: str, run_id: str) -> str:
        assert (dag_id, run_id) == ("finetune", "one")
        if isinstance(self.answer, ErrorResponse):
            raise AirflowRuntimeError(self.answer)
        return self.answer.state


@pytest.mark.parametrize("state", ["failed", "success", "running", "queued"])
def test_a_state_is_its_word(state: str) -> None:
    assert state_of(Task(DagRunStateResult.model_validate({"state": state})), "finetune", "one") == state


def test_an_unknown_run_has_none() -> None:
    assert state_of(Task(refusal(404)), "finetune", "one") is None


def test_silence_is_no_answer() -> None:
    with pytest.raises(AirflowRuntimeError):
        state_of(Task(refusal(503)), "finetune", "one")


def refusal(status: int) -> ErrorResponse:
    return ErrorResponse(error=ErrorType.API_SERVER_ERROR, detail={"status_code": status, "message": "said"})


def test_the_end_of_a_run_is_told_once_and_not_too_early(monkeypatch: pytest.MonkeyPatch) -> None:
    async def states(self: RunEndTrigger, runs_ids_or_dates_len: int = 0) -> dict[str, str]:
        return {"run": "failed"}

    monkeypatch.setattr(RunEndTrigger, "validate_count_dags_af_3", states)
    moment = time.time() + 0.3
    path, arguments = RunEndTrigger("dag", "run", ["failed", "success"], 5, not_before=moment).serialize()
    assert path == f"{RunEndTrigger.__module__}.RunEndTrigger"

    async def events() -> list[Any]:
        return [event.payload async for event in RunEndTrigger(**arguments).run()]

    ((_, told),) = asyncio.run(events())
    assert told["run"] == "failed"
    assert time.time() >= moment
