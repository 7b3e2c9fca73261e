"""Kueue's objects of the teams: plain dicts in a stable order, in which they can be applied. Pure.

Kueue admits a gang whole or not at all: its Workload has all pods, and reserves quota for all of them at once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any, Final

from dropforge.placement.teams import HOST, OWN, Flavor, Quota, Team, Teams

API: Final = "kueue.x-k8s.io/v1beta2"
"""Of Kueue 0.15 and later."""
LABELS: Final = {"app.kubernetes.io/managed-by": "dropforge", "app.kubernetes.io/component": "queues"}
QUEUE: Final = "kueue.x-k8s.io/queue-name"
"""The job's label that names its queue; Kueue leaves jobs without it alone."""
PRIORITY: Final = "kueue.x-k8s.io/priority-class"
"""The job's label that names its priority."""
POLICY: Final = "dropforge-priorities"
_WITHIN: Final = {"never": "Never", "lower": "LowerPriority", "any": "Any"}
_ORDER: Final = {"best-effort": "BestEffortFIFO", "strict": "StrictFIFO"}
_PLURALS: Final = {
    "Topology": "topologies",
    "ResourceFlavor": "resourceflavors",
    "WorkloadPriorityClass": "workloadpriorityclasses",
    "Cohort": "cohorts",
    "ClusterQueue": "clusterqueues",
    "LocalQueue": "localqueues",
    "ValidatingAdmissionPolicy": "validatingadmissionpolicies",
    "ValidatingAdmissionPolicyBinding": "validatingadmissionpolicybindings",
}
#: Kinds of jobs that Kueue queues and people label.
_JOBS: Final = (
    ("kubeflow.org", "pytorchjobs"),
    ("batch", "jobs"),
    ("jobset.x-k8s.io", "jobsets"),
    ("trainer.kubeflow.org", "trainjobs"),
)


def render(teams: Teams) -> list[dict[str, Any]]:
    """All objects; the same for the same teams."""
    found = [_topology(name, flavor) for name, flavor in teams.flavors.items() if flavor.topology]
    found += [_flavor(name, teams.flavors[name]) for name in teams.flavors]
    found += [_priority(name, value) for name, value in teams.priorities.items()]
    found += [_cohort(teams, name) for name in teams.cohorts]
    for name, team in teams.teams.items():
        found += [_cluster_queue(teams, name, team), _local_queue(teams, name)]
    return found + _policy(teams)


def path_of(made: Mapping[str, Any]) -> str:
    """Where the API server keeps it."""
    return f"{folder_of(made)}/{made['metadata']['name']}"


def folder_of(made: Mapping[str, Any]) -> str:
    """Where the API server keeps all of its kind, in its namespace if it has one."""
    namespace = made["metadata"].get("namespace")
    where = f"/namespaces/{namespace}" if namespace else ""
    return f"/apis/{made['apiVersion']}{where}/{_PLURALS[made['kind']]}"


def _object(kind: str, name: str, *, namespace: str | None = None, api: str = API, **body: Any) -> dict[str, Any]:
    where = {"namespace": namespace} if namespace else {}
    return {"apiVersion": api, "kind": kind, "metadata": {"name": name, **where, "labels": dict(LABELS)}, **body}


def _topology(name: str, flavor: Flavor) -> dict[str, Any]:
    # Down to the node: only then Kueue itself chooses each pod's node, in the order of the ranks.
    return _object("Topology", name, spec={"levels": [{"nodeLabel": label} for label in (*flavor.topology, HOST)]})


def _flavor(name: str, flavor: Flavor) -> dict[str, Any]:
    spec: dict[str, Any] = {"nodeLabels": dict(sorted(flavor.labels.items()))} if flavor.labels else {}
    if flavor.tolerations:
        spec["tolerations"] = [
            {"key": one.key}
            | ({"operator": "Exists"} if one.value is None else {"operator": "Equal", "value": one.value})
            | ({} if one.effect is None else {"effect": one.effect})
            for one in flavor.tolerations
        ]
    if flavor.topology:
        spec["topologyName"] = name
    return _object("ResourceFlavor", name, spec=spec)


def _priority(name: str, value: int) -> dict[str, Any]:
    # Of the queue alone. As a PriorityClass of pods the scheduler would take single pods out of running gangs.
    return _object("WorkloadPriorityClass", name, value=value)


def _cohort(teams: Teams, name: str) -> dict[str, Any]:
    cohort = teams.cohorts[name]
    spec: dict[str, Any] = {"fairSharing": {"weight": _number(cohort.weight)}}
    if cohort.parent is not None:
        spec["parentName"] = cohort.parent
    if cohort.shared:
        spec["resourceGroups"] = [_group(teams, cohort.shared, alone=cohort.parent is None)]
    return _object("Cohort", name, spec=spec)


def _cluster_queue(teams: Teams, name: str, team: Team) -> dict[str, Any]:
    preempts = team.preempts
    preemption: dict[str, Any] = {"withinClusterQueue": _WITHIN[preempts.own], "reclaimWithinCohort": "Never"}
    spec: dict[str, Any] = {
        "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": teams.namespace(name)}},
        "queueingStrategy": _ORDER[team.order],
        "preemption": preemption,
        "resourceGroups": [_group(teams, team.quota, alone=team.cohort is None)],
    }
    if team.cohort is not None:
        preemption["reclaimWithinCohort"] = _WITHIN[preempts.reclaim]
        preemption["borrowWithinCohort"] = {"policy": _WITHIN[preempts.borrow]}
        spec |= {"cohortName": team.cohort, "fairSharing": {"weight": _number(team.weight)}}
    return _object("ClusterQueue", name, spec=spec)


def _local_queue(teams: Teams, name: str) -> dict[str, Any]:
    where = teams.namespace(name)
    return _object("LocalQueue", teams.queue(name), namespace=where, spec={"clusterQueue": name})


def _group(teams: Teams, quotas: dict[str, Quota], *, alone: bool) -> dict[str, Any]:
    """One group, as a pod gets all it asks for of one flavor. Each flavor has to say something of each resource."""
    named = {flavor: quota.by_name(teams.flavors[flavor].gpu_resource) for flavor, quota in quotas.items()}
    covered = [*OWN, *sorted({resource for has in named.values() for resource in has} - set(OWN))]
    flavors = []
    for flavor, quota in quotas.items():
        gpu = teams.flavors[flavor].gpu_resource
        limits = {"borrowingLimit": quota.borrow.by_name(gpu), "lendingLimit": quota.lend.by_name(gpu)}
        rows = []
        for resource in covered:
            row = {"name": resource, "nominalQuota": _quantity(resource, named[flavor].get(resource, 0))}
            if resource not in named[flavor]:
                row |= {} if alone else {"borrowingLimit": "0"}  # the file says nothing of it: none, nor to borrow
            for key, limit in limits.items():
                row |= {key: _quantity(resource, limit[resource])} if resource in limit else {}
            rows.append(row)
        flavors.append({"name": flavor, "resources": rows})
    return {"coveredResources": covered, "flavors": flavors}


def _policy(teams: Teams) -> list[dict[str, Any]]:
    """What refuses jobs whose priority is not one of their team's; nothing where all may have all.

    Kueue itself asks nobody who names a WorkloadPriorityClass. Without one it takes the PriorityClass of the pods, and
    without that 0. What a job had in its queue before stays. Teams of one namespace may have those of either.
    """
    allowed: dict[str, set[str]] = {}
    free = {teams.namespace(name) for name, team in teams.teams.items() if team.priorities is None}
    for name, team in teams.teams.items():
        if teams.namespace(name) not in free:
            allowed.setdefault(teams.namespace(name), set()).update(team.priorities or ("",))  # none is all they have
    if not allowed:
        return []
    table = json.dumps({namespace: sorted(names) for namespace, names in sorted(allowed.items())})  # as CEL writes it
    spec = {
        "failurePolicy": "Fail",
        "matchConstraints": {
            "namespaceSelector": {
                "matchExpressions": [
                    {"key": "kubernetes.io/metadata.name", "operator": "In", "values": sorted(allowed)}
                ]
            },
            "resourceRules": [
                {
                    "apiGroups": [group],
                    "apiVersions": ["*"],
                    "operations": ["CREATE", "UPDATE"],
                    "resources": [plural],
                }
                for group, plural in _JOBS
            ],
        },
        "variables": [
            {"name": "queue", "expression": _label_of("object", QUEUE)},
            {"name": "stays", "expression": f"oldObject != null && {_label_of('oldObject', QUEUE)} == variables.queue"},
            {"name": "asked", "expression": _label_of("object", PRIORITY)},
            {"name": "before", "expression": f"variables.stays ? {_label_of('oldObject', PRIORITY)} : ''"},
            {"name": "allowed", "expression": f"{table}[object.metadata.namespace]"},
            {"name": "classes", "expression": _classes_of("object")},
            {"name": "classesBefore", "expression": f"variables.stays ? {_classes_of('oldObject')} : []"},
        ],
        "validations": [
            {
                "expression": "variables.queue == '' || variables.asked in variables.allowed || "
                "(variables.stays && variables.asked == variables.before)",
                "messageExpression": "(variables.asked == '' ? "
                f"'a job of the team needs a priority, its label {PRIORITY} (in a recipe `compute.priority`)' : "
                "'priority ' + variables.asked + ' is not one of the team') + '; it has ' + "
                "variables.allowed.map(one, one == '' ? 'none' : one).join(', ')",
            },
            {
                "expression": "variables.queue == '' || "
                "variables.classes.all(one, one == '' || one in variables.classesBefore)",
                "message": "pods of the team have no PriorityClass, which passes by the queue: take priorityClassName "
                "and schedulingPolicy.priorityClass away",
            },
        ],
    }
    api = "admissionregistration.k8s.io/v1"
    binding = {"policyName": POLICY, "validationActions": ["Deny"]}
    return [
        _object("ValidatingAdmissionPolicy", POLICY, api=api, spec=spec),
        _object("ValidatingAdmissionPolicyBinding", POLICY, api=api, spec=binding),
    ]


def _label_of(what: str, key: str) -> str:
    labels = f"{what}.metadata.labels"
    return f"(has({labels}) && '{key}' in {labels} ? {labels}['{key}'] : '')"


def _classes_of(what: str) -> str:
    """The PriorityClasses that a job of any of the kinds names, '' where it could; a TrainJob has no place for one."""
    spec, pods = f"{what}.spec", ".?template.?spec.?priorityClassName.orValue('')"
    return (
        f"([{spec}.?runPolicy.?schedulingPolicy.?priorityClass.orValue(''), {spec}{pods}]"
        f" + {spec}.?pytorchReplicaSpecs.orValue({{}}).map(name, {spec}.pytorchReplicaSpecs[name]{pods})"
        f" + {spec}.?replicatedJobs.orValue([]).map(job, job.?template.?spec{pods}))"
    )


def _quantity(resource: str, value: float) -> str:
    """As Kubernetes writes it: cores in thousandths, bytes in millions, where they are not whole."""
    if resource == "memory" and value:
        return f"{value / 1e9:.0f}G" if value % 1e9 == 0 else f"{math.ceil(value / 1e6)}M"
    return _number(value)


def _number(value: float) -> str:
    return f"{value:.0f}" if value == int(value) else f"{round(value * 1000)}m"
