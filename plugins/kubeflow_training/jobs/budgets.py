"""How often a failed gang is replaced: a budget per cause, as a pure decision over the failures so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kubeflow_training.jobs.observation.reasons import MENDS, RETRYABLE, Reason
from kubeflow_training.jobs.shapes import items, mapping

BUDGETS: Final[Mapping[Reason, int]] = {
    Reason.PREEMPTED: 10,
    Reason.EVICTED: 5,
    Reason.NODE_LOST: 3,
    Reason.TOO_FEW_NODES: 3,
    Reason.KILLED: 3,
    Reason.COLLECTIVE_TIMEOUT: 3,
    Reason.UNKNOWN: 2,
}
"""New gangs per cause. What is not here has 2 if another gang may end better, and none if not."""
NO_FAULT: Final = frozenset({Reason.PREEMPTED, Reason.EVICTED, Reason.TOO_FEW_NODES})
"""Causes that say nothing about the job: they never count against a budget that several causes share."""


@dataclass(frozen=True)
class Backoff:
    """How long to wait before the next attempt.

    :param first: seconds before the attempt that follows the first failure of the cause.
    :param factor: by which they grow with each further one.
    :param most: seconds that they never pass.
    """

    first: float
    factor: float = 2.0
    most: float = 1800.0

    def seconds(self, count: int) -> float:
        """Before the gang that follows failure number `count` of the cause, from 1."""
        return float(min(self.most, self.first * self.factor ** min(max(count - 1, 0), 64)))


BACKOFFS: Final[Mapping[Reason, Backoff]] = {
    # The queue makes a preempted gang wait by itself.
    Reason.PREEMPTED: Backoff(10, factor=1),
    Reason.EVICTED: Backoff(60),
    Reason.NODE_LOST: Backoff(30),
    # Who waits longer may find even fewer.
    Reason.TOO_FEW_NODES: Backoff(1, factor=1),
    Reason.KILLED: Backoff(30),
    Reason.COLLECTIVE_TIMEOUT: Backoff(30),
    # Only where a budget is given to them: a registry or a quota comes back in minutes, not in seconds.
    Reason.IMAGE: Backoff(60),
    Reason.QUOTA: Backoff(300),
}
"""Causes without one wait for the task's own `retry_delay`."""


@dataclass(frozen=True)
class Failure:
    """An attempt that failed; `uid` counts it once, however often its end is seen."""

    uid: str
    reason: Reason
    gang: int = 0
    node: str | None = None


@dataclass(frozen=True)
class Ledger:
    """The failed attempts of one generation of a task, that is, since it was last cleared."""

    generation: str
    failures: tuple[Failure, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        failures = [asdict(item) | {"reason": str(item.reason)} for item in self.failures]
        return {"generation": self.generation, "failures": failures}

    @classmethod
    def from_dict(cls, data: Any, generation: str) -> Ledger:
        """What was kept of this generation; empty if it is of another one or cannot be read."""
        data = mapping(data)
        if data.get("generation") != generation:
            return cls(generation)
        known = {str(item) for item in Reason}
        return cls(
            generation,
            tuple(
                Failure(str(item["uid"]), Reason(item["reason"]), int(item.get("gang") or 0), item.get("node"))
                for item in items(data.get("failures"))
                if item.get("uid") and item.get("reason") in known
            ),
        )

    def with_failure(self, failure: Failure) -> Ledger:
        """The ledger with one failure more; the same one if that gang is in it already."""
        if self.reason_of(failure.uid) is not None:
            return self
        return replace(self, failures=(*self.failures, failure))

    def reason_of(self, uid: str) -> Reason | None:
        """Why this gang failed, if it is known to have failed."""
        return next((item.reason for item in self.failures if item.uid == uid), None)

    def count(self, *reasons: Reason) -> int:
        return sum(1 for item in self.failures if item.reason in reasons)


@dataclass(frozen=True)
class Verdict:
    """
    :param delay: seconds until the next attempt; None means the task's own delay.
    :param text: cause, count and budget, in one line.
    """

    retry: bool
    text: str
    delay: float | None = None


@dataclass(frozen=True)
class Budgets:
    """
    :param per_cause: attempts beyond the first, per cause.
    :param shared: if given, the number that all causes but those of `NO_FAULT` have together, in place of theirs.
    :param name: what people call that number.
    """

    per_cause: Mapping[Reason, int]
    shared: int | None = None
    name: str = "the shared budget"

    @classmethod
    def of(cls, changed: Mapping[Reason, int], shared: int | None = None) -> Budgets:
        """The usual budgets with some changed."""
        usual = {reason: BUDGETS.get(reason, 2 if RETRYABLE.get(reason) else 0) for reason in Reason}
        return cls({**usual, **changed}, shared)

    @property
    def total(self) -> int:
        """The retries that a task needs for all of them."""
        alone = sum(number for reason, number in self.per_cause.items() if self.shared is None or reason in NO_FAULT)
        return alone + (self.shared or 0)

    def allows(self, reason: Reason) -> bool:
        """Whether this cause is retried at all."""
        return self.per_cause.get(reason, 0) > 0

    def verdict(self, ledger: Ledger, reason: Reason, backoffs: Mapping[Reason, Backoff] = BACKOFFS) -> Verdict:
        """After a failure for this reason, which is in the ledger."""
        if not self.allows(reason):
            return Verdict(False, f"{reason}: not retried. {MENDS[reason]}")
        count, budget, whose = ledger.count(reason), self.per_cause[reason], f"{reason}"
        if self.shared is not None and reason not in NO_FAULT:
            together = [item for item in Reason if item not in NO_FAULT]
            count, budget = ledger.count(*together), self.shared
            whose = f"{reason}, counted in {self.name} with all causes but preemption, eviction and too few nodes"
        if count > budget:
            return Verdict(False, f"{whose}: failure {count}, and its budget of {budget} retries is used up")
        backoff = backoffs.get(reason)
        delay = backoff.seconds(ledger.count(reason)) if backoff else None
        return Verdict(True, f"{whose}: retry {count} of {budget}", delay)
