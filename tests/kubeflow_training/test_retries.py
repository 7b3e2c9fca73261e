"""Retries by cause: budgets, delays, nodes to avoid, and what is kept between tries."""

from __future__ import annotations

import copy
from datetime import timedelta
from types import SimpleNamespace

import pytest
from airflow.sdk.exceptions import AirflowTaskTimeout
from kubeflow_training import retries
from kubeflow_training.exceptions import JobFailed, JobFailedForGood, JobNotReached, TaskStopped
from kubeflow_training.jobs.avoid import Avoided, away_from, current, extended, stored
from kubeflow_training.jobs.budgets import Backoff, Budgets, Failure, Ledger
from kubeflow_training.jobs.manifest import pytorch_job
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.observation import Observation, Phase, Reason
from kubeflow_training.operators import PyTorchJobOperator
from kubeflow_training.retries import AVOID_KEY, BUDGET_KEY, LEDGER_KEY, RetryBudget, RetryByCause, SharedBudget

MANIFEST = pytorch_job(name="job", image="i", command=["c"], nodes=2)


class Store(dict):
    """The task state store, whose values must be JSON and never None."""

    def set(self, key, value, *, retention=None):
        import json

        assert value is not None
        assert retention == timedelta.max  # nothing that is counted here may expire
        self[key] = json.loads(json.dumps(value))


def context(store=None, clears=0, answer=None):
    return {
        "task_state_store": Store() if store is None else store,
        "ti": SimpleNamespace(max_tries=40, xcom_pull=lambda task_ids, key: answer),
        "dag_run": SimpleNamespace(clear_number=clears),
    }


def failed(reason, uid="u1", node=None, gang=1):
    seen = Observation(Phase.FAILED, reason, "it broke", node=node)
    return JobFailed("it broke", seen, {"uid": uid, "gang": gang, "name": "job", "namespace": "default"})


def decisions(policy, ctx, *failures):
    return [policy.evaluate(item, n, 40, ctx).action.value for n, item in enumerate(failures, 1)]


@pytest.mark.parametrize("reason", list(Reason))
def test_only_what_may_end_better_has_a_budget(reason):
    budget = Budgets.of({}).per_cause[reason]
    seen = Observation(Phase.FAILED, reason)
    assert (budget > 0) is seen.retryable
    decision = RetryByCause().evaluate(failed(reason), 1, 40, context())
    assert decision.action.value == ("retry" if seen.retryable else "fail")
    if not seen.retryable:
        assert seen.mend in decision.reason


def test_each_cause_is_counted_apart():
    policy = RetryByCause({"node lost": 1, "preempted": 2})
    ctx = context()
    assert decisions(
        policy,
        ctx,
        failed(Reason.PREEMPTED, "a"),
        failed(Reason.NODE_LOST, "b"),
        failed(Reason.PREEMPTED, "c"),
        failed(Reason.NODE_LOST, "d"),
        failed(Reason.PREEMPTED, "e"),
    ) == ["retry", "retry", "retry", "fail", "fail"]


def test_a_gang_is_counted_once_however_often_its_end_is_seen():
    policy = RetryByCause({"node lost": 1})
    ctx = context()
    # Seen again later, it may look different: the pods are gone by then.
    assert decisions(policy, ctx, *[failed(Reason.NODE_LOST, "a")] * 3, failed(Reason.UNKNOWN, "a")) == ["retry"] * 4
    assert len(ctx["task_state_store"][LEDGER_KEY]["failures"]) == 1


def test_a_clear_begins_to_count_anew():
    policy, store = RetryByCause({"unknown": 1}), Store()
    assert decisions(policy, context(store), failed(Reason.UNKNOWN, "a"), failed(Reason.UNKNOWN, "b")) == [
        "retry",
        "fail",
    ]
    assert decisions(policy, context(store, clears=1), failed(Reason.UNKNOWN, "c")) == ["retry"]


def test_the_log_says_cause_count_budget_node_and_delay():
    policy = RetryByCause({"node lost": 3})
    reason = policy.evaluate(failed(Reason.NODE_LOST, node="gpu-7", gang=4), 1, 40, context()).reason
    assert reason.startswith("attempt 4: node lost: retry 1 of 3; other nodes than gpu-7 are preferred until 20")
    assert reason.endswith("(node lost); next attempt in 30 s")
    # Airflow's own count ends before the budget: that is told, too.
    assert "`retries` are used up" in policy.evaluate(failed(Reason.NODE_LOST), 41, 40, context()).reason


def test_backoff_grows_with_the_failures_of_the_cause():
    policy = RetryByCause({"image": 3}, backoffs={"image": Backoff(60, most=100)})
    ctx = context()
    delays = [policy.evaluate(failed(Reason.IMAGE, uid), 1, 40, ctx).retry_delay for uid in "abc"]
    assert [delay.total_seconds() for delay in delays] == [60, 100, 100]
    assert policy.evaluate(failed(Reason.UNKNOWN, "d"), 1, 40, ctx).retry_delay is None  # the task's own
    assert Backoff(1).seconds(10_000) == 1800


def test_a_shared_budget_comes_at_run_time_and_preemption_does_not_count_in_it():
    policy = RetryByCause({"preempted": 5}, shared=SharedBudget("open_run", "retries", at_most=4))
    assert policy.retries == 5 + 5 + 3 + 4
    ctx = context(answer=1)
    assert decisions(
        policy,
        ctx,
        *[failed(Reason.PREEMPTED, f"p{n}") for n in range(4)],
        failed(Reason.UNKNOWN, "a"),
        failed(Reason.EVICTED, "b"),
        failed(Reason.COLLECTIVE_TIMEOUT, "c"),
    ) == ["retry"] * 6 + ["fail"]
    assert decisions(policy, context(answer=0), failed(Reason.UNKNOWN)) == ["fail"]
    assert decisions(policy, context(answer=None), failed(Reason.UNKNOWN)) == ["fail"]
    assert decisions(policy, context(answer=9), *[failed(Reason.UNKNOWN, c) for c in "abcde"]) == ["retry"] * 4 + [
        "fail"
    ]
    assert decisions(policy, context(answer=9), failed(Reason.BAD_DATA)) == ["fail"]


def test_what_says_nothing_about_the_job_is_left_to_airflow():
    policy, ctx = RetryByCause(), context()
    for error in (TaskStopped("x"), JobNotReached("x"), RuntimeError("x"), JobFailed("without observation")):
        assert policy.evaluate(error, 1, 40, ctx).action.value == "default"
    assert LEDGER_KEY not in ctx["task_state_store"]
    # The limits of the operator are deadlines.
    assert policy.evaluate(AirflowTaskTimeout("too long"), 1, 40, ctx).action.value == "fail"
    granted = RetryByCause({"deadline": 1})
    assert granted.evaluate(AirflowTaskTimeout("too long"), 1, 40, context()).action.value == "retry"


def test_a_task_with_too_few_retries_is_refused_when_the_dag_is_parsed():
    policy = RetryByCause({"unknown": 3})
    with pytest.raises(ValueError, match=rf"task train: retries=2, but .* come to {policy.retries}"):
        PyTorchJobOperator(task_id="train", manifest=MANIFEST, retries=2, retry_policy=policy)
    PyTorchJobOperator(task_id="train", manifest=MANIFEST, retries=policy.retries, retry_policy=policy)


@pytest.mark.parametrize(("budgets", "words"), [({"oom": 1}, "no cause 'oom'"), ({"unknown": -1}, "whole number")])
def test_wrong_budgets_are_refused(budgets, words):
    with pytest.raises(ValueError, match=words):
        RetryByCause(budgets)


def test_the_policy_survives_serialization():
    policy = RetryByCause({"image": 2}, shared=SharedBudget("a", "b", 3, "c"), avoid_for=timedelta(hours=1))
    again = RetryByCause.deserialize(policy.serialize())
    assert again.serialize() == policy.serialize()
    assert (again.retries, again.shared) == (policy.retries, policy.shared)


@pytest.mark.parametrize(
    ("budgets", "reason", "kind"),
    [
        (None, Reason.UNKNOWN, JobFailed),
        (None, Reason.IMAGE, JobFailedForGood),
        ({"image": 1}, Reason.IMAGE, JobFailed),
        ({"unknown": 0}, Reason.UNKNOWN, JobFailedForGood),
    ],
)
def test_what_is_never_retried_asks_no_policy(budgets, reason, kind):
    task = SimpleNamespace(retry_policy=None if budgets is None else RetryByCause(budgets))
    assert type(retries.failure("text", task, Observation(Phase.FAILED, reason), {})) is kind


def test_a_gang_that_failed_unseen_is_counted_by_the_next_try():
    task = SimpleNamespace(retry_policy=RetryByCause({"node lost": 1}))
    ctx, seen = context(), Observation(Phase.FAILED, Reason.NODE_LOST, node="n")
    assert retries.replaced(task, ctx, seen, {"uid": "a", "gang": 1}) is True
    assert retries.replaced(task, ctx, seen, {"uid": "a", "gang": 1}) is True
    assert retries.replaced(task, ctx, seen, {"uid": "b", "gang": 2}) is False
    assert retries.replaced(task, ctx, Observation(Phase.FAILED, Reason.BAD_DATA), {"uid": "c"}) is False
    # Without the policy Airflow's `retries` alone decide.
    assert retries.replaced(SimpleNamespace(), ctx, seen, {"uid": "b", "gang": 2}) is True


# Nodes to avoid


def test_only_hardware_makes_a_node_avoided_each_for_its_own_time():
    policy, ctx = RetryByCause(avoid_for=timedelta(hours=1)), context()
    store = ctx["task_state_store"]
    decisions(policy, ctx, failed(Reason.UNKNOWN, "a", "n1"), failed(Reason.PREEMPTED, "b", "n2"))
    assert AVOID_KEY not in store
    decisions(policy, ctx, failed(Reason.NODE_LOST, "c", "n3"))
    store[AVOID_KEY][0]["until"] -= 1800
    decisions(policy, ctx, failed(Reason.COLLECTIVE_TIMEOUT, "d", "n4"))
    assert [item.node for item in retries.avoided(ctx)] == ["n4", "n3"]
    store[AVOID_KEY][1]["until"] -= 1800
    assert [item.node for item in retries.avoided(ctx)] == ["n4"]
    # The same node again: its time is the later one. The same gang again: nothing changes.
    before = copy.deepcopy(store[AVOID_KEY])
    decisions(policy, ctx, failed(Reason.COLLECTIVE_TIMEOUT, "d", "n4"))
    assert store[AVOID_KEY] == before
    none = context()
    decisions(RetryByCause(avoid_for=timedelta(0)), none, failed(Reason.NODE_LOST, "c", "n3"))
    assert AVOID_KEY not in none["task_state_store"]


def test_what_is_stored_of_nodes_may_be_anything():
    assert stored(None) == stored("x") == stored([1, {"node": "n"}, {"until": 3, "node": 4}]) == []
    assert current([Avoided("a", 5), Avoided("b", 9)], 6) == [Avoided("b", 9)]
    assert extended([Avoided("a", 9)], Avoided("a", 7), 6) == [Avoided("a", 9)]
    assert len(extended([Avoided(f"n{n}", 100 + n) for n in range(50)], Avoided("new", 500), 0)) == 20


def test_every_pod_prefers_other_nodes_and_keeps_its_own_affinity():
    manifest = copy.deepcopy(MANIFEST)
    own = {"podAntiAffinity": {"x": 1}, "nodeAffinity": {"requiredDuringSchedulingIgnoredDuringExecution": {"y": 2}}}
    manifest["spec"]["pytorchReplicaSpecs"]["Worker"]["template"]["spec"]["affinity"] = own
    before = copy.deepcopy(manifest)
    changed = away_from(manifest, ["bad-1", "bad-2"])
    assert manifest == before
    wishes = [
        {
            "weight": 100,
            "preference": {
                "matchFields": [
                    {"key": "metadata.name", "operator": "NotIn", "values": [node]} for node in ("bad-1", "bad-2")
                ]
            },
        }
    ]
    replicas = changed["spec"]["pytorchReplicaSpecs"]
    wish = {"preferredDuringSchedulingIgnoredDuringExecution": wishes}
    assert replicas["Master"]["template"]["spec"]["affinity"] == {"nodeAffinity": wish}
    assert replicas["Worker"]["template"]["spec"]["affinity"] == own | {"nodeAffinity": own["nodeAffinity"] | wish}
    assert away_from(MANIFEST, []) == MANIFEST
    assert fingerprint(MANIFEST) != fingerprint(changed)  # why it is applied after the fingerprint


def test_other_kinds_avoid_nodes_too():
    plain = {"kind": "Job", "spec": {"template": {"spec": {"containers": []}}}}
    assert "affinity" in away_from(plain, ["n"])["spec"]["template"]["spec"]
    train = {"kind": "TrainJob", "spec": {"trainer": {"image": "i"}}}
    assert "metadata.name" in str(away_from(train, ["n"])["spec"]["runtimePatches"])
    assert "runtimePatches" not in train["spec"]


def test_a_ledger_that_cannot_be_read_is_empty():
    for data in (None, 3, {"generation": "g"}, {"generation": "g", "failures": [{"uid": "a", "reason": "new cause"}]}):
        assert Ledger.from_dict(data, "g") == Ledger("g")
    ledger = Ledger("g", (Failure("a", Reason.UNKNOWN, 2, "n"),))
    assert Ledger.from_dict(ledger.to_dict(), "g") == ledger
    assert Ledger.from_dict(ledger.to_dict(), "h") == Ledger("h")


def test_a_budget_counts_what_a_task_raises_and_nothing_else():
    policy, ctx = RetryBudget(2), context()
    assert policy.evaluate(TaskStopped("a person, or Airflow"), 1, 40, ctx).action.value == "default"
    assert BUDGET_KEY not in ctx["task_state_store"]
    # Try 3 was ended by Airflow, and raised nothing; the uid of a job counts once, in whichever try it is seen.
    told = [policy.evaluate(error, n, 40, ctx) for n, error in ((1, OSError()), (2, failed("unknown")))]
    assert [decision.action.value for decision in told] == ["retry", "retry"]
    assert policy.evaluate(failed("unknown"), 4, 40, ctx).action.value == "retry"
    last = policy.evaluate(OSError(), 5, 40, ctx)
    assert (last.action.value, last.reason) == ("fail", "own failure 3 of a task that may have 2: no other try")
    cleared = context(ctx["task_state_store"], clears=1)
    assert policy.evaluate(OSError(), 6, 40, cleared).action.value == "retry"


def test_a_budget_may_have_less_for_jobs_than_for_services_that_are_away():
    policy, ctx = RetryBudget(4, jobs=1), context()
    told = [policy.evaluate(error, n, 40, ctx) for n, error in enumerate((OSError(), failed("unknown"), OSError()), 1)]
    assert [decision.action.value for decision in told] == ["retry"] * 3
    last = policy.evaluate(failed("unknown", "b"), 4, 40, ctx)
    assert (last.action.value, last.reason) == ("fail", "failure 2 of a job that may have 1: no other try")


def test_a_gang_that_failed_unseen_is_counted_by_the_budget():
    task, ctx = SimpleNamespace(retry_policy=RetryBudget(1)), context()
    seen = Observation(Phase.FAILED, Reason.UNKNOWN, "it broke")
    assert retries.replaced(task, ctx, seen, {"uid": "a"})
    assert retries.replaced(task, ctx, seen, {"uid": "a"})
    assert not retries.replaced(task, ctx, seen, {"uid": "b"})
    assert not retries.replaced(task, context(), Observation(Phase.FAILED, Reason.IMAGE, "no such image"), {"uid": "c"})


def test_a_budget_goes_through_airflows_database_and_refuses_nonsense():
    assert RetryBudget.deserialize(RetryBudget(3).serialize()).failures == 3
    assert RetryBudget.deserialize(RetryBudget(3, jobs=1).serialize()).jobs == 1
    assert RetryBudget.deserialize({"failures": 3}).jobs == 3  # of an older version
    with pytest.raises(ValueError, match="-1 failures"):
        RetryBudget(-1)
