"""TensorBoard's files on request: refused where nothing can write them, one curve over a resume where something can."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from dropforge.errors import RecipeError
from dropforge.store import FolderStore, open_store
from trainer.rank import run
from trainer.report import board
from trainer.report.board import Board
from trainer.report.console import Console
from trainer.state.stop import PreemptedError, StopSignal

from .toy import Toy


def test_without_the_package_the_run_is_refused_before_it_starts(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "find_spec", lambda name: None)
    with pytest.raises(RecipeError, match=r"train\.tensorboard.*dropforge\[tensorboard\]"):
        run(toy.run(train={"tensorboard": True}), StopSignal(), Console(quiet=True))
    assert not list(toy.files().list("attempts/"))
    board.check_board(False)


class Writer:
    """Stands for the package's writer: a line for each value."""

    def __init__(self, folder: Path, purge_step: int | None = None) -> None:
        self.path = Path(folder) / f"events-{purge_step}"
        self.lines = [f"purge {purge_step}"]

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.lines.append(f"{name} {value} {step}")

    def flush(self) -> None:
        self.path.write_text("\n".join(self.lines))

    def close(self) -> None:
        self.lines.append("closed")


@pytest.fixture
def writer(monkeypatch: pytest.MonkeyPatch) -> None:
    module: Any = ModuleType("torch.utils.tensorboard")
    module.SummaryWriter = Writer
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", module)
    monkeypatch.setattr(board, "find_spec", lambda name: object())


def stopped_at(step: int) -> tuple[StopSignal, Console]:
    stop, console = StopSignal(), Console(quiet=True)

    def hear(now: int, **facts: object) -> None:
        if now == step:
            stop.since = time.monotonic()

    console.progress = hear  # type: ignore[method-assign,assignment]
    return stop, console


@pytest.mark.usefixtures("writer")
def test_each_attempt_has_a_file_and_a_resumed_one_purges_what_came_after_its_checkpoint(toy: Toy) -> None:
    uri = toy.run(train={"tensorboard": True, "max_steps": 8, "log_every": 1})
    with pytest.raises(PreemptedError):
        run(uri, *stopped_at(5))  # the step after it is the last
    run(uri, StopSignal(), Console(quiet=True))
    files = toy.files()
    first, second = (files.get(f"tensorboard/events-{name}").decode().splitlines() for name in ("None", "7"))
    assert first[0] == "purge None"
    assert [line.split()[-1] for line in first if line.startswith("train/loss ")] == list("123456")
    assert [line.split()[-1] for line in second if line.startswith("train/loss ")] == list("78")
    assert [line.split()[-1] for line in first + second if line.startswith("eval/loss ")] == list("08")
    assert any(line.startswith("train/tokens_per_second_per_device ") for line in second)


@pytest.mark.usefixtures("writer")
def test_a_store_that_is_away_is_said_and_ends_nothing(tmp_path: Path) -> None:
    class Away(FolderStore):
        def put(self, key: str, data: Any) -> None:
            raise OSError("away")

    said: list[str] = []
    one = Board(Away(tmp_path), said.append)
    one.begin(None)
    one.scalars({"a": 1.0}, 1)
    one.copy()
    one.close()
    one.scalars({"a": 1.0}, 2)
    assert said == ["TensorBoard's files were not copied (OSError: away)"] * 2
    assert not one._folder.exists()


@pytest.mark.usefixtures("writer")
def test_a_writer_that_fails_is_given_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise ValueError("no")

    monkeypatch.setattr(Writer, "add_scalar", fail)
    said: list[str] = []
    one = Board(open_store(str(tmp_path)), said.append)
    one.begin(None)
    one.scalars({"a": 1.0}, 1)
    one.scalars({"a": 1.0}, 2)
    one.close()
    assert said == ["TensorBoard's files cannot be written (ValueError: no)"]


def test_tensorboard_itself_reads_one_curve_over_a_resume(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    store = open_store(str(tmp_path))
    for resumed_from, steps in ((None, range(1, 8)), (4, range(5, 10))):
        one = Board(store, print)
        one.begin(resumed_from)
        for step in steps:
            one.scalars({"train/loss": float(step + 100 * (resumed_from is not None))}, step)
        one.close()
        time.sleep(1.1)  # the name of an event file begins with the second in which it was made
    found = EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    points = [(event.step, event.value) for event in found.Scalars("train/loss")]
    assert points == [(1, 1), (2, 2), (3, 3), (4, 4), *((step, step + 100) for step in range(5, 10))]
