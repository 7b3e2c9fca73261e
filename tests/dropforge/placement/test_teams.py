"""Files of teams: what is refused, with which key, cause and mend, and what is rendered of those that can work."""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from kubernetes.utils.quantity import parse_quantity
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.placement.catalogue import pod_room, read
from dropforge.placement.pods import GIB
from dropforge.placement.queues import render
from dropforge.placement.team_rules import lacking, reach
from dropforge.placement.teams import Gang, Teams, count
from dropforge.placement.teams_file import parse_teams, read_teams
from dropforge.recipes.load import RECIPE_LIMIT

EXAMPLE = Path(__file__).parents[3] / "helm-values/teams.yaml"
FLAVORS = "flavors: {gpu: {}, cpu: {}}\n"
PRIORITIES = "priorities: {low: -1, high: 1}\n"
COHORTS = "cohorts: {both: {}}\n"
ROOM = "cpus: 8, memory_gb: 32"
TWINS = f"teams: {{a: {{quota: {{gpu: {{{ROOM}}}}}}}, b: {{namespace: a, queue: a, quota: {{gpu: {{{ROOM}}}}}}}}}"


def team(rest: str = "", quota: str = f"gpu: {{gpus: 8, {ROOM}}}") -> str:
    return f"teams: {{a: {{quota: {{{quota}}}{', ' + rest if rest else ''}}}}}\n"


def in_cohort(rest: str = "", quota: str = f"gpu: {{gpus: 8, {ROOM}}}") -> str:
    return FLAVORS + COHORTS + team(f"cohort: both{', ' + rest if rest else ''}", quota)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", r"key `flavors`: it is missing. Meaning: kinds of nodes"),
        ("- a", r"teams file: it is not a YAML mapping"),
        ("a: &x {}\nb: *x", r"aliases are not allowed\)"),
        ("a: !!python/object/apply:os.system [id]", r"could not determine a constructor"),
        ("#" * (RECIPE_LIMIT + 1), r"it is larger than 64 KiB"),
        (FLAVORS + "priorities: {a: 0x" + "f" * 4000 + "}", r"key `priorities.a`: it is a number of about 4817 digits"),
        (FLAVORS + "teams: {a: 0x" + "f" * 5000 + "}", r"a number of 5002 characters, line"),
        (FLAVORS + team() + team(), r"key 'teams' appears twice"),
        (FLAVORS + "teams:\n  a: {}\n  a: {}\n", r"key 'a' appears twice, line 4"),
        (FLAVORS + "team: {}\n" + team(), r"key `team`: it is unknown. Did you mean `teams`"),
        (FLAVORS + team("quotas: {}"), r"key `teams.a.quotas`: it is unknown. Did you mean `quota`"),
        (
            FLAVORS + team(quota="gpu: {gpus: 8}"),
            r"key `teams.a.quota.gpu.cpus`: it is missing, and every pod asks for some. Give it, or `nodes`",
        ),
        (
            FLAVORS + team(quota=f"gpu: {{gpu: 8, {ROOM}}}"),
            r"`teams.a.quota.gpu.gpu`: it is unknown. Did you mean `gpus`",
        ),
        (FLAVORS + team(quota=f"gpu: {{gpus: -8, {ROOM}}}"), r"`teams.a.quota.gpu.gpus`: .*greater than or equal to 0"),
        (FLAVORS + team(quota=f"gpu: {{gpus: '8', {ROOM}}}"), r"`teams.a.quota.gpu.gpus`: .*valid integer, not '8'"),
        (FLAVORS + team(quota="gpu: {cpus: .inf, memory_gb: 1}"), r"`teams.a.quota.gpu.cpus`: .*finite number"),
        (
            FLAVORS + team(quota=f"gqu: {{{ROOM}}}"),
            r"`teams.a.quota.gqu`: there is no flavor 'gqu'. Did you mean `gpu`",
        ),
        (
            FLAVORS + team(quota=f"tpu-x: {{{ROOM}}}"),
            r"there is no flavor 'tpu-x'. Add it to `flavors`, which has gpu, cpu",
        ),
        (FLAVORS + team(quota=""), r"`teams.a.quota`: .*at least 1 item"),
        (FLAVORS + "teams: {}", r"`teams`: .*at least 1 item"),
        (FLAVORS + "teams: {../etc: {}}", r"`teams.../etc`: it is no name that Kubernetes takes"),
        (FLAVORS + "teams: {\"a'], b: ['\": {}}", r"it is no name that Kubernetes takes"),
        (FLAVORS + team("namespace: A_B"), r"`teams.a.namespace`: it is no name that Kubernetes takes.*not 'A_B'"),
        ("flavors: {gpu: {labels: {a b: c}}}\n" + team(), r"`flavors.gpu.labels.a b`: it is no name"),
        ("flavors: {gpu: {tolerations: [{key: k, effect: No}]}}\n" + team(), r"`flavors.gpu.tolerations.0.effect`: "),
        (FLAVORS + "priorities: {low: 1.5}\n" + team(), r"`priorities.low`: .*valid integer, not 1.5"),
        (FLAVORS + "priorities: {low: 3000000000}\n" + team(), r"`priorities.low`: .*less than or equal to 1000000000"),
        (
            FLAVORS + TWINS,
            r"`teams.b`: team 'a' has queue 'a' in namespace 'a' too. Give one of them another `queue`",
        ),
        (
            FLAVORS + team(quota=f"gpu: {{{ROOM}, resources: {{nvidia.com/gpu: 8}}}}"),
            r"`teams.a.quota.gpu.resources`: nvidia.com/gpu has a key of its own. Say it as `gpus`",
        ),
        (FLAVORS + 'teams: {"\\e[31m": {}}', r"`teams.\\x1b\[31m`: it is no name that Kubernetes takes"),
        (
            FLAVORS + team(quota=f"gpu: {{{ROOM}, resources: {{hugepages-2Mi: 5 Gi}}}}"),
            r"`teams.a.quota.gpu.resources.hugepages-2Mi",
        ),
        # instances
        (
            "flavors: {gpu: {instance: p5.48xlrge}}\n" + team(),
            r"`flavors.gpu.instance`: instance 'p5.48xlrge': .*Did you mean p5.48xlarge",
        ),
        (
            "flavors: {gpu: {instance: p5.48xlarge, labels: {node.kubernetes.io/instance-type: p4d}}}\n" + team(),
            r"`flavors.gpu.labels`: node.kubernetes.io/instance-type is 'p4d', and `instance` is",
        ),
        (FLAVORS + team(quota="gpu: {nodes: 2}"), r"`teams.a.quota.gpu.nodes`: its flavor names no instance"),
        (
            "flavors: {gpu: {instance: p5.48xlarge}}\n" + team(quota="gpu: {nodes: 2, gpus: 16}"),
            r"`teams.a.quota.gpu.gpus`: `nodes` says it already",
        ),
        # sharing
        (FLAVORS + COHORTS + team("cohort: bot"), r"`teams.a.cohort`: there is no cohort 'bot'. Did you mean `both`"),
        (FLAVORS + team("weight: 2"), r"`teams.a.weight`: the team has no cohort to share with"),
        (
            FLAVORS + team(quota=f"gpu: {{{ROOM}, borrow: {{cpus: 8}}}}"),
            r"`teams.a.quota.gpu.borrow`: there is no cohort",
        ),
        (
            in_cohort(quota=f"gpu: {{{ROOM}, borrow: {{gpus: 8}}}}"),
            r"gpu.borrow`: the quota says nothing of nvidia.com/gpu",
        ),
        (in_cohort(quota=f"gpu: {{{ROOM}, lend: {{cpus: 9}}}}"), r"gpu.lend`: it is more cpu than the quota has"),
        (FLAVORS + "cohorts: {x: {parent: x}}\n" + team(), r"`cohorts.x.parent`: x -> x is a circle"),
        (FLAVORS + "cohorts: {x: {parent: y}, y: {parent: x}}\n" + team(), r"x -> y -> x is a circle"),
        (FLAVORS + "cohorts: {x: {parent: z}}\n" + team(), r"`cohorts.x.parent`: there is no cohort 'z'"),
        (
            FLAVORS + f"cohorts: {{x: {{shared: {{g: {{{ROOM}}}}}}}}}\n" + team(),
            r"`cohorts.x.shared.g`: there is no flavor 'g'",
        ),
        (
            FLAVORS + f"cohorts: {{x: {{shared: {{gpu: {{{ROOM}, lend: {{cpus: 1}}}}}}}}}}\n" + team(),
            r"`cohorts.x.shared.gpu.lend`: there is no parent to lend in",
        ),
        # preemption
        (FLAVORS + team("preempts: {own: lower}"), r"`teams.a.preempts.own`: no priority is lower than another"),
        (FLAVORS + "priorities: {all: 0}\n" + team("preempts: {own: lower}"), r"no priority is lower than another"),
        (
            FLAVORS + PRIORITIES + team("preempts: {reclaim: any}"),
            r"`teams.a.preempts.reclaim`: the team has no cohort",
        ),
        (
            PRIORITIES + in_cohort("preempts: {reclaim: never, borrow: lower}"),
            r"`teams.a.preempts.borrow`: who may not take back its own may not take what is others'. Set `reclaim`",
        ),
        (
            FLAVORS + PRIORITIES + team("priorities: [lo]"),
            r"`teams.a.priorities`: there is no priority 'lo'. Did you mean `low`",
        ),
        # room
        (
            FLAVORS + team(quota="gpu: {cpus: 0, memory_gb: 0}"),
            r"`teams.a.quota`: no pod can ever start \(gpu has 0 cpu",
        ),
        (
            FLAVORS + team("largest: {nodes: 2, gpus: 8, cpus: 4, memory_gb: 16}"),
            r"never has room for the largest job: gpu has 8 nvidia.com/gpu of 16 nvidia.com/gpu. Raise the quota",
        ),
        (
            FLAVORS + team("largest: {cpus: 1, memory_gb: 1, resources: {vpc.amazonaws.com/efa: 4}}"),
            r"gpu has no quota of vpc.amazonaws.com/efa",
        ),
        (in_cohort("largest: {nodes: 3, cpus: 3, memory_gb: 1}"), r"gpu has 8 cpu of 9 cpu"),  # nobody is there to lend
        (FLAVORS + team("largest: {memory_gb: 33}"), r"gpu has 32 GB of 33 GB"),
    ],
)
def test_what_cannot_work_is_refused_with_key_cause_and_mend(text: str, told: str) -> None:
    with pytest.raises(DropforgeError, match=told) as caught:
        parse_teams(text)
    assert caught.value.thing.startswith("teams file")
    assert caught.value.thing.isprintable()
    assert len(str(caught.value)) < 600


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(DropforgeError, match=r"teams file '.*no.yaml': No such file or directory. .*is an example"):
        read_teams(tmp_path / "no.yaml")
    with pytest.raises(DropforgeError, match=r"Is a directory"):
        read_teams(tmp_path)


_KEYS = st.sampled_from([*Teams.model_fields, "a", "quota", "gpu", "shared"]) | st.text(max_size=5)
_LEAVES = st.none() | st.booleans() | st.integers() | st.text(max_size=9)


@given(st.recursive(_LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(_KEYS, inner, max_size=4)))
def test_any_file_is_taken_or_refused_in_words(values: Any) -> None:
    with suppress(DropforgeError):  # no other error may come
        render(parse_teams(json.dumps(values)))


TWO = f"""
flavors:
  h100: {{labels: {{type: h100}}, tolerations: [{{key: gpu, effect: NoSchedule}}, {{key: team, value: ml}}]}}
  mi300: {{gpu_resource: amd.com/gpu}}
priorities: {{low: -10, high: 10}}
cohorts:
  all: {{}}
  lab: {{parent: all, weight: 0.5, shared: {{h100: {{gpus: 4, {ROOM}, lend: {{gpus: 1}}}}}}}}
teams:
  a:
    cohort: lab
    weight: 2
    order: strict
    quota:
      h100: {{gpus: 8, cpus: 0.5, memory_gb: 1.5, borrow: {{gpus: 6}}, lend: {{gpus: 2}}}}
      mi300: {{gpus: 8, cpus: 8, memory_gb: 32}}
    preempts: {{own: lower, reclaim: lower, borrow: lower}}
  b: {{namespace: research, queue: fast, cohort: all, quota: {{h100: {{gpus: 16, {ROOM}}}}}, priorities: [low]}}
  c: {{namespace: research, queue: slow, quota: {{h100: {{{ROOM}}}}}, priorities: [high]}}
"""


def rendered(text: str) -> dict[tuple[str, str], dict[str, Any]]:
    return {(one["kind"], one["metadata"]["name"]): one for one in render(parse_teams(text))}


def test_everything_of_the_file_stands_in_an_object() -> None:
    found = rendered(TWO)
    assert {one["apiVersion"] for one in found.values()} == {
        "kueue.x-k8s.io/v1beta2",
        "admissionregistration.k8s.io/v1",
    }
    assert found["ResourceFlavor", "h100"]["spec"] == {
        "nodeLabels": {"type": "h100"},
        "tolerations": [
            {"key": "gpu", "operator": "Exists", "effect": "NoSchedule"},
            {"key": "team", "operator": "Equal", "value": "ml"},
        ],
    }
    assert found["WorkloadPriorityClass", "low"]["value"] == -10
    assert found["Cohort", "lab"]["spec"]["parentName"] == "all"
    assert found["Cohort", "lab"]["spec"]["fairSharing"] == {"weight": "500m"}
    a = found["ClusterQueue", "a"]["spec"]
    assert a["preemption"] == {
        "withinClusterQueue": "LowerPriority",
        "reclaimWithinCohort": "LowerPriority",
        "borrowWithinCohort": {"policy": "LowerPriority"},
    }
    assert (a["cohortName"], a["queueingStrategy"], a["fairSharing"]) == ("lab", "StrictFIFO", {"weight": "2"})
    (group,) = a["resourceGroups"]
    assert group["coveredResources"] == ["cpu", "memory", "amd.com/gpu", "nvidia.com/gpu"]
    assert [one["name"] for one in group["flavors"]] == ["h100", "mi300"]
    for flavor in group["flavors"]:  # in the order of `coveredResources`, or Kueue refuses it
        assert [one["name"] for one in flavor["resources"]] == group["coveredResources"]
    cpu, memory, amd, nvidia = group["flavors"][0]["resources"]
    assert (cpu["nominalQuota"], memory["nominalQuota"]) == ("500m", "1500M")
    assert amd == {"name": "amd.com/gpu", "nominalQuota": "0", "borrowingLimit": "0"}
    assert nvidia == {"name": "nvidia.com/gpu", "nominalQuota": "8", "borrowingLimit": "6", "lendingLimit": "2"}
    c = found["ClusterQueue", "c"]["spec"]
    assert "cohortName" not in c
    assert not any("borrowingLimit" in one for one in c["resourceGroups"][0]["flavors"][0]["resources"])
    fast = found["LocalQueue", "fast"]
    assert (fast["metadata"]["namespace"], fast["spec"]) == ("research", {"clusterQueue": "b"})
    assert found["ClusterQueue", "b"]["spec"]["namespaceSelector"] == {
        "matchLabels": {"kubernetes.io/metadata.name": "research"}
    }
    policy = found["ValidatingAdmissionPolicy", "dropforge-priorities"]["spec"]
    assert '{"research": ["high", "low"]}' in json.dumps(policy).replace('\\"', '"')
    priority, classes = policy["validations"]  # evaluated by a real API server in tests/cluster/test_queues.py
    assert "variables.asked == ''" not in priority["expression"]
    assert "priorityClassName" in classes["message"]
    assert rendered(TWO) == found


def test_the_largest_file_is_checked_soon() -> None:
    cohorts = {f"c{n}": {"parent": f"c{n - 1}"} if n else {} for n in range(64)}
    nothing = {"quota": {"gpu": {"cpus": 0, "memory_gb": 0}}, "cohort": "c63"}
    one = {"quota": {"gpu": {"cpus": 1, "memory_gb": 1}}, "cohort": "c0"}
    teams = {f"t{n}": nothing for n in range(199)} | {"last": one}
    text = json.dumps({"flavors": {"gpu": {}}, "cohorts": cohorts, "teams": teams})
    assert len(text) < RECIPE_LIMIT
    assert reach(parse_teams(text), "t0", "gpu") == {"cpu": 1, "memory": 1e9}


def test_a_team_reaches_what_others_lend_it_and_no_more() -> None:
    teams = parse_teams(TWO)
    # Of b 16, of the shared ones 1, at most 6; `lend` of its own does not count against it.
    assert reach(teams, "a", "h100")["nvidia.com/gpu"] == 8 + 6
    assert reach(teams, "a", "h100", own=True)["nvidia.com/gpu"] == 8
    assert reach(teams, "b", "h100")["nvidia.com/gpu"] == 16 + 2 + 1
    assert "nvidia.com/gpu" not in reach(teams, "c", "h100")


def test_where_nodes_stand_is_a_topology_down_to_the_node() -> None:
    found = rendered("flavors: {gpu: {labels: {pool: gpu}, topology: [block, example.com/rack]}}\n" + team())
    assert found["Topology", "gpu"]["spec"] == {
        "levels": [{"nodeLabel": label} for label in ("block", "example.com/rack", "kubernetes.io/hostname")]
    }
    assert found["ResourceFlavor", "gpu"]["spec"]["topologyName"] == "gpu"
    assert [kind for kind, _ in found].index("Topology") < [kind for kind, _ in found].index("ResourceFlavor")


@pytest.mark.parametrize(
    ("flavor", "told"),
    [
        ("topology: [rack]", r"nodes that have a label in common. Name the flavor's `instance` or `labels`"),
        ("labels: {a: b}, topology: [rack, rack]", r"a label is listed twice"),
        ("labels: {a: b}, topology: [rack, kubernetes.io/hostname]", r"is added by itself, as the nearest. Leave it"),
        ("labels: {a: b}, topology: rack", r"`flavors.gpu.topology`"),
        ("labels: {a: b}, topology: ['a b']", r"`flavors.gpu.topology"),
    ],
)
def test_a_topology_that_kueue_could_not_use_is_refused(flavor: str, told: str) -> None:
    with pytest.raises(DropforgeError, match=told):
        parse_teams(f"flavors: {{gpu: {{{flavor}}}}}\n" + team())


def test_a_team_has_flavors_with_topologies_or_without() -> None:
    mixed = "flavors: {gpu: {labels: {a: b}, topology: [rack]}, cpu: {labels: {c: d}}}\n"
    both = team(quota=f"gpu: {{gpus: 8, {ROOM}}}, cpu: {{{ROOM}}}")
    with pytest.raises(DropforgeError, match=r"`teams.a.quota`: .* where one has none: 'cpu'. Give 'cpu' one too"):
        parse_teams(mixed + both)
    assert parse_teams(mixed.replace("{c: d}", "{c: d}, topology: [zone]") + both).flavors["cpu"].topology == ("zone",)


def test_where_all_may_have_all_priorities_no_policy_is_rendered() -> None:
    free = TWO.replace(", priorities: [low]", "").replace(", priorities: [high]", "")
    assert not [kind for kind, _ in rendered(free) if "Policy" in kind]
    # Somebody of the namespace may have all: nobody could tell whose job it is.
    assert not [kind for kind, _ in rendered(TWO.replace(", priorities: [low]", "")) if "Policy" in kind]


def test_a_team_that_has_no_priority_may_have_none_and_one_that_has_must_name_it() -> None:
    text = TWO.replace("priorities: [high]", "priorities: []")
    variables = rendered(text)["ValidatingAdmissionPolicy", "dropforge-priorities"]["spec"]["variables"]
    (allowed,) = (one["expression"] for one in variables if one["name"] == "allowed")
    assert allowed == '{"research": ["", "low"]}[object.metadata.namespace]'  # nobody can tell whose job it is
    alone = rendered(text.replace("research, queue: fast", "b, queue: fast"))
    assert '{"b": ["low"], "research": [""]}' in json.dumps(list(alone.values())).replace('\\"', '"')


def test_the_commands_tell_of_the_example(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["queues", "render", str(EXAMPLE)])
    assert list(yaml.safe_load_all(done.output)) == render(read_teams(EXAMPLE))
    sizes = "nodes: 3, gpus: 8, processes_per_node: 8, cpus: 190, memory_gb: 2000"
    text = "extends: tiny\ntrain: {tokens_per_step: 65536}\ncompute: {backend: kubernetes, namespace: vision, "
    (tmp_path / "recipe.yaml").write_text(f"{text}queue: vision, priority: low, {sizes}}}")
    done = CliRunner().invoke(app, ["queues", "fits", str(tmp_path / "recipe.yaml"), str(EXAMPLE)])
    assert done.output == "team vision has room by borrowing what others leave: h100\n"
    assert isinstance(CliRunner().invoke(app, ["queues", "render", "/none"]).exception, DropforgeError)


def test_the_commands_warn_of_racks_on_a_kueue_that_they_stand_still_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Bare:
        """A cluster that has none of it."""

        def get(self, path: str, **query: str) -> None:
            return None

    monkeypatch.setattr("dropforge.cli.queues.Cluster", Bare)
    for flavor, warned in (("{labels: {a: b}, topology: [rack]}", True), ("{labels: {a: b}}", False)):
        (tmp_path / "teams.yaml").write_text(f"flavors: {{gpu: {flavor}}}\n" + team())
        for command in ("render", "check"):
            done = CliRunner().invoke(app, ["queues", command, str(tmp_path / "teams.yaml")])
            assert ("(gpu) need a Kueue with the fix of its issue 10778" in done.stderr) == warned
            assert "10778" not in done.stdout


def test_a_gang_asks_for_what_all_its_pods_ask_for() -> None:
    asked = Gang(nodes=4, cpus=2, memory_gb=1.5, gpus=8, resources={"vpc.amazonaws.com/efa": 32})
    assert asked.whole("nvidia.com/gpu") == {
        "cpu": 8,
        "memory": 6e9,
        "nvidia.com/gpu": 32,
        "vpc.amazonaws.com/efa": 128,
    }


IN_NODES = """
flavors: {p5: {instance: p5.48xlarge, labels: {pool: a}}, arm: {instance: m8g.16xlarge}}
cohorts: {all: {shared: {p5: {nodes: 1}}}}
teams: {a: {cohort: all, quota: {p5: {nodes: 2, lend: {nodes: 1}}, arm: {nodes: 3, resources: {pods: 30}}}}}
"""


def test_nodes_of_an_instance_are_what_pods_that_have_them_ask_for() -> None:
    found = rendered(IN_NODES)
    labels = {"node.kubernetes.io/instance-type": "p5.48xlarge", "pool": "a"}
    assert found["ResourceFlavor", "p5"]["spec"] == {"nodeLabels": labels}
    on, teams = read()["p5.48xlarge"], parse_teams(IN_NODES)
    room, more = pod_room(on), {"vpc.amazonaws.com/efa": "32"}
    sizes: dict[str, Any] = {"cpus": room.cpus, "memory_gb": room.memory_gib * GIB, "gpus": on.gpus, "resources": more}
    gang = Gang(nodes=2, **sizes)
    assert lacking(teams, "a", "p5", gang, own=True) == []
    assert lacking(teams, "a", "p5", gang.model_copy(update={"nodes": 3})) == []  # the shared one is the third
    assert len(lacking(teams, "a", "p5", gang.model_copy(update={"nodes": 4}))) == 4
    (group,) = found["ClusterQueue", "a"]["spec"]["resourceGroups"]
    by_name = {one["name"]: one for one in group["flavors"][0]["resources"]}
    assert by_name["nvidia.com/gpu"] == {"name": "nvidia.com/gpu", "nominalQuota": "16", "lendingLimit": "8"}
    assert by_name["vpc.amazonaws.com/efa"]["nominalQuota"] == "64"
    assert "nvidia.com/gpu" not in parse_teams(IN_NODES).teams["a"].quota["arm"].by_name("nvidia.com/gpu")


def test_nodes_of_a_generic_instance_are_counted_and_known_by_labels_of_ones_own_alone() -> None:
    text = "flavors: {gpu: {instance: generic.8gpu-80gb%s}}\nteams: {a: {quota: {gpu: {nodes: 2}}}}\n"
    assert "nodeLabels" not in rendered(text % "")["ResourceFlavor", "gpu"].get("spec", {})
    assert rendered(text % ", labels: {pool: a}")["ResourceFlavor", "gpu"]["spec"] == {"nodeLabels": {"pool": "a"}}
    assert parse_teams(text % "").teams["a"].quota["gpu"].gpus == 16


@pytest.mark.parametrize(
    ("text", "number"), [("5120Mi", 5120 * 2**20), ("500m", 0.5), ("1.5G", 1.5e9), (7, 7), ("2k", 2000), ("3", 3)]
)
def test_quantities_are_read_as_kubernetes_does(text: str | int, number: float) -> None:
    assert count(text) == number == float(parse_quantity(text))
