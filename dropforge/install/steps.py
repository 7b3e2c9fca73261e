"""What an installation consists of, in the order in which it is made: data, and nothing is done here.

Commands are for a shell with the variables of `VARIABLES`. Versions are pinned here alone. Each chart's values are
files of `helm-values/`, see `dropforge.install.plan`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Literal

from dropforge.errors import DropforgeError

Size = Literal["laptop", "team", "production"]
Place = Literal["eks", "nebius", "any"]
SIZES: Final[tuple[Size, ...]] = ("laptop", "team", "production")
PLACES: Final[tuple[Place, ...]] = ("eks", "nebius", "any")


def size_named(name: str) -> Size:
    """The size of this name. :raises DropforgeError: if there is none."""
    found = next((one for one in SIZES if one == name), None)
    if found is None:
        raise DropforgeError(f"size {name!r}", "there is none such", f"Give {', '.join(SIZES)}")
    return found


def has_roles(size: Size, on: Place) -> bool:
    """Whether pods of such an installation may have roles, and so need no keys: another cluster may give them."""
    return on == "eks" or (on == "any" and size != "laptop")


_LARGE: Final[tuple[Size, ...]] = ("team", "production")
_IN: Final = "--namespace airflow"
#: On the server, since `apply` itself would keep a Secret's values in an annotation too.
_REPLACE: Final = "--dry-run=client --output yaml | kubectl apply --server-side --force-conflicts -f -"


@dataclass(frozen=True)
class Chart:
    """A release of Helm's.

    :param release: its name, and that of its values' files. :param chart: its address: `oci://...`, a folder of this
        repository, or a name in `repository`. :param version: empty for a folder. :param settings: of `--set`.
    :param without_roles: further ones, where pods have no roles and are given keys.
    :param wait: whether Helm waits for its pods; not where they wait for a hook of the chart, which runs after that.
    """

    release: str
    chart: str
    version: str
    namespace: str
    repository: str = ""
    settings: tuple[str, ...] = ()
    without_roles: tuple[str, ...] = ()
    wait: bool = True


@dataclass(frozen=True)
class Step:
    """One thing to install.

    :param what: it is. :param why: it is needed. :param before, after: commands around the chart's.
    :param without_roles: in the place of `before` where pods have no roles and are given keys.
    :param check: a command that succeeds once the step is done.
    :param sizes, places: where it is taken.
    """

    name: str
    what: str
    why: str
    check: str
    before: tuple[str, ...] = ()
    without_roles: tuple[str, ...] = ()
    chart: Chart | None = None
    after: tuple[str, ...] = ()
    sizes: tuple[Size, ...] = SIZES
    places: tuple[Place, ...] = PLACES


#: What differs between installations: an example of each, and what it is.
VARIABLES: Final = {
    "BUCKET": ("acme-dropforge", "of drops, datasets and runs"),
    "LOGS_BUCKET": ("acme-logs", "of the logs of all pods"),
    "REGION": ("eu-west-1", "of cluster and buckets"),
    "CLUSTER": ("training-1", "as EKS calls it"),
    "TRAINING": ("training", "namespace of trainings"),
    "INSTANCE": ("p5.48xlarge", "of `dropforge instances`, for trainings"),
    "ZONE": ("eu-west-1a", "of the subnet; EFA ends there"),
    "SUBNET": ("subnet-0123456789abcdef0", "where FSx has its servers: that of the nodes"),
    "SECURITY_GROUP": ("sg-0123456789abcdef0", "that lets nodes connect to FSx, TCP 988 and 1018 to 1023"),
    "FILE_SYSTEM": ("fs-0123456789abcdef0", "of EFS"),
    "AIRFLOW_IMAGE": ("registry.example/dropforge-airflow@sha256:...", "of images.lock"),
    "MLFLOW_IMAGE": ("registry.example/dropforge-mlflow@sha256:...", "of images.lock"),
    "TRAINER_IMAGE": ("registry.example/dropforge-trainer@sha256:...", "of images.lock"),
    "CURATION_IMAGE": ("registry.example/dropforge-curation@sha256:...", "of images.lock"),
}


def _rollout(namespace: str, *objects: str) -> str:
    return " && ".join(f"kubectl rollout status --namespace {namespace} {one} --timeout 10m" for one in objects)


_TRAINER: Final = "deployment/kubeflow-trainer-controller-manager"
#: A stack that is being made, or was rolled back, exists as well.
_STACK: Final = (
    "aws cloudformation describe-stacks --region $REGION --stack-name {} --query 'Stacks[0].StackStatus' --output text "
    "| grep -xE '(CREATE|UPDATE)_COMPLETE'"
)

STEPS: Final = (
    Step(
        "namespaces",
        "Namespaces, accounts and rights",
        "Airflow starts jobs in namespaces of trainings, and may do nothing else there; pods of trainings have an "
        "account of their own",
        # Not `auth can-i`: it says no as long as the kind PyTorchJob is not there.
        check="kubectl get rolebinding --namespace $TRAINING kubeflow-training-airflow",
        before=("dropforge manifests namespaces rights --namespace $TRAINING --size $SIZE | kubectl apply -f -",),
    ),
    Step(
        "aws",
        "Bucket, queue and a role per component",
        "Drops are announced by SQS, and no part needs a key",
        check=_STACK.format("dropforge"),
        before=(
            "dropforge install --aws --bucket $BUCKET --cluster $CLUSTER --namespace $TRAINING > dropforge-aws.yaml",
            # Of the cluster: by Pod Identity the stack tells it who gets which role.
            "aws cloudformation deploy --region $REGION --stack-name dropforge --template-file dropforge-aws.yaml "
            "--capabilities CAPABILITY_IAM",
        ),
        places=("eks",),
    ),
    Step(
        "gpu-operator",
        "NVIDIA's driver, device plugin and feature discovery",
        "Nodes offer nvidia.com/gpu only by it; DCGM is watched by the exporter below",
        check="kubectl get nodes -o jsonpath='{.items[*].status.allocatable.nvidia\\.com/gpu}' | grep -q '[1-9]'",
        chart=Chart(
            "gpu-operator", "gpu-operator", "v25.10.0", "gpu-operator", repository="https://helm.ngc.nvidia.com/nvidia"
        ),
        sizes=_LARGE,
        places=("any", "nebius"),
    ),
    Step(
        "device-plugin",
        "NVIDIA's device plugin",
        "Nodes offer nvidia.com/gpu only by it; the driver is in EKS's accelerated images. The check names nodes whose "
        "GPUs are not offered: run it again once the first GPU node is there",
        # Pools begin empty, so no node is no fault; the rollout tells a plugin that is not there.
        check=_rollout("kube-system", "daemonset/nvidia-device-plugin")
        + " && kubectl get nodes --selector karpenter.k8s.aws/instance-gpu-manufacturer=nvidia --output "
        "jsonpath='{range .items[*]}{.metadata.name}={.status.allocatable.nvidia\\.com/gpu}{\"\\n\"}{end}' "
        "| { ! grep -v '=[1-9]'; }",
        chart=Chart(
            "nvidia-device-plugin",
            "nvidia-device-plugin",
            "0.18.2",
            "kube-system",
            repository="https://nvidia.github.io/k8s-device-plugin",
        ),
        places=("eks",),
    ),
    Step(
        "efa",
        "The EFA device plugin",
        "Nodes offer vpc.amazonaws.com/efa, which jobs on several nodes ask for, only by it",
        check="kubectl get daemonset --namespace kube-system aws-efa-k8s-device-plugin",
        chart=Chart(
            "aws-efa-k8s-device-plugin",
            "aws-efa-k8s-device-plugin",
            "0.5.10",
            "kube-system",
            repository="https://aws.github.io/eks-charts",
        ),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "karpenter",
        "Karpenter, and a pool for each kind of instance",
        "Nodes come when pods wait, and go when they are empty",
        check="kubectl wait nodepools --all --for condition=Ready --timeout 2m",
        chart=Chart(
            "karpenter",
            "oci://public.ecr.aws/karpenter/karpenter",
            "1.8.1",
            "kube-system",
            settings=("settings.clusterName=$CLUSTER", "settings.interruptionQueue=$CLUSTER"),
        ),
        after=(
            "dropforge manifests node-pools --cluster $CLUSTER --instance $INSTANCE --zone $ZONE | kubectl apply -f -",
        ),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "fsx",
        "The driver of FSx for Lustre",
        "Models and datasets that many nodes read at once",
        check=_rollout("kube-system", "deployment/fsx-csi-controller"),
        chart=Chart(
            "aws-fsx-csi-driver",
            "aws-fsx-csi-driver",
            "1.17.0",
            "kube-system",
            repository="https://kubernetes-sigs.github.io/aws-fsx-csi-driver",
        ),
        after=(
            "dropforge manifests storage-classes --subnet $SUBNET --security-group $SECURITY_GROUP "
            "| kubectl apply -f -",
        ),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "efs",
        "The driver of EFS",
        "A cheaper shared folder: curation's work, caches that are read now and then",
        check=_rollout("kube-system", "deployment/efs-csi-controller"),
        chart=Chart(
            "aws-efs-csi-driver",
            "aws-efs-csi-driver",
            "3.2.3",
            "kube-system",
            repository="https://kubernetes-sigs.github.io/aws-efs-csi-driver",
        ),
        after=("dropforge manifests storage-classes --file-system $FILE_SYSTEM | kubectl apply -f -",),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "virtiofs",
        "The driver of Nebius's shared filesystems",
        "Models and datasets that many nodes read at once; the node group mounts the filesystem",
        check="kubectl get storageclass csi-mounted-fs-path-sc",
        chart=Chart(
            "csi-mounted-fs-path",
            "oci://cr.nebius.cloud/mk8s/helm/csi-mounted-fs-path",
            "0.1.5",
            "kube-system",
            settings=("dataDir=/mnt/data/csi-mounted-fs-path-data/",),
        ),
        sizes=_LARGE,
        places=("nebius",),
    ),
    Step(
        "training-operator",
        "Kubeflow's training operator 1.9.4",
        "It makes the pods of a PyTorchJob and gives each the others' addresses. It has no chart",
        check=_rollout("kubeflow", "deployment/training-operator"),
        before=(
            "kubectl apply --server-side -k "
            "'https://github.com/kubeflow/training-operator.git/manifests/overlays/standalone?ref=v1.9.4'",
        ),
    ),
    Step(
        "trainer",
        "Kubeflow Trainer 2.3.0 with JobSet, and the runtime of TrainJobs in $TRAINING",
        "Jobs are TrainJobs where it is there, unless a recipe's `compute.kind` names another kind; the training "
        "operator has the others. It has its own namespace, kubeflow-system. Where JobSet is installed already, apply "
        "that overlay without its line third-party/jobset",
        check=_rollout("kubeflow-system", _TRAINER) + " && kubectl get trainingruntime --namespace $TRAINING dropforge",
        before=(
            "kubectl apply --server-side -k "
            "'https://github.com/kubeflow/trainer.git/manifests/overlays/manager?ref=v2.3.0'",
            # Its webhook guards runtimes.
            _rollout("kubeflow-system", _TRAINER),
            "dropforge manifests runtime --namespace $TRAINING | kubectl apply -f -",
        ),
        sizes=_LARGE,
    ),
    Step(
        "kueue",
        "Kueue",
        "Jobs start whole or wait, by quotas and priorities of teams. After the operators, whose jobs it "
        "guards. teams.yaml begins with one team in $TRAINING: change it to your nodes, and give the step again "
        "(docs/how-to/team-queues.md)",
        check=_rollout("kueue-system", "deployment/kueue-controller-manager"),
        chart=Chart("kueue", "oci://registry.k8s.io/kueue/charts/kueue", "0.19.0", "kueue-system"),
        after=(
            "test -e teams.yaml || "
            'sed "s/namespace: training$/namespace: $TRAINING/" helm-values/one-team.yaml > teams.yaml',
            "dropforge queues render teams.yaml | kubectl apply --server-side -f -",
        ),
        sizes=_LARGE,
    ),
    Step(
        "spark-operator",
        "The Spark operator",
        "Curation of drops that one machine is too small for",
        check=_rollout("spark-operator", "deployment/spark-operator-controller"),
        chart=Chart(
            "spark-operator",
            "spark-operator",
            "2.4.0",
            "spark-operator",
            repository="https://kubeflow.github.io/spark-operator",
            settings=("spark.jobNamespaces={$TRAINING}",),
        ),
        after=(
            'sed "s/NAMESPACE/$TRAINING/" helm-values/spark-driver.yaml | kubectl apply --namespace $TRAINING -f -',
        ),
        sizes=_LARGE,
    ),
    Step(
        "node-problem-detector",
        "node-problem-detector, with rules for GPUs",
        "A node whose GPU or NVLink is broken is marked, and is avoided",
        check=_rollout("kube-system", "daemonset/node-problem-detector"),
        chart=Chart(
            "node-problem-detector",
            "oci://ghcr.io/deliveryhero/helm-charts/node-problem-detector",
            "2.3.14",
            "kube-system",
        ),
        sizes=_LARGE,
    ),
    Step(
        "prometheus",
        "Prometheus, Alertmanager and Grafana",
        "Figures of nodes, GPUs, Airflow and trainings, and who is alerted when they are wrong",
        # The operator makes the servers, so that Helm does not wait for them: without a disk they never come.
        check=_rollout(
            "monitoring",
            "deployment/kube-prometheus-stack-operator",
            "statefulset/prometheus-kube-prometheus-stack-prometheus",
        ),
        before=("dropforge manifests grafana-login | kubectl create -f -",),
        chart=Chart(
            "kube-prometheus-stack",
            "kube-prometheus-stack",
            "81.4.5",
            "monitoring",
            repository="https://prometheus-community.github.io/helm-charts",
        ),
        sizes=_LARGE,
    ),
    Step(
        "dcgm-exporter",
        "DCGM's exporter",
        "Use, memory, temperature, Xid and NVLink errors of each GPU, with the pod that has it",
        check=_rollout("monitoring", "daemonset/dcgm-exporter"),
        chart=Chart(
            "dcgm-exporter",
            "dcgm-exporter",
            "4.1.3",
            "monitoring",
            repository="https://nvidia.github.io/dcgm-exporter/helm-charts",
        ),
        sizes=_LARGE,
    ),
    Step(
        "loki",
        "Loki",
        "Logs of all pods, found by their labels; chunks are in a bucket of their own, by the role of its account",
        check=_rollout("monitoring", "statefulset/loki"),
        before=(
            "dropforge install --aws --logs-bucket $LOGS_BUCKET --cluster $CLUSTER > dropforge-logs-aws.yaml",
            "aws cloudformation deploy --region $REGION --stack-name dropforge-logs "
            "--template-file dropforge-logs-aws.yaml --capabilities CAPABILITY_IAM",
        ),
        chart=Chart(
            "loki",
            "loki",
            "6.46.0",
            "monitoring",
            repository="https://grafana.github.io/helm-charts",
            settings=(
                "loki.storage.s3.region=$REGION",
                "loki.storage.bucketNames.chunks=$LOGS_BUCKET",
                "loki.storage.bucketNames.ruler=$LOGS_BUCKET",
            ),
        ),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "alloy",
        "Alloy on each node",
        "It sends the logs of pods to Loki, with namespace, pod, container, job and replica as labels",
        check=_rollout("monitoring", "daemonset/alloy"),
        chart=Chart("alloy", "alloy", "1.4.0", "monitoring", repository="https://grafana.github.io/helm-charts"),
        sizes=_LARGE,
        places=("eks",),
    ),
    Step(
        "keys",
        "Airflow's keys",
        "Kept by you, as the chart's own would change with each upgrade. `create` refuses to replace them: keep a copy "
        "of the Fernet key elsewhere",
        check="kubectl get secret --namespace airflow dropforge-airflow-keys",
        before=("dropforge manifests keys --size $SIZE | kubectl create -f -",),
    ),
    Step(
        "postgres",
        "PostgreSQL in the cluster",
        "Airflow's and MLflow's databases. Where you have a managed one, leave this out",
        check=_rollout("airflow", "statefulset/postgres"),
        before=(f"kubectl apply {_IN} -f helm-values/postgres.yaml",),
        sizes=("laptop",),
    ),
    Step(
        "databases",
        "The addresses of the databases",
        "Two databases of a managed PostgreSQL. Each file holds postgresql+psycopg2://USER:PASSWORD@HOST:5432/NAME "
        "without an end of line, which would belong to the name (`printf %s ADDRESS > FILE`), and is removed",
        check="kubectl get secret --namespace airflow dropforge-airflow-database dropforge-mlflow-database",
        before=(
            # One command: what no Secret holds yet is not removed.
            f"kubectl create secret generic dropforge-airflow-database {_IN} "
            "--from-file connection=airflow-database.txt && "
            f"kubectl create secret generic dropforge-mlflow-database {_IN} --from-file uri=mlflow-database.txt && "
            "shred -u airflow-database.txt mlflow-database.txt",
        ),
        sizes=_LARGE,
    ),
    Step(
        "settings",
        "Settings, connections and the preset of this installation",
        "What no other installation has: bucket, queue, addresses, image. Change the copies of the three files first; "
        "after a later change give the step again. Images of the preset with our names become those of images.lock",
        check="kubectl get --namespace airflow configmap/dropforge-settings secret/dropforge-connections "
        "configmap/dropforge-presets",
        before=(
            'sed -e "s|image: [^ ,}]*/dropforge-trainer[:@][^ ,}]*|image: ${TRAINER_IMAGE:?}|" '
            '-e "s|image: [^ ,}]*/dropforge-curation[:@][^ ,}]*|image: ${CURATION_IMAGE:?}|" preset.yaml > preset.new '
            "&& mv preset.new preset.yaml",
            f"kubectl create configmap dropforge-settings {_IN} --from-env-file settings.env {_REPLACE}",
            f"kubectl create secret generic dropforge-connections {_IN} --from-env-file connections.env {_REPLACE}",
            f"kubectl create configmap dropforge-presets {_IN} --from-file cluster.yaml=preset.yaml {_REPLACE}",
        ),
    ),
    Step(
        "trainer-secret",
        "What pods of trainings know",
        "MLflow's address, and keys where they have no roles, in a copy of helm-values/trainer.env. `create` refuses "
        "to replace it",
        check="kubectl get secret --namespace $TRAINING dropforge-trainer",
        before=(
            "kubectl create secret generic dropforge-trainer --namespace $TRAINING "
            "--from-literal MLFLOW_TRACKING_URI=http://mlflow.airflow:5000",
        ),
        without_roles=(
            "kubectl create secret generic dropforge-trainer --namespace $TRAINING --from-env-file trainer.env",
        ),
    ),
    Step(
        "mlflow",
        "MLflow",
        "Runs, figures, models and their aliases. Its names are those that MLFLOW_SERVER_ALLOWED_HOSTS lets in",
        check=_rollout("airflow", "deployment/mlflow"),
        chart=Chart(
            "mlflow",
            "helm-values/mlflow",
            "",
            "airflow",
            settings=(
                "artifacts=s3://$BUCKET/mlflow",
                "image.repository=${MLFLOW_IMAGE%@*}",
                "image.digest=${MLFLOW_IMAGE#*@}",
            ),
            without_roles=("envFrom[0].secretRef.name=dropforge-connections",),
        ),
    ),
    Step(
        "airflow",
        "Airflow",
        "It starts, watches, retries and records. Helm ends when its database is migrated, for which its services wait",
        check=_rollout("airflow", "deployment/airflow-api-server", "deployment/airflow-scheduler"),
        chart=Chart(
            "airflow",
            "airflow",
            "1.22.0",
            "airflow",
            repository="https://airflow.apache.org",
            wait=False,
            settings=("images.airflow.repository=${AIRFLOW_IMAGE%@*}", "images.airflow.digest=${AIRFLOW_IMAGE#*@}"),
        ),
        after=(
            # Helm does not wait for it, and `exec` needs a pod that runs.
            _rollout("airflow", "deployment/airflow-api-server"),
            f"kubectl exec {_IN} --stdin --tty deployment/airflow-api-server -- airflow users create --role Admin "
            "--username admin --email admin@example.com --firstname Ad --lastname Min",
        ),
    ),
    Step(
        "job-triggerer",
        "Triggerers for jobs",
        "Full triggerers would push out the watcher of drops, so jobs have their own (queue `default`)",
        check=_rollout("airflow", "deployment/airflow-job-triggerer"),
        before=("dropforge manifests job-triggerer --size $SIZE --image $AIRFLOW_IMAGE | kubectl apply -f -",),
    ),
    Step(
        "watching",
        "Dropforge's metrics, alerts and dashboards",
        "What drops wait for, what trainings do and cost; each alert leads to its runbook. With AIRFLOW_USERNAME and "
        "AIRFLOW_PASSWORD in a Secret dropforge-metrics-login it reports the DAGs too",
        check=_rollout("airflow", "deployment/dropforge-metrics"),
        before=("dropforge manifests watching --image $AIRFLOW_IMAGE | kubectl apply -f -",),
        sizes=_LARGE,
    ),
    Step(
        "network-policies",
        "Which pods may connect to which",
        "A pod that trains on what others uploaded reaches S3 and MLflow, and neither Airflow nor its database. 443 "
        "is S3, 6443 or 443 Kubernetes' API, which Spark's drivers ask; name another port of your S3 by `--port`",
        check="kubectl get networkpolicies --namespace $TRAINING dropforge-training",
        before=(
            "dropforge manifests network-policies --namespace $TRAINING --port 443 --port 6443 | kubectl apply -f -",
        ),
        sizes=_LARGE,
    ),
    Step(
        "doctor",
        "What jobs need of the cluster, and the way of a drop, tried",
        "A pod of the preset has to get its image and to reach the bucket, and a test object to go from the bucket to "
        "Airflow's triggerer. The pod waits five minutes: where its node is made first, give the check again. Where "
        "pods have no roles, keys in your environment come before those of trainer.env, and have to write "
        "and delete below drops/, and to read and delete below ledger/",
        check="dropforge doctor --cluster --recipe preset.yaml --account airflow:airflow-worker --pod $BUCKET "
        "&& dropforge doctor --watcher",
        before=(
            'set -a; . ./settings.env; AIRFLOW_USERNAME=admin; read -rsp "Password: " AIRFLOW_PASSWORD; set +a',
            # Keys and address where pods have no roles; not sourced, as keys may have what means something to a shell.
            "test ! -e trainer.env || while read -r line; do name=${line%%=*}; "
            "export \"$name=${!name:-${line#*=}}\"; done < <(grep '^AWS_' trainer.env)",
        ),
    ),
)
