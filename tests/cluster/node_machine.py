"""What happens to a node that is this machine: a container killed, the node silent and back."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.e2e.harness import wait

OUT_OF_SERVICE = {"key": "node.kubernetes.io/out-of-service", "value": "nodeshutdown", "effect": "NoExecute"}
"""By which a person says that a silent node is off, so that Kubernetes does not wait for what its pods still do."""


def kill_container(pod: Any) -> None:
    """The container's first process, and with it all others, ends as by the kernel."""
    for process in _processes(pod):
        process.kill()


@contextmanager
def switched_off(core: Any, node: str, pods: list[Any]) -> Iterator[None]:
    """The node loses its power, which a person then says; at the block's end it is back and ready.

    Its kubelet stands still, so that nobody tells of the pods, whose processes are gone.
    """
    kubelet = _kubelet()
    taints = core.read_node(node).spec.taints or []
    kubelet.send_signal(signal.SIGSTOP)
    try:
        for pod in pods:
            kill_container(pod)
        wait("a node that is not ready", lambda: _ready(core, node) != "True", 90)
        core.patch_node(node, {"spec": {"taints": [*_now(core, node), OUT_OF_SERVICE]}})
        yield
    finally:
        try:
            # First: a node that kept it, because it returns too late, would take no pod of the tests that follow.
            kept = [taint for taint in _now(core, node) if taint["key"] != OUT_OF_SERVICE["key"]]
            core.patch_node(node, {"spec": {"taints": kept}})
        finally:
            kubelet.send_signal(signal.SIGCONT)
        wait("the node's return", lambda: _ready(core, node) == "True", 90)
        wait("its taints to go", lambda: len(core.read_node(node).spec.taints or []) == len(taints), 60)


def _ready(core: Any, node: str) -> str:
    return str(next(one.status for one in core.read_node(node).status.conditions if one.type == "Ready"))


def _now(core: Any, node: str) -> list[dict[str, Any]]:
    """Its taints, as a patch takes them."""
    found = core.api_client.sanitize_for_serialization(core.read_node(node).spec.taints or [])
    return list(found)


def _kubelet() -> psutil.Process:
    for process in psutil.process_iter(["cmdline"]):
        if process.info["cmdline"] and Path(process.info["cmdline"][0]).name == "kubelet":
            return process
    pytest.skip("the kubelet is no process of this machine")


def _processes(pod: Any) -> list[psutil.Process]:
    """Those of the pod's trainer; its sandbox stays."""
    uid, found = pod.metadata.uid, []
    for process in psutil.process_iter():
        try:
            cgroup = Path(f"/proc/{process.pid}/cgroup").read_text().replace("_", "-")
            if uid in cgroup and any("trainer" in word for word in process.cmdline()):
                found.append(process)
        except (OSError, psutil.Error):
            continue
    assert found, f"no process of {pod.metadata.name} is on this machine"
    return found
