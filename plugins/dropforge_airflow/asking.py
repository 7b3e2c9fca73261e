"""`AskPersonOperator`: a question to a person in Airflow's "Required actions", with a deadline and a default."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final, NoReturn, NotRequired, TypedDict, cast

from airflow.providers.standard.operators.hitl import HITLOperator
from airflow.sdk.exceptions import AirflowFailException, TaskAwaitingInput
from kubeflow_training.gangs.memory import keep
from kubeflow_training.retries import generation
from kubeflow_training.state_mismatch import ResumableTask, first_event_at, report_seconds

from dropforge_airflow.triggers.answers import AnswerTrigger

if TYPE_CHECKING:
    from airflow.sdk import Context

_QUESTION: Final = "question"  # keys in the task state store
_ANSWER: Final = "answer"


@dataclass(frozen=True)
class Question:
    """
    :param subject: in one line. :param body: in Markdown.
    :param about: what tells it from other questions of the task: an answer is good for this one only.
    :param yes: whether silence until the deadline is a yes. :param people: ids of those who may answer; none for all.
    """

    subject: str
    body: str
    about: str
    yes: bool
    deadline_hours: float
    people: Sequence[str] = ()


class Asked(TypedDict):
    """:param asked: whether a person had to be asked. :param told: who said what, in one line."""

    asked: bool
    told: str


class AskedQuestion(TypedDict):
    """A question that Airflow shows.

    :param of: the same in all retries, another after a clear. :param until: its deadline, as ISO 8601.
    :param silence: whether no answer is a yes. :param people: ids of those who may answer; none for all. Of what an
        older version asked neither is known.
    """

    of: str
    about: str
    until: str
    silence: NotRequired[bool]
    people: NotRequired[list[str]]


class Answered(TypedDict):
    """A person's answer, as the task keeps it from try to try. :param of, about: of its question.

    :param at: as ISO 8601.
    """

    of: str
    about: str
    yes: bool
    by: str | None
    at: str
    user: NotRequired[str | None]


class AskPersonOperator(ResumableTask, HITLOperator):
    """Wait for a person's word on an opened run. What is asked, and what becomes of the answer, is the subclass's.

    An answer, yes or no, outlives the try that it was given to, also one that Airflow ended before it could read it:
    the next try takes it, and nobody is asked twice. Only a clear asks again, unless the subclass says otherwise.

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

    def withdraw(self, about: str) -> None:
        """Have an answer of before a clear count no more. Called before the question is shown, also for the first time.

        :param about: of the question.
        """

    def take(self, about: str, *, yes: bool, by: str | None, at: datetime, user: str | None) -> str:
        """Keep the answer, and show it in MLflow; in one line. It may be called again with the same answer.

        :param about: of its question; empty if an older version asked.
        :param by: name of who answered; None if nobody did in time. :param user: the id; None also if an older version
            kept the answer.
        """
        raise NotImplementedError

    def execute(self, context: Context) -> Asked:
        self.explain_retry(context)
        question = self.question()
        if isinstance(question, str):
            self.log.info("%s", question)
            return Asked(asked=False, told=question)
        store: Any = context["task_state_store"]
        kept = store.get(_ANSWER)
        if isinstance(kept, dict) and not kept.get("about"):
            kept = {**kept, "about": question.about}  # an older version asked, and did not say about what
        if _of_this(kept, context, question):
            return self._take(cast("Answered", kept))
        if _of_this(store.get(_QUESTION), context, question):
            # To ask now would take an answer away that is there already: Airflow hands it on from try to try.
            self.note_wait(context)
            trigger = AnswerTrigger(task_instance_id=str(context["ti"].id), not_before=first_event_at())
            self.defer(trigger=trigger, method_name=self.take_earlier_answer.__name__)
        return self._ask(context, question)

    def take_earlier_answer(self, context: Context, event: dict[str, Any]) -> Asked:
        """Go on with the answer to an earlier try's question, or wait for it if there is none yet."""
        if "answered" not in event:
            # It was given while the trigger looked: Airflow then resumes the task by itself.
            return self.execute_complete(context, event)
        if event["answered"]:
            at = datetime.fromisoformat(event["at"])
            yes = self._said(context, event["chosen_options"], event.get("id") or event["by"])
            return self._take(self._kept(context, yes=yes, by=event["by"], at=at, user=event.get("id")))
        until = datetime.fromisoformat(_asked(context)["until"])
        self.log.info("The question of an earlier try is not answered yet, and is open until %s", f"{until:%FT%TZ}")
        self.note_wait(context)
        # A deadline at once would be a state mismatch.
        left = max(until - datetime.now(UTC), timedelta(seconds=report_seconds()))
        raise TaskAwaitingInput(method_name=self.execute_complete.__name__, timeout=left)

    def execute_complete(self, context: Context, event: dict[str, Any]) -> Asked:
        """Take the answer, or the default at the deadline."""
        super().execute_complete(context, event)
        user = event.get("responded_by_user")
        user = None if event.get("timedout") or not user else str(user["id"])
        by = None if user is None else str(event["responded_by_user"]["name"] or user)
        yes = self._said(context, event["chosen_options"], user)
        return self._take(self._kept(context, yes=yes, by=by, at=event["responded_at"], user=user))

    def _said(self, context: Context, chosen: Sequence[str], user: str | None) -> bool:
        """Whether it was a yes. Airflow may have shown the question of before a clear, with its people and its default.

        :param user: id of who chose; None if nobody did in time.
        :raises AirflowFailException: if who answered is not among those who are asked.
        """
        asked = _asked(context)
        if user is None:
            return bool(asked.get("silence", list(chosen) == [self.options[0]]))
        if (people := asked.get("people")) and user not in people:
            raise AirflowFailException(
                f"{user} answered, and those who are asked are {', '.join(people)}: Airflow showed the question of "
                f"before a clear. Load Dropforge's plugin in Airflow's API server, then clear task {self.task_id}"
            )
        return list(chosen) == [self.options[0]]

    def _ask(self, context: Context, question: Question) -> NoReturn:
        yes, no = self.options
        self.subject, self.body = question.subject, question.body
        self.defaults = [yes if question.yes else no]
        self.assigned_users = [{"id": person, "name": person} for person in question.people] or None
        self.response_timeout = timedelta(hours=question.deadline_hours)
        until = datetime.now(UTC) + self.response_timeout
        page = self.generate_link_to_ui_from_context(context=context)
        self.withdraw(question.about)
        self.tell(f"asked until {until:%FT%TZ}: {page}")
        self.log.info("%s\n\nThe answer is waited for until %s: %s", self.body, f"{until:%FT%TZ}", page)
        asked = AskedQuestion(
            of=generation(context),
            about=question.about,
            until=until.isoformat(),
            silence=question.yes,
            people=list(question.people),
        )

        def shown(context: Context) -> None:
            """Not earlier: by showing the question Airflow takes away the answer that was given before a clear."""
            keep(context["task_state_store"], _QUESTION, dict(asked))
            self.note_wait(context)

        self.notifiers = [cast("Any", shown), *self.notifiers]
        super().execute(context)
        raise AssertionError("the operator above parks the task")

    def _kept(self, context: Context, *, yes: bool, by: str | None, at: datetime, user: str | None) -> Answered:
        """Keep an answer first of all: bucket or MLflow may be away, and Airflow gives it to one try only."""
        answer = Answered(
            of=generation(context),
            about=_asked(context).get("about", ""),
            yes=yes,
            by=by,
            at=at.astimezone(UTC).isoformat(),
            user=user,
        )
        keep(context["task_state_store"], _ANSWER, dict(answer))
        return answer

    def _take(self, answer: Answered) -> Asked:
        at = datetime.fromisoformat(answer["at"])
        told = self.take(answer["about"], yes=answer["yes"], by=answer["by"], at=at, user=answer.get("user"))
        self.log.info("%s", told)
        return Asked(asked=True, told=told)


def _asked(context: Context) -> dict[str, Any]:
    """The question that the task asks, as `AskedQuestion`; empty if an older version asked, which did not keep it."""
    store: Any = context["task_state_store"]
    return store.get(_QUESTION) or {}


def _of_this(found: Any, context: Context, question: Question) -> bool:
    """Whether what is kept is of this question, and was kept since the task was last cleared."""
    return isinstance(found, dict) and (found.get("of"), found.get("about")) == (generation(context), question.about)
