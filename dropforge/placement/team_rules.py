"""What cannot work in a file of teams, and what a team can ever use. Pure."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from dropforge.placement.teams import GPU, HOST, OWN, Gang, Quota, Teams, wrong


def _known(name: str, among: Mapping[str, Any], key: str, what: str) -> None:
    if name not in among:
        near = difflib.get_close_matches(name, among, 1)
        mend = f"Did you mean `{near[0]}`?" if near else f"Add it to `{what}s`, which has {', '.join(among) or 'none'}"
        raise wrong(key, f"there is no {what} {name!r}", mend)


def check_teams(teams: Teams) -> None:
    """:raises DropforgeError: for the first thing that cannot work, with its key and its mend."""
    _check_names(teams)
    _check_topologies(teams)
    _check_sharing(teams)
    _check_preemption(teams)
    _check_room(teams)


def _check_names(teams: Teams) -> None:
    """:raises DropforgeError: for names that nothing has, and those that two have."""
    places: dict[tuple[str, str], str] = {}
    for name, team in teams.teams.items():
        for flavor in team.quota:
            _known(flavor, teams.flavors, f"teams.{name}.quota.{flavor}", "flavor")
        for priority in team.priorities or ():
            if priority not in teams.priorities:
                near = difflib.get_close_matches(priority, teams.priorities, 1)
                mend = f"Did you mean `{near[0]}`?" if near else "Add it to `priorities`, with its number"
                raise wrong(f"teams.{name}.priorities", f"there is no priority {priority!r}", mend)
        if team.cohort is not None:
            _known(team.cohort, teams.cohorts, f"teams.{name}.cohort", "cohort")
        place = (teams.namespace(name), teams.queue(name))
        if place in places:
            mend = "Give one of them another `queue` or `namespace`, or make them one team"
            cause = f"team {places[place]!r} has queue {place[1]!r} in namespace {place[0]!r} too"
            raise wrong(f"teams.{name}", cause, mend)
        places[place] = name
        gpus = {teams.flavors[flavor].gpu_resource for flavor in team.quota} | set(OWN)
        for flavor, quota in team.quota.items():
            for amount in (quota, quota.borrow, quota.lend):
                for resource in gpus & amount.resources.keys():
                    mend = "Say it as `gpus`, `cpus` or `memory_gb`"
                    raise wrong(f"teams.{name}.quota.{flavor}.resources", f"{resource} has a key of its own", mend)
    for name, cohort in teams.cohorts.items():
        for flavor in cohort.shared:
            _known(flavor, teams.flavors, f"cohorts.{name}.shared.{flavor}", "flavor")
        if cohort.parent is not None:
            _known(cohort.parent, teams.cohorts, f"cohorts.{name}.parent", "cohort")
    for name in teams.cohorts:
        line = [name]
        while (parent := teams.cohorts[line[-1]].parent) is not None:
            line.append(parent)
            if line.count(parent) > 1:
                raise wrong(f"cohorts.{name}.parent", f"{' -> '.join(line)} is a circle", "Take one `parent` away")


def _check_topologies(teams: Teams) -> None:
    """:raises DropforgeError: for nodes whose places Kueue could not tell."""
    for name, flavor in teams.flavors.items():
        key = f"flavors.{name}.topology"
        if flavor.topology and not flavor.labels:
            mend = "Name the flavor's `instance` or `labels`"
            raise wrong(key, "Kueue counts the places of nodes that have a label in common", mend)
        if HOST in flavor.topology:
            raise wrong(key, f"{HOST} is added by itself, as the nearest", "Leave it out")
        if len(set(flavor.topology)) < len(flavor.topology):
            raise wrong(key, "a label is listed twice", "Name each once, the widest first")
    for name, team in teams.teams.items():
        plain = [flavor for flavor in team.quota if not teams.flavors[flavor].topology]
        if plain and len(plain) < len(team.quota):
            mend = f"Give {plain[0]!r} one too, as `[topology.kubernetes.io/zone]`, or to a team of its own"
            cause = f"jobs that ask for no place get no flavor with a topology where one has none: {plain[0]!r}"
            raise wrong(f"teams.{name}.quota", cause, mend)


def _check_sharing(teams: Teams) -> None:
    """:raises DropforgeError: for borrowing and lending that cannot be."""
    for name, team in teams.teams.items():
        for flavor, quota in team.quota.items():
            _check_limits(f"teams.{name}.quota.{flavor}", quota, alone=team.cohort is None, where="cohort")
        if team.cohort is None and team.weight != 1:
            raise wrong(f"teams.{name}.weight", "the team has no cohort to share with", "Name a `cohort`")
    for name, cohort in teams.cohorts.items():
        for flavor, quota in cohort.shared.items():
            _check_limits(f"cohorts.{name}.shared.{flavor}", quota, alone=cohort.parent is None, where="parent")
        if cohort.parent is None and cohort.weight != 1:
            raise wrong(f"cohorts.{name}.weight", "the cohort has no parent to share with", "Name a `parent`")


def _check_limits(key: str, quota: Quota, *, alone: bool, where: str) -> None:
    own = quota.by_name(GPU)
    for word, limits in (("borrow", quota.borrow), ("lend", quota.lend)):
        asked = limits.by_name(GPU)
        if alone and asked:
            raise wrong(f"{key}.{word}", f"there is no {where} to {word} in", f"Name a `{where}`, or take it away")
        for resource, limit in asked.items():
            if resource not in own:
                raise wrong(f"{key}.{word}", f"the quota says nothing of {resource}", "Add it there; 0 has none of it")
            if word == "lend" and limit > own[resource]:
                raise wrong(f"{key}.lend", f"it is more {resource} than the quota has", "Lend less, or raise the quota")


def _check_preemption(teams: Teams) -> None:
    """:raises DropforgeError: for a preemption that can never come about, or that Kueue refuses."""
    for name, team in teams.teams.items():
        preempts, key = team.preempts, f"teams.{name}.preempts"
        asked = {word for word in preempts.model_fields_set if getattr(preempts, word) == "lower"}
        if asked and len({0, *teams.priorities.values()}) < 2:
            mend = "Give `priorities` with different numbers, such as `{low: -100, urgent: 100}`"
            raise wrong(f"{key}.{min(asked)}", "no priority is lower than another", mend)
        if team.cohort is None:
            for word in ("reclaim", "borrow"):
                if word in preempts.model_fields_set and getattr(preempts, word) != "never":
                    raise wrong(f"{key}.{word}", "the team has no cohort, so it cannot borrow", "Name a `cohort`")
        if preempts.borrow != "never" and preempts.reclaim == "never":
            mend = "Set `reclaim` to `lower` or `any`, or `borrow` to `never`"
            raise wrong(f"{key}.borrow", "who may not take back its own may not take what is others'", mend)


def _check_room(teams: Teams) -> None:
    """:raises DropforgeError: for a quota that never has room for the team's largest gang."""
    for name, team in teams.teams.items():
        gang = team.largest or Gang(cpus=1e-3, memory_gb=1e-3)
        lacks = {flavor: lacking(teams, name, flavor, gang) for flavor in team.quota}
        if all(lacks.values()):
            said = "; ".join(f"{flavor} has {' and '.join(words)}" for flavor, words in lacks.items())
            if team.largest is None:
                raise wrong(f"teams.{name}.quota", f"no pod can ever start ({said})", "Raise it")
            mend = "Raise the quota or what it may borrow, or lower `largest`"
            raise wrong(f"teams.{name}.quota", f"it never has room for the largest job: {said}", mend)


def lacking(teams: Teams, name: str, flavor: str, gang: Gang, *, own: bool = False) -> list[str]:
    """What a team's quota of a flavor lacks for a gang, in a few words each; nothing if there is room.

    :param own: without what it may borrow.
    """
    gpu = teams.flavors[flavor].gpu_resource
    has, words = reach(teams, name, flavor, own=own), []
    for resource, asked in gang.whole(gpu).items():
        there = has.get(resource)
        if there is None:
            words.append(f"no quota of {resource}")
        elif there < asked * (1 - 1e-9):
            words.append(f"{_told(resource, there)} of {_told(resource, asked)}")
    return words


def reach(teams: Teams, name: str, flavor: str, *, own: bool = False) -> dict[str, float]:
    """The most that a team can ever use of a flavor, by resource: its own, and what it may borrow of all others."""
    team, gpu = teams.teams[name], teams.flavors[flavor].gpu_resource
    quota = team.quota[flavor]
    nominal = quota.by_name(gpu)
    if own or team.cohort is None:
        return nominal
    limits, root = quota.borrow.by_name(gpu), top(teams, team.cohort)
    lent: dict[str, float] = {}
    pools = [one.quota for other, one in teams.teams.items() if other != name and one.cohort in teams.cohorts
             and top(teams, one.cohort or "") == root]  # fmt: skip
    pools += [one.shared for cohort, one in teams.cohorts.items() if top(teams, cohort) == root]
    for pool in pools:
        if flavor in pool:
            limit = pool[flavor].lend.by_name(gpu)
            for resource, value in pool[flavor].by_name(gpu).items():
                lent[resource] = lent.get(resource, 0.0) + min(value, limit.get(resource, value))
    return {key: value + min(lent.get(key, 0.0), limits.get(key, float("inf"))) for key, value in nominal.items()}


def top(teams: Teams, cohort: str) -> str:
    """The cohort that has no parent, above this one or it itself."""
    while (parent := teams.cohorts[cohort].parent) is not None:
        cohort = parent
    return cohort


def _told(resource: str, value: float) -> str:
    return f"{value / 1e9:g} GB" if resource == "memory" else f"{value:g} {resource}"
