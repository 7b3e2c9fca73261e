"""`ApproveOperator`: asks a person before a candidate becomes champion, where the recipe wants that."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final

from dropforge_airflow.asking import AskPersonOperator, Question
from dropforge_airflow.tasks import approval

PROMOTE: Final = "Promote"
KEEP: Final = "Keep the champion"


class ApproveOperator(AskPersonOperator):
    """Wait for a person's word, with the verdict's table as the question.

    Nobody is asked if neither the family nor the run's recipe has `promote.approval`, or if the candidate failed
    another check. The task ends well whatever the answer: the next one reads it where it is kept.

    :param opened: what task `open_run` returned; templated. :param families: folder of the families' files.
    """

    def __init__(self, *, opened: Any, families: str | None = None, **kwargs: Any) -> None:
        super().__init__(opened=opened, subject="Promote?", yes=PROMOTE, no=KEEP, **kwargs)
        self.families = families

    def question(self) -> Question | str:
        return approval.question(self.opened, self.families)

    def tell(self, text: str) -> None:
        approval.tell_asked(self.opened, text)

    def withdraw(self, about: str) -> None:
        approval.withdraw(self.opened, about, self.families)

    def take(self, about: str, *, yes: bool, by: str | None, at: datetime, user: str | None) -> str:
        return approval.take_answer(self.opened, about, self.families, promoted=yes, by=by, at=at, user=user)
