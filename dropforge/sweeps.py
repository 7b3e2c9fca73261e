"""What the bucket knows of a sweep: which run each trial is, why trials were ended, what came of them, who won.

The trials' own reports decide, so that asking again gives the same answer.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Final, Literal, TypedDict, TypeGuard

from dropforge import layout
from dropforge.errors import DataError
from dropforge.json_objects import UNREADABLE, read_as, read_object, typed
from dropforge.promotion import Direction
from dropforge.store import MissingObjectError, Store
from dropforge.text import as_cell, as_line, markdown_table

CANDIDATE_RUN: Final = "candidate__"  # how DAG runs that judge the best trial's model begin
_MOST_TRIALS: Final = 1_000_000  # numbers of trials
_DAG_RUN: Final = 240  # characters of a DAG run's id, of Airflow's 250


class Member(TypedDict):
    """What a fine-tune run knows of the sweep that started it.

    :param by: the sweep's run in Airflow. :param parent: its MLflow run. :param trial: the trial's number.
    :param candidate: whether the trial is the best, and this run judges and registers its model.
    """

    by: str
    parent: str
    trial: int
    candidate: bool


@dataclass(frozen=True)
class Noted:
    """The run that a trial is, and its MLflow run."""

    run: str
    mlflow_run: str


@dataclass(frozen=True)
class Stop:
    """Why a trial was ended. :param early: because it fell behind, which holds; else the sweep was ended."""

    early: bool
    told: str


@dataclass(frozen=True)
class Outcome:
    """What came of a trial. :param value: of the deciding metric, by the model at its end; None if there is none."""

    number: int
    state: Literal["done", "stopped early", "failed"]
    run: str = ""
    value: float | None = None
    steps: int | None = None
    seconds: float | None = None
    told: str = ""


def trial_run(by: str, number: int) -> str:
    """The fine-tune run of a trial: always the same one, so that a second try finds it."""
    return f"trial__{number}__{by}"[:_DAG_RUN]


def candidate_run(by: str) -> str:
    """The fine-tune run that judges and registers the best trial's model. The sweep's drop is claimed for it.

    The run of a trial that turns out better later begins with this name, see `keep_result`.
    """
    return f"{CANDIDATE_RUN}{by}"[:_DAG_RUN]


def member(values: Any) -> Member | None:
    """What a run's configuration says of its sweep; None for a run of its own."""
    if not values:
        return None
    try:
        if type(trial := values["trial"]) is not int or not 0 <= trial <= _MOST_TRIALS:
            raise ValueError(trial)
        return Member(
            by=str(values["by"]),
            parent=str(values["parent"]),
            trial=trial,
            candidate=values["candidate"] is True,
        )
    except (KeyError, TypeError, ValueError):
        raise DataError(
            "configuration key `sweep`", "it was not written by a sweep", "Start sweeps with `dropforge sweep`"
        ) from None


def note(store: Store, family: str, by: Member, run: str, mlflow_run: str) -> None:
    """Note which run a trial is."""
    key = f"{layout.sweep_prefix(family, by['by'])}trials/{by['trial']}.json"
    store.put(key, json.dumps({"run": run, "mlflow_run": mlflow_run}).encode())


def noted(store: Store, family: str, by: str) -> dict[int, Noted]:
    """The trials that have been opened, by number."""
    prefix = f"{layout.sweep_prefix(family, by)}trials/"
    found = {key.removeprefix(prefix).removesuffix(".json"): key for key in store.sizes(prefix)}
    return {int(number): read_as(store, found[number], _noted) for number in sorted(found, key=int)}


def _noted(values: Mapping[str, Any]) -> Noted:
    return typed(Noted(**values))


def stop(store: Store, family: str, by: str, number: int, why: Stop) -> bool:
    """Write down that a trial is ended, before it is; whether nothing stood there."""
    return store.put_if_absent(_stop_key(family, by, number), json.dumps(asdict(why)).encode())


def stopped(store: Store, family: str, by: str, number: int) -> Stop | None:
    """Why a trial is ended; None if it is not."""
    try:
        return read_as(store, _stop_key(family, by, number), lambda values: typed(Stop(**values)))
    except MissingObjectError:
        return None


def is_trial(by: Member | None) -> TypeGuard[Member]:
    """Whether a run is a trial: no run of its own, nor the one that judges the best trial's model."""
    return by is not None and not by["candidate"]


def ended(store: Store, family: str, by: Member | None) -> Stop | None:
    """Why its sweep has ended a run; None of one that goes on, or is no trial."""
    return stopped(store, family, by["by"], by["trial"]) if is_trial(by) else None


def refuse_stopped(store: Store, family: str, by: Member | None) -> None:
    """:raises DataError: for a trial that its sweep has ended."""
    why = ended(store, family, by)
    if by is not None and why is not None:
        raise DataError(
            f"trial {by['trial']} of sweep {by['by']}",
            f"it was ended: {why.told}",
            "Submit its recipe as a run of its own" if why.early else "Clear the trial in the sweep",
        )


def let_go_on(store: Store, family: str, by: str, number: int) -> None:
    """A trial that was ended with its sweep is tried again with it."""
    store.delete(_stop_key(family, by, number))


def _stop_key(family: str, by: str, number: int) -> str:
    return f"{layout.sweep_prefix(family, by)}stops/{number}.json"


def outcomes(store: Store, family: str, by: str, trials: int, metric: str) -> list[Outcome]:
    """What came of each trial.

    :raises DataError: if the trials that are done were measured on different rows.
    """
    runs = noted(store, family, by)
    found: list[Outcome] = []
    datasets: dict[str, int] = {}
    for number in range(trials):
        run = runs[number].run if number in runs else ""
        try:
            done = _done(number, run, read_object(store, layout.report_key(run)), metric) if run else None
        except MissingObjectError:
            done = None
        except UNREADABLE as error:
            found.append(Outcome(number, "failed", run, told=f"its report cannot be read ({error})"))
            continue
        if done is None:
            why = stopped(store, family, by, number)
            early = why is not None and why.early
            found.append(Outcome(number, "stopped early" if early else "failed", run, told=why.told if why else ""))
            continue
        dataset, outcome = done
        datasets.setdefault(dataset, number)
        found.append(outcome)
    if len(datasets) > 1:
        one, other = list(datasets.values())[:2]
        raise DataError(
            f"sweep {by}",
            f"trials {one} and {other} were measured on different dataset versions",
            "Start a new sweep, and change neither data nor code while it runs",
        )
    return found


def best(found: Sequence[Outcome], direction: Direction) -> Outcome | None:
    """The trial with the best value, of equal ones the first; None if no trial has one."""
    sign = 1 if direction == "lower" else -1
    measured = [(sign * one.value, one.number, one) for one in found if one.value is not None]
    return min(measured, key=lambda one: one[:2])[2] if measured else None


def table(found: Sequence[Outcome], told: Mapping[int, str], metric: str, winner: int | None) -> str:
    """All trials in Markdown."""
    head = ("trial", "values", metric, "steps", "seconds", "state")
    rows = []
    for one in found:
        value = "-" if one.value is None else f"{one.value:.4f}"
        state = "best" if one.number == winner else one.state
        seconds = "-" if one.seconds is None else f"{one.seconds:.0f}"
        steps = "-" if one.steps is None else str(one.steps)
        said = as_cell(f"{state}: {as_line(one.told)}" if one.told else state)  # pods write what is told of one
        rows.append((str(one.number), as_cell(told.get(one.number, "")), value, steps, seconds, said))
    return markdown_table(head, rows, {*head} - {"values", "state"})


def keep_result(store: Store, family: str, by: str, found: Sequence[Outcome], winner: int) -> str:
    """Write down what came of a sweep; the fine-tune run that judges the best trial's model.

    A trial that was cleared may be better than the one that was judged before, and then is judged by a run of its own.
    """
    candidates = _candidates(store, family, by)
    first = candidate_run(by)
    run = candidates.get(winner) or (f"{first}__{winner}" if first in candidates.values() else first)
    named = {str(number): name for number, name in (candidates | {winner: run}).items()}
    body = {"best": winner, "candidates": named, "trials": [asdict(one) for one in found]}
    store.put(_result_key(family, by), json.dumps(body, indent=1).encode())
    return run


def _candidates(store: Store, family: str, by: str) -> dict[int, str]:
    """The fine-tune runs that have judged best trials, by the trials' numbers."""

    def known(values: Mapping[str, Any]) -> dict[int, str]:
        # An earlier version kept the best one alone.
        named = values.get("candidates", {str(values["best"]): candidate_run(by)})
        return {int(number): str(run) for number, run in named.items()}

    try:
        return read_as(store, _result_key(family, by), known)
    except MissingObjectError:
        return {}


def _result_key(family: str, by: str) -> str:
    return f"{layout.sweep_prefix(family, by)}result.json"


def _done(number: int, run: str, report: Mapping[str, Any], metric: str) -> tuple[str, Outcome]:
    """The dataset of a trial that is done, and what came of it."""
    value = ((report.get("eval") or {}).get("after") or {}).get(metric)
    finite = float(value) if isinstance(value, int | float) and math.isfinite(value) else None
    told = "" if finite is not None else f"it has no finite {metric}"
    outcome = Outcome(number, "done", run, finite, int(report["steps"]), float(report["seconds"]), told)
    return str(report.get("dataset")), outcome
