"""Teams whose flavors name instances of the catalogue: labels of their nodes, and quotas in nodes as amounts. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeVar

from dropforge.errors import DropforgeError
from dropforge.placement.catalogue import ANY, Instance, find, pod_room
from dropforge.placement.pods import GIB, TYPE, devices
from dropforge.placement.teams import Amount, Flavor, Quota, Teams, count, wrong

_AMOUNTS: Final = ("gpus", "cpus", "memory_gb")
SomeAmount = TypeVar("SomeAmount", bound=Amount)


def in_amounts(teams: Teams, instances: Mapping[str, Instance]) -> Teams:
    """The same teams without `nodes`: what pods that have such nodes for themselves ask for together.

    :raises DropforgeError: for an instance that nobody knows, `nodes` where there is none, and a quota without sizes.
    """
    on = {name: _instance(name, flavor, instances) for name, flavor in teams.flavors.items() if flavor.instance}
    named = {name for name, instance in on.items() if instance.cloud != ANY}
    flavors = {name: _labelled(name, flavor) if name in named else flavor for name, flavor in teams.flavors.items()}
    found = {
        name: team.model_copy(update={"quota": _quotas(f"teams.{name}.quota", team.quota, on)})
        for name, team in teams.teams.items()
    }
    cohorts = {
        name: cohort.model_copy(update={"shared": _quotas(f"cohorts.{name}.shared", cohort.shared, on)})
        for name, cohort in teams.cohorts.items()
    }
    return teams.model_copy(update={"flavors": flavors, "teams": found, "cohorts": cohorts})


def _instance(name: str, flavor: Flavor, instances: Mapping[str, Instance]) -> Instance:
    try:
        return find(str(flavor.instance), instances)
    except DropforgeError as error:
        raise wrong(f"flavors.{name}.instance", f"{error.thing}: {error.cause}", error.mend) from None


def _labelled(name: str, flavor: Flavor) -> Flavor:
    if flavor.labels.get(TYPE, flavor.instance) != flavor.instance:
        cause = f"{TYPE} is {flavor.labels[TYPE]!r}, and `instance` is {flavor.instance!r}"
        raise wrong(f"flavors.{name}.labels", cause, "Say one of them")
    return flavor.model_copy(update={"labels": {**flavor.labels, TYPE: flavor.instance}})


def _quotas(key: str, quotas: Mapping[str, Quota], on: Mapping[str, Instance]) -> dict[str, Quota]:
    found = {}
    for flavor, quota in quotas.items():
        where = f"{key}.{flavor}"
        limits = {word: _whole(f"{where}.{word}", getattr(quota, word), on.get(flavor)) for word in ("borrow", "lend")}
        found[flavor] = _whole(where, quota, on.get(flavor)).model_copy(update=limits)
        for name in ("cpus", "memory_gb"):
            if getattr(found[flavor], name) is None:
                raise wrong(f"{where}.{name}", "it is missing, and every pod asks for some", "Give it, or `nodes`")
    return found


def _whole(key: str, amount: SomeAmount, on: Instance | None) -> SomeAmount:
    if amount.nodes is None:
        return amount
    if on is None:
        raise wrong(f"{key}.nodes", "its flavor names no instance", "Name one as `instance`, or give amounts")
    beside = [name for name in _AMOUNTS if getattr(amount, name) is not None]
    if beside:
        raise wrong(f"{key}.{beside[0]}", "`nodes` says it already", "Take one of them away")
    room, nodes = pod_room(on), amount.nodes
    each = {name: count(value) for name, value in devices(on, on.gpus).items()}
    update: dict[str, Any] = {
        "nodes": None,
        "cpus": nodes * room.cpus,
        "memory_gb": nodes * room.memory_gib * GIB,
        "resources": {**{name: int(nodes * value) for name, value in each.items()}, **amount.resources},
    }
    return amount.model_copy(update=update | ({"gpus": nodes * on.gpus} if on.gpus else {}))
