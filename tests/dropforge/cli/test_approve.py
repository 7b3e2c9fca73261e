"""An answer in the terminal is given once, and seen to be taken."""

from __future__ import annotations

from typing import Any

import pytest

from dropforge.client import airflow as client
from dropforge.client.airflow import FINETUNE, Airflow
from tests.dropforge.cli.conftest import FakeAirflow


class Asking:
    """A task that asks, and goes through these states once it is answered."""

    def __init__(self, *states: str) -> None:
        self.states, self.answered, self.taken = list(states), False, list[str]()

    def answer(self, path: str) -> dict[str, Any]:
        state = "awaiting_input" if not self.answered else self.states.pop(0) if self.states[1:] else self.states[0]
        return {"response_received": self.answered and state != "awaiting_input", "task_instance": {"state": state}}

    def obey(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        assert path.endswith("/confirm/-1/hitlDetails")
        self.taken += body["chosen_options"]
        self.answered = True
        return {}


@pytest.mark.parametrize(
    "states",
    [
        ["scheduled", "queued", "running", "success"],
        ["queued", "up_for_retry", "queued", "deferred", "running", "failed"],
        ["running", "awaiting_input"],  # cleared, and so asked anew, which is another's to answer
    ],
)
def test_it_waits_until_the_task_has_taken_it(
    airflow: FakeAirflow, monkeypatch: pytest.MonkeyPatch, states: list[str]
) -> None:
    task = Asking(*states)
    monkeypatch.setattr(airflow, "answer", task.answer)
    monkeypatch.setattr(airflow, "obey", task.obey)
    monkeypatch.setattr(client.time, "sleep", lambda _: None)
    person = Airflow(airflow.url, "ann", "")
    person.answer(FINETUNE, "run", "confirm", "Start")
    assert person.see_taken(FINETUNE, "run", "confirm")
    assert (task.states, task.taken) == (states[-1:], ["Start"])
