"""A person's answer is not lost with the try that it was given to."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk.exceptions import AirflowFailException
from dropforge_airflow.asking import AskPersonOperator, Question
from dropforge_airflow.confirm import ConfirmOperator

from dropforge import layout, tracking
from tests.dropforge_airflow.conftest import Yard
from tests.dropforge_airflow.test_confirm import opened

AT = datetime(2026, 11, 24, 5, tzinfo=UTC)


class Store(dict[str, Any]):
    """The task state store."""

    def set(self, key: str, value: Any, *, retention: timedelta | None = None) -> None:
        self[key] = json.loads(json.dumps(value))


def context(store: Store, clears: int = 0) -> Any:
    run = SimpleNamespace(clear_number=0)
    return {"ti": SimpleNamespace(max_tries=2 + clears), "dag_run": run, "task_state_store": store}


def answer(option: str, user: str | None = "ann") -> dict[str, Any]:
    by = None if user is None else {"id": "1", "name": user}
    return {"chosen_options": [option], "params_input": {}, "responded_at": AT, "responded_by_user": by}


class Asker(AskPersonOperator):
    """Keeps what it took, once `away` is over."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(opened={}, subject="?", yes="Yes", no="No", **kwargs)
        self.away = 0
        self.taken: list[tuple[bool, str | None, datetime]] = []

    def question(self) -> Question | str:
        return "asked again"

    def take(self, *, yes: bool, by: str | None, at: datetime) -> str:
        if self.away:
            self.away -= 1
            raise OSError("the bucket does not answer")
        self.taken.append((yes, by, at))
        return "taken"


@pytest.mark.parametrize("option", ["Yes", "No"])
@pytest.mark.parametrize("user", ["ann", None])
def test_an_answer_outlives_the_try_that_could_not_keep_it(option: str, user: str | None) -> None:
    store, asker = Store(), Asker(task_id="ask")
    asker.away = 2
    with pytest.raises(OSError, match="does not answer"):
        asker.execute_complete(context(store), answer(option, user))
    with pytest.raises(OSError, match="does not answer"):
        asker.execute(context(store))
    assert asker.execute(context(store)) == {"asked": True, "told": "taken"}
    # It may be cut off after that, too.
    assert asker.execute(context(store)) == {"asked": True, "told": "taken"}
    assert asker.taken == [(option == "Yes", user, AT)] * 2
    assert asker.execute(context(store, clears=1)) == {"asked": False, "told": "asked again"}


def test_a_no_ends_the_run_also_if_it_is_told_by_the_next_try(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    run, store = opened(yard, {"ask_above": {"cost": 9}}), Store()

    def cut_off(*_: Any) -> None:
        raise OSError("MLflow does not answer")

    def tries(act: Callable[[], Any], error: type[Exception], told: str) -> None:
        with pytest.raises(error, match=told):
            act()

    operator = ConfirmOperator(task_id="confirm", opened=run)
    monkeypatch.setattr(tracking, "note", cut_off)
    tries(lambda: operator.execute_complete(context(store), answer("Do not start")), OSError, "MLflow")
    monkeypatch.setattr(tracking, "note", lambda *_: None)
    tries(lambda: operator.execute(context(store)), AirflowFailException, "ann said no at 2026-11-24T05:00:00Z")
    assert json.loads(yard.store.get(layout.confirmation_key("fam-1")))["start"] is False
