"""What differs between runs: a pure function of what MLflow has of them.

Params and tags are compared as texts, metrics by their last and best values and by their course over optimizer steps.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import takewhile
from typing import Final

from dropforge.promotion import Direction
from dropforge.text import from_cell

Points = tuple[tuple[int, float], ...]

LOSS: Final = "train/loss"
EVAL: Final = "eval/loss"
SPEED: Final = "train/tokens_per_second"
DECIDING: Final = "promote.metric"  # the param that names the metric which decides
_TAGS: Final = "dropforge."
# Told of each run anyway, or about what somebody has asked for meanwhile.
_OTHER_TAGS: Final = frozenset(
    _TAGS + name
    for name in ("run", "family", "version", "verdict", "dag_run", "checkpoints", "ask", "answer", "profile")
)
_MACHINE: Final = "system/"  # by time, of a machine: a last value says nothing
_GROUPS: Final = ("eval", "gen", "candidate", "champion", "promote", "train", "wall")
_LOWER: Final = frozenset({"loss", "perplexity", "bits_per_byte"})
_HIGHER: Final = frozenset({"accuracy", "macro_f1"})
_CHECK: Final = ("check", "candidate", "reference", "passed", "reason")
_BEST: Final = ("eval/accuracy", "eval/macro_f1")  # other losses are best where the loss is
_UNITS: Final = {
    "loss": "nats",
    "bits_per_byte": "bits per byte",
    "accuracy": "share",
    "macro_f1": "F1",
    "tokens_per_second": "tokens per second",
}


@dataclass(frozen=True)
class History:
    """The course of a metric. :param points: by step. :param whole: false if the server has picked some of many."""

    points: Points = ()
    whole: bool = True


@dataclass(frozen=True)
class Check:
    """A row of a run's verdict table, in the very words that MLflow shows."""

    check: str
    candidate: str
    reference: str
    passed: str
    reason: str


@dataclass(frozen=True)
class ComparedRun:
    """A run, as MLflow has it.

    :param asked: how the person has named it. :param began: seconds since 1970; 0 if it is not known.
    :param metrics: the last value of each. :param champion: the version that it was measured against; empty if none.
    :param notes: what could not be read of it.
    """

    name: str
    family: str
    run_id: str
    experiment: str
    status: str
    asked: str = ""
    began: float = 0.0
    version: str = ""
    verdict: str = ""
    champion: str = ""
    params: Mapping[str, str] = field(default_factory=dict)
    tags: Mapping[str, str] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    histories: Mapping[str, History] = field(default_factory=dict)
    checks: tuple[Check, ...] = ()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class TextRow:
    """A param or a tag: its value in each run, None where a run has none."""

    name: str
    values: tuple[str | None, ...]

    @property
    def same(self) -> bool:
        return len(set(self.values)) == 1


@dataclass(frozen=True)
class Best:
    """The best value of a metric. :param whole: false if it is the best of those points only that the server picked."""

    value: float
    step: int
    whole: bool


@dataclass(frozen=True)
class Change:
    """How far a value lies from the first run's. :param percent: None where the first one is 0."""

    absolute: float
    percent: float | None


@dataclass(frozen=True)
class MetricRow:
    """A metric in each run, None where a run has none. :param better: None where nobody can say."""

    name: str
    better: Direction | None
    last: tuple[float | None, ...]
    best: tuple[Best | None, ...]
    changes: tuple[Change | None, ...]

    @property
    def same(self) -> bool:
        first = self.last[0]
        return all(_equal(first, value) for value in self.last)

    @property
    def leaders(self) -> frozenset[int]:
        """The runs whose last value is the best one; none if all are equal or nobody can say."""
        finite = {place: value for place, value in enumerate(self.last) if value is not None and math.isfinite(value)}
        if self.better is None or self.same or len(finite) < 2:
            return frozenset()
        best = (min if self.better == "lower" else max)(finite.values())
        return frozenset(place for place, value in finite.items() if value == best)


@dataclass(frozen=True)
class Curve:
    """The course of a metric in each run, over optimizer steps; empty where a run has none."""

    name: str
    unit: str
    lines: tuple[Points, ...]

    @property
    def finite(self) -> list[float]:
        return [value for line in self.lines for _, value in line if math.isfinite(value)]

    @property
    def steps(self) -> tuple[int, int]:
        """The first and the last step of all runs."""
        steps = [step for line in self.lines for step, _ in line]
        return (min(steps), max(steps)) if steps else (0, 0)


@dataclass(frozen=True)
class Comparison:
    """Everything that was compared, equal values too."""

    runs: tuple[ComparedRun, ...]
    params: tuple[TextRow, ...]
    tags: tuple[TextRow, ...]
    metrics: tuple[MetricRow, ...]
    curves: tuple[Curve, ...]

    @property
    def families(self) -> list[str]:
        return sorted({run.family for run in self.runs})

    @property
    def letters(self) -> tuple[str, ...]:
        return tuple(map(letter, range(len(self.runs))))


def compare(runs: Sequence[ComparedRun]) -> Comparison:
    """Compare runs with the first one, and with each other."""
    curves = (Curve(name, unit(name), tuple(_points(run, name) for run in runs)) for name in curve_names(runs))
    return Comparison(
        tuple(runs),
        _texts([run.params for run in runs]),
        _texts([{key: value for key, value in run.tags.items() if compared_tag(key)} for run in runs]),
        tuple(_metric(name, runs) for name in metric_names(runs)),
        tuple(curve for curve in curves if any(curve.lines)),
    )


def letter(place: int) -> str:
    """A, B, ... Z, AA, AB, ... for 0, 1, ..."""
    high, low = divmod(place, 26)
    return (letter(high - 1) if high else "") + chr(ord("A") + low)


def compared_tag(name: str) -> bool:
    """Whether a tag tells what went into a run, or how it went."""
    return name.startswith(_TAGS) and name not in _OTHER_TAGS


def metric_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Metrics of any of the runs but the machine's, those of the evaluation first."""
    names = {name for run in runs for name in run.metrics if not name.startswith(_MACHINE)}
    groups = {group: place for place, group in enumerate(_GROUPS)}
    return sorted(names, key=lambda name: (groups.get(name.partition("/")[0], len(groups)), name))


def curve_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Metrics whose course is shown: losses, what decides, and the speed."""
    deciding = sorted({run.params.get(DECIDING, "") for run in runs} - {""})
    return list(dict.fromkeys((LOSS, EVAL, *deciding, SPEED)))


def history_names(runs: Sequence[ComparedRun]) -> list[str]:
    """Metrics whose course is of interest, for a curve or for the best value of it."""
    known = metric_names(runs)
    return [name for name in dict.fromkeys((*curve_names(runs), *_BEST)) if name in known]


def better(name: str) -> Direction | None:
    """Which values of a metric are the better ones; None for one that is no loss, accuracy or score."""
    group, _, rest = name.partition("/")
    if group in ("candidate", "champion"):
        group, rest = ("gen", rest.removeprefix("gen/")) if rest.startswith("gen/") else ("eval", rest)
        rest = rest.removeprefix("holdout/")
    if group == "gen":
        return None if rest in ("tokens", "ended") else "higher"
    if group not in ("eval", "train"):
        return None
    return "lower" if rest in _LOWER else "higher" if rest in _HIGHER else None


def unit(name: str) -> str:
    """Of a metric's values; empty where it has none that is known."""
    return _UNITS.get(name.rpartition("/")[2], "score" if name.startswith("gen/") else "")


def read_checks(markdown: str) -> tuple[Check, ...]:
    """The rows of a verdict table (`Verdict.as_markdown`), behind which other text may follow.

    :raises ValueError: if it is none.
    """
    lines = [line.strip() for line in takewhile(str.strip, markdown.splitlines())]
    rows = [[cell.strip() for cell in line.removeprefix("|").removesuffix("|").split("|", 4)] for line in lines]
    if len(rows) < 3 or any(len(row) != 5 for row in rows) or rows[0] != list(_CHECK):
        raise ValueError("it is no verdict table")
    return tuple(Check(*[*row[:-1], from_cell(row[-1])]) for row in rows[2:])


def thin(points: Points, most: int) -> Points:
    """At most so many points, evenly picked; the first and the last are among them."""
    if len(points) <= most:
        return points
    return tuple(points[round(place * (len(points) - 1) / (most - 1))] for place in range(most))


def _texts(found: Sequence[Mapping[str, str]]) -> tuple[TextRow, ...]:
    names = sorted({name for values in found for name in values})
    return tuple(TextRow(name, tuple(values.get(name) for values in found)) for name in names)


def _metric(name: str, runs: Sequence[ComparedRun]) -> MetricRow:
    last = tuple(run.metrics.get(name) for run in runs)
    direction = better(name)
    best = tuple(_best(run.histories.get(name), direction) for run in runs)
    changes = (None, *(_change(last[0], value) for value in last[1:]))
    return MetricRow(name, direction, last, best, changes)


def _best(history: History | None, direction: Direction | None) -> Best | None:
    finite = [point for point in history.points if math.isfinite(point[1])] if history else []
    if history is None or not finite or direction is None:
        return None
    sign = 1 if direction == "lower" else -1
    step, value = min(finite, key=lambda point: (sign * point[1], point[0]))
    return Best(value, step, history.whole)


def _change(first: float | None, value: float | None) -> Change | None:
    if first is None or value is None or not (math.isfinite(first) and math.isfinite(value)):
        return None
    absolute = value - first
    return Change(absolute, 100 * absolute / abs(first) if first else None)


def _equal(one: float | None, other: float | None) -> bool:
    if one is None or other is None:
        return one is other
    return one == other or (math.isnan(one) and math.isnan(other))


def _points(run: ComparedRun, name: str) -> Points:
    return run.histories.get(name, History()).points
