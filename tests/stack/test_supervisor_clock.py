"""The supervisor and the queues where the clock is set: nothing is judged by it, and nothing waits for it."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge.stack import objects, supervisor
from dropforge.stack.services import Service
from dropforge.stack.supervisor import Supervisor

DAY = 86400.0


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.wall, self.steady = 2e9, 1000.0

    def time(self) -> float:
        return self.wall

    def monotonic(self) -> float:
        return self.steady

    def go_on(self, seconds: float) -> None:
        self.wall, self.steady = self.wall + seconds, self.steady + seconds


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    found = Clock()
    monkeypatch.setattr(supervisor, "time", found)
    monkeypatch.setattr(objects, "time", found)
    return found


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_service_is_judged_and_started_again_as_if_no_clock_had_been_set(
    clock: Clock, step: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    beats: list[float] = []
    service = Service("one", "none", (), {}, ready=lambda since: beats[-1] >= since)
    found = Supervisor(tmp_path, {}, [service], None, (1, 1), 0, 0)
    (watched,) = found.watched
    monkeypatch.setattr(found, "_spawn", lambda *_: os.getpid())
    (tmp_path / "logs").mkdir()
    found._start(watched)
    clock.go_on(5)
    beats.append(clock.wall)
    found._advance(watched)
    assert watched.state.status == "healthy"
    assert watched.state.message == "after 5.0 s"

    clock.wall += step
    clock.go_on(service.check_every)
    beats.append(clock.wall)  # by the clock as it is now
    found._advance(watched)
    assert watched.state.status == "healthy"
    assert watched.next_check == clock.steady + service.check_every

    found._ended(watched, 0, 1)
    assert watched.state.status == "restarting"
    clock.wall -= step
    found._advance(watched)
    assert watched.state.status == "restarting"
    clock.go_on(1)
    found._advance(watched)
    assert watched.state.status == "starting"


@pytest.mark.parametrize("step", [-DAY, DAY])
def test_a_message_that_was_taken_comes_back_after_its_time(
    clock: Clock, step: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    message = SimpleNamespace(visible_at=(clock.wall + 30) * 1000, delayed_until=0.0)
    monkeypatch.setattr(objects, "sqs_queues", lambda: {"one": SimpleNamespace(_messages=[message])})
    server: Any = SimpleNamespace(_clock=clock.wall - clock.steady)
    clock.wall += step
    for _ in range(2):
        clock.go_on(5)
        objects.ObjectServer._follow_clock(server)
    assert message.visible_at == pytest.approx((clock.wall + 20) * 1000)
