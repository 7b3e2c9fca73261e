"""Retry policies: by the cause of a failed gang, and a plain budget that only the task's own failures spend."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Final

from airflow.sdk import RetryPolicy
from airflow.sdk.definitions.retry_policy import RetryDecision

from kubeflow_training.exceptions import JobFailed, JobFailedForGood, TaskStopped
from kubeflow_training.gangs.memory import STATE_KEY, keep
from kubeflow_training.jobs import avoid
from kubeflow_training.jobs.budgets import BACKOFFS, Backoff, Budgets, Failure, Ledger, Verdict
from kubeflow_training.jobs.observation import Observation, Phase
from kubeflow_training.jobs.observation.reasons import Reason

if TYPE_CHECKING:
    from airflow.sdk import Context

LEDGER_KEY: Final = "pytorch_job_failed_gangs"
"""Key of the failed gangs in the task state store; see `jobs.budgets.Ledger`."""
AVOID_KEY: Final = "pytorch_job_avoided_nodes"
"""Key of the avoided nodes in the task state store; see `jobs.avoid`."""
AVOID_FOR: Final = timedelta(hours=12)
BUDGET_KEY: Final = "failures"
"""Key of the failures that a `RetryBudget` has counted, in the task state store."""
_TRY: Final = "try "  # before its number; failures of jobs are told by their uid

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class SharedBudget:
    """A number that another task of the run returns: what all causes but preemption and eviction have together.

    :param task_id, key: where the number is found in XCom.
    :param at_most: what the task's `retries` leaves room for; a larger number counts as this.
    :param name: what people call this number, for the log.
    """

    task_id: str
    key: str = "return_value"
    at_most: int = 10
    name: str = "the shared budget"


class RetryByCause(RetryPolicy):
    """Retries a failed job as its cause deserves.

    Wrong code, bad data, lack of memory, deadlines and the like are never retried; the failure says what to do. Each
    other cause has a budget of its own, counted by attempt in the task state store since the task was last cleared, so
    that a preemption costs none of the tries that are meant for broken hardware. After a failure of hardware the next
    attempts prefer other nodes for a time.

    The task's `retries` must be at least `policy.retries`, since a policy cannot grant more; what is left over pays for
    workers that are lost. A failure that no worker lived to see is counted by the next try.

    :param budgets: new attempts per cause, by `Reason` or its text, where they differ from `jobs.budgets.BUDGETS`.
    :param backoffs: seconds before a new attempt, where they differ from `jobs.budgets.BACKOFFS`.
    :param shared: one number at run time instead of the causes' own; those of `jobs.budgets.NO_FAULT` keep theirs.
    :param avoid_for: how long a node is avoided after a failure of hardware; zero avoids none.
    :raises ValueError: for an unknown cause or a negative number.
    """

    def __init__(
        self,
        budgets: Mapping[Reason | str, int] | None = None,
        *,
        backoffs: Mapping[Reason | str, Backoff] | None = None,
        shared: SharedBudget | None = None,
        avoid_for: timedelta = AVOID_FOR,
    ) -> None:
        changed = {_cause(name): number for name, number in (budgets or {}).items()}
        for reason, number in changed.items():
            if not isinstance(number, int) or number < 0:
                raise ValueError(f"RetryByCause: the budget of {reason!s} is {number!r}; give a whole number from 0")
        self.shared, self.avoid_for = shared, avoid_for
        self.budgets = Budgets.of(changed, shared.at_most if shared else None)
        self.backoffs = {**BACKOFFS, **{_cause(name): value for name, value in (backoffs or {}).items()}}

    @property
    def retries(self) -> int:
        """The sum of all budgets: what the task's `retries` must be at least."""
        return self.budgets.total

    def allows(self, observation: Observation) -> bool:
        """Whether the cause of this failure is retried at all."""
        return observation.phase is not Phase.SUCCEEDED and self.budgets.allows(observation.reason or Reason.UNKNOWN)

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        from airflow.sdk.exceptions import AirflowTaskTimeout

        observation, job = None, {}
        if isinstance(exception, JobFailed):
            observation, job = exception.observation, exception.job
        elif isinstance(exception, AirflowTaskTimeout):
            observation = Observation(Phase.FAILED, Reason.DEADLINE, str(exception))
        if observation is None or context is None:
            return RetryDecision.default()
        verdict = self.count(context, observation, job)
        if not verdict.retry:
            return RetryDecision.fail(verdict.text)
        text = verdict.text
        if try_number > max_tries:
            text += f"; but the task's own `retries` are used up: it needs {self.retries}, and some for lost workers"
        return RetryDecision.retry(None if verdict.delay is None else timedelta(seconds=verdict.delay), text)

    def count(self, context: Context, observation: Observation, job: Mapping[str, Any]) -> Verdict:
        """Count a gang's failure, once however often it is called, and decide what follows.

        :param job: the gang's uid and number; what the operator stored last, unless given.
        """
        store: Any = context["task_state_store"]
        known = job if job.get("uid") else (store.get(STATE_KEY) or {})
        uid, gang = str(known.get("uid") or ""), int(known.get("gang") or 0)
        ledger = Ledger.from_dict(store.get(LEDGER_KEY), generation(context))
        reason = ledger.reason_of(uid) or observation.reason or Reason.UNKNOWN
        fresh = ledger.reason_of(uid) is None
        if fresh:
            ledger = ledger.with_failure(Failure(uid, reason, gang, observation.node))
            keep(store, LEDGER_KEY, ledger.to_dict())
        verdict = self._budgets(context).verdict(ledger, reason, self.backoffs)
        words = [f"attempt {gang}: {verdict.text}"]
        if verdict.retry:
            if fresh and reason in avoid.HARDWARE and observation.node:
                self._avoid(store, observation.node, reason)
            words += [_told(node) for node in avoided(context)]
            words += [f"next attempt in {verdict.delay:.0f} s"] if verdict.delay else []
        return Verdict(verdict.retry, "; ".join(words), verdict.delay)

    def _budgets(self, context: Context) -> Budgets:
        if self.shared is None:
            return self.budgets
        answer = context["ti"].xcom_pull(task_ids=self.shared.task_id, key=self.shared.key)
        try:
            number = max(0, int(answer))
        except (TypeError, ValueError):
            log.warning("XCom %s of %s is no number: %r; no retry", self.shared.key, self.shared.task_id, answer)
            number = 0
        if number > self.shared.at_most:
            log.warning("%s is %d, and the task has retries for %d", self.shared.name, number, self.shared.at_most)
            number = self.shared.at_most
        return Budgets(self.budgets.per_cause, number, self.shared.name)

    def _avoid(self, store: Any, node: str, reason: Reason) -> None:
        now, seconds = time.time(), self.avoid_for.total_seconds()
        if seconds <= 0:
            return
        nodes = avoid.extended(avoid.stored(store.get(AVOID_KEY)), avoid.Avoided(node, now + seconds, str(reason)), now)
        keep(store, AVOID_KEY, [item.to_dict() for item in nodes])

    def serialize(self) -> dict[str, Any]:
        return {
            "budgets": {str(reason): number for reason, number in self.budgets.per_cause.items()},
            "backoffs": {str(reason): asdict(backoff) for reason, backoff in self.backoffs.items()},
            "shared": asdict(self.shared) if self.shared else None,
            "avoid_for": self.avoid_for.total_seconds(),
        }

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> RetryByCause:
        return cls(
            data["budgets"],
            backoffs={name: Backoff(**value) for name, value in data["backoffs"].items()},
            shared=SharedBudget(**data["shared"]) if data.get("shared") else None,
            avoid_for=timedelta(seconds=data["avoid_for"]),
        )


class RetryBudget(RetryPolicy):
    """Retries a task's own failures so many times.

    A try that Airflow ends, with a lost worker or by a state mismatch, raises nothing and costs nothing. What the
    task's `retries` have beyond this budget pays for such tries.

    :param failures: how many are followed by another try.
    :param jobs: how many of these may be failures of a job; all of them, unless given.
    :raises ValueError: for a negative number.
    """

    def __init__(self, failures: int, jobs: int | None = None) -> None:
        for number in (failures, jobs):
            if number is not None and number < 0:
                raise ValueError(f"RetryBudget: {number} failures; give a whole number from 0")
        self.failures = failures
        self.jobs = failures if jobs is None else jobs

    @property
    def retries(self) -> int:
        """What the task's `retries` must be at least."""
        return self.failures

    def allows(self, observation: Observation) -> bool:
        """Whether the cause of this failure is retried at all."""
        return observation.retryable

    def evaluate(
        self,
        exception: BaseException,
        try_number: int,
        max_tries: int,
        context: Context | None = None,
    ) -> RetryDecision:
        """Count the failure, and decide whether another try follows."""
        if context is None or isinstance(exception, TaskStopped):
            return RetryDecision.default()
        job = exception.job if isinstance(exception, JobFailed) else {}
        verdict = self._count(context, str(job.get("uid") or f"{_TRY}{try_number}"))
        if not verdict.retry:
            return RetryDecision.fail(verdict.text)
        text = verdict.text
        if try_number > max_tries:
            text += "; but the task's own `retries` are used up by what Airflow ended"
        return RetryDecision.retry(None, text)

    def count(self, context: Context, observation: Observation, job: Mapping[str, Any]) -> Verdict:  # noqa: ARG002
        """Count a gang's failure, once however often it is called, and decide what follows."""
        return self._count(context, str(job.get("uid")))

    def _count(self, context: Context, failure: str) -> Verdict:
        """:param failure: what tells it from the others since the task was last cleared."""
        store: Any = context["task_state_store"]
        found, now = store.get(BUDGET_KEY), generation(context)
        known = list(found["failures"]) if isinstance(found, dict) and found.get("of") == now else []
        if failure not in known:
            known.append(failure)
            keep(store, BUDGET_KEY, {"of": now, "failures": known})
        jobs = [one for one in known if not one.startswith(_TRY)]
        told = f"own failure {len(known)} of a task that may have {self.failures}"
        if len(jobs) > self.jobs:
            told = f"failure {len(jobs)} of a job that may have {self.jobs}"
        retry = len(known) <= self.failures and len(jobs) <= self.jobs
        return Verdict(retry, told if retry else f"{told}: no other try")

    def serialize(self) -> dict[str, Any]:
        """Return what `deserialize` takes."""
        return {"failures": self.failures, "jobs": self.jobs}

    @classmethod
    def deserialize(cls, data: dict[str, Any]) -> RetryBudget:
        """Return the policy of a stored DAG."""
        return cls(int(data["failures"]), data.get("jobs"))


# What the operator asks. Without this policy everything is as Airflow's `retries` alone would have it.


def require_retries(task: Any) -> None:
    """Refuse a task whose `retries` its policy could never use in full.

    :raises ValueError: when the DAG is parsed, with the number that is needed.
    """
    policy = _policy(task)
    retries = task.retries or 0
    if policy is not None and retries < policy.retries:
        raise ValueError(
            f"task {task.task_id}: retries={retries}, but the budgets of its {type(policy).__name__} come to "
            f"{policy.retries}, and a policy cannot grant more than `retries`. Give `retries=policy.retries` or more, "
            "or smaller budgets"
        )


def retried(task: Any, observation: Observation) -> bool:
    """Whether a failure like this may be retried: if not, no policy needs to be asked."""
    policy = _policy(task)
    return observation.retryable if policy is None else policy.allows(observation)


def replaced(task: Any, context: Context, observation: Observation, job: Mapping[str, Any]) -> bool:
    """Whether a gang that a new try finds failed is followed by another; one that nobody saw fail is counted here."""
    policy = _policy(task)
    if policy is None or not retried(task, observation):
        return retried(task, observation)
    verdict = policy.count(context, observation, job)
    log.info("%s", verdict.text)
    return verdict.retry


def failure(text: str, task: Any, observation: Observation, job: Mapping[str, Any]) -> JobFailed:
    """The exception that the task's policy understands."""
    kind = JobFailed if retried(task, observation) else JobFailedForGood
    return kind(text, observation, job)


def avoided(context: Context) -> list[avoid.Avoided]:
    """The nodes that the next gang should rather not get."""
    return avoid.current(avoid.stored(context["task_state_store"].get(AVOID_KEY)), time.time())


def generation(context: Context) -> str:
    """What is new after a clear and the same in all retries."""
    run = context["dag_run"]
    return f"{getattr(context['ti'], 'max_tries', 0)}.{getattr(run, 'clear_number', 0) or 0}"


def _policy(task: Any) -> RetryByCause | RetryBudget | None:
    policy = getattr(task, "retry_policy", None)
    return policy if isinstance(policy, RetryByCause | RetryBudget) else None


def _cause(name: Reason | str) -> Reason:
    try:
        return Reason(name)
    except ValueError:
        known = ", ".join(str(item) for item in Reason)
        raise ValueError(f"RetryByCause: there is no cause {name!r}; the causes are {known}") from None


def _told(node: avoid.Avoided) -> str:
    until = datetime.fromtimestamp(node.until, UTC)
    return f"other nodes than {node.node} are preferred until {until:%Y-%m-%d %H:%M} UTC ({node.reason})"
