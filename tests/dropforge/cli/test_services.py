"""`dropforge up` and `demo` in the foreground: they end with the stack that they started, and with no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from dropforge.cli import services
from dropforge.cli.app import app
from dropforge.terminal import Console


def stack(pid: int) -> Any:
    return SimpleNamespace(supervisor=(pid, 1), services={})


@pytest.mark.parametrize(
    ("seen", "stopped"),
    [
        ([stack(1), None, None], True),  # by `down`, or killed: what is left of it is ended
        ([stack(1), stack(2), stack(2)], False),  # and another was started since
        ([stack(1), KeyboardInterrupt(), stack(1)], True),
        ([KeyboardInterrupt(), stack(2)], False),
    ],
    ids=["down", "another", "ctrl-c", "ctrl-c late"],
)
def test_what_was_started_is_stopped_and_no_other(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seen: list[Any], stopped: bool
) -> None:
    looks: Iterator[Any] = iter(seen)
    ended: list[Path] = []

    def look(_: Path) -> Any:
        found = next(looks)
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(services, "read_state", lambda _: stack(1))
    monkeypatch.setattr(services, "running_state", look)
    monkeypatch.setattr(services, "stop", ended.append)
    monkeypatch.setattr(services.signal, "signal", lambda *_: None)
    monkeypatch.setattr(services.signal, "sigtimedwait", lambda *_: None)
    services.stay(tmp_path, Console())
    assert (ended == [tmp_path]) == stopped


ASKED = "hub:* /models/"


@pytest.mark.parametrize(
    ("readable", "words", "line"),
    [
        (ASKED, (), f"DROPFORGE_READABLE='{ASKED}' dropforge up -d --state "),
        (None, ("--airflow-port", "9001"), "dropforge up -d --airflow-port 9001 --state "),
        (None, ("--airflow-port", "9000"), ""),
        ("/models/ hub:*", (), ""),
        (None, (), ""),
    ],
    ids=["readable", "port", "same port", "same words", "nothing"],
)
def test_what_a_running_stack_has_otherwise_is_told_with_the_lines_that_change_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, readable: str | None, words: tuple[str, ...], line: str
) -> None:
    has = "hub:*" if readable == ASKED else ASKED
    running = SimpleNamespace(ports={"airflow": 9000}, pod_host=None, readable=has)
    monkeypatch.setattr(services, "start", lambda *_, **__: False)
    monkeypatch.setattr(services, "running_state", lambda _: running)
    monkeypatch.delenv("DROPFORGE_READABLE", raising=False)
    if readable is not None:
        monkeypatch.setenv("DROPFORGE_READABLE", readable)
    done = CliRunner().invoke(app, ["up", "-d", *words, "--state", str(tmp_path)])
    if line:
        assert (done.exit_code, "already running, and was started otherwise" in done.stderr) == (1, True), done.output
        assert f"\n  dropforge down --state {tmp_path}\n  {line}{tmp_path}\n" in done.stderr
    else:
        assert (done.exit_code, done.stderr) == (0, ""), done.output
