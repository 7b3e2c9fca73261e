"""Nodes that a new gang should rather not get: pure functions over plain values.

The wish is a preferred node affinity, never a required one: a gang on a bad node is better than one that never starts.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kubeflow_training.jobs.kinds import kind_seen
from kubeflow_training.jobs.observation.reasons import Reason
from kubeflow_training.jobs.shapes import items, mapping

HARDWARE: Final = frozenset({Reason.NODE_LOST, Reason.COLLECTIVE_TIMEOUT})
"""Reasons that point to the node on which a job failed first."""
WEIGHT: Final = 100
_MOST: Final = 20


@dataclass(frozen=True)
class Avoided:
    """
    :param until: Unix time from which the node is welcome again.
    :param reason: why it is avoided.
    """

    node: str
    until: float
    reason: str = ""

    def to_dict(self) -> dict[str, Any]:
        return {"node": self.node, "until": self.until, "reason": self.reason}


def stored(data: Any) -> list[Avoided]:
    """What was kept as a list of `to_dict`; anything else in it is left out."""
    return [
        Avoided(item["node"], float(item["until"]), str(item.get("reason") or ""))
        for item in items(data)
        if isinstance(item.get("node"), str) and isinstance(item.get("until"), int | float)
    ]


def current(avoided: Sequence[Avoided], now: float) -> list[Avoided]:
    """Those whose time is not over, the latest first."""
    return sorted((item for item in avoided if item.until > now), key=lambda item: -item.until)


def extended(avoided: Sequence[Avoided], new: Avoided, now: float) -> list[Avoided]:
    """The list with a node more; each node stands in it once, with its latest time."""
    known = {item.node: item for item in current(avoided, now)}
    older = known.get(new.node)
    if older is None or older.until < new.until:
        known[new.node] = new
    return current(list(known.values()), now)[:_MOST]


def away_from(manifest: Mapping[str, Any], nodes: Sequence[str], weight: int = WEIGHT) -> dict[str, Any]:
    """The manifest with the wish that no pod of it comes to these nodes; its own affinity stays."""
    changed = copy.deepcopy(dict(manifest))
    for pod in kind_seen(changed).pod_specs(changed) if nodes else ():
        affinity = mapping(pod.get("affinity"))
        node_affinity = mapping(affinity.get("nodeAffinity"))
        wishes = list(node_affinity.get("preferredDuringSchedulingIgnoredDuringExecution") or [])
        # By name, as the label kubernetes.io/hostname may differ. One term for all: the scheduler scales the sum of
        # the weights, so that with a term per node an avoided one would lose only its share.
        wishes.append({"weight": weight, "preference": {"matchFields": [_other_than(node) for node in nodes]}})
        node_affinity = {**node_affinity, "preferredDuringSchedulingIgnoredDuringExecution": wishes}
        pod["affinity"] = {**affinity, "nodeAffinity": node_affinity}
    return changed


def _other_than(node: str) -> dict[str, Any]:
    return {"key": "metadata.name", "operator": "NotIn", "values": [node]}
