"""The fine-tune DAG, unchanged, with a gang of two pods on a real cluster, one of which is lost in the middle."""

from __future__ import annotations

from pathlib import Path

import pytest

from dropforge import tracking
from dropforge.cli.drops import wait_for_run
from tests.cluster.conftest import Namespace
from tests.e2e.harness import Stack, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]

FAMILY = "on-cluster"


def test_a_drop_becomes_a_registered_model_although_a_pod_is_lost(
    stack: Stack, namespace: Namespace, sample: dict[str, Path]
) -> None:
    drop = stack.drop(FAMILY, "one", sample, None)
    run = wait_for_run(stack.connection, drop)

    def past_a_checkpoint() -> bool:
        assert stack.state(run) not in {"success", "failed"}, stack.log(run, "train")
        keys = [info.key for info in stack.connection.store.list(f"runs/{FAMILY}-")]
        return any(key.endswith("/manifest.json") and "/checkpoints/" in key for key in keys)

    wait("the first checkpoint", past_a_checkpoint)
    gang = namespace.running()
    assert [name.rsplit("-", 2)[1] for name in gang] == ["master", "worker"]
    namespace.kill(next(name for name in gang if "worker" in name))

    assert stack.end(run) == "success", stack.log(run, "train")
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.params["compute.backend"] == "kubernetes"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 5
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION]
    log = stack.log(run, "train")
    assert "[worker-0]" in log
    assert "resuming from checkpoint step-" in log
    assert {condition["type"] for job in namespace.jobs() for condition in job["status"]["conditions"]} >= {"Succeeded"}
    assert not namespace.running()
