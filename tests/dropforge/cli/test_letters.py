"""`dropforge letters` on a real queue and bucket."""

from __future__ import annotations

import json

import pytest

from dropforge import layout
from dropforge.cli import letters
from dropforge.store import S3Store
from dropforge.terminal import Console
from tests.dropforge.cli.conftest import Terminal
from tests.dropforge.test_letters import Queues, queues, refuse  # noqa: F401 - a fixture


@pytest.fixture(autouse=True)
def _wide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(letters, "console", Console(width=300))


def test_letters_are_listed_shown_replayed_and_deleted(
    terminal: Terminal,
    queues: Queues,  # noqa: F811
    s3_store: S3Store,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("DROPFORGE_QUEUE_URL", queues.home)
    assert "There are no dead letters" in terminal("letters").output
    assert "There are no dead letters" in terminal("dlq").output
    queues.kill("[/red] hello", "it is not JSON: [red]")
    refuse(s3_store, "fam", "d1")
    s3_store.put("drops/fam/d1/_SUCCESS", b"")
    listed = terminal("letters").output
    assert "it is not JSON: [red]" in listed
    assert "fam/d1" in listed
    assert "Upload it" in listed
    assert "hello" not in listed
    values = {row["reason"]: row for row in json.loads(terminal("letters", "-o", "json").stdout)}
    assert values["it is not JSON: [red]"]["message"] == "[/red] hello"
    assert values["it is not JSON: [red]"]["mend"] is None
    names, *lines = [line.split("\t") for line in terminal("letters", "-o", "tsv").stdout.splitlines()]
    assert (names, {len(line) for line in lines}) == (["id", "since", "reason", "mend", "message"], {5})
    name = next(line.split()[0] for line in listed.splitlines() if "not JSON" in line)
    assert "[/red] hello" in terminal("letters", name).output
    assert "fam/d1" not in terminal("letters", name).output
    answer = terminal("letters", name, "fam/d1", "--replay")
    assert answer.exit_code == 0
    assert "within a minute" in answer.output
    assert queues.bodies(queues.home) == ["[/red] hello"]
    assert len(list(s3_store.list(layout.INBOX))) == 1
    assert terminal("letters", "--all", "--discard").exit_code == 0
    assert "There are no dead letters" in terminal("letters").output


def test_what_cannot_be_sent_or_meant_is_told_and_holds_up_nothing_else(terminal: Terminal, s3_store: S3Store) -> None:
    s3_store.put(f"{layout.MESSAGES}x.json", json.dumps({"reason": "odd", "body": "body"}).encode())
    refuse(s3_store, "fam", "gone")  # first, and nothing is left of it
    answer = terminal("letters", "--replay", "--all")
    assert answer.exit_code == 1
    assert "its _SUCCESS is gone" in answer.output
    assert len(list(s3_store.list(layout.INBOX))) == 1
    assert terminal("letters", "--replay").exit_code == 2
    assert terminal("letters", "--replay", "--discard", "--all").exit_code == 2
    assert "none with that name" in str(terminal("letters", "nobody").exception)
