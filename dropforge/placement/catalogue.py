"""The instances of clouds as data (`instances.csv`): found by name, or by what a pod needs.

The figures are those of the clouds' own pages: https://docs.aws.amazon.com/ec2/latest/instancetypes/ and
https://docs.nebius.com/compute/virtual-machines/types; those of the cloud `any` are what usual machines have at the
least. A file of one's own, with the same columns, adds rows and replaces those of the same name.
"""

from __future__ import annotations

import csv
import difflib
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from dropforge.errors import DropforgeError
from dropforge.validation_errors import cause

VARIABLE: Final = "DROPFORGE_INSTANCES"
"""Names a file of one's own."""
ANY: Final = "any"
"""Cloud of instances that stand for machines of whatever name: pods ask for no `instance-type`."""
_OWN: Final = Path(__file__).with_name("instances.csv")
_CLOSE: Final = 5  # that are named where none fits

_DEVICE: Final = r"^([a-z0-9]([-a-z0-9.]{0,180}[a-z0-9])?/[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$"
Fabric = Literal["tcp", "efa", "infiniband"]


class Instance(BaseModel):
    """One kind of machine."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(min_length=1, max_length=60, pattern=r"^[A-Za-z0-9][A-Za-z0-9.-]*$")
    """As the cloud calls it, and as the node's label `node.kubernetes.io/instance-type` has it."""
    cloud: str = Field(min_length=1, max_length=30)
    arch: Literal["amd64", "arm64"]
    """As the node's label `kubernetes.io/arch` has it."""
    cpus: int = Field(gt=0)
    """Virtual cores."""
    memory_gib: float = Field(gt=0)
    gpu: str = ""
    """The GPU's model; empty without one."""
    gpus: int = Field(default=0, ge=0)
    gpu_memory_gib: float = Field(default=0, ge=0)
    """Of one GPU."""
    gpu_link: Literal["", "pcie", "nvlink"] = ""
    """How its GPUs reach each other; empty where there is only one."""
    network_gbps: float = Field(default=0, ge=0)
    """At the most."""
    fabric: Fabric = "tcp"
    adapters: int = Field(default=0, ge=0)
    """EFA or InfiniBand devices of a node."""
    nvme_gb: int = Field(default=0, ge=0)
    """On disks of its own."""
    amx: bool = False
    """Whether its cores multiply matrices of bfloat16 (Intel AMX)."""
    device: str = Field(default="", max_length=253, pattern=_DEVICE)
    """By which name Kubernetes knows the adapters. Empty is `vpc.amazonaws.com/efa` for EFA; for InfiniBand, that pods
    ask for none."""
    price_hour: float = Field(default=0, ge=0, le=1e6)
    """What an hour of it costs you, in `currency`; 0 is not known."""
    currency: str = Field(default="USD", pattern="^[A-Z]{3}$")

    @field_validator("*", mode="before")
    @classmethod
    def _empty_is_default(cls, value: object, info: object) -> object:
        field = cls.model_fields[info.field_name]  # type: ignore[attr-defined]
        return field.default if value == "" and not field.is_required() else value

    @model_validator(mode="after")
    def _fits_together(self) -> Instance:
        if bool(self.gpu) != bool(self.gpus) or bool(self.gpus) != bool(self.gpu_memory_gib):
            raise ValueError("gpu, gpus and gpu_memory_gib go together")
        if (self.gpus > 1) != bool(self.gpu_link):
            raise ValueError("gpu_link is for several GPUs, which all have one")
        if (self.fabric != "tcp") != bool(self.adapters):
            raise ValueError("a fabric has adapters, and tcp has none")
        if self.device and not self.adapters:
            raise ValueError("device is the name of adapters, and there are none")
        return self


class Needs(BaseModel):
    """What one pod needs of its node; what is left out does not matter."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    gpus: int = Field(default=0, ge=0)
    gpu_memory_gib: float = Field(default=0, ge=0)
    cpus: float = Field(default=0, ge=0)
    memory_gib: float = Field(default=0, ge=0)
    arch: Literal["amd64", "arm64"] | None = None
    cloud: str | None = None
    fabric: Fabric | None = None
    gpu_link: Literal["pcie", "nvlink"] | None = None
    amx: bool = False


def read(environ: Mapping[str, str] = os.environ) -> dict[str, Instance]:
    """All instances by name. :raises DropforgeError: if one's own file cannot be read, naming line and cause."""
    found = _rows(_OWN)
    own = environ.get(VARIABLE)
    return found | _rows(Path(own)) if own else found


def find(name: str, among: Mapping[str, Instance]) -> Instance:
    """The instance of that name. :raises DropforgeError: naming the nearest, if there is none."""
    if name in among:
        return among[name]
    near = difflib.get_close_matches(name, among, 3)
    mend = f"Did you mean {' or '.join(near)}? " if near else ""
    raise DropforgeError(
        f"instance {name!r}",
        "the catalogue has none of that name",
        f"{mend}`dropforge instances` lists all; {VARIABLE} names a file with others",
    )


def suited(needs: Needs, among: Iterable[Instance]) -> list[Instance]:
    """Instances whose node has room for such a pod, those with the least beyond it first.

    :raises DropforgeError: if there is none, with the need that the fewest meet.
    """
    every = list(among)
    found = [one for one in every if not missing(needs, one)]
    if found:
        return sorted(found, key=size)
    nearest = sorted(every, key=lambda one: (len(missing(needs, one)), -min(one.gpus, needs.gpus), -one.memory_gib))
    lacks = "; ".join(f"{one.name} {' and '.join(missing(needs, one))}" for one in nearest[:_CLOSE])
    raise DropforgeError("instances", f"none fits: {lacks}", "Ask for less, or take more pods of fewer GPUs")


def size(of: Instance) -> tuple[float | str, ...]:
    """By which instances are sorted."""
    return of.gpus, of.gpu_memory_gib, of.memory_gib, of.cpus, of.name


def missing(needs: Needs, of: Instance) -> list[str]:
    """What an instance lacks for such a pod, each in a few words; nothing if it has room."""
    room = pod_room(of)
    lacks = []
    if of.gpus < needs.gpus:
        lacks.append(f"has {of.gpus} of {needs.gpus} GPUs")
    elif needs.gpus and of.gpu_memory_gib < needs.gpu_memory_gib:
        lacks.append(f"has {of.gpu_memory_gib:g} of {needs.gpu_memory_gib:g} GiB per GPU")
    if room.cpus < needs.cpus:
        lacks.append(f"leaves a pod {room.cpus:g} of {needs.cpus:g} cores")
    if room.memory_gib < needs.memory_gib:
        lacks.append(f"leaves a pod {room.memory_gib:g} of {needs.memory_gib:g} GiB")
    if needs.arch is not None and of.arch != needs.arch:
        lacks.append(f"is {of.arch}")
    if needs.cloud is not None and of.cloud != needs.cloud:
        lacks.append(f"is of {of.cloud}")
    if needs.fabric is not None and of.fabric != needs.fabric:
        lacks.append(f"has no {needs.fabric}" if needs.fabric != "tcp" else f"has {of.fabric}")
    if needs.gpu_link is not None and of.gpu_link != needs.gpu_link:
        lacks.append(f"has no {needs.gpu_link}")
    if needs.amx and not of.amx:
        lacks.append("has no AMX")
    return lacks


class Room(BaseModel):
    """What one pod that has a node for itself may ask for."""

    model_config = ConfigDict(frozen=True)

    cpus: float
    memory_gib: float


#: What DaemonSets ask for on a usual node: network, proxy, device plugin, logs and metrics.
_DAEMONS: Final = Room(cpus=0.5, memory_gib=1.0)
_PODS: Final = 110  # for which a kubelet keeps memory
#: Huge pages that the images of nodes with GPUs and EFA set aside, whether anybody asks for them or not.
_EFA_PAGES_MIB: Final = 5128 * 2
#: Shares of cores that a kubelet keeps for itself: of the first, the second, the next two, and the rest.
_KEPT: Final = ((1, 0.06), (1, 0.01), (2, 0.005))
_KEPT_OF_REST: Final = 0.0025
#: Memory that a machine does not show its kernel, as a share: firmware and the kernel's own.
_HIDDEN: Final = 0.02


def pod_room(of: Instance) -> Room:
    """What is left for one pod when kubelet, system and DaemonSets have theirs, rounded down to tenths.

    Reserved is what EKS reserves: 11 MiB for each pod and 255 MiB more, 100 MiB before it evicts, and the shares of
    cores of https://github.com/awslabs/amazon-eks-ami (`kubeReserved`).
    """
    kept, rest = 0.0, float(of.cpus)
    for cores, share in _KEPT:
        kept += min(cores, rest) * share
        rest = max(0.0, rest - cores)
    kept += rest * _KEPT_OF_REST
    reserved = (11 * _PODS + 255 + 100) / 1024
    if of.gpus and of.fabric == "efa":
        reserved += _EFA_PAGES_MIB / 1024
    cpus = of.cpus - kept - _DAEMONS.cpus
    memory = of.memory_gib * (1 - _HIDDEN) - reserved - _DAEMONS.memory_gib
    return Room(cpus=max(0.0, int(cpus * 10) / 10), memory_gib=max(0.0, int(memory * 10) / 10))


def _rows(path: Path) -> dict[str, Instance]:
    try:
        with path.open(newline="", encoding="utf-8") as file:
            rows = list(csv.DictReader(file, restval=""))
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise DropforgeError(f"{VARIABLE}, file {path}", str(error), "Name a readable CSV file") from error
    found: dict[str, Instance] = {}
    for number, row in enumerate(rows, start=2):
        try:
            one = Instance.model_validate(row)
        except ValidationError as error:
            first = error.errors()[0]
            where = f" column {first['loc'][0]!r}:" if first["loc"] else ""
            raise DropforgeError(
                f"file {path}, line {number}",
                f"{where} {cause(first)}".strip(),
                f"Its columns are {', '.join(Instance.model_fields)}",
            ) from error
        if one.name in found:
            raise DropforgeError(f"file {path}, line {number}", f"{one.name} is listed twice", "Keep one of them")
        found[one.name] = one
    return found
