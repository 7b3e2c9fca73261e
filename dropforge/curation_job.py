"""A curation on Kubernetes: a SparkApplication, or a Job whose one pod is the driver that `spark-submit` starts.

Pure: the manifests as plain values, for the operator that also runs the training jobs. What a pod needs stands in the
pod templates, which Spark itself reads, so that the Spark operator's webhook is not needed.
https://www.kubeflow.org/docs/components/spark-operator/user-guide/writing-sparkapplication/
https://spark.apache.org/docs/latest/running-on-kubernetes.html
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from dropforge import layout, pod_rights
from dropforge.errors import DropforgeError
from dropforge.job import SECRET
from dropforge.recipe_spark import SparkCluster
from dropforge.volumes import pod_volumes

_PROGRAM: Final = "curation/spark_job/__main__.py"
_FAMILY_LENGTH: Final = 20
_ROLES: Final = {"driver": "spark-kubernetes-driver", "executor": "spark-kubernetes-executor"}
# For people to read: the image has its own. Never this worker's, which would make another job of it on the next one.
_SPARK_VERSION: Final = "4.3.0"
_PYTHON_PERCENT: Final = 40
KEPT_SECONDS: Final = 24 * 3600
"""How long what has ended can be looked at."""
TEMPLATE: Final = "DROPFORGE_SPARK_EXECUTOR"
"""Variable with the executors' pod template, for a driver that makes them itself."""


SETTINGS: Final = {
    # Milliseconds for an answer of the API server. Spark's own 10 s end the driver where server or node are busy.
    **{
        f"spark.kubernetes.{who}.{what}Timeout": "60000"
        for who in ("driver", "submission")
        for what in ("connection", "request")
    },
    # Executors need no name of the driver, which is known to the cluster's DNS only some time after its start.
    "spark.kubernetes.executor.useDriverPodIP": "true",
    # Pods mount claims that are there, and Spark makes none: so its driver needs no right to look for its own.
    "spark.kubernetes.driver.ownPersistentVolumeClaim": "false",
}
"""Of Spark, for both submitters."""


@dataclass(frozen=True)
class CurationJob:
    """What a driver has to do.

    :param counter: of the drop's claim; above 1 for forced re-runs.
    :param recipe: the resolved recipe.
    :param workdir: absolute folder on a volume that the driver and every executor mount under this path.
    :param result: object key for the outcome, `{"digest": ...}`.
    """

    family: str
    drop_id: str
    counter: int
    recipe: dict[str, Any]
    workdir: str
    result: str

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), indent=1, sort_keys=True, ensure_ascii=False).encode()

    @classmethod
    def from_json(cls, data: bytes) -> CurationJob:
        """:raises DropforgeError: if the text is no job."""
        try:
            job = cls(**json.loads(data))
            texts = (job.family, job.drop_id, job.workdir, job.result)
            if not all(isinstance(text, str) and text for text in texts) or not isinstance(job.recipe, dict):
                raise TypeError("a field has another type")
            if not job.workdir.startswith("/"):
                raise ValueError(f"workdir {job.workdir!r} is not absolute")
        except (ValueError, TypeError) as error:
            raise DropforgeError("curation job", f"it cannot be read: {error}", "Start the run again") from error
        return job

    @property
    def identity(self) -> str:
        """16 hexadecimal digits of what is to be done."""
        what = json.dumps([self.family, self.drop_id, self.counter, self.recipe], sort_keys=True)
        return hashlib.sha256(what.encode()).hexdigest()[:16]


def job_of(
    family: str, drop_id: str, counter: int, recipe: Mapping[str, Any], asked: SparkCluster
) -> tuple[CurationJob, str]:
    """The job of a drop and its folder in the bucket; the same for every try, so that a later one goes on."""
    made = CurationJob(family, drop_id, counter, dict(recipe), "/", "-")
    prefix = layout.curation_prefix(family, drop_id, made.identity)
    workdir = f"{asked.work_path.rstrip('/')}/{drop_id}-{made.identity}"
    return replace(made, workdir=workdir, result=f"{prefix}result.json"), prefix


def manifest(job: CurationJob, address: str, asked: SparkCluster) -> dict[str, Any]:
    """The job's manifest, of the kind that the recipe asks for.

    :param address: URI of the job file.
    """
    make = spark_application if asked.submit == "operator" else driver_job
    return make(job, address, asked)


def spark_application(job: CurationJob, address: str, asked: SparkCluster) -> dict[str, Any]:
    """`sparkoperator.k8s.io/v1beta2`. It is never restarted: whether to try again is the task's to say."""
    common: dict[str, Any] = {"cores": asked.cores, "memory": asked.memory}
    if asked.cpu_request is not None:
        common["coreRequest"] = asked.cpu_request
    driver = {**common, "serviceAccount": asked.service_account, "template": template(job, asked, "driver")}
    return {
        "apiVersion": "sparkoperator.k8s.io/v1beta2",
        "kind": "SparkApplication",
        "metadata": _metadata(job, asked),
        "spec": {
            "type": "Python",
            "mode": "cluster",
            "pythonVersion": "3",
            "sparkVersion": _SPARK_VERSION,
            "image": asked.image,
            "imagePullPolicy": "IfNotPresent",
            "mainApplicationFile": f"local://{asked.code}/{_PROGRAM}",
            "arguments": [address],
            "sparkConf": SETTINGS,
            "restartPolicy": {"type": "Never"},
            "timeToLiveSeconds": KEPT_SECONDS,
            "driver": driver,
            "executor": {
                **common,
                "instances": asked.executors,
                "serviceAccount": asked.service_account,
                "template": template(job, asked, "executor"),
            },
        },
    }


def driver_job(job: CurationJob, address: str, asked: SparkCluster) -> dict[str, Any]:
    """`batch/v1`: the pod is the driver, and the executors that it makes go with it."""
    pod = template(job, asked, "driver")
    container = pod["spec"]["containers"][0]
    container["command"] = ["python", "-m", "curation.spark_job.submit"]
    container["args"] = [*submission(asked), f"{asked.code}/{_PROGRAM}", address]
    fields = {"POD_NAME": "metadata.name", "POD_IP": "status.podIP", "POD_NAMESPACE": "metadata.namespace"}
    container["env"] = [
        *({"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}} for name, path in fields.items()),
        {"name": TEMPLATE, "value": json.dumps(template(job, asked, "executor"), sort_keys=True)},
    ]
    container["resources"] = {"requests": {"cpu": asked.cpu_request or str(asked.cores), "memory": _with_python(asked)}}
    pod["spec"] |= {"restartPolicy": "Never", "serviceAccountName": asked.service_account}
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": _metadata(job, asked),
        "spec": {
            "completionMode": "Indexed",
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": 0,
            "ttlSecondsAfterFinished": KEPT_SECONDS,
            "template": {"metadata": {"labels": _labels(job)}, **pod},
        },
    }


def submission(asked: SparkCluster) -> list[str]:
    """Arguments of `spark-submit`, but for those that only the pod knows."""
    settings = {
        "spark.kubernetes.container.image": asked.image,
        "spark.kubernetes.container.image.pullPolicy": "IfNotPresent",
        "spark.kubernetes.namespace": asked.namespace,
        "spark.kubernetes.authenticate.executor.serviceAccountName": asked.service_account,
        "spark.executor.instances": str(asked.executors),
        "spark.executor.cores": str(asked.cores),
        "spark.executor.memory": asked.memory,
        **SETTINGS,
        # Spark's own for programs in Python, but in client mode it takes 0.1, as for Java.
        "spark.executor.memoryOverheadFactor": f"{_PYTHON_PERCENT / 100:g}",
    }
    if asked.cpu_request is not None:
        settings["spark.kubernetes.executor.request.cores"] = asked.cpu_request
    confs = [part for name, value in settings.items() for part in ("--conf", f"{name}={value}")]
    return ["--deploy-mode", "client", "--driver-memory", asked.memory, *confs]


def template(job: CurationJob, asked: SparkCluster, role: str) -> dict[str, Any]:
    """The pod template of `driver` or `executor`."""
    held = pod_volumes(asked.volumes)
    container: dict[str, Any] = {
        "name": _ROLES[role],
        "image": asked.image,
        "imagePullPolicy": "IfNotPresent",
        "envFrom": [{"secretRef": {"name": SECRET}}],
        "volumeMounts": held.get("mounts", []),
        # The last lines of its log say more than an exit code.
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if asked.entrypoint:
        container["command"] = list(asked.entrypoint)
    spec: dict[str, Any] = {"containers": [container], "volumes": held.get("volumes", [])}
    # It is the driver that makes pods, also by an account that gives nobody its token unasked.
    spec["automountServiceAccountToken"] = role == "driver"
    if asked.run_as is not None:
        claims = {"runAsGroup": asked.run_as, "fsGroup": asked.run_as, "fsGroupChangePolicy": "OnRootMismatch"}
        spec["securityContext"] = {**pod_rights.pod(asked.run_as), **claims}
        container["securityContext"] = pod_rights.container()
    if asked.node_selector:
        spec["nodeSelector"] = dict(asked.node_selector)
    if asked.image_pull_secrets:
        spec["imagePullSecrets"] = [{"name": name} for name in asked.image_pull_secrets]
    if asked.tolerations:
        spec["tolerations"] = [item.model_dump(exclude_none=True) for item in asked.tolerations]
    return {"metadata": {"labels": _labels(job)}, "spec": spec}


def _with_python(asked: SparkCluster) -> str:
    """Kubernetes' word for the heap and what Python takes beside it, by Spark's own factor or least amount."""
    heap = int(asked.memory[:-1]) * (1024 if asked.memory.endswith("g") else 1)
    return f"{heap + max(heap * _PYTHON_PERCENT // 100, 384)}Mi"


def _metadata(job: CurationJob, asked: SparkCluster) -> dict[str, Any]:
    short = job.family[:_FAMILY_LENGTH].rstrip("-")
    return {"name": f"curate-{short}-{job.identity[:8]}", "namespace": asked.namespace, "labels": _labels(job)}


def _labels(job: CurationJob) -> dict[str, str]:
    return {
        "app.kubernetes.io/managed-by": "dropforge",
        "dropforge/family": job.family,
        "dropforge/purpose": "curate",
        "dropforge/curation": job.identity,
    }
