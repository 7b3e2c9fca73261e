"""Whether the queues of the teams have room for a recipe's gang, and what a cluster has of their objects. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from dropforge.errors import RecipeError
from dropforge.placement.team_rules import lacking
from dropforge.placement.teams import GPU, Flavor, Gang, Teams
from dropforge.recipe import Compute, Recipe

_DISK: Final = "ephemeral-storage"
_QUANTITIES: Final = ("nominalQuota", "borrowingLimit", "lendingLimit", "weight")
#: What the API server adds to what is left out, by kind.
_ADDED: Final[Mapping[str, Mapping[str, Any]]] = {
    "ClusterQueue": {"flavorFungibility": ..., "stopPolicy": "None"},
    "LocalQueue": {"stopPolicy": "None"},
}
_LOOSE: Final = ("ValidatingAdmissionPolicy", "ValidatingAdmissionPolicyBinding", "TrainingRuntime")
"""Kinds to which it adds in many places."""


@dataclass(frozen=True)
class Room:
    """Where a gang may run. :param own: flavors with room of the team's own. :param borrowed: with what it borrows."""

    team: str
    own: tuple[str, ...]
    borrowed: tuple[str, ...]


def room_for(teams: Teams, recipe: Recipe, job: Mapping[str, Any]) -> Room:
    """
    :param job: what it asks of the cluster, as `dropforge.job.train_job` says it.
    :raises RecipeError: if no queue takes the recipe's gang, or none ever has room for it; with the mend.
    """
    compute = recipe.compute
    if compute.backend != "kubernetes":
        raise RecipeError("recipe key `compute.backend`", "only pods wait in queues", "Use `backend: kubernetes`")
    name = _team_of(teams, compute.namespace, compute.queue)
    ours = teams.teams[name].priorities
    allowed = tuple(teams.priorities) if ours is None else ours
    if compute.priority is None and ours:
        mend = f"Set it to {' or '.join(map(repr, ours))}"
        raise RecipeError("recipe key `compute.priority`", f"it is missing, and team {name!r} has its own", mend)
    if compute.priority is not None and compute.priority not in allowed:
        raise RecipeError(
            "recipe key `compute.priority`",
            f"{compute.priority!r} is no priority of team {name!r}",
            _choose(compute.priority, allowed, "Leave it out: the team has none"),
        )
    gpus = {GPU: job["gpus"]} if job["gpus"] else {}
    more = gpus | dict(job.get("resources") or {})
    flavors = teams.teams[name].quota
    if not any(_DISK in quota.resources for quota in flavors.values()):
        more.pop(_DISK, None)  # which helm-values/kueue.yaml leaves out of Kueue's sums
    gang = Gang(nodes=job["nodes"], cpus=job["cpus"], memory_gb=job["memory_gb"], resources=more)
    lacks = {
        flavor: _elsewhere(teams.flavors[flavor], job.get("node_selector") or {})
        or _placeless(teams.flavors[flavor], compute)
        or lacking(teams, name, flavor, gang)
        for flavor in flavors
    }
    if all(lacks.values()):
        said = "; ".join(f"flavor {flavor} has {' and '.join(words)}" for flavor, words in lacks.items())
        mend = "Ask for less, or have its quota raised"
        raise RecipeError("recipe section `compute`", f"team {name!r} never has room for the job's pods: {said}", mend)
    fit = [flavor for flavor in flavors if not lacks[flavor]]
    own = tuple(flavor for flavor in fit if not lacking(teams, name, flavor, gang, own=True))
    return Room(name, own, tuple(flavor for flavor in fit if flavor not in own))


def _elsewhere(flavor: Flavor, selector: Mapping[str, str]) -> list[str]:
    """Which labels the job's node selector wants otherwise than the flavor's nodes have them."""
    other = {key: value for key, value in flavor.labels.items() if selector.get(key, value) != value}
    return [f"{key} {value}, not {selector[key]}" for key, value in other.items()]


def _placeless(flavor: Flavor, compute: Compute) -> list[str]:
    """Whether Kueue would not know the nodes' places, without which it admits no gang that asks for near ones."""
    if compute.topology in (None, *flavor.topology) or compute.nodes == 1:
        return []
    return [f"no {compute.topology} in its `topology`"]


def _team_of(teams: Teams, namespace: str, queue: str | None) -> str:
    here = {teams.queue(name): name for name in teams.teams if teams.namespace(name) == namespace}
    if not here:
        every = sorted({teams.namespace(name) for name in teams.teams})
        mend = _choose(namespace, every, "")
        raise RecipeError("recipe key `compute.namespace`", f"no team has the namespace {namespace!r}", mend)
    if queue is None:
        cause = f"it is missing, and its pods would compete with the queues of namespace {namespace!r}"
        raise RecipeError("recipe key `compute.queue`", cause, f"Set it to {' or '.join(map(repr, here))}")
    if queue not in here:
        cause = f"namespace {namespace!r} has no queue {queue!r}"
        raise RecipeError("recipe key `compute.queue`", cause, f"Set it to {' or '.join(map(repr, here))}")
    return here[queue]


def _choose(asked: str, among: Sequence[str], none: str) -> str:
    near = difflib.get_close_matches(asked, among, 1)
    return f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(among)}" if among else none


def differences(wanted: Mapping[str, Any], found: Mapping[str, Any], number: Callable[[str], Any]) -> list[str]:
    """Where an object of the cluster is not as wanted, each in a few words; nothing if it is.

    :param number: reads a quantity, so that `1000m` is `1`.
    """
    kind = str(wanted["kind"])
    added = _ADDED.get(kind, {})
    told = []
    for key in ("spec", "value"):
        if key in wanted:
            told += list(_differ(key, wanted[key], found.get(key), number, strict=kind not in _LOOSE, added=added))
    return told


def _differ(
    path: str, wanted: Any, found: Any, number: Callable[[str], Any], *, strict: bool, added: Mapping[str, Any]
) -> Iterator[str]:
    if isinstance(wanted, Mapping) and isinstance(found, Mapping):
        for key, value in wanted.items():
            yield from _differ(f"{path}.{key}", value, found.get(key), number, strict=strict, added={})
        for key in sorted(found.keys() - wanted.keys()) if strict else ():
            if added.get(key) is not ... and added.get(key) != found[key]:
                yield f"{path}.{key} is {_short(found[key])}, and the file says nothing of it"
    elif isinstance(wanted, list) and isinstance(found, list) and len(wanted) == len(found):
        for index, (left, right) in enumerate(zip(wanted, found, strict=True)):
            name = left.get("name", index) if isinstance(left, Mapping) else index
            yield from _differ(f"{path}[{name}]", left, right, number, strict=strict, added={})
    elif path.rpartition(".")[2] in _QUANTITIES and found is not None:
        if number(str(wanted)) != number(str(found)):
            yield f"{path} is {_short(found)}, not {_short(wanted)}"
    elif wanted != found:
        yield f"{path} is {'missing' if found is None else _short(found)}, not {_short(wanted)}"


def _short(value: Any) -> str:
    return f"{value!r:.60}" if not isinstance(value, str) else f"{value:.60}"
