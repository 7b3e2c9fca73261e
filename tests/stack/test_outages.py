"""MLflow or S3 is away for five minutes, beginning in each stage of a run: all runs end well by themselves."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from dropforge import layout, ledger, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.drop import Drop
from dropforge.stages import JOBS, STAGES
from tests.e2e.harness import Stack, logged_in, running, wait
from tests.stack import holds
from tests.stack.holds import Hold, Pause

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(7200)]

AWAY: Final = 300.0  # seconds: half of them nothing answers, then connections are refused
REACHED: Final = 2400.0  # until every run is where it is to be
ENDED: Final = 2400.0  # from the end of the outage until all runs have ended

INTAKE: Final = "take_in"
YES: Final = {"confirm": "Start", "approve": "Promote"}
QUIET: Final = "quiet"  # a run that ends before the outage
LONG: Final = frozenset({"train", QUIET})
STEPS: Final = 3
LONG_STEPS: Final = 300
# Jobs wait for each other where a machine has no room for all; here each is held where it is.
ROOM: Final = {"KUBEFLOW_TRAINING_CPUS": "12", "KUBEFLOW_TRAINING_MEMORY_GB": "64"}


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("outages") / "state"
    holds.install(folder)
    with running(folder, ROOM) as found, logged_in(found):
        yield found


def rows(folder: Path) -> dict[str, Path]:
    """A file of a few rows."""
    path = folder / "rows.jsonl"
    lines = [{"text": f"In outage {n}, {n} plus {n} is {2 * n}, and {n} times three is {3 * n}."} for n in range(60)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return {path.name: path}


def recipe(stage: str) -> str:
    """The same for all but for what makes the stage do something, and for the training that is cut."""
    promote = ["better_than_base: false", "min_improvement: -0.9"]
    promote += ["approval: {deadline_hours: 2}"] * (stage == "approve")
    compute = ["limits: {ask_above: {core_hours: 0.00001}}"] * (stage == "confirm")
    compute += ["tokenize_ahead: true"] * (stage == "tokenise")
    train = f"max_steps: {LONG_STEPS}, checkpoint_every: 20" if stage in LONG else f"max_steps: {STEPS}"
    sections = [
        "extends: tiny",
        "evaluate: {max_rows: 8}",
        f"train: {{{train}}}",
        f"promote: {{{', '.join(promote)}}}",
        f"compute: {{{', '.join(compute)}}}",
    ]
    return "\n".join(sections) + "\n"


class Flight:
    """The run of a family, on its way to the stage in which the outage finds it."""

    def __init__(self, stack: Stack, service: str, stage: str, files: dict[str, Path]) -> None:
        self.stack, self.stage = stack, stage
        self.family = f"{service}-{stage.replace('_', '-')}"
        self.hold: Hold | None = None
        self.pause = Pause(stack, self.family, stage) if stage in JOBS else None
        self._run: str | None = None
        if stage == INTAKE:
            self.hold = Hold(stack.folder, "", INTAKE)
        elif stage not in {*JOBS, *YES, QUIET}:
            self.hold = Hold(stack.folder, self.family, stage)
        self.drop: Drop = stack.drop(self.family, "one", files, recipe(stage))

    @property
    def run(self) -> str | None:
        """Its run in Airflow, if there is one. Events may come twice: who loses the claim skips its plan."""
        if self._run is None:
            runs = holds.runs_of(self.stack, self.drop)
            plans = {run: self.stack.tasks(run).get("plan", {}).get("state") for run in runs}
            left = [run for run, state in plans.items() if state != "skipped"]
            if len(left) == 1:
                self._run = left[0] if plans[left[0]] == "success" else None
                return left[0]
        return self._run

    def reached(self) -> bool:
        """Whether the run is at its stage; a job is paused there at once."""
        if self.hold is not None:
            return self.hold.reached()
        if (run := self.run) is None:
            return False
        if self.stage == QUIET:
            return self.stack.state(run) in {"success", "failed"}
        if self.stage in YES:
            return self.stack.tasks(run).get(self.stage, {}).get("state") == "awaiting_input"
        assert self.pause is not None
        return self.pause.reached() and self.stack.tasks(run).get(self.stage, {}).get("state") == "deferred"

    def let_go(self) -> None:
        if self.hold is not None:
            self.hold.let_go()
        if self.pause is not None:
            self.pause.let_go()
        if self.stage in YES:
            assert self.run is not None
            self.stack.connection.airflow.answer(FINETUNE, self.run, self.stage, YES[self.stage])

    def ended(self) -> str | None:
        """How its run ended, if it has."""
        if (run := self.run) is None:
            return None
        state = self.stack.state(run)
        return state if state in {"success", "failed"} else None

    def result(self) -> dict[str, Any]:
        """What users rely on."""
        run, store = self.run, self.stack.connection.store
        assert run is not None
        (tracked,) = self.stack.tracked(run)
        tags, mlflow = tracked.data.tags, self.stack.mlflow
        folder = layout.run_prefix(tags[tracking.TAG_RUN])
        asked = {"confirm": tracking.TAG_CONFIRMED, "approve": tracking.TAG_APPROVAL}
        return {
            "MLflow run": tracked.info.status,
            "MLflow runs": len(mlflow.search_runs([tracked.info.experiment_id])),
            "versions": [one.version for one in mlflow.search_model_versions(f"name = '{self.family}'")],
            "champion": self.stack.champion(self.family),
            "verdict": tags[tracking.TAG_VERDICT].partition(":")[0],
            "version": tags[tracking.TAG_VERSION],
            "answered": {task for task, tag in asked.items() if " said yes at " in tags.get(tag, "")},
            "steps": [point.step for point in mlflow.get_metric_history(tracked.info.run_id, "train/loss")],
            "tagged steps": tags[tracking.TAG_STEPS],
            "unsent": [info.key for info in store.list(f"{folder}unsent-") if not _of_checkpoints(store.get(info.key))],
            # How a training of three steps was held back is not known in all it has.
            "metrics": {name for name in tracked.data.metrics if not name.startswith(("system/", "health/"))},
            "weights": {
                info.key.removeprefix(folder): info.etag
                for info in store.list(f"{folder}model/")
                if info.key.endswith(".safetensors")
            },
            "turn": store.stat(layout.turn_key(self.family)),
            "claimed by this run": ledger.owner_of(store, self.family, self.drop.id) == run,
            "second claim": ledger.owner_of(store, self.family, self.drop.id, 2),
            "failed runs": [one for one in holds.runs_of(self.stack, self.drop) if self.stack.state(one) == "failed"],
        }


def _of_checkpoints(kept: bytes) -> bool:
    """Whether a file of what MLflow did not take holds checkpoints as logged models and no more; these stay there."""
    found = json.loads(kept)
    return isinstance(found, dict) and not found["tags"] and bool(found["checkpoints"])


def expected(stage: str, twin: dict[str, Any], weights: dict[str, str]) -> dict[str, Any]:
    """The result of a run to which nothing happened.

    :param twin: of the undisturbed one of LONG_STEPS. :param weights: of a run of STEPS.
    """
    own = stage in LONG
    return {
        **twin,
        "answered": {stage} & YES.keys(),
        "steps": twin["steps"] if own else list(range(1, STEPS + 1)),
        "tagged steps": str(LONG_STEPS if own else STEPS),
        "weights": twin["weights"] if own else weights,
    }


@pytest.mark.parametrize("service", ["mlflow", "objects"])
def test_a_service_is_away_for_five_minutes_in_each_stage(stack: Stack, tmp_path: Path, service: str) -> None:
    files = rows(tmp_path)
    flights = [Flight(stack, service, stage, files) for stage in (QUIET, *STAGES)]
    _see(flights, "to reach their stages", Flight.reached, REACHED)
    flights.append(Flight(stack, service, INTAKE, files))  # last, because none else is taken in meanwhile
    _see(flights, "to be taken in", Flight.reached, 300)
    with holds.away(stack, service, AWAY):
        for flight in flights:
            flight.let_go()
    _see(flights, "to end", Flight.ended, ENDED)
    assert {flight.stage: flight.ended() for flight in flights} == {flight.stage: "success" for flight in flights}, [
        stack.unfinished(str(flight.run)) for flight in flights if flight.ended() != "success"
    ]
    results = {flight.stage: flight.result() for flight in flights}
    steps = results[QUIET]["steps"]
    assert (steps[-1], steps) == (LONG_STEPS, sorted(set(steps)))
    assert (results[QUIET]["versions"], results[QUIET]["champion"]) == (["1"], "1")
    assert results == {stage: expected(stage, results[QUIET], results["plan"]["weights"]) for stage in results}


def _see(flights: list[Flight], what: str, is_so: Any, seconds: float) -> None:
    """Wait until all flights are so; else tell which are not, and what became of their tasks."""
    done: set[str] = set()

    def all_are() -> bool:
        done.update(flight.stage for flight in flights if flight.stage not in done and is_so(flight))
        return len(done) == len(flights)

    try:
        wait(f"the runs {what}", all_are, seconds)
    except pytest.fail.Exception as error:
        left = [flight for flight in flights if flight.stage not in done]
        told = [f"{one.stage}:\n{one.stack.unfinished(one.run)}" if one.run else f"{one.stage}: no run" for one in left]
        pytest.fail("\n".join([str(error), *told]))
