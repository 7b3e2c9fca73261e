"""The clock is set while the stack works: by an hour and by a day, forward and back."""

from __future__ import annotations

import datetime
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import botocore.auth
import psutil
import pytest

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from tests.e2e.harness import EVALUATE, Stack, kill, logged_in, running, services, wait

pytestmark = [pytest.mark.e2e, pytest.mark.chaos, pytest.mark.timeout(1800)]

HOUR, DAY = 3600, 86400
SOURCE = Path(__file__).with_name("set_clock.c")
BASE = f"extends: tiny\n{EVALUATE}promote: {{better_than_base: false, min_improvement: -0.9"
ASKS = f"{BASE}, approval: {{deadline_hours: 30}}}}\ntrain: {{max_steps: 3}}\n"
LONG = f"{BASE}}}\ntrain: {{max_steps: 4000, checkpoint_every: 20}}\n"
SHORT = f"{BASE}}}\ntrain: {{max_steps: 3}}\n"


@dataclass
class Clock:
    """The clock of all processes of the stack, as an offset to the true one."""

    file: Path
    offset: int = 0

    def set(self, offset: int) -> None:
        """Move it by whole seconds, in all processes at this moment."""
        self.file.touch()
        with self.file.open("r+b", buffering=0) as file:
            file.write(offset.to_bytes(8, sys.byteorder, signed=True))
        self.offset = offset

    def now(self) -> datetime.datetime:
        return datetime.datetime.now(datetime.UTC) + datetime.timedelta(seconds=self.offset)


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Clock:
    assert shutil.which("cc"), "no clock can be set without a C compiler: `apt install gcc libc6-dev`"
    found = Clock(tmp_path / "clock")
    found.set(0)
    # Requests are signed by the machine's clock, which is the stack's as well.
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: found.now().replace(tzinfo=None))
    return found


@pytest.fixture
def stack(clock: Clock, tmp_path: Path) -> Iterator[Stack]:
    library = tmp_path / "set_clock.so"
    subprocess.run(["cc", "-O2", "-shared", "-fPIC", "-o", str(library), str(SOURCE), "-ldl"], check=True)
    env = {"LD_PRELOAD": str(library), "SET_CLOCK": str(clock.file)}
    with running(tmp_path / "stack", env) as found, logged_in(found):
        yield found


def rows(folder: Path, name: str) -> dict[str, Path]:
    lines = [f'{{"text": "In hour {n} of {name}, {n} hours and {n} more are {2 * n} hours."}}\n' for n in range(60)]
    path = folder / f"{name}.jsonl"
    path.write_text("".join(lines))
    return {path.name: path}


def wait_healthy(stack: Stack) -> None:
    wait("all services to be well", lambda: all(one.status in {"healthy", "done"} for one in services(stack).values()))


def fetch(link: str) -> str:
    """What the link leads to, or what is said instead."""
    try:
        with urllib.request.urlopen(link) as answer:
            return str(answer.read().decode())
    except urllib.error.HTTPError as error:
        return f"{error.code}: {error.read().decode()}"


def test_a_clock_that_is_set_ends_nothing_and_holds_up_nothing(stack: Stack, clock: Clock, tmp_path: Path) -> None:
    begun = clock.now()

    def take_in(name: str, recipe: str) -> str:
        return wait_for_run(stack.connection, stack.drop(name, "one", rows(tmp_path, name), recipe), 120)

    def see_work(run: str) -> None:
        wait("a task of it to run", lambda: "running" in {one["state"] for one in stack.tasks(run).values()}, 120)

    asks, long = take_in("asks", ASKS), take_in("long", LONG)
    stack.see_checkpoint(long)
    (rank,) = [process for process in stack.ranks() if "long" in " ".join(process.cmdline())] or stack.ranks()
    rank.suspend()  # it is to be there after the last step
    stack.see(asks, "approve", "awaiting_input")
    key = f"runs/{stack.tracked(asks)[0].data.tags[tracking.TAG_RUN]}/run.json"
    link = stack.connection.store.client.generate_presigned_url(
        "get_object", {"Bucket": "dropforge", "Key": key}, ExpiresIn=2 * HOUR
    )
    assert fetch(link).startswith("{")

    def identities() -> dict[str, tuple[int | None, int]]:
        return {name: (one.pid, one.restarts) for name, one in services(stack).items()}

    before = identities()

    def goes_on() -> None:
        """Nothing was ended or started again, and the training trains."""
        known = len(stack.checkpoints(long))
        rank.resume()
        wait("another checkpoint", lambda: len(stack.checkpoints(long)) != known, 120)
        rank.suspend()
        assert rank.pid in {process.pid for process in stack.ranks()}
        assert stack.tasks(asks)["approve"]["state"] == "awaiting_input"
        assert stack.tracked(long)[0].data.tags[tracking.TAG_ATTEMPT] == "1"
        assert stack.tasks(long)["train"]["try_number"] == 1
        wait_healthy(stack)
        assert identities() == before

    clock.set(HOUR)
    goes_on()
    assert fetch(link).startswith("{")
    clock.set(0)
    goes_on()
    kill(stack, "airflow-triggerer")
    kill(stack, "airflow-scheduler")
    before = identities()
    second = take_in("second", SHORT)
    see_work(second)
    clock.set(DAY)
    goes_on()
    assert "Request has expired" in fetch(link)
    assert stack.end(second) == "success", stack.unfinished(second)
    third = take_in("third", SHORT)
    # Airflow itself goes on with no run that it has noted for tomorrow.
    assert stack.end(third) == "success", stack.unfinished(third)
    clock.set(0)
    goes_on()
    assert fetch(link).startswith("{")
    kill(stack, "airflow-triggerer")
    fourth = take_in("fourth", SHORT)
    rank.resume()
    stack.connection.airflow.answer(FINETUNE, asks, "approve", "Promote")
    runs = {"asks": asks, "long": long, "second": second, "third": third, "fourth": fourth}
    for run in runs.values():
        assert stack.end(run) == "success", stack.unfinished(run)
    hours = (clock.now() - begun).total_seconds() / HOUR
    for family, run in runs.items():
        assert {one["try_number"] for one in stack.tasks(run).values() if one["start_date"]} == {1}, stack.tasks(run)
        assert stack.champion(family) == "1"
        (tracked,) = stack.tracked(run)
        assert 0 < tracked.data.metrics["cost/core_hours"] < hours * (psutil.cpu_count() or 1)
        assert 0 < tracked.data.metrics["wall/seconds"] < hours * HOUR
