"""The promotion rule: a pure function of (candidate, champion, policy).

Both sides are measured on the candidate's evaluation rows, so the numbers can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Direction = Literal["lower", "higher"]


@dataclass(frozen=True)
class Policy:
    """What a candidate must show.

    :param metric: the deciding metric, by its name in MLflow (`eval/loss`).
    :param direction: whether lower or higher is better.
    :param min_improvement: how much better than the champion, as a fraction of the champion's value; a negative
        value tolerates that much regression.
    :param better_than_base: the candidate must also beat the model it started from.
    """

    metric: str = "eval/loss"
    direction: Direction = "lower"
    min_improvement: float = 0.0
    better_than_base: bool = True


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
        decisive = [check for check in self.checks if not check.passed] or list(self.checks)
        return "; ".join(check.reason for check in decisive)

    def as_markdown(self) -> str:
        rows = [
            f"| {check.name} | {_show(check.candidate)} | {_show(check.reference)} |"
            f" {'yes' if check.passed else 'no'} | {check.reason} |"
            for check in self.checks
        ]
        head = "| check | candidate | reference | passed | reason |\n|---|---|---|---|---|"
        return "\n".join([head, *rows])


def policy_of(promote: Mapping[str, Any], *, same_tokenizer: bool, task: str = "causal-lm") -> Policy:
    """The policy that a recipe's `promote` section asks for.

    Losses and accuracies of language models count tokens, so between different tokenizers they say nothing: bits per
    byte of text decide then. Generated answers are texts (`gen/...`), and compare whatever they are made of; figures of
    classifiers count rows, whatever the tokens.

    :param task: the recipe's.
    """
    metric = str(promote["metric"])
    answers = metric.startswith("gen/")
    if not (same_tokenizer or answers or task == "classification"):
        metric = "eval/bits_per_byte"
    return Policy(
        metric=metric,
        direction="higher" if answers or metric in ("eval/accuracy", "eval/macro_f1") else "lower",
        min_improvement=float(promote["min_improvement"]),
        better_than_base=bool(promote["better_than_base"]),
    )


def decide(
    candidate: Mapping[str, Any],
    champion: Mapping[str, Any] | None,
    base: Mapping[str, Any] | None,
    policy: Policy,
) -> Verdict:
    """Decide whether `candidate` replaces `champion`.

    :param candidate: the candidate's metrics on its own evaluation rows.
    :param champion: the champion's metrics on the same rows; None when the family has no champion.
    :param base: the metrics before training on the same rows; None when they were not measured.
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
    if champion is None:
        checks.append(Check("better than champion", value, None, True, "the family has no champion yet"))
    else:
        reference = champion.get(policy.metric)
        checks.append(
            _compare("better than champion", value, reference, policy.min_improvement, policy, "the champion")
        )
    return Verdict(all(check.passed for check in checks), tuple(checks))


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


def _show(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def verdict_as_dict(verdict: Verdict) -> dict[str, Any]:
    """Plain values for XCom, MLflow and the run's folder."""
    return {
        "promote": verdict.promote,
        "reason": verdict.reason,
        "checks": [vars(check) for check in verdict.checks],
    }
