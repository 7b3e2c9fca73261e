"""Values: every key is one that its chart has, and what Dropforge relies on is set for each size."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any
from urllib.parse import parse_qsl

import pytest
import yaml

from dropforge import mlflow_pages
from dropforge.install.node_pools import node_pool
from dropforge.install.plan import values_of
from dropforge.install.steps import PLACES, SIZES, STEPS, Chart
from dropforge.job import train_job
from dropforge.placement.admission import room_for
from dropforge.placement.catalogue import read
from dropforge.placement.teams_file import parse_teams, read_teams
from dropforge.recipes.load import build_recipe, load_recipe, presets
from dropforge.run import RunSpec
from dropforge.run_limits import run_limits

ROOT = Path(__file__).parents[3]
VALUES = ROOT / "helm-values"
FOLDERS = (VALUES, *(VALUES / name for name in (*SIZES, *PLACES)))  # others hold a chart of ours and manifests
FILES = {str(path.relative_to(ROOT)) for folder in FOLDERS for path in folder.glob("*.yaml")}
KEYS = Path(__file__).with_name("chart_keys")
RELEASES = [step.chart for step in STEPS if step.chart and step.chart.version]
OURS = [chart.release for chart in RELEASES if any(name.endswith(f"/{chart.release}.yaml") for name in FILES)]
SECRET = re.compile(r"passw|secret$|token$|private", re.IGNORECASE)
#: Names of earlier versions of charts, which Helm takes without a word although they do nothing, and the new ones.
OLD = {
    "airflow": {
        r"workers\.(?!kubernetes\.|celery\.).+": "workers.kubernetes or workers.celery, since 1.20",
        r"webserver.*": "apiServer, apiSecretKeySecretName",
        r"ingress\.(?!apiServer\.).+": "ingress.apiServer",
        r"(.+\.)?securityContext(\..+)?": "securityContexts.pod, securityContexts.container",
    },
    "karpenter": {r"settings\.aws\..+": "settings, since 0.33"},
    "loki": {r"monitoring\.lokiCanary\..+": "lokiCanary, since 6.0"},
    "spark-operator": {
        r"sparkJobNamespaces?": "spark.jobNamespaces, since 2.0",
        r"serviceAccounts\..+": "spark.serviceAccount, controller.serviceAccount",
        r"replicaCount|resources(\..+)?": "controller.replicas, controller.resources",
    },
}


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted keys with what stands there; lists are taken whole."""
    if not isinstance(value, dict) or not value:
        yield path, value
        return
    for key, inner in value.items():
        yield from leaves(inner, f"{path}.{key}" if path else str(key))


def listed(release: str) -> tuple[dict[str, str], list[str]]:
    """What a list of keys says of itself, and the keys: those that our files may use. `*` is a mapping, taken whole."""
    head, _, body = (KEYS / f"{release}.txt").read_text().partition("\n\n")
    return dict(line.split(": ", 1) for line in head.splitlines()), body.split()


def known(release: str) -> re.Pattern[str]:
    _, keys = listed(release)
    return re.compile("|".join(re.escape(key).replace(r"\.\*", r"(\..+)?") for key in keys))


def merged(release: str, size: Any, on: Any = "any") -> dict[str, Any]:
    """As Helm merges the files of a release."""

    def over(below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
        found = dict(below)
        for key, value in above.items():
            both = isinstance(value, dict) and isinstance(found.get(key), dict)
            found[key] = over(found[key], value) if both else value
        return found

    found: dict[str, Any] = {}
    for name in values_of(release, size, on, FILES):
        found = over(found, yaml.safe_load((ROOT / name).read_text()) or {})
    return found


@pytest.mark.parametrize("release", OURS)
def test_every_key_is_one_of_its_chart(release: str) -> None:
    chart = known(release)
    for name in sorted(name for name in FILES if name.endswith(f"/{release}.yaml")):
        for key, _ in leaves(yaml.safe_load((ROOT / name).read_text())):
            assert chart.fullmatch(key), f"{name}: {release} has no {key}"
    for setting in next(one for one in RELEASES if one.release == release).settings:
        assert chart.fullmatch(setting.split("=")[0]), f"--set {setting}"


def test_values_of_mlflow_s_own_chart_have_its_keys_and_the_names_of_ours() -> None:
    values = yaml.safe_load((VALUES / "mlflow-official.yaml").read_text())
    for key, _ in leaves(values):
        assert known("mlflow-official").fullmatch(key), key
    ours = (VALUES / "mlflow" / "templates" / "mlflow.yaml").read_text()
    assert values["fullnameOverride"] == values["serviceAccount"]["name"] == "mlflow"
    migration = (VALUES / "mlflow" / "templates" / "migration.yaml").read_text()
    assert values["extraInitContainers"][0]["command"][-1] in migration
    assert values["mlflow"]["backendStoreUriFrom"]["secretKeyRef"] == merged_database()
    hosts = next(one["value"] for one in values["env"] if one["name"] == "MLFLOW_SERVER_ALLOWED_HOSTS").split(",")
    for own in re.findall(r'"([a-z0-9.]+)"', ours.partition("$own := list")[2].partition("}}")[0].replace("$name", "")):
        assert {own, f"{own}:*"} <= set(hosts)
    assert {"mlflow:*", "mlflow.airflow.svc.cluster.local:*"} <= set(hosts)


def merged_database() -> dict[str, str]:
    """The Secret that our chart takes the database's address from."""
    found = yaml.safe_load((VALUES / "mlflow" / "values.yaml").read_text())["database"]
    return {"name": found["secret"], "key": found["key"]}


@pytest.mark.parametrize("chart", RELEASES, ids=lambda chart: str(chart.release))
def test_a_list_of_keys_is_of_the_version_that_is_installed(chart: Chart) -> None:
    if chart.release not in OURS:
        assert not (KEYS / f"{chart.release}.txt").exists(), "a chart without values of ours needs no list"
        return
    said, keys = listed(chart.release)
    assert said["chart"] == chart.chart.rsplit("/", 1)[-1]
    assert said["version"] == chart.version, f"look each key up in {chart.version}, and say so in {chart.release}.txt"
    assert "/" in said["source"], "where the keys were read"
    assert len(set(keys)) == len(keys) > 0


@pytest.mark.parametrize("release", sorted(OLD))
def test_no_key_has_a_name_that_its_chart_gave_up(release: str) -> None:
    names = [name for name in FILES if name.endswith(f"/{release}.yaml")]
    used = [key for name in names for key, _ in leaves(yaml.safe_load((ROOT / name).read_text()))]
    for key in (*listed(release)[1], *used):
        assert not [new for old, new in OLD[release].items() if re.fullmatch(old, key)], key


def test_no_values_hold_a_secret() -> None:
    for name in FILES:
        for document in yaml.safe_load_all((ROOT / name).read_text()):
            for key, value in leaves(document):
                assert not (SECRET.search(key) and isinstance(value, str) and len(value) > 40), f"{name}: {key}"
    for name in ("settings.env", "connections.env", "trainer.env"):
        for line in (VALUES / name).read_text().splitlines():
            assert line.startswith("#") or not re.search(r"SECRET|PASSWORD|ACCESS_KEY", line), f"{name}: {line}"


def test_what_finds_gpus_bears_the_taint_of_our_pools() -> None:
    pool, _ = node_pool(read()["p5.48xlarge"], cluster="c", nodes=1)
    (taint,) = pool["spec"]["template"]["spec"]["taints"]
    values = merged("nvidia-device-plugin", "team", "eks")
    for (borne,) in (values["tolerations"], values["nfd"]["worker"]["tolerations"]):
        assert borne["operator"] == "Exists"  # whatever the value: the pools' has none
        assert taint.items() >= {name: value for name, value in borne.items() if name != "operator"}.items()


@pytest.mark.parametrize("size", SIZES)
def test_airflow_runs_our_image_with_keys_of_ours_and_apart_from_the_jobs(size: Any) -> None:
    airflow = merged("airflow", size)
    config = airflow["config"]
    assert airflow["airflowVersion"] in (ROOT / "requirements" / "image-airflow.txt").read_text()
    dockerfile = (ROOT / "images" / "airflow" / "Dockerfile").read_text()
    assert f"DAGS_FOLDER={config['core']['dags_folder']} " in dockerfile
    assert f"PLUGINS_FOLDER={config['core']['plugins_folder']} " in dockerfile
    assert f"USER {airflow['uid']}:{airflow['gid']}" in dockerfile
    assert not airflow["postgresql"]["enabled"]
    assert config["triggerer"]["queues_enabled"] == "True"
    assert "args" not in airflow["triggerer"], "the chart's triggerer is the watcher's, and has no queue"
    assert config["workers"]["min_heartbeat_interval"] == "1"
    assert config["logging"]["remote_logging"] == "True"
    # With both, the executor would start repository:tag in the place of the image by its digest.
    assert not config["kubernetes_executor"]["worker_container_repository"]
    assert not config["kubernetes_executor"]["worker_container_tag"]
    # Of Airflow's own image alone, which ours is not made from.
    for part in ("scheduler", "dagProcessor", "triggerer"):
        assert airflow[part]["logGroomerSidecar"] == {"enabled": False}
        assert "airflow jobs check" in airflow[part]["livenessProbe"]["command"][-1]
    assert "/entrypoint" not in str(airflow)


@pytest.mark.parametrize("size", SIZES)
def test_airflow_says_what_version_2_of_its_chart_has_otherwise(size: Any) -> None:
    airflow = merged("airflow", size)
    assert airflow["enableServiceLinks"] is False
    assert airflow["executor"] == ("LocalExecutor" if size == "laptop" else "KubernetesExecutor")
    # Else a laptop's scheduler were a StatefulSet, which neither the plan's check nor a restore's scaling would find.
    assert size != "laptop" or airflow["workers"]["celery"]["persistence"]["enabled"] is False


def test_what_must_not_stand_still_is_there_more_than_once() -> None:
    for size in ("team", "production"):
        airflow = merged("airflow", size)
        assert all(airflow[part]["replicas"] > 1 for part in ("scheduler", "triggerer", "apiServer"))


def test_the_preset_is_a_recipe(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from dropforge.recipes import load_recipe

    (tmp_path / "cluster.yaml").write_text((VALUES / "preset.yaml").read_text())
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    assert load_recipe("cluster").compute.backend == "kubernetes"


def test_the_preset_takes_an_instance_in_the_place_of_its_sizes(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from dropforge.errors import RecipeError
    from dropforge.recipes import load_recipe

    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    text = (VALUES / "preset.yaml").read_text()
    named = text.replace("# instance:", "instance:").replace("extends: tiny", "extends: llama-3.1-8b")
    (tmp_path / "cluster.yaml").write_text(named)
    with pytest.raises(
        RecipeError, match=r"all GPUs of p5.48xlarge .*Leave out `cpus`, `memory_gb` and `processes_per"
    ):
        load_recipe("cluster")
    head, tail = named.split("  processes_per_node:")
    (tmp_path / "cluster.yaml").write_text(head + "".join(tail.splitlines(keepends=True)[3:]))
    compute = load_recipe("cluster").compute
    assert (compute.nodes, compute.gpus, compute.processes_per_node) == (2, 8, 8)
    assert compute.cpus > 100
    assert f"whose step has {load_recipe('tiny').train.rows} rows" in text


def test_the_first_queue_and_the_first_limits_take_what_the_presets_and_pages_ask_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Two nodes of the instance that both name, and each preset of ours on a cluster."""
    settings = dict(line.split("=", 1) for line in (VALUES / "settings.env").read_text().splitlines() if line[:1] > "@")
    limits = run_limits(settings)
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    text = (VALUES / "preset.yaml").read_text().replace("# instance:", "instance:").replace("# queue:", "queue:")
    head, tail = text.replace("extends: tiny", "extends: llama-3.1-8b").split("  processes_per_node:")
    (tmp_path / "cluster.yaml").write_text(head + "".join(tail.splitlines(keepends=True)[3:]))
    recipe = load_recipe("cluster")
    limits.check_recipe(recipe)
    spec = RunSpec("r", "f", 1, "s3://b/runs/r", "s3://b", "s3://b/d", "0" * 64, recipe.plain(), "c")
    teams = read_teams(VALUES / "one-team.yaml")
    assert room_for(teams, recipe, train_job(spec, recipe)).own == ("nodes",)
    for name in presets():
        limits.check_recipe(load_recipe(name))
    pages = (ROOT / "docs/how-to/team-queues.md").read_text()
    [example] = re.findall(r"```yaml\n(flavors:.*?)```", pages, re.DOTALL)
    told = re.search(r"# or (\{.*\})", example)
    assert told
    spelled = example.replace("{nodes: 2} #", f"{told[1]} #").replace("instance: p5.48xlarge", "labels: {a: b}")
    compute = {**recipe.plain()["compute"], "namespace": "vision", "queue": "vision"}
    asked = build_recipe({**recipe.plain(), "compute": compute})
    for file in (example, spelled):
        assert room_for(parse_teams(file), asked, train_job(spec, asked)).own == ("h100",)


def test_browsers_are_told_where_mlflow_is() -> None:
    settings = dict(line.split("=", 1) for line in (VALUES / "settings.env").read_text().splitlines() if line[:1] > "@")
    assert mlflow_pages.server(settings["MLFLOW_TRACKING_URI"], settings) == "https://mlflow.acme.example"


def test_files_of_values_belong_to_a_release() -> None:
    others = {"mlflow-official", "teams", "one-team", "spark-driver", "terminal", "preset", "postgres"}
    releases = {step.chart.release for step in STEPS if step.chart}
    for name in FILES:
        assert Path(name).stem in releases | others, name


def test_a_database_whose_host_is_gone_is_given_up_here_and_in_compose() -> None:
    set_here = merged("airflow", "laptop")["config"]["database"]
    compose = yaml.safe_load((ROOT / "docker-compose.yaml").read_text())["services"]
    for name, where in set_here.items():
        assert compose["airflow-scheduler"]["environment"][f"AIRFLOW__DATABASE__{name.upper()}"] == where
        assert resolve_name(where)
    _, _, of_mlflow = compose["mlflow"]["environment"]["MLFLOW_BACKEND_STORE_URI"].partition("?")
    asked = resolve_name(set_here["sql_alchemy_connect_args"])
    assert dict(parse_qsl(of_mlflow)) == {name: str(value) for name, value in asked.items()}


@pytest.mark.parametrize("size", SIZES)
def test_airflow_knows_every_option_that_is_set(size: Any) -> None:
    from airflow.configuration import conf

    known_options = conf.configuration_description
    for section, options in merged("airflow", size)["config"].items():
        for name, value in options.items():
            assert name in known_options[section]["options"], f"[{section}] {name}"
            assert isinstance(value, str), f"[{section}] {name}: the chart wants a text"
    variables = [
        line.split("=")[0]
        for line in (VALUES / "settings.env").read_text().splitlines()
        if line.startswith("AIRFLOW__")
    ]
    for variable in variables:
        _, section, name = variable.lower().split("__")
        assert name in known_options[section]["options"], variable
