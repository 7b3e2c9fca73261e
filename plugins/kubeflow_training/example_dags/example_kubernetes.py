"""A job of two pods on Kubernetes, with most of what a spec can say."""

from __future__ import annotations

from airflow.sdk import DAG

from kubeflow_training.jobs.spec import TrainingJobSpec
from kubeflow_training.operators import PyTorchJobOperator

# Any image with a shell and nc will do. For your own training, name your image, and `torchrun` with your script.
SCRIPT = """
echo "rank $RANK of $WORLD_SIZE, master $MASTER_ADDR:$MASTER_PORT"
if [ "$RANK" = 0 ]; then
  nc -l -p "$MASTER_PORT"
  sleep 3  # with the master's end the operator ends the worker, whose last words may not have been read
else
  echo "rank $RANK is here" > /scratch/greeting  # a file, as nc may end before a pipe has been written to
  until nc "$MASTER_ADDR" "$MASTER_PORT" < /scratch/greeting; do sleep 1; done
fi
"""

with DAG("example_kubernetes", schedule=None, params={"namespace": "default", "image": "busybox:1.37"}):
    # [START howto_kubernetes]
    PyTorchJobOperator(
        task_id="train",
        kubernetes_conn_id="kubernetes_default",
        spec=TrainingJobSpec(
            namespace="{{ params.namespace }}",
            image="{{ params.image }}",
            image_pull_policy="IfNotPresent",
            command=["sh", "-c", SCRIPT],
            nodes=2,
            processes_per_node=1,
            cpus=0.1,
            memory_gb=0.1,
            shm_gb=0.05,
            env={"EPOCHS": "3"},
            volumes=[{"name": "scratch", "emptyDir": {}}],
            mounts=[{"name": "scratch", "mountPath": "/scratch"}],
            spread="spread",
            grace_seconds=60,
            ttl_seconds=3600,
        ),
    )
    # [END howto_kubernetes]
