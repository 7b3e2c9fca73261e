"""`dropforge up` and `demo` in the foreground: they end with the stack that they started, and with no other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.cli import services
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
