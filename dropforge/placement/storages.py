"""What a claim can stand on, as data: who shares its files, what its locks are worth, and what to take it for. Pure.

A recipe says it of a volume (`compute.volumes`, `storage`), so that what cannot work is refused when a run is planned;
`dropforge doctor --cluster` holds the claim itself against it. Without any volume all is in S3, which suits every gang.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

Kind = Literal["disk", "node", "nfs", "lustre", "virtiofs"]
Mode = Literal["ReadWriteOnce", "ReadWriteMany"]


@dataclass(frozen=True)
class Storage:
    """One kind.

    :param what: it is. :param mode: access mode of its claims. :param shared: whether all nodes see the same files.
    :param storage_class: what makes its claims; empty for the cluster's default, None for volumes made by hand.
    :param gigabytes: the least that can be claimed. :param reason: when to take it, and what to look out for.
    """

    kind: Kind
    what: str
    mode: Mode
    shared: bool
    storage_class: str | None
    gigabytes: int
    reason: str


STORAGES: Final[dict[Kind, Storage]] = {
    one.kind: one
    for one in (
        Storage(
            "disk",
            "a disk of the network (EBS, a cloud's SSD)",
            "ReadWriteOnce",
            False,
            "",
            1,
            "for jobs of one pod: a disk is attached to one node at a time, so a second node's pod would wait for ever",
        ),
        Storage(
            "node",
            "each node's own disk, by a volume of hostPath",
            "ReadWriteMany",
            False,
            None,
            1,
            "for `data_cache` and `compile_cache`: the fastest, and each node has other files, so what must outlive a "
            "node does not belong there. The folder has to let user 10001 write",
        ),
        Storage(
            "nfs",
            "NFS 4, as EFS",
            "ReadWriteMany",
            True,
            "dropforge-efs",
            1,
            "for curation's work and caches that are read now and then: locks hold among all nodes, many small files "
            "are slow",
        ),
        Storage(
            "lustre",
            "FSx for Lustre",
            "ReadWriteMany",
            True,
            "dropforge-fsx",
            1200,
            "for large models that many nodes read at once, and checkpoints: locks hold among all nodes where it is "
            "mounted with `flock`, as our class does",
        ),
        Storage(
            "virtiofs",
            "a cloud's shared filesystem that the nodes mount, as Nebius's",
            "ReadWriteMany",
            True,
            "csi-mounted-fs-path-sc",
            1,
            "for models and checkpoints: locks may hold within a node only, so a `data_cache` belongs on `node`",
        ),
    )
}
