"""What is in no chart: complete, of the least rights, and refused where a cloud would refuse it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dropforge.cli import manifests
from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.install.access import COMPONENTS
from dropforge.install.node_pools import node_pool
from dropforge.install.policies import policies
from dropforge.install.storage import claims
from dropforge.install.triggerer import job_triggerer
from dropforge.placement.catalogue import read
from dropforge.placement.pods import placed
from dropforge.volumes import Volume
from tests.cluster.test_install import WORDS
from tests.dropforge.install.test_values import ROOT, merged

INSTANCES = read({})
P5 = INSTANCES["p5.48xlarge"]


def made(*words: str) -> list[dict[str, Any]]:
    done = CliRunner().invoke(app, ["manifests", *words], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return list(yaml.safe_load_all(done.stdout))


@pytest.mark.parametrize("name", sorted(manifests._KINDS))
def test_each_kind_is_among_those_that_an_api_server_is_shown(name: str) -> None:
    assert WORDS.keys() <= manifests._KINDS.keys()
    assert all(one["apiVersion"] and one["metadata"]["name"] for one in made(name, *WORDS[name]))


def test_airflow_starts_jobs_where_trainings_are_and_nothing_else() -> None:
    found = made("rights", "--namespace", "team-a", "--namespace", "team-b")
    everywhere = [one for one in found if "namespace" not in one["metadata"]]
    assert {one["metadata"]["namespace"] for one in found if one not in everywhere} == {"team-a", "team-b"}
    role, binding = everywhere  # to know a broken node
    assert role["rules"] == [{"apiGroups": [""], "resources": ["nodes"], "verbs": ["get"]}]
    assert (binding["kind"], binding["roleRef"]["name"]) == ("ClusterRoleBinding", role["metadata"]["name"])
    verbs = {
        (each, verb)
        for one in found
        if one["kind"] == "Role"
        for rule in one["rules"]
        for each in rule["resources"]
        for verb in rule["verbs"]
    }
    assert ("pytorchjobs", "create") in verbs
    assert not {"secrets", "pods/exec", "configmaps", "serviceaccounts"} & {each for each, _ in verbs}
    assert ("pods", "create") not in verbs
    roles = {one["metadata"]["name"] for one in found if one["kind"] == "Role"}
    bindings = [one for one in found if one["kind"] == "RoleBinding"]
    assert {one["roleRef"]["name"] for one in bindings} == roles
    for one in [*bindings, binding]:
        assert {(each["namespace"], each["name"]) for each in one["subjects"]} == {
            ("airflow", "airflow-worker"),
            ("airflow", "airflow-triggerer"),
        }
    accounts = {one["metadata"]["name"] for one in found if one["kind"] == "ServiceAccount"}
    assert accounts == {one.account for one in COMPONENTS if one.account.startswith("dropforge-") and not one.airflow}
    assert not any(one["automountServiceAccountToken"] for one in found if one["kind"] == "ServiceAccount")


def test_on_a_laptop_tasks_have_the_schedulers_account() -> None:
    assert merged("airflow", "laptop")["executor"] == "LocalExecutor"
    (subjects, *_) = [one["subjects"] for one in made("rights", "--size", "laptop") if one["kind"] == "RoleBinding"]
    assert "airflow-scheduler" in {each["name"] for each in subjects}


def test_keys_are_new_each_time_and_addresses_have_the_password_of_the_database() -> None:
    first, second = (
        {one["metadata"]["name"]: one["stringData"] for one in made("keys", "--size", "laptop")} for _ in range(2)
    )
    airflow = merged("airflow", "laptop")
    assert set(first[airflow["fernetKeySecretName"]]) == {"fernet-key", "api-secret-key", "jwt-secret"}
    assert first["dropforge-postgres"]["password"] in first[airflow["data"]["metadataSecretName"]]["connection"]
    assert all(first[name] != second[name] for name in first)
    assert [one["metadata"]["name"] for one in made("keys", "--size", "team")] == ["dropforge-airflow-keys"]


def test_namespaces_enforce_what_is_asked_for() -> None:
    label = "pod-security.kubernetes.io/enforce"
    for words, enforced in (([], "baseline"), (["--enforce", "restricted"], "restricted")):
        found = made("namespaces", "--namespace", "a", *words)
        assert {one["metadata"]["name"]: one["metadata"]["labels"][label] for one in found} == {
            "airflow": enforced,
            "a": enforced,
        }


def test_keys_do_not_go_to_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dropforge.cli.manifests.to_terminal", lambda: True)
    with pytest.raises(DropforgeError, match="the secrets"):
        made("keys")
    assert made("namespaces")


def test_the_triggerer_of_jobs_is_set_up_as_the_charts_own() -> None:
    pod = job_triggerer("team", "r.example/a@sha256:aa")[0]["spec"]["template"]["spec"]
    values = merged("airflow", "team")
    container = pod["containers"][0]
    names = [next(iter(each.values()))["name"] for each in container["envFrom"]]
    assert names == [next(iter(each.values()))["name"] for each in yaml.safe_load(values["extraEnvFrom"])]
    assert values["volumes"][0] in pod["volumes"]
    assert values["volumeMounts"][0] in container["volumeMounts"]
    assert values["env"][0] in container["env"]
    assert pod["securityContext"] == values["securityContexts"]["pod"]
    secrets = {each["valueFrom"]["secretKeyRef"]["name"] for each in container["env"] if "valueFrom" in each}
    assert secrets == {values["data"]["metadataSecretName"], values["fernetKeySecretName"], values["jwtSecretName"]}
    assert container["livenessProbe"]["exec"]["command"] == values["triggerer"]["livenessProbe"]["command"]


def test_alerts_and_dashboards_are_those_that_are_shipped_and_grafana_finds_them() -> None:
    parts = made("watching", "--image", "r.example/a@sha256:aa")
    monitors = {one["metadata"]["name"]: one["spec"] for one in parts if one["kind"] == "ServiceMonitor"}
    assert monitors.keys() == {"dropforge-metrics", "airflow-statsd", "mlflow"}
    found = {one["kind"]: one for one in parts}
    pod = found["Deployment"]["spec"]["template"]["spec"]
    assert pod["serviceAccountName"] == found["ServiceAccount"]["metadata"]["name"] == "dropforge-metrics"
    labels = found["Service"]["spec"]["selector"]
    assert labels == found["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert labels.items() <= found["Service"]["metadata"]["labels"].items()
    assert monitors["dropforge-metrics"]["selector"]["matchLabels"] == labels
    # What is scraped may be reached by Prometheus, whatever policies there are.
    prometheus = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "monitoring"}}}
    for name, port in (("dropforge-metrics", 9469), ("airflow-statsd", 9102), ("mlflow", 5000)):
        assert reaches(policies(["training"]), "airflow", monitors[name]["selector"]["matchLabels"], prometheus, port)
    assert found["PrometheusRule"]["spec"]["groups"][0]["rules"]
    label = merged("kube-prometheus-stack", "team")["grafana"]["sidecar"]["dashboards"]["label"]
    assert label in found["ConfigMap"]["metadata"]["labels"]
    for text in found["ConfigMap"]["data"].values():
        assert json.loads(text)["panels"]


def reaches(
    found: list[dict[str, Any]], namespace: str, labels: dict[str, str], peer: dict[str, Any], port: int
) -> bool:
    """Whether a policy lets a pod of these labels be reached by such a peer, as Kubernetes joins policies."""
    for policy in found:
        spec = policy["spec"]
        chosen = spec["podSelector"].get("matchLabels", {}).items() <= labels.items()
        if policy["metadata"]["namespace"] == namespace and chosen:
            for rule in spec["ingress"]:
                ports = {one["port"] for one in rule.get("ports", [])}
                if peer in rule["from"] and (not ports or port in ports):
                    return True
    return False


def test_a_training_reaches_mlflow_and_neither_airflow_nor_its_database() -> None:
    found = policies(["training"])
    training = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "training"}}}
    airflow = {"podSelector": {"matchLabels": {"tier": "airflow"}}}
    mlflow, postgres = {"app.kubernetes.io/name": "mlflow"}, {"app.kubernetes.io/name": "postgres"}
    api = {"tier": "airflow", "component": "api-server"}
    assert reaches(found, "airflow", mlflow, training, 5000)
    assert not reaches(found, "airflow", api, training, 8080)
    assert not reaches(found, "airflow", postgres, training, 5432)
    assert reaches(found, "airflow", api, airflow, 8080)
    assert reaches(found, "airflow", postgres, airflow, 5432)
    closed = next(one for one in found if one["metadata"]["name"] == "dropforge-closed")
    assert closed["spec"] == {"podSelector": {}, "policyTypes": ["Ingress"], "ingress": []}
    (own,) = (one for one in found if one["metadata"]["namespace"] == "training")
    assert set(own["spec"]["policyTypes"]) == {"Ingress", "Egress"}
    open_ports = {port["port"] for rule in own["spec"]["egress"] if "to" not in rule for port in rule["ports"]}
    assert open_ports == {443}
    trainer = {"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "kubeflow-system"}}}
    assert {"to": [trainer], "ports": [{"port": 10443, "protocol": "TCP"}]} in own["spec"]["egress"]
    (names,) = (rule for rule in own["spec"]["egress"] if {"port": 53, "protocol": "UDP"} in rule.get("ports", []))
    assert {"ipBlock": {"cidr": "169.254.20.10/32"}} in names["to"]  # NodeLocal DNSCache


def test_a_pool_has_nodes_that_the_catalogues_pods_tolerate_and_fit() -> None:
    pool, kind = node_pool(
        P5, cluster="c1", nodes=4, zone="eu-west-1a", capacity="reserved", reservation="cr-0123456789abcdef0"
    )
    spec = pool["spec"]["template"]["spec"]
    pods = placed(P5, job="j", nodes=2, gpus=8)
    wanted = {one["key"]: one["values"] for one in spec["requirements"]}
    assert all(wanted[key] == [value] for key, value in pods["node_selector"].items())
    assert {one["key"] for one in spec["taints"]} == {one["key"] for one in pods["tolerations"]}
    assert pool["spec"]["limits"] == {"cpu": str(4 * P5.cpus), "nvidia.com/gpu": "32"}
    assert wanted["karpenter.sh/capacity-type"] == ["reserved"]
    assert kind["spec"]["capacityReservationSelectorTerms"] == [{"id": "cr-0123456789abcdef0"}]
    assert kind["spec"]["instanceStorePolicy"] == "RAID0"
    assert spec["expireAfter"] == "Never"
    cpu, _ = node_pool(INSTANCES["r8g.4xlarge"], cluster="c1", nodes=4)
    assert "taints" not in cpu["spec"]["template"]["spec"]


def test_claims_are_of_what_the_recipe_says_and_say_why(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = """
extends: tiny
compute:
  backend: kubernetes
  namespace: team-a
  volumes:
    - {claim: models, path: /models, storage: lustre}
    - {claim: models, path: /again, sub_path: some}
    - {claim: cache, path: /cache, read_only: false, storage: node}
    - {claim: own, path: /own, storage: disk}
"""
    file.write_text(text)
    models, volume, cache, own = made("claims", "--recipe", str(file), "--gigabytes", "500", "--node-path", "/mnt/fast")
    assert (models["spec"]["storageClassName"], models["metadata"]["namespace"]) == ("dropforge-fsx", "team-a")
    assert models["spec"]["resources"]["requests"]["storage"] == "1200Gi"  # the least that FSx makes
    assert "many nodes read at once" in models["metadata"]["annotations"]["dropforge/storage"]
    assert volume["spec"]["hostPath"]["path"] == "/mnt/fast/team-a/cache"
    assert volume["spec"]["claimRef"] == {"namespace": "team-a", "name": "cache"}
    assert cache["spec"]["volumeName"] == volume["metadata"]["name"]
    assert own["spec"]["accessModes"] == ["ReadWriteOnce"]
    assert "storageClassName" not in own["spec"]  # the cluster's own
    file.write_text(text.replace(", storage: disk", ""))
    with pytest.raises(DropforgeError, match="claim own: the recipe does not say what storage it is on"):
        made("claims", "--recipe", str(file))
    for wrong in ("/", "/a/../b", "etc", "/$HOME"):
        with pytest.raises(DropforgeError, match="no folder of a node's own"):
            made("claims", "--recipe", str(file), "--node-path", wrong)


def test_a_claim_of_gang_and_spark_is_one(tmp_path: Path) -> None:
    file = tmp_path / "own.yaml"
    text = """
extends: tiny
compute:
  backend: kubernetes
  namespace: team
  volumes: [{claim: a-work, path: /work, storage: nfs}]
curation:
  spark:
    cluster:
      image: registry.example/curation:1
      namespace: team
      work_path: /work
      volumes: [{claim: a-work, path: /work, read_only: false}]
"""
    file.write_text(text)
    (work,) = made("claims", "--recipe", str(file))
    assert work["spec"]["storageClassName"] == "dropforge-efs"
    file.write_text(text.replace("read_only: false", "read_only: false, storage: lustre"))
    with pytest.raises(DropforgeError, match="claim a-work: it is said to be `lustre` and `nfs`"):
        made("claims", "--recipe", str(file))
    file.write_text(text.replace("      namespace: team\n", "      namespace: other\n"))
    with pytest.raises(DropforgeError, match="claim a-work: the recipe does not say what storage it is on"):
        made("claims", "--recipe", str(file))


def test_node_volumes_of_two_teams_are_two() -> None:
    names = set()
    for namespace, claim in (("team", "a-cache"), ("team-a", "cache")):
        volume, asked = claims([Volume(claim=claim, path="/cache", storage="node")], namespace)
        assert asked["spec"]["volumeName"] == volume["metadata"]["name"]
        names.add(volume["metadata"]["name"])
    assert len(names) == 2


def test_help_names_all_kinds() -> None:
    told = " ".join(CliRunner().invoke(app, ["manifests", "--help"], env={"COLUMNS": "300"}).output.split())
    with pytest.raises(DropforgeError) as refused:
        made("nothing")
    assert refused.value.mend.removeprefix("Give some of ") in told


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["node-pools", "--cluster", "c"], "--instance"),
        (["node-pools", "--cluster", "c", "--instance", "p5.48xlarge"], "EFA ends at a zone's border"),
        (["node-pools", "--cluster", "c", "--instance", "p9.huge"], "p9.huge"),
        (["node-pools", "--cluster", "c: {", "--instance", "g6.xlarge"], "cluster"),
        (["node-pools", "--cluster", "c", "--instance", "g6.xlarge", "--zone", "mars"], "no zone"),
        (["node-pools", "--cluster", "c", "--instance", "g6.xlarge", "--capacity", "free"], "capacity"),
        (["node-pools", "--cluster", "c", "--instance", "g6.xlarge", "--capacity", "reserved"], "go together"),
        (["node-pools", "--cluster", "c", "--instance", "g6.xlarge", "--nodes", "0"], "at least one"),
        (["node-pools", "--cluster", "c", "--instance", "gpu-h100-sxm.8gpu-128vcpu-1600gb"], "gpu-h100"),
        (["storage-classes"], "no filesystem"),
        (["storage-classes", "--subnet", "subnet-1; rm"], "no id"),
        (["storage-classes", "--file-system", "fs-xyz"], "no id"),
        (["claims"], "--recipe"),
        (["claims", "--recipe", "tiny"], "it has no volumes"),
        (["job-triggerer"], "--image"),
        (["job-triggerer", "--size", "huge", "--image", "x"], "size"),
        (["namespaces", "--namespace", "Team_A"], "namespace"),
        (["namespaces", "--enforce", "privileged"], "standard 'privileged': .*baseline or restricted"),
        (["nothing"], "there are none such"),
    ],
)
def test_what_cannot_be_is_said(words: list[str], told: str) -> None:
    with pytest.raises(DropforgeError, match=told):
        made(*words)


def test_the_database_of_a_laptop_has_the_names_that_its_keys_say() -> None:
    objects = list(yaml.safe_load_all((ROOT / "helm-values" / "postgres.yaml").read_text()))
    secret = next(one for one in made("keys", "--size", "laptop") if one["metadata"]["name"] == "dropforge-postgres")
    container = objects[-1]["spec"]["template"]["spec"]["containers"][0]
    reference = next(each for each in container["env"] if each["name"] == "POSTGRES_PASSWORD")["valueFrom"]
    assert reference["secretKeyRef"] == {"name": secret["metadata"]["name"], "key": "password"}
    addresses = [
        value
        for one in made("keys", "--size", "laptop")
        for value in one["stringData"].values()
        if value.startswith("postgresql")
    ]
    assert {address.rsplit("/", 1)[1] for address in addresses} == {"airflow", "mlflow"}
    assert all(f"@{objects[0]['metadata']['name']}.airflow:5432/" in address for address in addresses)
