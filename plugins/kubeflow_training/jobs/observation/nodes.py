"""What the nodes of a failed gang say about themselves, where its pods cannot say why it failed. Pure.

Nodes travel among the events of a `Snapshot`, as `told` leaves them: `reader.nodes_to_ask` says which, and when.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.observation.phases import Observation, Phase
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.shapes import items, mapping, name

KIND: Final = "Node"
BROKEN: Final[Mapping[str, str]] = {
    # Of a node-problem-detector with rules for GPUs.
    "GPUNeedsReset": "True",
    "GPUNeedsReplacement": "True",
    "NVLinkBroken": "True",
    # Of the EKS node monitoring agent.
    "AcceleratedHardwareReady": "False",
}
"""Conditions of nodes that tell of broken accelerators, with the status that does."""
LEAVING: Final = frozenset(
    {
        "karpenter.sh/disrupted",
        "karpenter.sh/disruption",
        "aws-node-termination-handler/spot-itn",
        "aws-node-termination-handler/rebalance-recommendation",
        "aws-node-termination-handler/scheduled-maintenance",
        "aws-node-termination-handler/asg-lifecycle-termination",
        "cloud.google.com/impending-node-termination",
        "node.cloudprovider.kubernetes.io/shutdown",
        "ToBeDeletedByClusterAutoscaler",
    }
)
"""Taints of nodes that their cloud or autoscaler takes back."""
_UNEXPLAINED: Final = frozenset({Reason.UNKNOWN, Reason.KILLED, Reason.COLLECTIVE_TIMEOUT})


@dataclass(frozen=True)
class Blame:
    """The node that explains a failure, the reason that this makes it, and what the node says."""

    node: str
    reason: Reason
    message: str


def told(node: Mapping[str, Any]) -> dict[str, Any]:
    """Of a node what is read here, fit to travel among events."""
    conditions = [item for item in items(mapping(node.get("status")).get("conditions")) if item.get("type") in BROKEN]
    return {
        "apiVersion": "v1",
        "kind": KIND,
        "metadata": {"name": name(node)},
        "spec": {"taints": items(mapping(node.get("spec")).get("taints"))},
        "status": {"conditions": conditions},
    }


def doubtful(seen: Observation) -> bool:
    """Whether a node may explain this failure better than the pods did."""
    return seen.phase is Phase.FAILED and (seen.reason in _UNEXPLAINED or _taken(seen))


def blamed(seen: Observation, events: Sequence[Mapping[str, Any]]) -> Blame | None:
    """The node at fault, if one says so: that of the first failure before any other."""
    nodes = [item for item in events if item.get("kind") == KIND] if doubtful(seen) else []
    nodes.sort(key=lambda item: name(item) != seen.node)
    if seen.reason is not Reason.COLLECTIVE_TIMEOUT:  # only then another rank than the one at fault may fail first
        nodes = [item for item in nodes if name(item) == seen.node]
    if seen.reason in _UNEXPLAINED:
        for node in nodes:
            if fault := _fault(node):
                return Blame(name(node), Reason.NODE_LOST, fault)
    for node in nodes:
        if key := _leaves(node):
            return Blame(name(node), Reason.PREEMPTED, f"is taken back by its cloud or autoscaler (taint {key})")
    return None


def silent(seen: Observation, events: Sequence[Mapping[str, Any]]) -> bool:
    """Whether the nodes of a failure that nobody explains are known, and say nothing of it yet."""
    return doubtful(seen) and any(item.get("kind") == KIND for item in events)


def _taken(seen: Observation) -> bool:
    """Whether the cluster took the pod: one that has an exit code has blamed its node itself."""
    return seen.reason is Reason.EVICTED or (seen.reason is Reason.NODE_LOST and seen.exit_code is None)


def _fault(node: Mapping[str, Any]) -> str:
    for item in items(mapping(node.get("status")).get("conditions")):
        kind, status = str(item.get("type")), item.get("status")
        if status is not None and BROKEN.get(kind) == status:
            why = str(item.get("message") or item.get("reason") or "").strip()
            return f"has {kind}={status}" + (f": {why[:500]}" if why else "")
    return ""


def _leaves(node: Mapping[str, Any]) -> str:
    taints = (str(item.get("key")) for item in items(mapping(node.get("spec")).get("taints")))
    return next((key for key in taints if key in LEAVING), "")
