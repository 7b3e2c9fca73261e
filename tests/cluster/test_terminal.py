"""`top`, `shell` and `stop` on a gang of two pods, with the rights of this test's own kubeconfig."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge import tracking
from dropforge.client.drops import wait_for_run
from tests.cluster.conftest import Namespace
from tests.e2e.harness import Stack, typed, wait

pytestmark = [pytest.mark.cluster, pytest.mark.timeout(900)]


def test_a_gang_is_looked_at_entered_and_stopped(stack: Stack, namespace: Namespace, sample: dict[str, Path]) -> None:
    drop = stack.drop("at-terminal", "one", sample, "extends: cluster\ntrain: {max_steps: 100000}\n")
    run = wait_for_run(stack.connection, drop)
    wait("the gang", lambda: len(namespace.running()) == 2)
    (tracked,) = stack.tracked(run)
    name = tracked.data.tags[tracking.TAG_RUN]

    def told() -> dict[str, Any] | None:
        found: dict[str, Any] = json.loads(typed(stack, "top", name, "--json").stdout)
        seen = [rank["seen_seconds"] for rank in found["ranks"]]
        return found if found["step"] and len(seen) == 2 and None not in seen else None

    found = wait("what is recorded of both nodes", told)
    assert [rank["of"] for rank in found["ranks"]] == ["node", "node"]
    assert [rank["pod"] for rank in found["ranks"]] == namespace.running()
    assert all(rank["node"] for rank in found["ranks"])

    done = typed(stack, "shell", name, "--rank", "1", "--", "sh", "-c", "hostname; echo no >&2; exit 7")
    assert (done.returncode, done.stdout.strip()) == (7, found["ranks"][1]["pod"]), done.stderr
    assert "no" in done.stderr
    done = typed(stack, "shell", name, "--rank", "1", "--", "/none")
    assert done.returncode == 2
    done = typed(stack, "queue", "hold", name)
    assert (done.returncode, "it waits in no queue" in done.stderr) == (2, True)

    done = typed(stack, "stop", name, "--yes")
    assert (done.returncode, "nothing of it runs any more" in done.stdout) == (0, True), done.stderr
    assert namespace.running() == []
