"""Claims that pods mount, as a recipe names them and as Kubernetes does."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

from pydantic import Field

from dropforge.placement.storages import Kind
from dropforge.section import Section

USER: Final = 10001
"""User id of our images, whose group gets the claims that can be given to one."""


class Volume(Section):
    """A claim that each pod mounts: a model cache, a shared disk."""

    claim: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    """Name of the PersistentVolumeClaim."""
    path: str = Field(pattern=r"^/[^\s:]+$")
    """Where it is mounted."""
    sub_path: str = Field(default="", pattern=r"^(\.?[^/.][^/]*(/\.?[^/.][^/]*)*)?$")
    """The part of it that is mounted."""
    read_only: bool = True
    """Whether pods can only read it."""
    storage: Kind | None = None
    """Its storage: `disk` of one node, each `node`'s own, or shared by all: `nfs`, `lustre`, `virtiofs`. Settings that
    cannot work on it are then refused; null refuses nothing."""


def nearest(folder: str, asked: Sequence[Volume]) -> Volume | None:
    """The claim that a folder of a pod lies in; None for a folder of the pod's own."""
    held = [item for item in asked if f"{folder}/".startswith(f"{item.path.rstrip('/')}/")]
    return max(held, key=lambda item: len(item.path), default=None)


def pod_volumes(asked: Sequence[Volume]) -> dict[str, Any]:
    """`volumes` and `mounts` of a pod, none for none; a claim that is mounted twice is one volume."""
    names = {claim: f"claim-{n}" for n, claim in enumerate(dict.fromkeys(item.claim for item in asked))}
    writes = {item.claim for item in asked if not item.read_only}
    volumes = [
        {"name": name, "persistentVolumeClaim": {"claimName": claim, "readOnly": claim not in writes}}
        for claim, name in names.items()
    ]
    mounts = [
        {
            "name": names[item.claim],
            "mountPath": item.path,
            "readOnly": item.read_only,
            **({"subPath": item.sub_path} if item.sub_path else {}),
        }
        for item in asked
    ]
    return {"volumes": volumes, "mounts": mounts} if volumes else {}
