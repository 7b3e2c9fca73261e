"""The file of teams (`teams.yaml`): which nodes there are, whose they are, who may borrow them, and who comes first.

`teams_file` reads it, `team_rules` holds what cannot work in it, and `queues` makes Kueue's objects of it.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

from pydantic import Field, StringConstraints

from dropforge.errors import DropforgeError
from dropforge.section import Section

FILE: Final = "teams.yaml"
# Names become label values too, so that all are as short as those.
_LABEL: Final = r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$"
Name = Annotated[str, StringConstraints(pattern=_LABEL)]
Resource = Annotated[str, StringConstraints(pattern=r"^([a-z0-9.-]{1,200}/)?[A-Za-z0-9][-A-Za-z0-9_.]{0,62}$")]
LabelKey = Resource
LabelValue = Annotated[str, StringConstraints(pattern=r"^([A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?)?$")]
Count = Annotated[int, Field(ge=0, le=1_000_000)]
Quantity = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}(\.[0-9]{1,3})?(m|k|M|G|T|Ki|Mi|Gi|Ti)?$")]
_SUFFIXES: Final = {"m": 1e-3, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12} | {
    f"{letter}i": 1024.0**power for power, letter in enumerate("KMGT", 1)
}
Size = Annotated[float, Field(ge=0, le=1e9)]
GPU: Final = "nvidia.com/gpu"
HOST: Final = "kubernetes.io/hostname"
"""The label that each node has to itself."""
OWN: Final = ("cpu", "memory")
"""Resources that every pod asks for, and that have keys of their own."""


def count(value: int | float | str) -> float:
    """A quantity as Kubernetes writes it: `5120Mi`, `500m`, or a number."""
    text = str(value)
    digits = text.rstrip("".join({letter for suffix in _SUFFIXES for letter in suffix}))
    return float(digits) * _SUFFIXES.get(text[len(digits) :], 1.0)


class Toleration(Section):
    """A taint of the nodes that the team's pods may ignore."""

    key: LabelKey
    value: LabelValue | None = None
    """Null tolerates any value."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"] | None = None
    """Null tolerates any effect."""


class Flavor(Section):
    """A kind of nodes."""

    instance: str | None = Field(default=None, max_length=60)
    """An instance of the catalogue: its label is one of `labels`, and quotas may count in nodes."""
    labels: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=8)
    """Labels that its nodes have; pods get them as their node selector."""
    tolerations: Annotated[tuple[Toleration, ...], Field(strict=False, max_length=8)] = ()
    """What its pods tolerate."""
    gpu_resource: Resource = GPU
    """What `gpus` are called there."""
    topology: Annotated[tuple[LabelKey, ...], Field(strict=False, max_length=7)] = ()
    """Labels that say where its nodes are, the widest first, as of a block and a rack: jobs may ask to be near."""


class Amount(Section):
    """So much of each resource; what is left out is not limited, or not asked for."""

    nodes: Count | None = None
    """Whole nodes of the flavor's `instance`, instead of all that follows."""
    gpus: Count | None = None
    """GPUs."""
    cpus: Size | None = None
    """CPU cores."""
    memory_gb: Size | None = None
    """Memory in gigabytes (10^9 bytes), as in a recipe."""
    resources: dict[Resource, Count | Quantity] = Field(default_factory=dict, max_length=16)
    """More of what pods ask for, by the names of Kubernetes, such as `vpc.amazonaws.com/efa`."""

    def by_name(self, gpu_resource: str) -> dict[str, float]:
        """Amounts by the names of Kubernetes, memory in bytes; only what is given."""
        memory = None if self.memory_gb is None else self.memory_gb * 1e9
        given: dict[str, float | str | None] = {"cpu": self.cpus, "memory": memory, gpu_resource: self.gpus}
        given |= self.resources
        return {name: count(value) for name, value in given.items() if value is not None}


class Quota(Amount):
    """What a team has of a flavor."""

    borrow: Amount = Amount()
    """The most that it may use beyond its own, of what others of its cohort leave; what is left out has no limit."""
    lend: Amount = Amount()
    """The most that others may use of it; what is left out may be lent whole."""


class Gang(Section):
    """A job's pods, as `compute` of a recipe has them."""

    nodes: int = Field(default=1, ge=1, le=100_000)
    """Pods."""
    cpus: float = Field(default=1, gt=0, le=1e6)
    """CPU cores of each pod."""
    memory_gb: float = Field(default=2, gt=0, le=1e6)
    """Memory of each pod in gigabytes."""
    gpus: Count = 0
    """GPUs of each pod."""
    resources: dict[Resource, Count | Quantity] = Field(default_factory=dict, max_length=16)
    """More of what each pod asks for."""

    def whole(self, gpu_resource: str) -> dict[str, float]:
        """What all pods ask for together, by the names of Kubernetes."""
        each = {"cpu": self.cpus, "memory": self.memory_gb * 1e9, gpu_resource: self.gpus, **self.resources}
        return {name: self.nodes * count(value) for name, value in each.items() if count(value) or name in OWN}


class Preempts(Section):
    """Whose running jobs a team's job may suspend, where there is no room for it."""

    own: Literal["never", "lower"] = "lower"
    """Jobs of its own team, of a lower priority."""
    reclaim: Literal["never", "lower", "any"] = "any"
    """Jobs of other teams that use what they borrowed of this one: of a lower priority, or any."""
    borrow: Literal["never", "lower"] = "never"
    """Jobs of other teams that borrow, of a lower priority, to borrow itself. Kueue ignores it with fair sharing."""


class Cohort(Section):
    """Teams that lend one another what they do not use."""

    parent: Name | None = None
    """A cohort that this one is a part of."""
    weight: float = Field(default=1, ge=0, le=1e6)
    """Its share among the cohorts of its parent, against theirs."""
    shared: dict[Name, Quota] = Field(default_factory=dict, max_length=64)
    """By flavor, what belongs to no team and all may borrow."""


class Team(Section):
    """Who trains in a namespace."""

    namespace: Name | None = None
    """Where its jobs are; the team's name unless given. It has to be there already."""
    queue: Name | None = None
    """The local queue that its recipes name as `compute.queue`; the team's name unless given."""
    cohort: Name | None = None
    """With whom it lends and borrows; null keeps to its own quota."""
    quota: dict[Name, Quota] = Field(min_length=1, max_length=64)
    """By flavor, what it has; the first flavor is tried first."""
    weight: float = Field(default=1, ge=0, le=1e6)
    """Its share of what is free in the cohort, against those of others; 0 is served last."""
    order: Literal["best-effort", "strict"] = "best-effort"
    """`strict` lets no job pass one that waits, so that small jobs cannot starve a large one."""
    preempts: Preempts = Preempts()
    priorities: Annotated[tuple[Name, ...], Field(strict=False, max_length=64)] | None = None
    """Which priorities its jobs may have; null allows all. The API server refuses others."""
    largest: Gang | None = None
    """The largest job that it means to run; a quota that never has room for it is refused."""


class Teams(Section):
    """The whole file."""

    flavors: dict[Name, Flavor] = Field(min_length=1, max_length=64)
    """Kinds of nodes."""
    priorities: dict[Name, Annotated[int, Field(ge=-1_000_000_000, le=1_000_000_000)]] = Field(
        default_factory=dict, max_length=64
    )
    """Names that recipes give as `compute.priority`, and how much each counts. Without one a job has 0."""
    cohorts: dict[Name, Cohort] = Field(default_factory=dict, max_length=64)
    teams: dict[Name, Team] = Field(min_length=1, max_length=200)

    def namespace(self, team: str) -> str:
        return self.teams[team].namespace or team

    def queue(self, team: str) -> str:
        return self.teams[team].queue or team


def wrong(key: str, cause: str, mend: str) -> DropforgeError:
    """An error of the file that names the key."""
    shown = key if key.isprintable() else repr(key)[1:-1]  # no name of the file may speak to a terminal
    return DropforgeError(f"teams file, key `{shown:.200}`", cause, mend)
