"""`AskPersonOperator`: a question to a person in Airflow's "Required actions", with a deadline and a default."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, TypedDict, cast

from airflow.providers.standard.operators.hitl import HITLOperator
from kubeflow_training.gangs.memory import keep
from kubeflow_training.retries import generation

if TYPE_CHECKING:
    from airflow.sdk import Context

_ANSWER: Final = "answer"  # key in the task state store


@dataclass(frozen=True)
class Question:
    """
    :param subject: in one line. :param body: in Markdown.
    :param yes: whether silence until the deadline is a yes. :param people: ids of those who may answer; none for all.
    """

    subject: str
    body: str
    yes: bool
    deadline_hours: float
    people: Sequence[str] = ()


class Asked(TypedDict):
    """:param asked: whether a person had to be asked. :param told: who said what, in one line."""

    asked: bool
    told: str


class Answered(TypedDict):
    """A person's answer, as the task keeps it from try to try.

    :param of: the same in all retries, another after a clear. :param at: as ISO 8601.
    """

    of: str
    yes: bool
    by: str | None
    at: str


class AskPersonOperator(HITLOperator):
    """Wait for a person's word on an opened run. What is asked, and what becomes of the answer, is the subclass's.

    Whoever has answered is not asked again by a try that only follows because the one before was cut off; after a clear
    somebody is, unless the subclass says otherwise.

    :param opened: what task `open_run` returned; templated.
    :param yes, no: the two options, in words.
    """

    # The question is made while the task runs: names of people's runs are no templates.
    template_fields: Collection[str] = ("opened",)

    def __init__(self, *, opened: Any, subject: str, yes: str, no: str, **kwargs: Any) -> None:
        super().__init__(subject=subject, options=[yes, no], **kwargs)
        self.opened = opened

    def question(self) -> Question | str:
        """What to ask; if nobody has to be asked, why not."""
        raise NotImplementedError

    def tell(self, text: str) -> None:
        """Show in MLflow that the run waits for a person."""
        raise NotImplementedError

    def take(self, *, yes: bool, by: str | None, at: datetime) -> str:
        """Keep the answer, and show it in MLflow; in one line. It may be called again with the same answer.

        :param by: None if nobody answered in time.
        """
        raise NotImplementedError

    def execute(self, context: Context) -> Asked:
        given = _given(context)
        if given is not None:
            return self._take(given)
        question = self.question()
        if isinstance(question, str):
            self.log.info("%s", question)
            return Asked(asked=False, told=question)
        yes, no = self.options
        self.subject, self.body = question.subject, question.body
        self.defaults = [yes if question.yes else no]
        self.assigned_users = [{"id": person, "name": person} for person in question.people] or None
        self.response_timeout = timedelta(hours=question.deadline_hours)
        until = datetime.now(UTC) + self.response_timeout
        page = self.generate_link_to_ui_from_context(context=context)
        self.tell(f"asked until {until:%FT%TZ}: {page}")
        self.log.info("%s\n\nThe answer is waited for until %s: %s", self.body, f"{until:%FT%TZ}", page)
        super().execute(context)
        raise AssertionError("the operator above parks the task")

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Asked:
        super().execute_complete(context, event)
        user = event.get("responded_by_user")
        answer = Answered(
            of=generation(context),
            yes=event["chosen_options"] == [self.options[0]],
            by=None if not user or event.get("timedout") else str(user["name"] or user["id"]),
            at=event["responded_at"].astimezone(UTC).isoformat(),
        )
        # First of all: bucket or MLflow may be away, and Airflow gives the answer to this try only.
        keep(context["task_state_store"], _ANSWER, dict(answer))
        return self._take(answer)

    def _take(self, answer: Answered) -> Asked:
        told = self.take(yes=answer["yes"], by=answer["by"], at=datetime.fromisoformat(answer["at"]))
        self.log.info("%s", told)
        return Asked(asked=True, told=told)


def _given(context: Context) -> Answered | None:
    """The answer to an earlier try of this one, which was cut off before it was done with it."""
    store: Any = context["task_state_store"]
    found = store.get(_ANSWER)
    ours = isinstance(found, dict) and found.get("of") == generation(context)
    return cast("Answered", found) if ours else None
