"""What Airflow says of Dropforge's DAGs: whether they are paused, and how many runs of each state it has."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol

STATES: Final = ("queued", "running", "success", "failed")


class Api(Protocol):
    """The two questions; `dropforge.client.airflow.Airflow` answers them."""

    def is_paused(self, dag: str) -> bool: ...

    def count_runs(self, dag: str, state: str) -> int: ...


@dataclass(frozen=True)
class Dag:
    """:param runs: how many there are, by state."""

    paused: bool
    runs: Mapping[str, int]


def read_dags(api: Api, dags: tuple[str, ...]) -> dict[str, Dag]:
    """Each DAG as it is now. :raises DropforgeError: if Airflow is away, or does not let one look."""
    return {dag: Dag(api.is_paused(dag), {state: api.count_runs(dag, state) for state in STATES}) for dag in dags}
