"""`ConfirmOperator`: asks a person before a run begins whose plan is above the recipe's limits."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from dropforge_airflow.asking import AskPersonOperator, Question
from dropforge_airflow.tasks import confirm

START: Final = "Start"
STOP: Final = "Do not start"


class ConfirmOperator(AskPersonOperator):
    """Wait for a person's word, with the plan as the question. No pod of the run exists before it.

    Nobody is asked if the recipe limits nothing, if the plan is within its limits, or if somebody has said yes to this
    run before. After a no the task fails, and the run ends.

    :param opened: what task `open_run` returned; templated.
    """

    def __init__(self, *, opened: Any, **kwargs: Any) -> None:
        super().__init__(opened=opened, subject="Start?", yes=START, no=STOP, **kwargs)

    def question(self) -> Question | str:
        return confirm.question(self.opened)

    def tell(self, text: str) -> None:
        confirm.tell_asked(self.opened, text)

    # A run has one plan, and whom to ask about it.
    def take(self, about: str, *, yes: bool, by: str | None, at: datetime, user: str | None) -> str:  # noqa: ARG002
        told = confirm.take_answer(self.opened, start=yes, by=by, at=at)
        confirm.require_yes(self.opened)
        return told
