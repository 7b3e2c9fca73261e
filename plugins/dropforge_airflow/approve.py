"""`ApproveOperator`: asks a person before a candidate becomes champion, where the recipe wants that."""

from __future__ import annotations

from collections.abc import Collection
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypedDict

from airflow.providers.standard.operators.hitl import HITLOperator

from dropforge_airflow.tasks import approval

if TYPE_CHECKING:
    from airflow.sdk import Context

PROMOTE: Final = "Promote"
KEEP: Final = "Keep the champion"


class Approved(TypedDict):
    """:param asked: whether a person had to be asked. :param told: who said what, in one line."""

    asked: bool
    told: str


class ApproveOperator(HITLOperator):
    """Wait for a person's word, in Airflow's "Required actions", with the verdict's table as the question.

    Nobody is asked if the recipe has no `promote.approval`, if the candidate failed another check, or if somebody has
    said yes to this candidate against this champion before. The task ends well whatever the answer: the next one reads
    it where it is kept.

    :param opened: what task `open_run` returned; templated.
    """

    # The question is made while the task runs: names of people's runs are no templates.
    template_fields: Collection[str] = ("opened",)

    def __init__(self, *, opened: Any, **kwargs: Any) -> None:
        super().__init__(subject="Promote?", options=[PROMOTE, KEEP], **kwargs)
        self.opened = opened

    def execute(self, context: Context) -> Approved:
        question = approval.question(self.opened)
        if isinstance(question, str):
            self.log.info("%s", question)
            return Approved(asked=False, told=question)
        asked = question.asked
        self.subject, self.body = question.subject, question.body
        self.defaults = [PROMOTE if asked.otherwise == "promote" else KEEP]
        self.assigned_users = [{"id": person, "name": person} for person in asked.people] or None
        self.response_timeout = timedelta(hours=asked.deadline_hours)
        until = datetime.now(UTC) + self.response_timeout
        page = self.generate_link_to_ui_from_context(context=context)
        approval.tell_asked(self.opened, f"asked until {until:%FT%TZ}: {page}")
        self.log.info("%s\n\nThe answer is waited for until %s: %s", self.body, f"{until:%FT%TZ}", page)
        super().execute(context)
        raise AssertionError("the operator above parks the task")

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Approved:
        super().execute_complete(context, event)
        user = event.get("responded_by_user")
        told = approval.take_answer(
            self.opened,
            promoted=event["chosen_options"] == [PROMOTE],
            by=None if not user or event.get("timedout") else str(user["name"] or user["id"]),
            at=event["responded_at"].astimezone(UTC),
        )
        self.log.info("%s", told)
        return Approved(asked=True, told=told)
