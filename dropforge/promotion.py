"""The promotion rule: a pure function of (candidate, champion, policy).

Both sides are measured on the candidate's evaluation rows, so the numbers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from dropforge import holdout
from dropforge.slices import named
from dropforge.text import as_cell, as_line, markdown_table

Direction = Literal["lower", "higher"]

SLICE: Final = "slice"  # a line that tells a slice's figures, and judges nothing
_HIGHER: Final = ("eval/accuracy", "eval/macro_f1", "holdout/accuracy", "holdout/macro_f1", "model/rows_per_second")
LOST_LABELS: Final = f"{holdout.PREFIX}lost_labels"  # rows whose label the champion knows and the candidate does not
UNSEEN_LABELS: Final = f"{holdout.PREFIX}unseen_labels"  # rows left out for a label that the model does not know
_TAKE_AWAY: Final = "Take its alias away in MLflow if it is not to be compared with"
LEAST_ROWS: Final = 20  # of fewer rows, draws from them say little about rows that were not there


@dataclass(frozen=True)
class Guard:
    """Limits of a metric that does not decide.

    :param at_least: and :param at_most: for the candidate's value; None for no limit.
    :param max_regression: how much worse than the champion's it may be, as a fraction of that; None for any.
    """

    metric: str
    direction: Direction
    at_least: float | None = None
    at_most: float | None = None
    max_regression: float | None = None


def is_cost(guard: Guard) -> bool:
    """Whether it limits what the run has used, which no evaluation measures."""
    return guard.metric.startswith("cost/")


def _limits_holdout(guard: Guard) -> bool:
    """Whether it limits a figure of the family's own rows, whatever the champion's is."""
    limited = guard.at_least is not None or guard.at_most is not None
    return limited and guard.metric.startswith(holdout.PREFIX)


@dataclass(frozen=True)
class SliceGuards:
    """Limits that hold in each slice of the rows that is measured. :param by: how rows are cut."""

    by: str
    guards: tuple[Guard, ...] = ()


@dataclass(frozen=True)
class Stale:
    """An old champion is easier to replace.

    :param after_days: it is old from then on. :param min_improvement: enough then.
    """

    after_days: float
    min_improvement: float


@dataclass(frozen=True)
class Policy:
    """What a candidate must show.

    :param metric: the deciding metric, by its name in MLflow (`eval/loss`).
    :param direction: whether lower or higher is better.
    :param min_improvement: how much better than the champion, as a fraction of the champion's value; a negative
        value tolerates that much regression.
    :param better_than_base: the candidate must also beat the model it started from.
    :param guards: all of them must hold too.
    :param slices: what must hold in parts of the rows.
    :param stale: what is enough against an old champion; None for the same whatever its age.
    :param confidence: with which the gain over the champion must be more than `min_improvement`; None for any gain.
    """

    metric: str = "eval/loss"
    direction: Direction = "lower"
    min_improvement: float = 0.0
    better_than_base: bool = True
    guards: tuple[Guard, ...] = ()
    confidence: float | None = None
    slices: tuple[SliceGuards, ...] = ()
    stale: Stale | None = None


@dataclass(frozen=True)
class Gain:
    """How much better the candidate is, as a fraction of the champion's value, by a paired bootstrap over rows.

    :param rows: that were drawn from. :param value: on these rows; above 0 is better.
    :param low, high: the ends of the central interval at this confidence; None of too few rows.
    """

    metric: str
    confidence: float
    rows: int
    value: float
    low: float | None
    high: float | None

    def __str__(self) -> str:
        told = f"the gain in {self.metric} is {_share(self.value)}"
        sure = f"{100 * self.confidence:g}% confidence"
        if self.low is None or self.high is None:
            return f"{told}, and {self.rows} rows are too few to say anything with {sure}"
        return f"{told}, from {_share(self.low)} to {_share(self.high)} with {sure}, by {self.rows} rows"


@dataclass(frozen=True)
class Check:
    """One row of the verdict table."""

    name: str
    candidate: float | None
    reference: float | None
    passed: bool
    reason: str


@dataclass(frozen=True)
class Verdict:
    """Whether the candidate becomes champion, with every check that led to it."""

    promote: bool
    checks: tuple[Check, ...]

    @property
    def reason(self) -> str:
        told = [check for check in self.checks if check.name != SLICE]
        decisive = [check for check in self.checks if not check.passed] or told
        return "; ".join(check.reason for check in decisive)

    def as_markdown(self) -> str:
        rows = [
            (one.name, _show(one.candidate), _show(one.reference), "yes" if one.passed else "no", as_cell(one.reason))
            for one in self.checks
        ]
        return markdown_table(("check", "candidate", "reference", "passed", "reason"), rows, {"candidate", "reference"})


def policy_of(
    promote: Mapping[str, Any], *, same_tokenizer: bool, task: str = "causal-lm", held_out: bool = False
) -> Policy:
    """The policy that a recipe's `promote` section asks for.

    Losses and accuracies of language models count tokens, so between different tokenizers they say nothing: bits per
    byte of text decide then. Generated answers are texts (`gen/...`), and compare whatever they are made of; figures of
    classifiers count rows, whatever the tokens.

    :param task: the recipe's.
    :param held_out: whether the recipe names a `holdout`: without a guard that says otherwise, the candidate may be no
        worse than the champion there, by the deciding metric; by the loss where generated answers decide.
    """

    def comparable(metric: str) -> str:
        group = metric.partition("/")[0]
        counts_tokens = group in ("eval", "holdout") and task != "classification"
        return f"{group}/bits_per_byte" if counts_tokens and not same_tokenizer else metric

    def guards_of(section: Mapping[str, Any]) -> tuple[Guard, ...]:
        guards: list[Guard] = []
        for asked in section.get("guards") or ():
            guarded, regression = str(asked["metric"]), asked.get("max_regression")
            if asked.get("at_least") is not None or asked.get("at_most") is not None:
                guards.append(Guard(guarded, direction_of(guarded), asked.get("at_least"), asked.get("at_most")))
            if regression is not None:
                guarded = comparable(guarded)
                guards.append(Guard(guarded, direction_of(guarded), max_regression=float(regression)))
        return tuple(guards)

    metric = comparable(str(promote["metric"]))
    stale = promote.get("stale")
    guards = guards_of(promote)
    if held_out and not any(
        guard.metric.startswith(holdout.PREFIX) and guard.max_regression is not None for guard in guards
    ):
        there = comparable(holdout.named_as(metric if metric.startswith("eval/") else "eval/loss"))
        guards += (Guard(there, direction_of(there), max_regression=0.0),)
    return Policy(
        metric=metric,
        direction=direction_of(metric),
        min_improvement=float(promote["min_improvement"]),
        better_than_base=bool(promote["better_than_base"]),
        guards=guards,
        slices=tuple(SliceGuards(str(part["by"]), guards_of(part)) for part in promote.get("slices") or ()),
        stale=None if stale is None else Stale(float(stale["after_days"]), float(stale["min_improvement"])),
        confidence=promote.get("confidence"),  # runs of before have none
    )


def direction_of(metric: str) -> Direction:
    """Whether lower or higher values of a metric are better."""
    return "higher" if metric.startswith("gen/") or metric in _HIGHER else "lower"


def decide(
    candidate: Mapping[str, Any],
    champion: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    policy: Policy,
    gain: Gain | None = None,
    slices: Sequence[Mapping[str, Any]] = (),
    champion_days: float | None = None,
    shared: Mapping[str, Any] | None = None,
) -> Verdict:
    """Decide whether `candidate` replaces `champion`, which keeps its place where it has no figure to be held against.

    :param candidate: the candidate's metrics on its own evaluation rows.
    :param champion: the champion's metrics on the same rows; None when the family has no champion.
    :param shared: the candidate's on the rows whose labels both know, where the champion does not know all.
    :param base: the metrics before training on the same rows; None when they were not measured.
    :param gain: over the champion, with the interval that `policy.confidence` asks for.
    :param slices: figures of parts of the rows, as `evaluation.json` has them.
    :param champion_days: how old the champion's version was when it was looked up; None if that is not known.
    """
    value = candidate.get(policy.metric)
    if value is None or not math.isfinite(value):
        problem = f"the candidate has no finite {policy.metric}"
        return Verdict(False, (Check("measured", value, None, False, problem),))
    checks = [Check("measured", value, None, True, f"{policy.metric} is {_show(value)}")]
    mine, theirs = candidate.get("precision"), (base or {}).get("precision")
    if policy.better_than_base and base is not None and None not in (mine, theirs) and mine != theirs:
        problem = f"the base model was measured in {theirs}, the candidate in {mine}: they do not compare"
        checks.append(Check("better than base", value, base.get(policy.metric), False, problem))
    elif policy.better_than_base and base is not None:
        checks.append(_compare("better than base", value, base.get(policy.metric), 0.0, policy, "the base model"))
    if champion is not None and policy.stale is not None:
        checks.append(_aged(policy.stale, champion_days))
        if _is_stale(policy.stale, champion_days):
            policy = replace(policy, min_improvement=min(policy.min_improvement, policy.stale.min_improvement))
    same_rows = {**candidate, **(shared or {})}
    if champion is None:
        checks.append(Check("better than champion", value, None, True, "the family has no champion yet"))
    else:
        checks += _against(champion, same_rows, policy, gain)
    if lost := candidate.get(LOST_LABELS):
        problem = f"the champion knows the labels of {lost:,} rows of the holdout that the candidate does not know"
        checks.append(Check("labels", lost, 0, False, problem))
    unseen = candidate.get(UNSEEN_LABELS)
    if champion is None and unseen and any(map(_limits_holdout, policy.guards)):
        problem = (
            f"the candidate does not know the labels of {unseen:,} rows of the holdout, and a guard has a limit there"
        )
        checks.append(Check("labels", unseen, 0, False, problem))
    for guard in policy.guards:
        checks += _guarded(guard, candidate, champion, same_rows)
    for part in policy.slices:
        for one in slices:
            if one["by"] == part.by:
                checks += _in_slice(part, one, policy.metric, candidate, known=champion is not None)
    return Verdict(all(check.passed for check in checks), tuple(checks))


def _against(
    champion: Mapping[str, Any], candidate: Mapping[str, Any], policy: Policy, gain: Gain | None
) -> list[Check]:
    """Whether the candidate is enough better than the champion on the same rows."""
    name, value, reference = "better than champion", candidate.get(policy.metric), champion.get(policy.metric)
    if _finite(reference) is None or _finite(value) is None:
        why = as_line(champion.get("problem") or "", 1000)  # a job's word, which XComs and tags take too
        told = f"the champion has no finite {policy.metric} to beat" + (f": {why}" if why else "")
        return [Check(name, value, reference, False, f"{told}. {_TAKE_AWAY}")]
    assert value is not None
    checks = [_compare(name, value, reference, policy.min_improvement, policy, "the champion")]
    return [*checks, _sure(gain, policy)] if policy.confidence is not None else checks


def _compare(name: str, value: float, reference: float | None, improvement: float, policy: Policy, who: str) -> Check:
    if reference is None or not math.isfinite(reference):
        return Check(name, value, reference, True, f"{who} has no finite {policy.metric} to beat")
    sign = 1 if policy.direction == "lower" else -1
    gain = sign * (reference - value)
    needed = improvement * abs(reference)
    # Equal is not better: an unchanged model must not move the alias.
    passed = gain > needed or (improvement < 0 and gain >= needed)
    word = "better" if gain > 0 else "worse" if gain < 0 else "no better"
    needs = f"; {100 * improvement:g}% is needed" if improvement else ""
    share = f" by {abs(gain) / abs(reference):.2%}" if reference and gain else ""
    return Check(name, value, reference, passed, f"{policy.metric} is {word} than {who}'s{share}{needs}")


def _sure(gain: Gain | None, policy: Policy) -> Check:
    name, needed = "gain is sure", policy.min_improvement
    if gain is None or (gain.metric, gain.confidence) != (policy.metric, policy.confidence):
        problem = f"no interval of the gain in {policy.metric} was measured: clear the task `evaluate`"
        return Check(name, None, needed, False, problem)
    if gain.low is None:
        return Check(name, None, needed, False, f"{gain}: keep more rows for evaluation (`data.eval_fraction`)")
    passed = gain.low > needed or (needed < 0 and gain.low >= needed)
    return Check(name, gain.low, needed, passed, f"{gain}; more than {_share(needed)} is needed")


def _guarded(
    guard: Guard,
    candidate: Mapping[str, Any],
    champion: Mapping[str, Any] | None,
    same_rows: Mapping[str, Any] | None = None,
) -> list[Check]:
    """:param same_rows: the candidate's figures on the champion's rows; None in a slice, which it need not know."""
    metric = guard.metric
    value = _finite(candidate.get(metric))
    if value is None:
        problem = f"the candidate has no finite {metric}, which is guarded"
        return [Check("guard", candidate.get(metric), None, False, problem)]
    checks = []
    for limit, holds, word in (
        (guard.at_least, guard.at_least is None or value >= guard.at_least, "at least"),
        (guard.at_most, guard.at_most is None or value <= guard.at_most, "at most"),
    ):
        if limit is not None:
            said = f"{metric} is {_show(value)} and must be {word} {limit:g}"
            checks.append(Check("guard", value, limit, holds, said))
    if guard.max_regression is not None:
        must = champion is not None and same_rows is not None and not is_cost(guard)
        mine = value if same_rows is None else _finite(same_rows.get(metric))
        reference = None if champion is None or mine is None else champion.get(metric)
        checks.append(
            _kept_up(guard, value if mine is None else mine, reference, known=champion is not None, must=must)
        )
    return checks


def _kept_up(guard: Guard, value: float, reference: Any, *, known: bool, must: bool) -> Check:
    """:param known: whether there is a champion. :param must: whether it has to have the figure."""
    assert guard.max_regression is not None
    metric, reference = guard.metric, _finite(reference)
    if reference is None:
        who = "the champion has no finite" if known else "there is no champion yet with a"
        told = f"{who} {metric} to hold it against"
        return Check("guard", value, None, not must, f"{told}. {_TAKE_AWAY}" if must else told)
    loss = (value - reference) * (1 if guard.direction == "lower" else -1)
    allowed = guard.max_regression * abs(reference)
    share = f"{loss / abs(reference):.2%}" if reference else _show(loss)
    told = (
        f"{metric} is worse than the champion's by {share}" if loss > 0 else f"{metric} is no worse than the champion's"
    )
    return Check("guard", value, reference, loss <= allowed, f"{told}; {guard.max_regression:.2%} is let pass")


def _in_slice(
    part: SliceGuards, one: Mapping[str, Any], metric: str, whole: Mapping[str, Any], *, known: bool
) -> list[Check]:
    """A slice's figures in the deciding metric, and what its guards say; names come from `dropforge.slices.named`."""
    where = f"of {named(part.by)} {as_line(one['name'])} ({as_line(one['rows'])} rows)"
    if "too_few" in one:
        told = f"{where.removeprefix('of ')}: too few to measure, {as_line(one['too_few'])} are needed"
        return [Check(SLICE, None, None, True, told)]
    mine, theirs = one.get("candidate") or {}, one.get("champion") or {}
    checks = [Check(SLICE, mine.get(metric), theirs.get(metric), True, f"{metric} {where}")]
    for guard in part.guards:
        if guard.metric not in mine and guard.metric in whole:
            checks.append(
                Check(SLICE, None, None, True, f"{guard.metric} {where}: too few of them were measured by it")
            )
            continue
        for check in _guarded(guard, mine, theirs if known else None):
            checks.append(replace(check, name="guard in slice", reason=f"{where.removeprefix('of ')}: {check.reason}"))
    return checks


def _is_stale(stale: Stale, days: float | None) -> bool:
    return days is not None and days > stale.after_days


def _aged(stale: Stale, days: float | None) -> Check:
    if days is None:
        return Check("age", None, stale.after_days, True, "the champion's age is not known: it counts as new")
    word = f"the champion is {days:.1f} days old"
    if _is_stale(stale, days):
        word += f", more than {stale.after_days:g}: a gain of {_share(stale.min_improvement)} is enough"
    return Check("age", days, stale.after_days, True, word)


def _finite(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def gain_from(values: Mapping[str, Any] | None) -> Gain | None:
    """What the evaluation has written of the gain; None if it was not asked for."""
    return None if values is None else Gain(**values)


def _share(value: float) -> str:
    # Over a champion's value of 0 a gain is as good as infinite.
    return (
        f"{value:.2%}"
        if abs(value) < 100
        else f"{'more' if value > 0 else 'less'} than {math.copysign(10000, value):.0f}%"
    )


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if abs(value) >= 1e6 else f"{value:.4f}"


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """Plain values for XCom, MLflow and the run's folder."""
    return {
        "promote": verdict.promote,
        "reason": verdict.reason,
        "checks": [vars(check) for check in verdict.checks],
    }
