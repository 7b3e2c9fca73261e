"""Thirty seeded faults over two ranks: every run ends by itself, loses and repeats no row, and learns the same."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from .faults.course import Traced, course, difference, read_traces
from .faults.driver import Driver
from .faults.ours import Ours
from .faults.scenarios import KINDS, Scenario, scenarios

SCENARIOS = scenarios(Ours.steps)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    return Driver(Ours(), tmp_path_factory.mktemp("faults"))


@pytest.mark.chaos
@pytest.mark.timeout(900)
@pytest.mark.dist
@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda item: f"{item.kind}: {item.name}")
def test_a_fault_costs_time_and_nothing_else(driver: Driver, scenario: Scenario) -> None:
    verdict = driver.run(scenario)
    assert not verdict.faults, f"{verdict.faults}\n{verdict.log[-6000:]}"


def test_the_faults_are_those_that_were_promised() -> None:
    counts = {kind: sum(item.kind == kind for item in SCENARIOS) for kind in KINDS}
    assert list(counts.values()) == [5, 6, 4, 2, 3, 4, 2, 4]
    assert len({(item.kind, item.name) for item in SCENARIOS}) == 30
    assert scenarios(Ours.steps, seed=6) != SCENARIOS == scenarios(Ours.steps)


def traced(first: int, last: int, *skipped: int) -> Traced:
    return Traced({step: (f"a{step}", f"b{step}") for step in range(first, last + 1)}, frozenset(skipped))


WHOLE = traced(1, 9).rows


@pytest.mark.parametrize(
    ("attempts", "lost", "repeated"),
    [
        ([traced(1, 9)], 0, 0),
        ([traced(1, 6), traced(5, 9)], 0, 0),  # what was redone after a checkpoint counts once
        ([traced(1, 6), Traced({}, frozenset()), traced(4, 5), traced(6, 9)], 0, 0),
        ([traced(1, 6), traced(8, 9)], 2, 0),  # the resume jumped over a step
        ([traced(1, 9), traced(4, 5)], 8, 0),  # the weights are those of the last attempt
        ([traced(1, 9, 3)], 2, 0),
        ([traced(1, 4, 3), traced(3, 9)], 0, 0),  # skipped in a past that was thrown away
        ([Traced({**WHOLE, 5: WHOLE[4]}, frozenset())], 2, 2),
    ],
)
def test_the_course_of_a_run_is_what_its_weights_have_seen(attempts: list[Traced], lost: int, repeated: int) -> None:
    assert difference(course(attempts), WHOLE) == (lost, repeated)


def test_a_step_counts_once_all_ranks_have_traced_it(tmp_path: Path) -> None:
    def write(rank: int, *lines: tuple[int, str, bool]) -> None:
        text = "".join(json.dumps({"step": a, "rank": rank, "rows": [b], "applied": c}) + "\n" for a, b, c in lines)
        (tmp_path / f"trace-1-{rank}.jsonl").write_text(text)

    write(0, (1, "d", True), (2, "a", True))
    write(1, (1, "c", True))
    [found] = read_traces(tmp_path, 1)
    assert found.rows == {1: ("c", "d")}
    write(1, (1, "c", False))
    with pytest.raises(ValueError, match="disagree on step 1"):
        read_traces(tmp_path, 1)
    write(1, (1, "c", True), (1, "c", True))
    with pytest.raises(ValueError, match="step 1 twice"):
        read_traces(tmp_path, 1)
