"""The two dashboards: for whoever runs the installation, and for whoever waits for a training.

`max by` takes one answer of several exporters, which all tell the same.
"""

from __future__ import annotations

from typing import Final

from dropforge.watching.panels import Dashboard, Panel, Query, Row

_F: Final = 'family=~"$family"'
_OPEN: Final = "preparing|waiting|training|judging|asked|unread"
_ENDED: Final = "finished|failed|killed"


def _runs(states: str) -> str:
    return f'max by (family, state, task, reason) (dropforge_runs{{{_F},state=~"{states}"}})'


def _age(metric: str, by: str = "family") -> str:
    return f"time() - min by ({by}) (dropforge_{metric}{{{_F}}})"


def _quantile(share: float, metric: str) -> str:
    rates = f"max by (family, le) (rate(dropforge_{metric}_bucket{{{_F}}}[1h]))"
    return f"histogram_quantile({share}, sum by (le) ({rates}))"


def _hours(what: str) -> str:
    """Of a day, from what was held every half minute: a sum of hours would fall with each run that is deleted."""
    return f"sum_over_time(({_newest(what)})[1d:30s]) / 120"


def _newest(metric: str) -> str:
    return f"max by (family) (dropforge_training_{metric}{{{_F}}})"


_DROPS: Final = Row(
    "Drops",
    (
        Panel(
            "Drops that wait for a run",
            (Query(f'max by (family) (dropforge_drops{{{_F},state="waiting"}})', "{{family}}"),),
        ),
        Panel(
            "Longest wait of a drop now",
            (Query(_age("drop_oldest_waiting_timestamp_seconds"), "{{family}}"),),
            unit="s",
            about="Nothing is shown of families in which none waits.",
        ),
        Panel(
            "Wait of a drop until its run, by the hour",
            (
                Query(_quantile(0.5, "drop_wait_seconds"), "half"),
                Query(_quantile(0.9, "drop_wait_seconds"), "nine of ten"),
            ),
            unit="s",
        ),
        Panel(
            "What happened to drops",
            (Query(f"sum by (state) (max by (family, state) (dropforge_drops{{{_F}}}))", "{{state}}"),),
            kind="stat",
        ),
        Panel(
            "Refused drops",
            (Query(f"max by (family) (dropforge_drops_refused{{{_F}}})", "{{family}}"),),
            about="`dropforge letters` lists each with its reason and fix.",
        ),
        Panel(
            "Messages",
            (
                Query("max(dropforge_inbox_messages)", "not worked through"),
                Query("max(dropforge_dead_messages)", "no S3 event"),
            ),
        ),
    ),
)
_RUNS: Final = Row(
    "Runs",
    (
        Panel("Open runs", (Query(f"sum by (state) ({_runs(_OPEN)})", "{{state}}"),)),
        Panel("Ended runs", (Query(f"sum by (state) ({_runs(_ENDED)})", "{{state}}"),), kind="stat"),
        Panel(
            "Failures by task and reason",
            (Query(f"sum by (family, task, reason) ({_runs('failed')}) >= 0"),),
            kind="table",
            about="A reason is its job's; a task without a job has none.",
        ),
        Panel(
            "Longest wait of a run for its pods now",
            (Query(_age("run_oldest_waiting_timestamp_seconds"), "{{family}}"),),
            unit="s",
        ),
        Panel(
            "Queue time of runs, by the hour",
            (
                Query(_quantile(0.5, "run_queue_seconds"), "half"),
                Query(_quantile(0.9, "run_queue_seconds"), "nine of ten"),
            ),
            unit="s",
        ),
        Panel(
            "The gate's decisions",
            (
                Query(
                    f"sum by (decision) (max by (family, decision) (dropforge_gate_decisions{{{_F}}}))", "{{decision}}"
                ),
            ),
            kind="stat",
        ),
        Panel(
            "What held finished runs back",
            (Query(f"sum by (health) (max by (family, health) (dropforge_runs_by_health{{{_F}}}))", "{{health}}"),),
            kind="stat",
        ),
    ),
)
_GPUS: Final = Row(
    "GPUs",
    (
        Panel("GPUs that trainings hold", (Query(_newest("gpus"), "{{family}}"),)),
        Panel(
            "GPU-hours of trainings, last day",
            (Query(_hours("gpus"), "{{family}}"),),
            unit="h",
            kind="stat",
        ),
        Panel(
            "Core-hours of trainings, last day",
            (Query(_hours("cores"), "{{family}}"),),
            unit="h",
            kind="stat",
        ),
        Panel(
            "GPUs of the cluster",
            (
                Query('sum(kube_node_status_allocatable{resource="nvidia_com_gpu"})', "there"),
                Query('sum(kube_pod_container_resource_requests{resource="nvidia_com_gpu"})', "asked for"),
            ),
        ),
        Panel(
            "Pods of trainings that are pending",
            (Query('sum by (namespace) (kube_pod_status_phase{phase="Pending",pod=~"train-.*"})', "{{namespace}}"),),
        ),
        Panel("Use of GPUs", (Query("avg by (Hostname) (DCGM_FI_DEV_GPU_UTIL)", "{{Hostname}}"),), unit="percent"),
        Panel(
            "Hottest GPU of a node",
            (Query("max by (Hostname) (DCGM_FI_DEV_GPU_TEMP)", "{{Hostname}}"),),
            unit="celsius",
        ),
        Panel("Last Xid", (Query("max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS) > 0"),), kind="table"),
    ),
)
_SERVICES: Final = Row(
    "Services",
    (
        Panel("Sources that answer", (Query("min by (source) (dropforge_source_up)", "{{source}}"),), kind="stat"),
        Panel(
            "Age of the reported values",
            (Query("time() - max by (source) (dropforge_source_last_success_timestamp_seconds)", "{{source}}"),),
            unit="s",
        ),
        Panel("Time of a look", (Query("max by (source) (dropforge_source_read_seconds)", "{{source}}"),), unit="s"),
        Panel("DAGs that are paused", (Query("max by (dag) (dropforge_dag_paused)", "{{dag}}"),), kind="stat"),
        Panel("Runs of DAGs", (Query("max by (dag, state) (dropforge_dag_runs)", "{{dag}} {{state}}"),)),
        Panel(
            "Airflow: heartbeats",
            (
                Query("sum(rate(airflow_scheduler_heartbeat[5m]))", "schedulers"),
                Query("sum(rate(airflow_triggerer_heartbeat[5m]))", "triggerers"),
            ),
            unit="cps",
        ),
        Panel(
            "Airflow: tasks that wait for a slot",
            (
                Query("max(airflow_executor_queued_tasks)", "queued"),
                Query("max(airflow_executor_running_tasks)", "running"),
            ),
        ),
        Panel(
            "MLflow: requests",
            (Query("sum by (status) (rate(mlflow_http_request_total[5m]))", "{{status}}"),),
            unit="reqps",
        ),
        Panel(
            "MLflow: one of a hundred requests takes longer",
            (
                Query(
                    "histogram_quantile(0.99, sum by (le) (rate(mlflow_http_request_duration_seconds_bucket[5m])))",
                    "99%",
                ),
            ),
            unit="s",
        ),
    ),
)
_COURSE: Final = Row(
    "Course",
    (
        Panel(
            "Loss",
            (Query(_newest("loss"), "training"), Query(_newest("eval_loss"), "evaluation")),
            about="Of the family's newest training, in nats per target.",
            width=12,
        ),
        Panel("Tokens per second", (Query(_newest("tokens_per_second"), "tokens/s"),), width=12),
        Panel("Done", (Query(_newest("progress_ratio"), "done"),), unit="percentunit", kind="stat", width=6),
        Panel(
            "Age of the checkpoint",
            (Query(_age("training_checkpoint_timestamp_seconds"), "lost by a kill now"),),
            unit="s",
            width=6,
        ),
        Panel(
            "Since the last log step",
            (Query(_age("training_last_step_timestamp_seconds"), "seconds"),),
            unit="s",
            width=6,
        ),
        Panel("Attempts", (Query(_newest("attempts"), "attempts"),), kind="stat", width=6),
    ),
)
_SPEED: Final = Row(
    "Where the time goes",
    (
        Panel("A step", (Query(_newest("step_seconds"), "seconds"),), unit="s"),
        Panel(
            "Shares of a step",
            (
                Query(_newest("data_wait_ratio"), "making batches"),
                Query(_newest("gradient_wait_ratio"), "waiting for gradients"),
            ),
            unit="percentunit",
        ),
        Panel("Slowest rank against fastest", (Query(_newest("rank_spread_ratio"), "times"),)),
        Panel("Model FLOPs utilisation", (Query(_newest("mfu_ratio"), "MFU"),), unit="percentunit"),
        Panel("Gradient norm", (Query(_newest("grad_norm"), "before clipping"),)),
        Panel("GPUs held", (Query(_newest("gpus"), "GPUs"),)),
    ),
)
_DEVICES: Final = Row(
    "Its GPUs",
    (
        Panel(
            "Use",
            (Query('avg by (pod, gpu) (DCGM_FI_DEV_GPU_UTIL{pod=~"train-$family-.*"})', "{{pod}} {{gpu}}"),),
            unit="percent",
        ),
        Panel(
            "Clock",
            (Query('min by (pod) (DCGM_FI_DEV_SM_CLOCK{pod=~"train-$family-.*"}) * 1e6', "{{pod}}"),),
            unit="hertz",
        ),
        Panel(
            "Power", (Query('sum by (pod) (DCGM_FI_DEV_POWER_USAGE{pod=~"train-$family-.*"})', "{{pod}}"),), unit="watt"
        ),
    ),
)
_FAMILY: Final = Row(
    "The family",
    (
        Panel("Runs", (Query(f"sum by (state) ({_runs(_OPEN + '|' + _ENDED)})", "{{state}}"),), kind="stat"),
        Panel(
            "The gate's decisions",
            (Query(f"max by (decision) (dropforge_gate_decisions{{{_F}}})", "{{decision}}"),),
            kind="stat",
        ),
        Panel(
            "What held its runs back",
            (Query(f"max by (health) (dropforge_runs_by_health{{{_F}}})", "{{health}}"),),
            kind="stat",
        ),
    ),
)

OPERATORS: Final = Dashboard("dropforge-operators", "Dropforge: operation", (_DROPS, _RUNS, _GPUS, _SERVICES))
TRAINING: Final = Dashboard(
    "dropforge-training", "Dropforge: a training", (_COURSE, _SPEED, _DEVICES, _FAMILY), several=False
)
DASHBOARDS: Final = (OPERATORS, TRAINING)
