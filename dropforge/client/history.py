"""The course of a metric in MLflow, read on from where it was left: a long run's is not fetched anew at every look."""

from __future__ import annotations

from dataclasses import dataclass, field

from dropforge.rest import real

_MOST = 2500  # the server's limit for one answer; of more points it picks evenly, the first and the last among them
_LAST = 2**31 - 1
_PATH = "/api/2.0/mlflow/metrics/get-history-bulk-interval"


def read_points(tracking_uri: str, run_id: str, metric: str, *, start: int = 0, most: int = _MOST) -> dict[int, float]:
    """Values by step, in order, from step `start` on.

    :raises mlflow.exceptions.MlflowException: if the server is away, or does not know the run.
    """
    # MLflow's client always asks for a whole history; its pages ask as we do here.
    from mlflow.utils.credentials import get_default_host_creds
    from mlflow.utils.rest_utils import http_request_safe

    query = {"run_ids": run_id, "metric_key": metric, "start_step": start, "end_step": _LAST, "max_results": most}
    server = get_default_host_creds(tracking_uri)  # type: ignore[no-untyped-call]
    answer = http_request_safe(server, _PATH, "GET", params=query)  # type: ignore[no-untyped-call]
    return {int(point.get("step", 0)): real(point["value"]) for point in answer.json().get("metrics", [])}


@dataclass
class Course:
    """A metric of one run, as far as it is known."""

    tracking_uri: str
    run_id: str
    metric: str
    points: dict[int, float] = field(default_factory=dict)

    def read_on(self) -> tuple[float, ...]:
        """Fetch what is new since the last call; all values in order of their steps."""
        last = max(self.points, default=0)
        self.points |= read_points(self.tracking_uri, self.run_id, self.metric, start=last)
        return tuple(self.points[step] for step in sorted(self.points))
