"""Alerts: what they say, who gets them, each told once, through Airflow's own notifiers and a real queue."""

from __future__ import annotations

import json
from datetime import UTC, datetime, timedelta
from types import SimpleNamespace
from typing import Any

import pytest
from airflow.sdk import BaseNotifier
from dropforge_airflow.alerts import callbacks, texts, wanted
from dropforge_airflow.alerts.telling import send, tell
from dropforge_airflow.alerts.texts import Where
from dropforge_airflow.alerts.trial import send_all
from dropforge_airflow.alerts.wanted import Wanted, parse
from dropforge_airflow.tasks.failure import MendableError
from dropforge_airflow.tasks.intake import Line, _tell_refused, take_in
from dropforge_airflow.triggers.post import Post

from dropforge import sweeps
from dropforge.errors import DataError, DropforgeError, RecipeError
from tests.dropforge_airflow.conftest import Yard

SQS = "airflow.providers.amazon.aws.notifications.sqs.SqsNotifier"
RUN = Where("dropforge_finetune", "manual__1", 0, "faq", "monday", "http://a/dags/d/runs/r", "http://m/#/runs/1")


class Broken(BaseNotifier):
    """A service that is away."""

    def __init__(self, text: str) -> None:
        super().__init__()

    def notify(self, context: Any) -> None:
        raise ConnectionError("nobody is there")


class Slow(Broken):
    """Only asynchronous, as some are."""

    def notify(self, context: Any) -> None:
        raise NotImplementedError

    async def async_notify(self, context: Any) -> None:
        SEEN.append(str(context.get("run_id")))


class Wordy(Broken):
    """Quotes all that its service answered, as errors of HTTP clients do."""

    def notify(self, context: Any) -> None:
        raise ConnectionError("<h1>\x1b[2J\nerror: forged\n" * 100_000)


SEEN: list[str] = []


def to_queue(yard: Yard, **more: Any) -> dict[str, Any]:
    arguments = {"aws_conn_id": "dropforge_s3", "queue_url": yard.dead_url, "message_body": "{subject}\n\n{body}"}
    return {"notifier": SQS, "arguments": arguments, **more}


def told(yard: Yard) -> list[str]:
    return [message["Body"] for message in yard.dead()]


# --- what they say


def test_a_failure_names_task_reason_mend_and_where_to_look() -> None:
    error = MendableError(RecipeError("recipe key `train.lr`", "it is too high.", "Lower it"))
    alert = callbacks.failure(RUN, "open_run", error, 3)
    assert alert.subject == "Dropforge: faq: run failed at open_run"
    assert alert.body.splitlines() == [
        "The run failed at task open_run, try 3.",
        "",
        "Reason: recipe key `train.lr`: it is too high.",
        "Fix: Lower it",
        "",
        "Family: faq",
        "Drop: monday",
        "Run: http://a/dags/d/runs/r",
        "MLflow: http://m/#/runs/1",
    ]


def test_data_that_a_gate_refuses_are_a_rejected_drop_and_a_failed_run_at_once() -> None:
    error = MendableError(DataError("dataset faq/1", "90% of its rows are left out", "Look at its card"))
    alert = callbacks.failure(RUN, "check_data", error, 1)
    assert alert.occasions == ("rejected", "failed")
    assert alert.subject == "Dropforge: faq: drop monday is rejected at check_data"
    assert "Fix: Look at its card" in alert.body
    # The same error in a task that judges no data is a failure.
    assert callbacks.failure(RUN, "open_run", error, 1).occasions == ("failed",)
    assert alert.once == callbacks.failure(RUN, "open_run", error, 1).once


def test_a_jobs_last_lines_stay_in_its_log() -> None:
    error = RuntimeError("job a/b failed, out of memory.\nLast lines of worker 0:\n    a row of the data")
    assert "a row" not in callbacks.failure(RUN, "train", error, 1).body


def test_names_from_outside_cannot_break_a_header_grow_without_end_or_become_markup() -> None:
    alert = texts.rejected("faq", "x\r\nBcc: a@b\x1b[2J<!channel>" + "y" * 500, "1", "<b>\n{family}" * 500, "é")
    assert "\n" not in alert.subject
    assert len(alert.subject) <= 100
    assert alert.subject.isascii()
    assert len(alert.body) < 1500
    assert not set("\r\x1b") & set(alert.body)
    filled = alert.fill({"a": ["{body_html}"], "b": "{other} {body} {", "c": 3})
    assert "<" not in filled["a"][0]
    assert filled["b"].startswith("{other} The drop cannot be taken in")
    assert "{family}" in filled["b"]  # what a text holds is no word of ours
    assert filled["c"] == 3


def test_a_question_says_until_when_and_what_silence_means() -> None:
    until = datetime(2026, 11, 25, 12, 0, tzinfo=UTC)
    body = texts.approval(RUN, "approve", "Promote?", "http://a/required_actions", until, "Keep the champion").body
    assert (
        "Answer: http://a/required_actions\nUntil: 2026-11-25 12:00 UTC; without an answer: Keep the champion" in body
    )


def test_a_trial_that_its_sweep_ended_is_no_failure(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wanted.ENVIRONMENT, json.dumps([to_queue(yard)]))

    def fail(run: str, trial: int, plan: Any = None) -> None:
        by = sweeps.Member(by="sweep__faq__1", parent="p", trial=trial, candidate=False)
        dag_run = SimpleNamespace(run_id=run, conf={"family": "faq", "sweep": dict(by)}, clear_number=0)
        ti = SimpleNamespace(task_id="train", try_number=1, xcom_pull=lambda **_: plan)
        ti.get_task_states = lambda **_: {run: {"train": "failed"}}
        dag = SimpleNamespace(dag_id="dropforge_finetune", task_dict={"plan": None})
        context: Any = {"dag_run": dag_run, "dag": dag, "ti": ti, "exception": RuntimeError("its job is gone")}
        callbacks.TASK_FAILED.notify(context)
        callbacks.RUN_FAILED.notify(context)

    sweeps.stop(yard.store, "faq", "sweep__faq__1", 1, sweeps.Stop(early=True, told="it is worse"))
    fail("trial__1", 1)
    assert told(yard) == []
    fail("trial__2", 2, plan=[{"run": "a sweep's own plan is a list"}])
    (text,) = told(yard)
    assert "its job is gone" in text
    assert "Family: faq" in text


# --- who gets them


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("{", "invalid JSON"),
        ("{}", "valid array"),
        ('[{"notifier": "x", "arguments": {"text": "{body}"}}]', "`0.notifier`"),
        ('[{"notifier": "a.B", "arguments": {"text": "hello"}}]', "nothing would be sent"),
        ('[{"notifier": "a.B", "arguments": {"text": "{body}"}, "occasions": ["birthday"]}]', "`0.occasions.0`"),
        ('[{"notifier": "a.B", "arguments": {"text": "{body}"}, "more": 1}]', "`0.more`"),
        ('[{"notifier": "a.B", "arguments": {"text": "{body}", "auth_token": "s3cret"}}]', "`auth_token` looks like"),
        ('[{"notifier": "a.B", "arguments": {"text": "{body}", "to": "https://me:s3cret@x"}}]', "`to` looks like"),
    ],
)
def test_a_broken_configuration_is_told_without_its_values(text: str, cause: str) -> None:
    with pytest.raises(DropforgeError) as told:
        parse(text, "Variable x")
    assert cause in str(told.value)
    assert "s3cret" not in str(told.value)


def test_without_configuration_nobody_is_told() -> None:
    assert parse(" ", "x") == []


def test_occasions_and_families_choose() -> None:
    one = Wanted(notifier="a.B", arguments={"text": "{body}"}, occasions=["rejected"], families=["faq"])
    refused = texts.refused_data(RUN, "curate", "c", "m")
    assert one.wants(refused)
    assert not one.wants(texts.failed(RUN, "train", "r"))
    assert not one.wants(texts.letters(["r"], "1"))  # of no family
    assert one.model_copy(update={"families": None}).wants(texts.letters(["r"], "1"))


# --- told once, through a real queue


@pytest.fixture
def configured(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> Yard:
    broken = {"notifier": f"{__name__}.Broken", "arguments": {"text": "{body}"}, "occasions": ["failed"]}
    monkeypatch.setenv(wanted.ENVIRONMENT, json.dumps([broken, to_queue(yard)]))
    return yard


def test_each_is_told_once_and_anew_after_a_clear_whatever_another_notifier_does(configured: Yard) -> None:
    tell(texts.failed(RUN, "train", "the reason {{ conn.dropforge_s3.password }}"))
    tell(texts.failed(RUN, "close_run", "train failed"))
    (body,) = told(configured)
    # As it came: nothing of an alert is a template.
    assert "the reason {{ conn.dropforge_s3.password }}" in body
    tell(texts.failed(Where(RUN.dag, RUN.run, 1), "train", "again"))
    assert len(told(configured)) == 2


def test_what_no_notifier_took_is_told_by_the_next_who_knows(
    yard: Yard, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    broken = {"notifier": f"{__name__}.Broken", "arguments": {"text": "{body}"}}
    monkeypatch.setenv(wanted.ENVIRONMENT, json.dumps([broken]))
    tell(texts.failed(RUN, "train", "why"))
    assert "did not send 'Dropforge: faq: run failed at train': ConnectionError: nobody is there" in caplog.text
    monkeypatch.setenv(wanted.ENVIRONMENT, json.dumps([to_queue(yard)]))
    tell(texts.failed(RUN, "train", "why"))
    assert len(told(yard)) == 1


def test_a_store_that_is_away_keeps_no_alert_back(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(wanted.ENVIRONMENT, json.dumps([to_queue(yard)]))
    monkeypatch.delenv("DROPFORGE_BUCKET")
    tell(texts.failed(RUN, "plan", "no bucket"))
    assert len(told(yard)) == 1


def test_a_configuration_that_is_broken_fails_nothing(yard: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    for text in ("{", json.dumps([{"notifier": "no.Such", "arguments": {"text": "{body}"}}])):
        monkeypatch.setenv(wanted.ENVIRONMENT, text)
        tell(texts.failed(RUN, "train", "why"))


def test_a_notifier_may_be_asynchronous_and_reads_the_context() -> None:
    one = Wanted(notifier=f"{__name__}.Slow", arguments={"text": "{body}"})
    assert send(one, texts.failed(RUN, "train", "why"), {"run_id": "r1"}) == ""
    assert "r1" in SEEN
    assert "is no class" in send(Wanted(notifier="json.dumps", arguments={"obj": "{body}"}), texts.trial("a", "b"))


def test_what_a_service_answers_is_one_short_line() -> None:
    said = send(Wanted(notifier=f"{__name__}.Wordy", arguments={"text": "{body}"}), texts.trial("a", "b"))
    assert said.startswith("ConnectionError: <h1>")
    assert len(said) <= 500
    assert said.isprintable()


def test_the_trial_fails_with_what_each_says(configured: Yard, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(Exception, match="Broken: ConnectionError: nobody is there"):
        send_all({"text": "hello"}, "r")
    assert "hello" in told(configured)[0]
    monkeypatch.setenv(wanted.ENVIRONMENT, "")
    with pytest.raises(Exception, match="names a notifier"):
        send_all({"text": "hello"}, "r")


def test_intake_tells_of_a_refused_drop_once_and_of_the_same_mistake_made_again(configured: Yard) -> None:
    yard = configured

    def intake() -> None:
        post = Post(yard.queue_url, yard.store, yard.sqs)
        post.collect(1)
        take_in(yard.store, yard.bucket, "b", Line, timedelta(0), on_refusal=_tell_refused)

    yard.store.put("drops/faq/monday/_SUCCESS", b"{")
    intake()
    intake()
    first = told(yard)
    assert len(first) == 1, first
    assert first[0].startswith("Dropforge: faq: drop monday is rejected")
    assert "Fix: " in first[0]
    yard.store.put("drops/faq/monday/_SUCCESS", b"{")
    intake()
    assert len(told(yard)) == 2


def test_messages_that_become_letters_are_told_together(configured: Yard) -> None:
    configured.send("hello")
    configured.send('{"a": 1}')
    Post(configured.queue_url, configured.store, configured.sqs).collect(1)
    bodies = [body for body in told(configured) if body.startswith("Dropforge:")]
    assert len(bodies) == 1
    assert bodies[0].startswith("Dropforge: 2 messages were set aside by intake")
