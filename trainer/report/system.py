"""A node's use of its machine as MLflow's system metrics, sampled by a thread of its launcher.

Obeys MLflow's own variables: `MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL` (seconds, 10), `MLFLOW_SYSTEM_METRICS_NODE_ID`,
and `MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING=false`, which leaves them out.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Final

from dropforge.rest import Rest, reached, speaks_rest
from dropforge.run import Tracking
from trainer.node.system import Machine, find_gpus
from trainer.report.tracking import RestSender, Tracker

EVERY: Final = 10.0
_LEAST: Final = 1.0
_WAITING: Final = 1000  # samples that wait for MLflow's first answer


class SystemMetrics:
    """Samples until it is closed. It costs its node a fraction of a percent of one core, whatever MLflow does.

    A sample's step is the number of seconds since the MLflow run began, on every node and in every attempt.
    """

    def __init__(self, tracking: Tracking, prefix: str, every: float, machine: Callable[[], Machine]) -> None:
        self._rest, self._run_id = Rest(tracking.uri), tracking.run_id
        self._tracker = Tracker(RestSender(tracking), lambda _: None)  # rank 0 tells how MLflow is
        self._prefix, self._every, self._machine = prefix, every, machine
        self._began: float | None = None
        self._samples: list[tuple[float, dict[str, float]]] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="system-metrics", daemon=True)
        self._thread.start()

    def close(self, seconds: float = 1.0) -> None:
        """Take a last sample and send it, if MLflow answers within so many seconds."""
        end = time.monotonic() + seconds
        self._over.set()
        self._thread.join(seconds)
        self._tracker.close(max(0.0, end - time.monotonic()))

    def _run(self) -> None:
        try:
            machine = self._machine()
            began = time.monotonic()
            while not self._over.wait(self._every):
                self._take(machine)
                began = time.monotonic()
            if time.monotonic() - began > min(_LEAST, self._every / 2):  # a percentage of less time says little
                self._take(machine)
        except Exception:  # no figure is worth a training
            return

    def _take(self, machine: Machine) -> None:
        self._samples = [*self._samples[-_WAITING:], (time.time(), machine.sample())]
        if self._began is None:
            self._began = self._ask()
        if self._began is None:
            return
        for at, values in self._samples:
            named = {f"system/{self._prefix}{key}": value for key, value in values.items()}
            self._tracker.metrics(named, max(0, round(at - self._began)), at)
        self._samples = []

    def _ask(self) -> float | None:
        """When the MLflow run began, in seconds since 1970; None if MLflow does not say now."""
        try:
            found: dict[str, Any] = self._rest.call("GET", f"runs/get?run_id={self._run_id}")
            return int(found["run"]["info"]["start_time"]) / 1000
        except Exception:
            return None


def start_system_metrics(
    tracking: Tracking | None, env: Mapping[str, str], node: int, nodes: int
) -> SystemMetrics | None:
    """Begin to sample this node; None where nobody wants it, or MLflow is not spoken to over REST.

    :param node: number of this node among `nodes`.
    """
    if tracking is None or env.get("MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING", "true").lower() in ("false", "0"):
        return None
    tracking = reached(tracking)
    if not speaks_rest(tracking.uri):
        return None
    try:
        every = float(env.get("MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL") or EVERY)
    except ValueError:
        every = EVERY
    name = env.get("MLFLOW_SYSTEM_METRICS_NODE_ID") or (f"node_{node}" if nodes > 1 else "")
    return SystemMetrics(tracking, f"{name}/" if name else "", max(0.1, every), lambda: Machine(gpus=find_gpus()))
