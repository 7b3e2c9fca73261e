"""What is worth waking somebody, as Prometheus' rules. Pure.

Single events, as a run that failed, are told by Airflow's notifiers to whom they concern (docs/how-to/alerts.md).
These are for whoever runs the installation: something stays wrong.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final, Literal

from dropforge.health.xids import XIDS, Action

RUNBOOKS: Final = "docs/how-to/alert-runbooks.md"
Severity = Literal["critical", "warning"]


@dataclass(frozen=True)
class Alert:
    """:param name: its heading in the page of runbooks. :param lasts: how long it must be so, in Prometheus' words."""

    name: str
    expr: str
    lasts: str
    severity: Severity
    summary: str


_FAILED: Final = 'max by (family) (dropforge_run_last_end_timestamp_seconds{state="failed"})'
_FINISHED: Final = 'max by (family) (dropforge_run_last_end_timestamp_seconds{state="finished"})'
#: Of codes for which a training avoids the node. Those that only a word of the kernel's line tells apart are left out.
_BROKEN: Final = tuple(xid.code for xid in XIDS if xid.action is not Action.RETRY and not xid.severe)
_BROKEN_XID: Final = " or ".join(f"DCGM_FI_DEV_XID_ERRORS == {code}" for code in _BROKEN)
#: First the `max`: newer exporters have the code as a label too, so that each code begins a series.
_XID: Final = "max by (Hostname, gpu) (DCGM_FI_DEV_XID_ERRORS)"
_SPEED: Final = "max by (family) (dropforge_training_tokens_per_second)"

ALERTS: Final = (
    Alert(
        "DropforgeMetricsMissing",
        "absent(dropforge_source_up)",
        "10m",
        "critical",
        "No exporter reports Dropforge's metrics, so no other alert of it can fire.",
    ),
    Alert(
        "DropforgeSourceDown",
        "max by (source) (dropforge_source_up) == 0",
        "10m",
        "critical",
        "{{ $labels.source }} does not answer the exporter.",
    ),
    Alert(
        "DropforgeIntakePaused",
        "max by (dag) (dropforge_dag_paused) == 1",
        "30m",
        "warning",
        "DAG {{ $labels.dag }} is paused: drops wait, and nothing begins.",
    ),
    Alert(
        "DropforgeDropWaits",
        "time() - min by (family) (dropforge_drop_oldest_waiting_timestamp_seconds) > 3600",
        "10m",
        "warning",
        "A drop of {{ $labels.family }} has waited {{ $value | humanizeDuration }} for a run.",
    ),
    Alert(
        "DropforgeInboxStuck",
        "min_over_time(max(dropforge_inbox_messages)[15m:1m]) > 0",
        "5m",
        "critical",
        "Messages of S3 have been in the inbox for 15 minutes: intake does not process them.",
    ),
    Alert(
        "DropforgeDropRefused",
        "max by (family) (dropforge_drops_refused) > 0",
        "5m",
        "warning",
        "{{ $value }} drop(s) of {{ $labels.family }} cannot be used and get no run until they are fixed.",
    ),
    Alert(
        "DropforgeDeadMessages",
        "max(dropforge_dead_messages) > 0",
        "5m",
        "warning",
        "{{ $value }} message(s) that are no S3 event are set aside.",
    ),
    Alert(
        "DropforgeRunsFail",
        f"{_FAILED} > ({_FINISHED} or {_FAILED} * 0)",
        "5m",
        "warning",
        "The last run of {{ $labels.family }} that came to an end failed.",
    ),
    Alert(
        "DropforgeRunWaitsForPods",
        "time() - min by (family) (dropforge_run_oldest_waiting_timestamp_seconds) > 7200",
        "10m",
        "warning",
        "A run of {{ $labels.family }} has waited {{ $value | humanizeDuration }} for its pods.",
    ),
    Alert(
        "DropforgeTrainingStalled",
        "time() - min by (family) (dropforge_training_last_step_timestamp_seconds) > 1800",
        "5m",
        "critical",
        "A training of {{ $labels.family }} has logged no step for {{ $value | humanizeDuration }}.",
    ),
    Alert(
        "DropforgeCheckpointOld",
        "time() - min by (family) (dropforge_training_checkpoint_timestamp_seconds) > 10800",
        "5m",
        "warning",
        "A kill of the training of {{ $labels.family }} would now lose {{ $value | humanizeDuration }} of work.",
    ),
    Alert(
        "DropforgeTrainingSlow",
        f"{_SPEED} < 0.6 * quantile_over_time(0.5, {_SPEED}[6h:5m])",
        "20m",
        "warning",
        "Trainings of {{ $labels.family }} are slower by more than 40% than over the last six hours.",
    ),
    Alert(
        "DropforgeGpuXid",
        # The gauge keeps the last code for ever: what is new is worth an alert.
        f"max by (Hostname, gpu) ({_BROKEN_XID}) and changes(({_XID})[10m:1m]) > 0",
        "0m",
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} reported Xid {{ $value }}: trainings should avoid the node.",
    ),
    Alert(
        "DropforgeGpuHot",
        "max by (Hostname, gpu) (DCGM_FI_DEV_GPU_TEMP) > 87",
        "10m",
        "warning",
        "GPU {{ $labels.gpu }} of {{ $labels.Hostname }} is at {{ $value }} degrees: it slows itself down.",
    ),
    Alert(
        "DropforgeSchedulerSilent",
        "sum(rate(airflow_scheduler_heartbeat[5m])) == 0",
        "5m",
        "critical",
        "No scheduler of Airflow gives a sign of life.",
    ),
)


def rules(runbooks: str = RUNBOOKS) -> dict[str, Any]:
    """The rules as Prometheus reads them, and as `spec` of a PrometheusRule.

    :param runbooks: address of the page of runbooks, to which an alert's name in lower case is the anchor.
    """
    return {
        "groups": [
            {
                "name": "dropforge",
                "rules": [
                    {
                        "alert": alert.name,
                        "expr": alert.expr,
                        "for": alert.lasts,
                        "labels": {"severity": alert.severity},
                        "annotations": {
                            "summary": alert.summary,
                            "runbook_url": f"{runbooks}#{alert.name.lower()}",
                        },
                    }
                    for alert in ALERTS
                ],
            }
        ]
    }
