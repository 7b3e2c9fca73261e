"""A team's place on a cluster, as an installation leaves it: image, rights, queue, stack; and the runs there."""

from __future__ import annotations

import hashlib
import json
import os
import re
import subprocess
import sys
import sysconfig
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import yaml
from kubeflow_training.jobs.kinds import Kind, kind_named
from kubeflow_training.jobs.kubernetes.discovery import served
from kubernetes import client
from typer.testing import CliRunner

from dropforge import layout, tracking
from dropforge.cli.app import app
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.gangs import Gang, kept
from dropforge.install.keys import AIRFLOW
from dropforge.install.rights import ENFORCED
from dropforge.job import RUNTIME, SECRET
from tests.cluster.conftest import IMAGE, REPOSITORY, Namespace, claimed, kubectl, preset, started
from tests.cluster.queue_yard import queues
from tests.e2e.harness import Stack, wait
from tests.kubeflow_training.rights import admin, write_kubeconfig

_BUILDER = os.environ.get("DROPFORGE_IMAGE_BUILDER", "")
ACCOUNT, QUEUE = "dropforge-trainer", "training"
_PRESET = "team"
GANG = {"nodes": 2, "cpus": 0.9, "memory_gb": 2}
_ACCOUNT_OF_TASKS = "airflow-worker"


def _missing() -> str:
    if IMAGE:
        return ""
    if not _BUILDER:
        return "DROPFORGE_IMAGE_BUILDER names no tool that builds images, and DROPFORGE_TEST_IMAGE no image"
    if sys.version_info[:2] != (3, 11):
        return "the image has Python 3.11, and these tests run by another, whose packages its pods would mount"
    return ""


NO_IMAGE = _missing()
"""Why there can be no image for the pods; empty if there can."""


#: Build arguments of images whose packages are this machine's.
MOUNTED = {"trainer": ("VARIANT=mounted",), "mlflow": ("PACKAGES=mounted",)}


def built(service: str) -> tuple[str, float]:
    """An image on the node, and the seconds that it took to build and load."""
    if IMAGE and service == "trainer":
        return IMAGE, 0.0
    name, began = f"test.local/dropforge-{service}:whole-way", time.monotonic()
    load_image(REPOSITORY / "images" / service, name, *MOUNTED.get(service, ()), context=REPOSITORY)
    return name, time.monotonic() - began


def load_image(folder: Path, name: str, *arguments: str, context: Path | None = None) -> None:
    """Build an image and load it onto the node.

    :param folder: of its Dockerfile, and the context unless that is said. :param arguments: of the build.
    """
    given = [word for one in arguments for word in ("--build-arg", one)]
    command = [_BUILDER, str(folder / "Dockerfile"), str(context or folder), name, "--load", *given]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]


@dataclass(frozen=True)
class Place:
    """
    :param image: of the pods. :param built: seconds that it took to build. :param kind: of the jobs.
    :param presets: the folder of the team's preset.
    """

    stack: Stack
    namespace: Namespace
    image: str
    built: float
    kind: Kind
    presets: Path

    def drop(self, family: str, files: dict[str, Path], recipe: str | None = None) -> Course:
        """Upload the files, and wait until their run is there."""
        began = time.time()
        made = self.stack.drop(family, "one", files, recipe)
        return Course(self, family, began, wait_for_run(self.stack.connection, made))


@contextmanager
def place(machine_node: Any, folder: Path, recipe: dict[str, Any], *, curation: bool = False) -> Iterator[Place]:
    """A stack with the account of Airflow's tasks, whose pods come from the image and an account without rights, and
    wait in a team's queue with room for one gang.

    :param folder: an empty one. :param recipe: what the team's preset says beside that.
    :param curation: whether the curation's image is built too, for drops that ask for Spark.
    """
    image, seconds = built("trainer")
    claims = {"work": str(folder / "work")} if curation else {}
    with installed(machine_node, folder, **claims) as namespace:
        if curation:
            recipe = recipe | {"curation": {"spark": {"cluster": _curating(namespace.name)}}}
        # An older Kueue takes no TrainJobs, and the training operator's own container is not restricted.
        kind = "auto" if served(admin(), namespace.name, RUNTIME).queued else "Job"
        recipe = recipe | {"compute": {"kind": kind}}
        mark = namespace.name.removeprefix("test-")
        team = {"namespace": namespace.name, "queue": QUEUE, "largest": GANG}
        team["quota"] = {f"real-{mark}": {"cpus": 1.9, "memory_gb": 6}}
        file = {"flavors": {f"real-{mark}": {}}, "teams": {f"team-{mark}": team}}
        presets, state = _presets(folder / "presets", namespace, image, recipe), folder / "stack"
        state.mkdir()
        with queues(file), started(state, machine_node, namespace, presets, _PRESET, {}) as stack:
            yield Place(stack, namespace, image, seconds, kind_named("TrainJob" if kind == "auto" else kind), presets)


@contextmanager
def installed(machine_node: Any, folder: Path, **claims: str) -> Iterator[Namespace]:
    """What `dropforge manifests` prints of namespaces, rights and runtime, applied; restricted pods alone may come.

    :param folder: for the kubeconfig of Airflow's tasks. :param claims: as of `claimed`.
    """
    name, core = f"test-{uuid.uuid4().hex[:10]}", client.CoreV1Api()
    words = ("namespaces", "rights", "runtime", "--size", "team", "--namespace", name)
    printed = CliRunner().invoke(app, ["manifests", *words], catch_exceptions=False).stdout
    wide = [one for one in yaml.safe_load_all(printed) if "namespace" not in one["metadata"]]
    # What the cluster has already stays.
    made = [one for one in wide if kubectl("create", "-f", "-", feed=json.dumps(one)).returncode == 0]
    try:
        applied("apply", "-f", "-", feed=printed)
        applied("label", "--overwrite", "namespace", name, f"{ENFORCED}=restricted")
        # Its chart makes it.
        applied("apply", "-f", "-", "-n", AIRFLOW, feed=json.dumps(_account_of_tasks()))
        kubeconfig = write_kubeconfig(folder / "tasks.kubeconfig", AIRFLOW, _ACCOUNT_OF_TASKS)
        with claimed(name, machine_node, machine="/", **claims):
            yield Namespace(name, core, client.CustomObjectsApi(), kubeconfig)
    finally:
        applied("delete", "--wait=false", "-f", "-", feed=yaml.safe_dump_all(made))


def _curating(namespace: str) -> dict[str, Any]:
    """The section `curation.spark.cluster` of pods that have nothing of this machine. Makes their driver's account."""
    image, _ = built("curation")
    driver = (REPOSITORY / "helm-values" / "spark-driver.yaml").read_text().replace("NAMESPACE", namespace)
    applied("apply", "-n", namespace, "-f", "-", feed=driver)
    work = {"claim": "work", "path": "/work", "read_only": False}
    size = {"executors": 1, "memory": "600m", "cpu_request": "100m"}
    return size | {
        "submit": "spark-submit",
        "image": image,
        "namespace": namespace,
        "work_path": "/work",
        "volumes": [work],
    }


def _account_of_tasks() -> dict[str, Any]:
    return {"apiVersion": "v1", "kind": "ServiceAccount", "metadata": {"name": _ACCOUNT_OF_TASKS}}


def applied(*words: str, feed: str = "") -> None:
    done = kubectl(*words, feed=feed)
    assert done.returncode == 0, done.stderr


def packages(image: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A volume, and where its mount puts this machine's packages in an image without its own.

    :param image: its folder below /opt.
    """
    found = str(Path(sysconfig.get_path("purelib")).resolve()).lstrip("/")
    volume = {"name": "packages", "persistentVolumeClaim": {"claimName": "machine", "readOnly": True}}
    path = f"/opt/{image}/.venv/lib/python3.11/site-packages"
    return volume, {"name": "packages", "mountPath": path, "subPath": found, "readOnly": True}


@contextmanager
def serving(place: Place, model: str) -> Iterator[str]:
    """`mlflow models serve` of a registered model in MLflow's image; its address."""
    image, _ = built("mlflow")
    core, name = place.namespace.core, place.namespace.name
    volume, mount = packages("mlflow")
    container = {
        "name": "mlflow",
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "args": f"mlflow models serve -m models:/{model} --env-manager local --host 0.0.0.0 --port 5000".split(),
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "resources": {"requests": {"cpu": "50m", "memory": "1G"}, "limits": {"memory": "3G"}},
        "readinessProbe": {"httpGet": {"path": "/ping", "port": 5000}, "periodSeconds": 2},
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "capabilities": {"drop": ["ALL"]},
            "readOnlyRootFilesystem": True,
        },
        "volumeMounts": [mount, {"name": "tmp", "mountPath": "/tmp"}],
    }
    spec = {
        "restartPolicy": "Never",
        "automountServiceAccountToken": False,
        "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
        "containers": [container],
        "volumes": [volume, {"name": "tmp", "emptyDir": {}}],
    }
    core.create_namespaced_pod(name, {"metadata": {"name": "serving"}, "spec": spec})
    try:

        def ready() -> str:
            status = core.read_namespaced_pod("serving", name).status
            assert status.phase in {"Pending", "Running"}, core.read_namespaced_pod_log("serving", name)
            true = {one.type for one in status.conditions or [] if one.status == "True"}
            return f"http://{status.pod_ip}:5000" if "Ready" in true else ""

        yield str(wait("the served model", ready, 300))
    finally:
        core.delete_namespaced_pod("serving", name, grace_period_seconds=0)


def _presets(folder: Path, namespace: Namespace, image: str, recipe: dict[str, Any]) -> Path:
    """The folder of the team's preset."""
    found = preset(namespace.name)
    found |= recipe | {"compute": found["compute"] | recipe["compute"]}
    found["compute"] |= GANG | {"image": image, "queue": QUEUE, "service_account": ACCOUNT}
    if not IMAGE:
        _, mount = packages("dropforge")
        found["compute"]["volumes"] = [{"claim": "machine", "path": mount["mountPath"], "sub_path": mount["subPath"]}]
    folder.mkdir()
    (folder / f"{_PRESET}.yaml").write_text(yaml.safe_dump(found))
    return folder


def rank(pod: Any) -> int:
    """The rank of its node in the job."""
    return int(pod.metadata.labels["batch.kubernetes.io/job-completion-index"])


@dataclass(frozen=True)
class Course:
    """A run. :param dropped: Unix time of its drop."""

    place: Place
    family: str
    dropped: float
    dag_run: str

    @property
    def stack(self) -> Stack:
        return self.place.stack

    @property
    def namespace(self) -> Namespace:
        return self.place.namespace

    @property
    def run(self) -> str:
        """Its name, once it is opened."""
        (tracked,) = self.stack.tracked(self.dag_run)
        return str(tracked.data.tags[tracking.TAG_RUN])

    def pods(self) -> list[Any]:
        """Of its training, now, in the order of their ranks; they are named after their job."""
        found: list[Any] = self.namespace.core.list_namespaced_pod(self.namespace.name).items
        return sorted((pod for pod in found if pod.metadata.name.startswith(f"train-{self.family}-")), key=rank)

    def step(self) -> int:
        """The last one that rank 0 told."""
        told = 0
        for pod in self.pods():
            if rank(pod) == 0 and pod.status.phase == "Running":
                log = self.namespace.core.read_namespaced_pod_log(pod.metadata.name, self.namespace.name)
                told = max([told, *(int(step) for step in re.findall(r'@progress {"step": (\d+)', log))])
        return told

    def sealed(self) -> int:
        """The step of its newest complete checkpoint; 0 without one."""
        keys = self.stack.connection.store.sizes(f"{layout.run_prefix(self.run)}checkpoints/")
        return max((int(step) for key in keys for step in re.findall(r"/step-(\d+)/manifest\.json$", key)), default=0)

    def end(self) -> Any:
        """Wait for its model; its MLflow run."""
        assert self.stack.end(self.dag_run) == "success", self.stack.log(self.dag_run, "train")
        (tracked,) = self.stack.tracked(self.dag_run)
        assert tracked.info.status == "FINISHED"
        assert self.stack.champion(self.family) == tracked.data.tags[tracking.TAG_VERSION]
        return tracked

    def weights(self) -> str:
        """Digest of the registered model's weights."""
        data = self.stack.connection.store.get(f"runs/{self.run}/model/model.safetensors")
        return hashlib.sha256(data).hexdigest()

    def gangs(self) -> list[Gang]:
        return [gang for gang in kept(self.stack.connection.store, self.run) if gang.task == "train"]

    def job(self) -> dict[str, Any]:
        """The one that trained, or trains, as the cluster has it."""
        kind, labels = self.place.kind, f"dropforge/family={self.family},dropforge/purpose=train"
        place = (kind.group, kind.version, self.namespace.name, kind.plural)
        found = self.namespace.custom.list_namespaced_custom_object(*place, label_selector=labels)["items"]
        return dict(next(one for one in found if not kind.part_of_another(one)))

    def marks(self) -> Marks:
        """Of a run that is over, and had one gang."""
        (tracked,) = self.stack.tracked(self.dag_run)
        found = self.namespace.custom.list_namespaced_custom_object(
            "kueue.x-k8s.io", "v1beta2", self.namespace.name, "workloads"
        )["items"]
        name = self.job()["metadata"]["name"]
        (workload,) = [one for one in found if one["metadata"]["ownerReferences"][0]["name"] == name]
        conditions = {one["type"]: one["lastTransitionTime"] for one in workload["status"]["conditions"]}
        result = self.stack.xcom(FINETUNE, self.dag_run, "train", "return_value")
        result = json.loads(result) if isinstance(result, str) else result
        return Marks(
            dropped=self.dropped,
            opened=tracked.info.start_time / 1000,
            admitted=datetime.fromisoformat(conditions["Admitted"]).timestamp(),
            ended=tracked.info.end_time / 1000,
            pulled=float(result["durations"]["pulled"]),
            wall=json.loads(self.stack.connection.store.get(f"runs/{self.run}/report.json"))["wall"],
        )


@dataclass(frozen=True)
class Marks:
    """Unix times of a run's course, and what the trainer counted.

    :param pulled: seconds from the last pod's node to the last container's start. :param wall: of the report.
    """

    dropped: float
    opened: float
    admitted: float
    ended: float
    pulled: float
    wall: dict[str, float]

    def parts(self) -> dict[str, float]:
        """Seconds from the drop to the model, without a rest."""
        began, seconds = self.wall["began"], self.wall["seconds"]
        image = min(self.pulled, began - self.admitted)
        return {
            "intake, curation": self.opened - self.dropped,
            "queue": self.admitted - self.opened,
            "node": began - self.admitted - image,
            "image, container": image,
            "start-up": self.wall["load"],
            "data": self.wall["data"],
            "training": seconds - self.wall["load"] - self.wall["data"],
            "evaluation, registry": self.ended - began - seconds,
        }

    def __str__(self) -> str:
        return ", ".join(f"{name} {seconds:.1f} s" for name, seconds in self.parts().items())
