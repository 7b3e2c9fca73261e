"""The plan: a shell script whose own commands are real ones, for each size and place."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from dropforge.cli import install, manifests
from dropforge.cli.app import app
from dropforge.errors import DropforgeError
from dropforge.install.plan import chosen, commands, text
from dropforge.install.steps import PLACES, SIZES, STEPS, VARIABLES
from tests.dropforge.install.test_values import FILES, merged

ROOT = Path(__file__).parents[3]
PAIRS = [(size, on) for size in SIZES for on in PLACES if (size, on) != ("laptop", "eks")]


def run(*words: str) -> str:
    """What the command prints. :raises DropforgeError: as the command does."""
    done = CliRunner().invoke(app, words, catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return done.stdout


@pytest.mark.parametrize(("size", "on"), PAIRS)
def test_it_is_a_shell_script_that_sets_what_it_uses(size: Any, on: Any) -> None:
    script = text(size, on, FILES, {})
    subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    used = set(re.findall(r"\$\{?([A-Z_]+)", script))
    assert used == set(re.findall(r"^([A-Z_]+)=", script, re.MULTILINE)) | ({"SIZE"} & used)
    for name in re.findall(r"--values (\S+)", script):
        assert (ROOT / name).is_file()
    # What is typed stands in the process list: no secret may.
    literal = [word for word in shlex.split(script, comments=True) if word.startswith("--from-literal")]
    assert len(literal) == script.count("--from-literal MLFLOW_TRACKING_URI=")


@pytest.mark.parametrize(("size", "on"), PAIRS)
def test_the_shell_puts_values_in_wherever_a_variable_stands(size: Any, on: Any) -> None:
    for step in chosen(size, on):
        for line in (*commands(step, size, on, FILES), step.check):
            assert not [quoted for quoted in re.findall("'[^']*'", line) if "$" in quoted], line


def test_what_aws_gives_rights_to_is_where_trainings_run() -> None:
    (step,) = (step for step in STEPS if step.name == "aws")
    words = shlex.split(next(line for line in step.before if line.startswith("dropforge install --aws")))
    assert words[words.index("--namespace") + 1] == "$TRAINING"


def test_namespaces_are_checked_by_a_binding_that_their_step_makes() -> None:
    (step,) = (step for step in STEPS if step.name == "namespaces")
    bindings = [one for one in yaml.safe_load_all(run("manifests", "rights")) if one["kind"] == "RoleBinding"]
    assert step.check.split()[-1] in {one["metadata"]["name"] for one in bindings}


def test_the_addresses_of_databases_stay_until_both_are_kept(tmp_path: Path) -> None:
    (step,) = (step for step in STEPS if step.name == "databases")
    (tmp_path / "kubectl").write_text('#!/bin/sh\necho "$@" >>told; ! grep -q mlflow told\n')
    (tmp_path / "kubectl").chmod(0o755)
    files = [tmp_path / f"{name}-database.txt" for name in ("airflow", "mlflow")]
    for file in files:
        file.write_text("postgresql+psycopg2://")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    for _ in range(2):
        done = subprocess.run(["bash", "-c", "\n".join(step.before)], cwd=tmp_path, env=env)
        assert done.returncode != 0
        assert all(file.exists() for file in files)


def test_settings_take_a_change_and_keys_are_not_replaced(tmp_path: Path) -> None:
    # A cluster that refuses to create what is there.
    (tmp_path / "kubectl").write_text(
        """#!/bin/bash
        case "$*" in
        create*--dry-run=client*) cat "${@: -4:1}" ;;
        create*) mkdir there && cat >there/kept ;;
        apply*) cat >>applied ;;
        esac
        """
    )
    (tmp_path / "kubectl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "TRAINING": "training"}
    env |= {"TRAINER_IMAGE": "t", "CURATION_IMAGE": "c"}
    steps = {step.name: "\n".join(["set -e", *step.before]) for step in STEPS}

    def give(name: str) -> int:
        words = ["bash", "-c", steps[name].replace("cluster.yaml=", "")]
        return subprocess.run(words, cwd=tmp_path, env=env, stdin=subprocess.DEVNULL, capture_output=True).returncode

    for change in ("old", "new"):
        for file in ("settings.env", "connections.env", "preset.yaml"):
            (tmp_path / file).write_text(f"{file} {change}\n")
        assert give("settings") == 0
    assert (tmp_path / "applied").read_text().splitlines()[-3:] == [
        "settings.env new",
        "connections.env new",
        "preset.yaml new",
    ]
    assert [give("trainer-secret"), give("trainer-secret")] == [0, 1]


def test_an_upgrade_goes_through_all_steps_that_have_our_images_or_settings() -> None:
    page = (ROOT / "docs" / "how-to" / "install" / "kubernetes-upgrade.md").read_text()
    upgrade = " ".join(page[page.index("## Upgrade") : page.index("## Removal")].split())
    ours = {
        step.name
        for step in STEPS
        if re.search(r"_IMAGE|settings\.env", " ".join(commands(step, "team", "eks", FILES))) and step.name != "doctor"
    }
    named = {
        "settings": "settings",
        "mlflow": "MLflow",
        "airflow": "Airflow",
        "job-triggerer": "triggerers for jobs",
        "watching": "metrics",
    }
    assert ours == set(named)
    (told,) = re.findall(r"Then give the steps for (.*?) again\.", upgrade)
    assert all(words in told for words in named.values())


def test_the_preset_gets_the_images_of_the_lock_and_keeps_others(tmp_path: Path) -> None:
    (step,) = (step for step in STEPS if step.name == "settings")
    preset, env = tmp_path / "preset.yaml", {"PATH": os.environ["PATH"]}
    env |= {
        f"{name}_IMAGE": f"r.example:5000/a/dropforge-{name.lower()}@sha256:{'b' * 64}"
        for name in ("TRAINER", "CURATION")
    }

    def filled(text: str) -> Any:
        preset.write_text(text)
        subprocess.run(["bash", "-c", step.before[0]], cwd=tmp_path, env=env, check=True)
        return yaml.safe_load(preset.read_text())

    shipped = (ROOT / "helm-values" / "preset.yaml").read_text()
    for _again in range(2):
        assert filled(shipped)["compute"]["image"] == env["TRAINER_IMAGE"]
        shipped = preset.read_text()
    pods = "curation: {spark: {cluster: {image: old.example/dropforge-curation@sha256:aa, executors: 2}}}\n"
    found = filled(f"{pods}compute:\n  image: old.example/our-trainer:1\n  nodes: 2 # as dropforge-trainer:1 had\n")
    assert found["curation"]["spark"]["cluster"] == {"image": env["CURATION_IMAGE"], "executors": 2}
    assert found["compute"] == {"image": "old.example/our-trainer:1", "nodes": 2}
    del env["TRAINER_IMAGE"]
    with pytest.raises(subprocess.CalledProcessError):
        filled(shipped)
    assert preset.read_text() == shipped, "a shell without the variables leaves it as it is"


@pytest.mark.parametrize(("size", "on"), PAIRS)
def test_pods_get_keys_where_they_have_no_roles(size: Any, on: Any) -> None:
    script = " ".join(text(size, on, FILES, {}).replace("\\\n", " ").split())
    keyed = on == "nebius" or size == "laptop"
    assert ("secret generic dropforge-trainer --namespace $TRAINING --from-env-file trainer.env" in script) == keyed
    assert ('--set "envFrom[0].secretRef.name=dropforge-connections"' in script) == keyed
    assert ("dropforge-trainer --namespace $TRAINING --from-literal" in script) != keyed
    # The order: what MLflow names is made before it.
    assert script.index("secret generic dropforge-connections") < script.index("--install mlflow")


def test_the_last_check_starts_a_pod_that_needs_image_and_bucket() -> None:
    for size, on in PAIRS:
        step = chosen(size, on)[-1]
        words = shlex.split(step.check.partition("&&")[0])
        assert words[:3] == ["dropforge", "doctor", "--cluster"]
        assert words[words.index("--pod") + 1] == "$BUCKET"


@pytest.mark.parametrize(
    ("status", "done"),
    [
        ("CREATE_COMPLETE", True),
        ("UPDATE_COMPLETE", True),
        ("CREATE_IN_PROGRESS", False),
        ("ROLLBACK_COMPLETE", False),
        ("UPDATE_ROLLBACK_COMPLETE", False),
        ("UPDATE_COMPLETE_CLEANUP_IN_PROGRESS", False),
    ],
)
def test_a_stack_that_exists_and_is_not_whole_is_not_taken_for_done(tmp_path: Path, status: str, done: bool) -> None:
    (step,) = (step for step in STEPS if step.name == "aws")
    (tmp_path / "aws").write_text(f"#!/bin/sh\necho {status}\n")
    (tmp_path / "aws").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    assert (subprocess.run(["bash", "-c", step.check], env=env, capture_output=True).returncode == 0) == done


@pytest.mark.parametrize(
    ("rollout", "nodes", "done"),
    [
        (0, "", True),  # no GPU node yet
        (0, "n1=8\nn2=4\n", True),
        (0, "n1=8\nn2=\n", False),
        (0, "n1=0\n", False),
        (1, "", False),
    ],
)
def test_gpus_of_eks_are_there_when_each_gpu_node_offers_them(
    tmp_path: Path, rollout: int, nodes: str, done: bool
) -> None:
    (step,) = (step for step in STEPS if step.name == "device-plugin")
    (tmp_path / "nodes").write_text(nodes)
    (tmp_path / "kubectl").write_text(f'#!/bin/sh\n[ "$1" = get ] && exec cat {tmp_path}/nodes\nexit {rollout}\n')
    (tmp_path / "kubectl").chmod(0o755)
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    told = subprocess.run(["bash", "-c", step.check], env=env, capture_output=True, text=True)
    assert (told.returncode == 0) == done
    assert told.stdout == ("" if done or rollout else nodes.splitlines()[-1] + "\n")


def test_the_page_of_eks_takes_karpenters_template_of_the_plans_version() -> None:
    (step,) = (step for step in STEPS if step.name == "karpenter")
    page = (ROOT / "docs" / "how-to" / "install" / "eks.md").read_text()
    (find,) = re.findall(r"VERSION=\$\(dropforge install --plan --on eks \| (.*)\)$", page, re.MULTILINE)
    plan = text("team", "eks", FILES, {})
    done = subprocess.run(["bash", "-c", find], input=plan, text=True, capture_output=True, check=True)
    assert step.chart is not None
    assert done.stdout == f"{step.chart.version}\n"


def test_loki_gets_its_bucket_in_the_region_that_its_chart_is_told() -> None:
    (step,) = (step for step in STEPS if step.name == "loki")
    assert step.chart is not None
    assert "--logs-bucket $LOGS_BUCKET" in step.before[0]
    assert {"loki.storage.s3.region=$REGION", "loki.storage.bucketNames.chunks=$LOGS_BUCKET"} <= set(
        step.chart.settings
    )


def test_stacks_are_in_the_clusters_region_where_pod_identity_looks_for_its_associations() -> None:
    stacks = [line for step in STEPS for line in (*step.before, step.check) if "aws cloudformation " in line]
    assert len(stacks) == 3
    assert all("--region $REGION " in line for line in stacks)
    for page in ("aws.md", "eks.md"):
        for line in (ROOT / "docs" / "how-to" / "install" / page).read_text().splitlines():
            assert not line.startswith("    aws cloudformation ") or " --region " in line, line


def test_loki_is_where_it_gets_its_bucket() -> None:
    for size, on in PAIRS:
        names = {step.name for step in chosen(size, on)}
        datasources = merged("kube-prometheus-stack", size, on)["grafana"].get("additionalDataSources", [])
        assert {"loki", "alloy"} <= names if on == "eks" else not {"loki", "alloy"} & names
        assert bool(datasources) == (on == "eks")
    assert re.search(r"^REGION=.*\n(.*\n)*.*loki.storage.s3.region=\$REGION", text("team", "eks", FILES, {}), re.M)


def test_queues_begin_in_the_plans_namespace_and_changes_to_them_stay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (step,) = (step for step in STEPS if step.name == "kueue")
    (tmp_path / "helm-values").symlink_to(ROOT / "helm-values")
    monkeypatch.chdir(tmp_path)
    make = ["bash", "-c", f"TRAINING=team-a; {step.after[0]}"]
    subprocess.run(make, check=True)
    made = list(yaml.safe_load_all(run("queues", "render", "teams.yaml")))
    assert [one["metadata"]["name"] for one in made if one["kind"] == "LocalQueue"] == ["training"]
    assert {one["metadata"].get("namespace", "team-a") for one in made} == {"team-a"}
    # What recipes name as `compute.priority` is there; pods have no PriorityClass, which would pass by the queue.
    priorities = {one["metadata"]["name"]: one["value"] for one in made if one["kind"] == "WorkloadPriorityClass"}
    assert priorities["low"] < priorities["normal"] == 0 < priorities["urgent"]
    (tmp_path / "teams.yaml").write_text("of our own")
    subprocess.run(make, check=True)
    assert (tmp_path / "teams.yaml").read_text() == "of our own"


def test_our_commands_in_it_do_what_it_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "teams.yaml").write_text((ROOT / "helm-values/one-team.yaml").read_text())
    monkeypatch.chdir(tmp_path)
    known = {name: example for name, (example, _) in VARIABLES.items()} | {"SIZE": "team"}
    lines = {line for pair in PAIRS for step in chosen(*pair) for line in (*step.before, *step.after, step.check)}
    ours = [
        line
        for line in sorted(lines)
        if line.startswith(("dropforge manifests", "dropforge install", "dropforge queues"))
    ]
    assert len(ours) > 8
    for line in ours:
        told = run(*expanded(line, known))
        assert "kind:" in told or "Resources:" in told, line


def parsed(*words: str) -> list[Any]:
    return list(yaml.load_all(run(*words), Loader=yaml.CSafeLoader))


def expanded(line: str, known: dict[str, str]) -> list[str]:
    """The words of a command of ours, up to where the shell takes what it prints."""
    words = [re.sub(r"\$([A-Z_]+)", lambda found: known[found[1]], word) for word in shlex.split(line)]
    return words[1 : next((index for index, word in enumerate(words) if word in ("|", ">")), len(words))]


@pytest.mark.parametrize("size", SIZES)
def test_a_size_alone_prints_what_the_plan_applies_and_no_secret(
    size: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    image = f"r.example/a@sha256:{'a' * 64}"
    Path("images.lock").write_text(json.dumps({"airflow": image}))
    printed = parsed("install", "--size", size, "--namespace", "team-a")
    known = {"SIZE": size, "TRAINING": "team-a", "AIRFLOW_IMAGE": image}
    wanted: list[Any] = []
    for step in chosen(size, "any"):
        for line in step.before:
            if line.startswith("dropforge manifests") and line.endswith("| kubectl apply -f -"):
                wanted += parsed(*expanded(line, known))
    queues = (ROOT / "helm-values/one-team.yaml").read_text().replace("namespace: training\n", "namespace: team-a\n")
    Path("teams.yaml").write_text(queues)
    if size != "laptop":
        wanted += parsed("queues", "render", "teams.yaml")

    def named(found: list[Any]) -> dict[tuple[str, ...], Any]:
        return {(one["kind"], one["metadata"].get("namespace", ""), one["metadata"]["name"]): one for one in found}

    assert named(printed) == named(wanted)
    assert len(printed) == len(named(printed)), "twice"
    assert "Secret" not in {one["kind"] for one in printed}
    # Teams of one's own are taken in the place of the one, and may have several namespaces.
    Path("teams.yaml").write_text(queues.replace("  training:\n", "  ours:\n"))
    again = named(parsed("install", "--size", size, "--namespace", "team-a", "--namespace", "b"))
    assert (("LocalQueue", "team-a", "ours") in again) == (size != "laptop")
    assert ("Namespace", "", "b") in again


def test_a_size_prints_the_storage_that_is_asked_for_and_the_standard(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images.lock").write_text(json.dumps({"airflow": f"r.example/a@sha256:{'a' * 64}"}))
    volumes = "volumes: [{claim: hub, path: /hub, storage: nfs, read_only: false}]"
    Path("mine.yaml").write_text(f"extends: tiny\ncompute: {{backend: kubernetes, namespace: training, {volumes}}}\n")
    words = ("--enforce", "restricted", "--file-system", "fs-0123456789abcdef0", "--recipe", "mine.yaml")
    done = CliRunner().invoke(app, ["install", "--size", "team", *words, "--gigabytes", "300"])
    assert done.exit_code == 0, done.output
    found = {one["kind"]: one for one in yaml.safe_load_all(done.stdout)}
    assert found["StorageClass"]["parameters"]["fileSystemId"] == "fs-0123456789abcdef0"
    assert found["PersistentVolumeClaim"]["metadata"]["name"] == "hub"
    assert found["PersistentVolumeClaim"]["spec"]["resources"]["requests"] == {"storage": "300Gi"}
    assert found["Namespace"]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"
    (told,) = [line for line in done.stderr.splitlines() if "not among them" in line]
    assert "node-pools" in told
    assert not re.search("storage-classes|claims", told)


def test_what_a_size_alone_does_not_print_is_told() -> None:
    assert sorted((*install.BY_SIZE, *install.OTHERS)) == sorted(manifests._KINDS)


@pytest.mark.parametrize(
    ("lock", "words", "told"),
    [
        ({}, [], "images.lock: it names no image of Airflow"),
        ({"airflow": "r.example/a:1"}, [], "names no image by its digest"),
        ({"airflow": f"r.example/a@sha256:{'a' * 64}"}, ["--namespace", "a", "--namespace", "b"], "teams.yaml"),
    ],
)
def test_a_size_alone_prints_nothing_where_something_is_missing(
    lock: dict[str, str], words: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("images.lock").write_text(json.dumps(lock))
    done = CliRunner().invoke(app, ["install", "--size", "team", *words])
    assert isinstance(done.exception, DropforgeError)
    assert told in str(done.exception)
    assert done.stdout == ""


def test_steps_come_after_what_they_need() -> None:
    names = [step.name for step in STEPS]
    assert len(names) == len(set(names))
    for before, after in (
        ("training-operator", "kueue"),  # whose webhooks guard the operator's jobs
        ("trainer", "kueue"),
        ("namespaces", "trainer"),
        ("namespaces", "settings"),
        ("keys", "airflow"),
        ("postgres", "mlflow"),
        ("databases", "mlflow"),
        ("settings", "mlflow"),
        ("mlflow", "airflow"),
        ("airflow", "job-triggerer"),
        ("prometheus", "watching"),
        ("prometheus", "dcgm-exporter"),  # a ServiceMonitor needs its kind
    ):
        assert names.index(before) < names.index(after)
    assert {"node-problem-detector", "doctor"} <= set(names)
    for size, on in PAIRS:
        assert [step.name for step in chosen(size, on)][-1] == "doctor"
        gpus = {"gpu-operator", "device-plugin"} & {step.name for step in chosen(size, on)}
        assert len(gpus) == 1 or size == "laptop"


def test_helm_does_not_wait_for_airflow_whose_services_wait_for_a_hook_that_comes_after() -> None:
    told = run("install", "--plan")
    commands_of_helm = re.findall(r"helm upgrade(?:.*\\\n)+.*", told)
    waiting = {command.split()[3]: "--wait" in command for command in commands_of_helm}
    assert waiting["mlflow"]
    assert not waiting["airflow"]
    assert told.index("rollout status --namespace airflow deployment/airflow-api-server") < told.index("kubectl exec")


def test_images_of_the_lock_and_what_was_asked_stand_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lock = {name: f"r.example/dropforge-{name}@sha256:{'a' * 64}" for name in ("airflow", "mlflow")}
    (tmp_path / "images.lock").write_text(json.dumps(lock))
    monkeypatch.chdir(tmp_path)  # not the repository's folder
    told = run("install", "--plan", "--size", "team", "--on", "eks", "--bucket", "drops-1")
    assert f"AIRFLOW_IMAGE=r.example/dropforge-airflow@sha256:{'a' * 64} " in told
    assert "BUCKET=drops-1 " in told
    assert "helm-values/airflow.yaml" in told
    shown = subprocess.run(
        ["bash", "-c", 'I=r.example/a@sha256:aa; echo "${I%@*} ${I#*@}"'], capture_output=True, text=True
    ).stdout
    assert shown == "r.example/a sha256:aa\n"


def test_where_pods_have_no_roles_the_last_step_asks_the_s3_that_trainings_ask(tmp_path: Path) -> None:
    def last(size: Any, on: Any) -> str:
        return "\n".join(commands(chosen(size, on)[-1], size, on, set()))

    (tmp_path / "settings.env").write_text("DROPFORGE_BUCKET=acme\n")
    given = "MLFLOW_TRACKING_URI=http://mlflow.airflow:5000\n# AWS_DEFAULT_REGION=\n"
    given += "AWS_ENDPOINT_URL=https://s3.example\nAWS_SECRET_ACCESS_KEY=a$b/c+d==\n"
    (tmp_path / "trainer.env").write_text(given)
    for size, on in (("laptop", "any"), ("team", "nebius"), ("team", "any")):
        asked = 'echo "$AWS_ENDPOINT_URL $AWS_SECRET_ACCESS_KEY $DROPFORGE_BUCKET ${MLFLOW_TRACKING_URI-none}"'
        script = f"{last(size, on)}\nbash -c '{asked}'"
        done = subprocess.run(
            ["bash", "-c", script],
            cwd=tmp_path,
            input="word\n",
            capture_output=True,
            text=True,
            env={"PATH": "/usr/bin:/bin"},
        )
        assert done.stdout == "https://s3.example a$b/c+d== acme none\n", done.stderr
        env = {"PATH": "/usr/bin:/bin", "AWS_SECRET_ACCESS_KEY": "of somebody who uploads"}
        done = subprocess.run(
            ["bash", "-c", script], cwd=tmp_path, input="word\n", capture_output=True, text=True, env=env
        )
        assert done.stdout == "https://s3.example of somebody who uploads acme none\n", done.stderr
    (tmp_path / "trainer.env").unlink()
    script = f"set -e\n{last('team', 'eks')}\necho $DROPFORGE_BUCKET"
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, input="word\n", capture_output=True, text=True)
    assert done.stdout == "acme\n", done.stderr


def test_what_stands_in_a_lock_or_is_given_is_no_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    evil = 'x"$(touch made)"; touch made\ntouch made'
    with pytest.raises(DropforgeError, match="bucket 'x"):
        run("install", "--plan", "--size", "team", "--on", "eks", "--bucket", evil)
    told = run("install", "--plan", "--size", "team", "--on", "eks", "--cluster", evil)
    head = told[: told.index("\n\n# 1. ")]
    subprocess.run(["bash", "-c", head], check=True)
    assert not (tmp_path / "made").exists()
    (tmp_path / "images.lock").write_text(json.dumps({"airflow": f"r.example/a@sha256:{'a' * 64}\ntouch made"}))
    with pytest.raises(DropforgeError, match="names no image by its digest"):
        run("install", "--plan")


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--aws", "--logs-bucket", "acme-logs", "--bucket", "b", "--cluster", "c"], "a template of its own"),
        (["--aws", "--logs-bucket", "Acme", "--cluster", "c"], "bucket 'Acme'"),
        (["--aws", "--logs-bucket", "acme-logs"], "--cluster"),
        (["--plan", "--size", "huge"], "size 'huge'"),
        (["--plan", "--on", "mars"], "place 'mars'"),
        (["--plan", "--size", "laptop", "--on", "eks"], "has no role there"),
        (["--plan", "--namespace", "a", "--namespace", "b"], "a plan is for one namespace"),
        (["--plan", "--namespace", "Bad_Name"], "namespace 'Bad_Name'"),
        (["--plan", "--bucket", "UPPER"], "bucket 'UPPER'"),
        (["--plan", "--airflow-namespace", "mine"], "option --airflow-namespace: it is for the template"),
        (["--size", "team", "--kms-key", "arn:aws:kms:eu-west-1:1:key/a"], "option --kms-key: it is for the template"),
        (["--plan", "--aws"], "it needs one order"),
        (["--plan", "--enforce", "restricted"], "for the manifests of a size"),
        ([], "it needs one order"),
        (["--size", "huge"], "size 'huge'"),
    ],
)
def test_what_there_is_no_plan_for_is_said(words: list[str], told: str) -> None:
    with pytest.raises(DropforgeError, match=told):
        run("install", *words)


def test_pages_name_files_that_are_there_and_samples_are_yaml() -> None:
    pages = [*(ROOT / "docs" / "how-to" / "install").glob("*.md"), ROOT / "helm-values" / "README.md"]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)(?:#[^)]*)?\)", page.read_text()):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"
        for name in re.findall(r"(?:docs/how-to/install|helm-values)/[\w./-]+\.(?:yaml|env)", page.read_text()):
            assert (ROOT / name).is_file(), f"{page.name}: {name}"
    folder = ROOT / "docs" / "how-to" / "install"
    samples = {path.name: yaml.safe_load(path.read_text()) for path in folder.glob("*.yaml")}
    cluster = samples["eks-cluster.yaml"]["metadata"]["name"]
    assert cluster == VARIABLES["CLUSTER"][0]
    (node_class,) = (one for one in yaml.safe_load_all(run(*POOLS)) if one["kind"] == "EC2NodeClass")
    mapped = samples["eks-cluster.yaml"]["iamIdentityMappings"][0]["arn"]
    assert mapped.endswith(f"role/{node_class['spec']['role']}")
    (disks,) = (one for one in samples["eks-cluster.yaml"]["addons"] if one["name"] == "aws-ebs-csi-driver")
    assert json.loads(disks["configurationValues"]) == {"defaultStorageClass": {"enabled": True}}
    tags = samples["eks-cluster.yaml"]["metadata"]["tags"]
    assert node_class["spec"]["subnetSelectorTerms"] == [{"tags": tags}]


POOLS = ("manifests", "node-pools", "--cluster", "training-1", "--instance", "g6.xlarge")
