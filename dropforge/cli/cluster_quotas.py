"""Whether quotas have room for a whole job: the namespace's ResourceQuotas, and those of a ClusterQueue. Pure.

A quota that is smaller than the job never lets it run: pods of a gang are refused one by one, and Kueue has the job
wait for good. The API server's dry run asks for one pod alone.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

from dropforge.stack.doctor import Finding, Level

_PLAIN: Final = ("cpu", "memory", "ephemeral-storage")  # a quota may name their requests without saying so
_UNITS: Final = (
    *((1000**power, unit) for power, unit in ((4, "T"), (3, "G"), (2, "M"))),
    *((1024**power, unit) for power, unit in ((4, "Ti"), (3, "Gi"), (2, "Mi"))),
)


def needed(pod: Mapping[str, Any], pods: int) -> dict[str, Decimal]:
    """What a job's pods count in a namespace's quotas, by the quotas' keys.

    :param pod: the spec of each. :param pods: how many there are.
    """
    from kubernetes.utils.quantity import parse_quantity

    total: dict[str, Decimal] = {"pods": Decimal(pods), "count/pods": Decimal(pods)}
    for container in pod["containers"]:
        resources = container["resources"]
        for word, amounts in (("requests", resources.get("requests")), ("limits", resources.get("limits"))):
            for resource, amount in (amounts or {}).items():
                keys = [f"{word}.{resource}"]
                if word == "requests" and (resource in _PLAIN or resource.startswith("hugepages-")):
                    keys.append(resource)
                for key in keys:
                    total[key] = total.get(key, Decimal(0)) + parse_quantity(amount) * pods
    return total


def quota_findings(quotas: Sequence[Mapping[str, Any]], pod: Mapping[str, Any], pods: int) -> list[Finding]:
    """What a namespace's ResourceQuotas have too little of; quotas of a scope are left out."""
    from kubernetes.utils.quantity import parse_quantity

    wanted, found = needed(pod, pods), []
    for quota in quotas:
        spec, status = quota.get("spec") or {}, quota.get("status") or {}
        if spec.get("scopes") or spec.get("scopeSelector"):
            continue
        used = status.get("used") or {}
        for key, most in sorted((spec.get("hard") or {}).items()):
            if key not in wanted:
                continue
            text = f"the job's {_pods(pods)} {_plain(wanted[key])} of {key}, and ResourceQuota"
            left = parse_quantity(most) - parse_quantity(used.get(key, "0"))
            if parse_quantity(most) < wanted[key]:
                mend = "Have it raised, or ask for less in the recipe's `compute`"
                found.append(Finding("quota", Level.FAIL, f"{text} {_name(quota)} has {most}", mend))
            elif left < wanted[key]:
                mend = "Wait for what runs there, or have it raised"
                told = f"{text} {_name(quota)} has {_plain(left)} of {most} left"
                found.append(Finding("quota", Level.WARN, told, mend))
    return found


def queue_finding(queue: Mapping[str, Any], pod: Mapping[str, Any], pods: int) -> Finding | None:
    """Why a ClusterQueue would never admit a job; None if it may.

    Each resource is taken from one flavor. What a queue may borrow without a bound depends on its cohort, which is not
    looked at.
    """
    from kubernetes.utils.quantity import parse_quantity

    spec = queue.get("spec") or {}
    wanted = {key.removeprefix("requests."): n for key, n in needed(pod, pods).items() if key.startswith("requests.")}
    wanted["pods"] = Decimal(pods)
    cohort = spec.get("cohortName") or spec.get("cohort")
    most: dict[str, Decimal] = {}
    for group in spec.get("resourceGroups") or []:
        for flavor in group.get("flavors") or []:
            for resource in flavor.get("resources") or []:
                more = resource.get("borrowingLimit") if cohort else "0"
                has = Decimal("Infinity")
                if more is not None:
                    has = parse_quantity(resource.get("nominalQuota", "0")) + parse_quantity(more)
                name = resource["name"]
                most[name] = max(most.get(name, Decimal(0)), has)
    for name in sorted(wanted.keys() & most.keys()):
        if most[name] < wanted[name]:
            text = f"the job's {_pods(pods)} {_plain(wanted[name])} of {name}, and no flavor of ClusterQueue"
            mend = "Raise its quota (docs/how-to/team-queues.md), or ask for less in the recipe's `compute`"
            return Finding("queue quota", Level.FAIL, f"{text} {_name(queue)} has more than {_plain(most[name])}", mend)
    return None


def _name(thing: Mapping[str, Any]) -> str:
    return str((thing.get("metadata") or {}).get("name", "?"))


def _pods(pods: int) -> str:
    return "pod needs" if pods == 1 else f"{pods} pods need"


def _plain(amount: Decimal) -> str:
    """An amount as Kubernetes writes it, with the largest unit that keeps it whole."""
    if amount != amount.to_integral_value():
        return f"{amount.normalize():f}"
    whole = int(amount)
    for size, unit in _UNITS:
        if whole and whole % size == 0:
            return f"{whole // size}{unit}"
    return str(whole)
