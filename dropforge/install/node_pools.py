"""Karpenter's NodePools and their EC2NodeClasses, from instances of the catalogue. Pure."""

from __future__ import annotations

import re
from typing import Any, Final, Literal

from dropforge.errors import DropforgeError
from dropforge.placement.catalogue import Instance
from dropforge.placement.teams import GPU

Capacity = Literal["on-demand", "spot", "reserved"]
CAPACITIES: Final[tuple[Capacity, ...]] = ("on-demand", "spot", "reserved")
_RESERVATION: Final = re.compile(r"cr-[0-9a-f]{8,17}")
_ZONE: Final = re.compile(r"[a-z]{2}(-[a-z]+)+-[0-9][a-z]|[a-z]{3,4}[0-9]-az[0-9]")
_CLUSTER: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")


def node_pool(
    on: Instance,
    *,
    cluster: str,
    nodes: int,
    zone: str = "",
    capacity: Capacity = "on-demand",
    reservation: str = "",
) -> list[dict[str, Any]]:
    """The pool of one kind of instance and its class.

    :param nodes: at most so many. :param zone: the only one; EFA does not reach beyond a zone.
    :param reservation: id of a capacity reservation or block, with `capacity` reserved.
    :raises DropforgeError: for what EC2 or Karpenter would refuse.
    """
    _check(on, cluster, nodes, zone, capacity, reservation)
    name = on.name.replace(".", "-")
    requirements = [
        _in("node.kubernetes.io/instance-type", on.name),
        _in("kubernetes.io/arch", on.arch),
        _in("karpenter.sh/capacity-type", capacity),
    ]
    if zone:
        requirements.append(_in("topology.kubernetes.io/zone", zone))
    template: dict[str, Any] = {
        "metadata": {"labels": {"dropforge/pool": name}},
        "spec": {
            "nodeClassRef": {"group": "karpenter.k8s.aws", "kind": "EC2NodeClass", "name": name},
            "requirements": requirements,
            # An age would end a training in the middle, whatever the budgets say.
            "expireAfter": "Never",
        },
    }
    limits = {"cpu": str(on.cpus * nodes)}
    if on.gpus:
        limits[GPU] = str(on.gpus * nodes)
        template["spec"]["taints"] = [{"key": GPU, "effect": "NoSchedule"}]  # pods of the catalogue tolerate it
    pool = {
        "apiVersion": "karpenter.sh/v1",
        "kind": "NodePool",
        "metadata": {"name": name},
        "spec": {
            "template": template,
            "limits": limits,
            "disruption": {
                "consolidationPolicy": "WhenEmpty",
                "consolidateAfter": "20m",  # so long an image and its caches wait for the next gang
                # A newer image of the node is no reason to end a training: those nodes go when they are empty.
                "budgets": [{"nodes": "0", "reasons": ["Drifted"]}, {"nodes": "100%", "reasons": ["Empty"]}],
            },
        },
    }
    return [pool, _node_class(on, name, cluster, reservation)]


def _node_class(on: Instance, name: str, cluster: str, reservation: str) -> dict[str, Any]:
    found = [{"tags": {"karpenter.sh/discovery": cluster}}]
    spec: dict[str, Any] = {
        # NVIDIA's driver is in the variant that Karpenter takes for GPUs.
        "amiSelectorTerms": [{"alias": "al2023@latest"}],
        "role": f"KarpenterNodeRole-{cluster}",
        "subnetSelectorTerms": found,
        "securityGroupSelectorTerms": found,
        "blockDeviceMappings": [
            {
                "deviceName": "/dev/xvda",
                "ebs": {"volumeSize": "200Gi", "volumeType": "gp3", "encrypted": True, "deleteOnTermination": True},
            }
        ],
        # Pods must not reach the node's role; theirs come by Pod Identity or IRSA.
        "metadataOptions": {"httpEndpoint": "enabled", "httpTokens": "required", "httpPutResponseHopLimit": 1},
    }
    if on.nvme_gb:
        spec["instanceStorePolicy"] = "RAID0"  # images and emptyDir on the instance's own disks
    if reservation:
        spec["capacityReservationSelectorTerms"] = [{"id": reservation}]
    return {"apiVersion": "karpenter.k8s.aws/v1", "kind": "EC2NodeClass", "metadata": {"name": name}, "spec": spec}


def _in(key: str, value: str) -> dict[str, Any]:
    return {"key": key, "operator": "In", "values": [value]}


def _check(on: Instance, cluster: str, nodes: int, zone: str, capacity: Capacity, reservation: str) -> None:
    if on.cloud != "aws":
        raise DropforgeError(
            f"instance {on.name}",
            f"it is one of {on.cloud}, and Karpenter makes nodes at AWS",
            "Make a node group there",
        )
    if not _CLUSTER.fullmatch(cluster):
        raise DropforgeError(f"cluster {cluster!r}", "EKS has no such names", "Give --cluster as EKS calls it")
    if nodes < 1:
        raise DropforgeError(f"{nodes} nodes", "a pool has at least one", "Give --nodes 1 or more")
    if zone and not _ZONE.fullmatch(zone):
        raise DropforgeError(f"zone {zone!r}", "it is no zone of AWS", "Give one as eu-west-1a")
    if (capacity == "reserved") != bool(reservation):
        raise DropforgeError(
            "capacity reservation",
            "--capacity reserved and --reservation go together",
            "Give both, as --capacity reserved --reservation cr-0123456789abcdef0, or neither",
        )
    if reservation and not _RESERVATION.fullmatch(reservation):
        raise DropforgeError(f"reservation {reservation!r}", "it is no id of AWS", "Give one as cr-0123456789abcdef0")
    if on.fabric == "efa" and nodes > 1 and not zone:
        raise DropforgeError(
            f"pool of {nodes} {on.name}",
            "EFA ends at a zone's border, and pods in several zones cannot form one job",
            "Give --zone, that of the subnet and of the shared filesystem",
        )
