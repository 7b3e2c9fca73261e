"""A person answers once: what Airflow asks again within seconds gets the same answer."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from dropforge.cli import airflow as client
from dropforge.cli.airflow import FINETUNE, Airflow
from tests.dropforge.cli.conftest import FakeAirflow

LONG_AGO = "2026-11-20T08:00:00Z"


class Asking:
    """A task that asks; of its answers `lost` come to nothing, because the task is tried again."""

    def __init__(self, lost: int) -> None:
        self.lost = lost
        self.state, self.answered = "awaiting_input", False
        self.looks = 0
        self.started = LONG_AGO
        self.taken: list[str] = []

    def answer(self, path: str) -> dict[str, Any]:
        self.looks += 1
        if self.answered and self.looks % 3 == 0:
            self.state = "awaiting_input" if self.lost else "success"
            self.answered = not self.lost
            self.lost -= 1
        task = {"state": self.state, "start_date": self.started}
        return {"created_at": LONG_AGO, "response_received": self.answered, "task_instance": task}

    def obey(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/confirm/-1/hitlDetails")
        self.taken += body["chosen_options"]
        self.state, self.answered = "scheduled", True
        return {}


@pytest.fixture
def asking(airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch) -> Asking:
    task = Asking(0)
    monkeypatch.setattr(airflow, "answer", task.answer)
    monkeypatch.setattr(airflow, "obey", task.obey)
    return task


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_an_answer_that_is_asked_for_again_is_given_again(airflow: FakeAirflow, asking: Asking, lost: int) -> None:
    asking.lost = lost
    person = Airflow(airflow.url, "ann", "")
    person.answer(FINETUNE, "run", "confirm", "Start")
    person.see_taken(FINETUNE, "run", "confirm", "Start")
    assert asking.state == "success"
    assert asking.taken == ["Start"] * (lost + 1)


def test_a_question_that_is_asked_anew_after_a_clear_settles_too(
    airflow: FakeAirflow, asking: Asking, monkeypatch: pytest.MonkeyPatch
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(client.time, "sleep", waits.append)
    asking.started = datetime.now(UTC).isoformat()  # the question itself is the one of the try before
    Airflow(airflow.url, "ann", "").answer(FINETUNE, "run", "confirm", "Start")
    (waited,) = waits
    assert 9 < waited <= 10
