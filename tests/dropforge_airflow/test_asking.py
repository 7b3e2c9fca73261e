"""A person's answer is not lost with the try that it was given to."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Sequence
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from airflow.providers.standard.operators import hitl
from airflow.sdk.api.datamodels._generated import HITLDetailResponse, HITLUser
from airflow.sdk.exceptions import AirflowFailException, TaskAwaitingInput, TaskDeferred
from dropforge_airflow.asking import AskPersonOperator, Question
from dropforge_airflow.confirm import ConfirmOperator
from dropforge_airflow.triggers.answers import AnswerTrigger

from dropforge import layout, tracking
from tests.dropforge_airflow.conftest import Yard
from tests.dropforge_airflow.test_confirm import opened

AT = datetime(2026, 11, 24, 5, tzinfo=UTC)
TASK = UUID("0198a1f0-0000-7000-8000-000000000001")


class Store(dict[str, Any]):
    """The task state store."""

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        self[key] = json.loads(json.dumps(value))


def context(store: Store, clears: int = 0, attempt: int = 1) -> Any:
    ti = SimpleNamespace(max_tries=4 + clears, try_number=attempt, id=TASK)
    return {"ti": ti, "task_instance": ti, "dag_run": SimpleNamespace(clear_number=0), "task_state_store": store}


def answer(option: str, user: str | None = "ann") -> dict[str, Any]:
    by = None if user is None else {"id": "1", "name": user}
    return {"chosen_options": [option], "params_input": {}, "responded_at": AT, "responded_by_user": by}


class Asker(AskPersonOperator):
    """Keeps what it took, once `away` is over."""

    def __init__(self, people: Sequence[str] = (), **kwargs: Any) -> None:
        super().__init__(opened={}, subject="?", yes="Yes", no="No", **kwargs)
        self.people = people
        self.away = 0
        self.about = "this model"
        self.taken: list[tuple[bool, str | None, datetime]] = []
        self.withdrawn = 0

    def question(self) -> Question | str:
        return Question("?", "", self.about, yes=False, deadline_hours=2, people=self.people)

    def tell(self, text: str) -> None:
        pass

    def withdraw(self, about: str) -> None:
        assert about == self.about
        self.withdrawn += 1

    def take(self, about: str, *, yes: bool, by: str | None, at: datetime, user: str | None) -> str:
        assert about == self.about
        if self.away:
            self.away -= 1
            raise OSError("the bucket does not answer")
        self.taken.append((yes, by, at))
        return "taken"


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The questions that Airflow was told to show. By that it takes an earlier answer away."""
    found: list[str] = []
    monkeypatch.setattr(hitl, "upsert_hitl_detail", lambda **question: found.append(question["subject"]))
    monkeypatch.setattr(Asker, "generate_link_to_ui_from_context", staticmethod(lambda **_: "page"))
    return found


def asks(asker: Asker, ctx: Any) -> timedelta:
    """The try waits for a person. :returns: for how long."""
    with pytest.raises(TaskAwaitingInput) as waits:
        asker.execute(ctx)
    assert isinstance(waits.value.timeout, timedelta)
    return waits.value.timeout


@pytest.mark.parametrize(("option", "user"), [("Yes", "ann"), ("No", "ann"), ("No", None)])
def test_an_answer_outlives_the_try_that_could_not_keep_it(option: str, user: str | None, shown: list[str]) -> None:
    store, asker = Store(), Asker(task_id="ask")
    asks(asker, context(store))
    asker.away = 2
    with pytest.raises(OSError, match="does not answer"):
        asker.execute_complete(context(store), answer(option, user))
    with pytest.raises(OSError, match="does not answer"):
        asker.execute(context(store, attempt=2))
    assert asker.execute(context(store, attempt=3)) == {"asked": True, "told": "taken"}
    # It may be cut off after that, too.
    assert asker.execute(context(store, attempt=4)) == {"asked": True, "told": "taken"}
    assert asker.taken == [(option == "Yes", user, AT)] * 2
    assert shown == ["?"]
    assert asker.withdrawn == 1
    asks(asker, context(store, clears=1))  # only a clear asks again
    assert (shown, asker.withdrawn) == (["?", "?"], 2)


@pytest.mark.parametrize("about", [{}, {"about": ""}])
def test_an_answer_that_an_older_version_kept_is_taken(shown: list[str], about: dict[str, str]) -> None:
    store, asker = Store(), Asker(task_id="ask")
    store["answer"] = {"of": "4.0", "yes": True, "by": "ann", "at": AT.isoformat()} | about
    assert asker.execute(context(store, attempt=2)) == {"asked": True, "told": "taken"}
    assert (asker.taken, shown) == ([(True, "ann", AT)], [])


def test_an_answer_is_for_its_question_only(shown: list[str]) -> None:
    store, asker = Store(), Asker(task_id="ask")
    asks(asker, context(store))
    asker.execute_complete(context(store), answer("Yes"))
    asker.about = "another model"
    asks(asker, context(store, attempt=2))
    assert shown == ["?", "?"]


def test_neither_the_people_nor_the_silence_of_before_a_clear_count(
    monkeypatch: pytest.MonkeyPatch, shown: list[str]
) -> None:
    """Where Airflow shows the question of before, since its API server has no plugin of ours."""
    store, asker = Store(), Asker(task_id="ask", people=["boss"])
    asks(asker, context(store))
    with pytest.raises(AirflowFailException, match=r"eve answered, and those who are asked are boss.*clear task ask"):
        asker.execute_complete(context(store), answer("Yes", "eve") | {"responded_by_user": {"id": "eve", "name": "e"}})
    known(monkeypatch, responded_by_user=HITLUser(id="eve", name="boss"), responded_at=AT, chosen_options=["Yes"])
    found = asyncio.run(event_of(looks(asker, context(store, attempt=2))))
    with pytest.raises(AirflowFailException, match="eve answered"):
        asker.take_earlier_answer(context(store, attempt=2), found)
    asker.execute_complete(context(store), answer("Yes", None) | {"timedout": True})
    assert asker.taken == [(False, None, AT)]
    by_boss = {"responded_by_user": {"id": "boss", "name": "The boss"}}
    asker.execute_complete(context(store), answer("Yes") | by_boss)
    assert asker.taken[1:] == [(True, "The boss", AT)]


def looks(asker: Asker, ctx: Any) -> AnswerTrigger:
    """The next try leaves the question as it is, and has a triggerer look for the answer."""
    with pytest.raises(TaskDeferred) as deferred:
        asker.execute(ctx)
    assert deferred.value.method_name == "take_earlier_answer"
    path, arguments = deferred.value.trigger.serialize()
    assert path == "dropforge_airflow.triggers.answers.AnswerTrigger"
    assert arguments["not_before"] > time.time()  # not at once: that would be a state mismatch again
    return AnswerTrigger(**arguments | {"not_before": 0.0})


async def event_of(trigger: AnswerTrigger) -> dict[str, Any]:
    events = [event.payload async for event in trigger.run()]
    (found,) = events
    return dict(json.loads(json.dumps(found)))  # as Airflow stores it


def known(monkeypatch: pytest.MonkeyPatch, **response: Any) -> None:
    """What Airflow knows of the answer."""
    none = {"responded_by_user": None, "responded_at": None, "chosen_options": None}
    found = HITLDetailResponse(**none | {"response_received": bool(response)} | response)

    def ask(ti_id: UUID) -> HITLDetailResponse:
        assert ti_id == TASK
        return found

    monkeypatch.setattr("airflow.sdk.execution_time.hitl.get_hitl_detail_content_detail", ask)


@pytest.mark.parametrize("user", ["ann", None])
def test_an_answer_that_no_try_has_read_is_taken_by_the_next(
    monkeypatch: pytest.MonkeyPatch, shown: list[str], user: str | None
) -> None:
    store, asker = Store(), Asker(task_id="ask")
    asks(asker, context(store))
    by = None if user is None else HITLUser(id="1", name=user)
    known(monkeypatch, responded_by_user=by, responded_at=AT, chosen_options=["No"])
    trigger = looks(asker, context(store, attempt=2))
    found = asker.take_earlier_answer(context(store, attempt=2), asyncio.run(event_of(trigger)))
    assert found == {"asked": True, "told": "taken"}
    assert asker.taken == [(False, user, AT)]
    assert asker.execute(context(store, attempt=3)) == found
    assert shown == ["?"]


def test_a_question_without_an_answer_stands_until_its_first_deadline(
    monkeypatch: pytest.MonkeyPatch, shown: list[str]
) -> None:
    store, asker = Store(), Asker(task_id="ask")
    asks(asker, context(store))
    store["question"]["until"] = (datetime.now(UTC) + timedelta(minutes=30)).isoformat()
    known(monkeypatch)
    trigger = looks(asker, context(store, attempt=2))
    with pytest.raises(TaskAwaitingInput) as waits:
        asker.take_earlier_answer(context(store, attempt=2), asyncio.run(event_of(trigger)))
    assert isinstance(waits.value.timeout, timedelta)
    assert timedelta(minutes=29) < waits.value.timeout <= timedelta(minutes=30)
    assert shown == ["?"]
    # Airflow resumes the task itself if the answer comes while the triggerer looks.
    asker.take_earlier_answer(context(store, attempt=2), answer("Yes"))
    assert asker.taken == [(True, "ann", AT)]


def test_a_no_ends_the_run_also_if_it_is_told_by_the_next_try(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = opened(yard, {"ask_above": {"cost": 9}}), Store()

    def cut_off(*_: Any) -> None:
        raise OSError("MLflow does not answer")

    def tries(act: Callable[[], Any], error: type[Exception], told: str) -> None:
        with pytest.raises(error, match=told):
            act()

    operator = ConfirmOperator(task_id="confirm", opened=run)
    about = operator.question()
    assert isinstance(about, Question)
    store["question"] = {"of": "4.0", "about": about.about, "until": AT.isoformat()}
    monkeypatch.setattr(tracking, "note", cut_off)
    tries(lambda: operator.execute_complete(context(store), answer("Do not start")), OSError, "MLflow")
    monkeypatch.setattr(tracking, "note", lambda *_: None)
    tries(lambda: operator.execute(context(store)), AirflowFailException, "ann said no at 2026-11-24T05:00:00Z")
    assert json.loads(yard.store.get(layout.confirmation_key("fam-1")))["start"] is False
