"""StorageClasses of shared filesystems at AWS, and the claims that a recipe names. Pure.

Nebius's chart brings a class of its own, `csi-mounted-fs-path-sc`.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.placement.storages import STORAGES, Storage
from dropforge.volumes import Volume

_IDS: Final = {
    "subnet": r"subnet-[0-9a-f]{8,17}",
    "security group": r"sg-[0-9a-f]{8,17}",
    "file system": r"fs-[0-9a-f]{8,17}",
}


def lustre(subnet: str, group: str) -> dict[str, Any]:
    """FSx for Lustre: each claim becomes a filesystem, kept when the claim goes."""
    found = _class("dropforge-fsx", "fsx.csi.aws.com")
    found["parameters"] = {
        "subnetId": _known("subnet", subnet),
        "securityGroupIds": _known("security group", group),
        "deploymentType": "PERSISTENT_2",
        "perUnitStorageThroughput": "250",  # MB/s for each TiB
        "dataCompressionType": "LZ4",
        "fileSystemTypeVersion": "2.15",
    }
    found["mountOptions"] = ["flock"]  # datasets and model hubs lock their files
    return found


def nfs(file_system: str) -> dict[str, Any]:
    """EFS: each claim becomes an access point of one filesystem."""
    found = _class("dropforge-efs", "efs.csi.aws.com")
    found["parameters"] = {
        "provisioningMode": "efs-ap",
        "fileSystemId": _known("file system", file_system),
        "directoryPerms": "770",
        "uid": "10001",  # of our images
        "gid": "10001",
    }
    found["mountOptions"] = ["tls"]
    return found


def claims(
    volumes: Sequence[Volume], namespace: str, *, gigabytes: int = 100, node_path: str = "/mnt/dropforge"
) -> Iterator[dict[str, Any]]:
    """The claims of volumes whose storage a recipe says, each with the reason for it.

    :param gigabytes: of each, or the least that its storage has. :param node_path: the folder of each node's own disk.
    :raises DropforgeError: for a size or folder that cannot be, and a claim of which nothing or two things are said.
    """
    if gigabytes < 1:
        raise DropforgeError(f"size {gigabytes}", "a claim has one gigabyte at least", "Give --gigabytes 100")
    if not re.fullmatch(r"(/[A-Za-z0-9_][-A-Za-z0-9_.]*)+", node_path):
        raise DropforgeError(f"folder {node_path!r}", "it is no folder of a node's own", "Give one as /mnt/dropforge")
    for claim in dict.fromkeys(volume.claim for volume in volumes):
        said = sorted({volume.storage for volume in volumes if volume.claim == claim and volume.storage})
        if not said:
            mend = f"Say `storage` of that volume: {', '.join(STORAGES)}"
            raise DropforgeError(f"claim {claim}", "the recipe does not say what storage it is on", mend)
        if len(said) > 1:
            cause = f"it is said to be {' and '.join(f'`{kind}`' for kind in said)}"
            raise DropforgeError(f"claim {claim}", cause, "Say the same of it in each place")
        on = STORAGES[said[0]]
        size = {"storage": f"{max(gigabytes, on.gigabytes)}Gi"}
        spec: dict[str, Any] = {"accessModes": [on.mode], "resources": {"requests": size}}
        if on.storage_class is None:
            name = f"{namespace}.{claim}"  # neither has a dot, so no two are one
            yield _node_volume(name, claim, namespace, on, size, node_path)
            spec |= {"storageClassName": "", "volumeName": name}
        elif on.storage_class:
            spec["storageClassName"] = on.storage_class
        yield {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": claim, "namespace": namespace, "annotations": _why(on)},
            "spec": spec,
        }


def _node_volume(
    name: str, claim: str, namespace: str, on: Storage, size: dict[str, str], folder: str
) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": name, "annotations": _why(on)},
        "spec": {
            "accessModes": [on.mode],
            "capacity": size,
            "claimRef": {"namespace": namespace, "name": claim},
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            # Teams have folders of their own there.
            "hostPath": {"path": f"{folder}/{namespace}/{claim}", "type": "DirectoryOrCreate"},
        },
    }


def _why(on: Storage) -> dict[str, str]:
    return {"dropforge/storage": f"{on.kind}: {on.what}; {on.reason}"}


def _class(name: str, provisioner: str) -> dict[str, Any]:
    return {
        "apiVersion": "storage.k8s.io/v1",
        "kind": "StorageClass",
        "metadata": {"name": name},
        "provisioner": provisioner,
        "reclaimPolicy": "Retain",
        "volumeBindingMode": "Immediate",
    }


def _known(what: str, value: str) -> str:
    if not re.fullmatch(_IDS[what], value):
        raise DropforgeError(f"{what} {value!r}", "it is no id of AWS", f"Give one as {_example(what)}")
    return value


def _example(what: str) -> str:
    return _IDS[what].split("[")[0] + "0123456789abcdef0"
