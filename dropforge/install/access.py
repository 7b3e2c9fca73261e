"""Which component may do what with the bucket and the queue: the least with which each one works. Pure.

Prefixes are those of `dropforge.layout`. A role per component follows from this table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from dropforge.layout import DROPS, INBOX, MESSAGES, PROBES, SEEN

LEDGER: Final = "ledger/"
DATASETS: Final = "datasets/"
RUNS: Final = "runs/"
SWEEPS: Final = "sweeps/"
CURATION: Final = "curation/"
MLFLOW: Final = "mlflow/"
TOKENS: Final = "datasets/*/*/tokens/"
"""Of a dataset version: the stars stand for family and digest. One alone would let in a family's own `tokens/`."""
TOLD: Final = "ledger/told/"
TASK_LOGS: Final = "airflow/logs/"
"""Where Airflow's tasks leave their logs, by `helm-values/`."""


@dataclass(frozen=True)
class Component:
    """Something that runs with an identity of its own.

    :param name: short, for the role. :param account: its Kubernetes service account. :param what: what it is.
    :param airflow: whether it belongs to Airflow, and so to its namespace.
    :param reads: prefixes of keys that it reads and lists. :param writes: those that it writes.
    :param deletes: those that it deletes from. :param queue: whether it takes messages from the queue, and puts those
        that cannot be read into the dead-letter queue.
    """

    name: str
    account: str
    what: str
    airflow: bool = False
    reads: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    deletes: tuple[str, ...] = ()
    queue: bool = False

    @property
    def role(self) -> str:
        """What its role is called in the template."""
        return f"{self.name.capitalize()}Role"


COMPONENTS: Final = (
    Component(
        "watcher",
        "airflow-triggerer",
        "Airflow's triggerer: takes messages from the queue into the inbox, and watches jobs",
        airflow=True,
        reads=(DROPS, LEDGER, RUNS, SWEEPS, TASK_LOGS),
        writes=(INBOX, MESSAGES, PROBES, SEEN, TOLD, TASK_LOGS),
        queue=True,
    ),
    Component(
        "tasks",
        "airflow-worker",
        "Airflow's tasks: plan, curate in the process, open and close runs, decide, register",
        airflow=True,
        reads=(DROPS, LEDGER, DATASETS, RUNS, SWEEPS, CURATION, TASK_LOGS),
        writes=(LEDGER, DATASETS, RUNS, SWEEPS, CURATION, TASK_LOGS),
        deletes=(LEDGER, DATASETS, SWEEPS, CURATION, RUNS),
    ),
    Component(
        "callbacks",
        "airflow-dag-processor",
        "Airflow's DAG processor: reports runs that failed, each once",
        airflow=True,
        reads=(LEDGER, RUNS, SWEEPS),
        writes=(TOLD,),
    ),
    Component(
        "pages",
        "airflow-api-server",
        "Airflow's pages and API: the tab, the family page and the logs; reads alone",
        airflow=True,
        reads=(LEDGER, DATASETS, RUNS, SWEEPS, TASK_LOGS),
    ),
    Component(
        "metrics",
        "dropforge-metrics",
        "the exporter of metrics; reads alone, and no data",
        airflow=True,
        reads=(LEDGER, RUNS),
    ),
    Component(
        "curation",
        "dropforge-curation",
        "Spark's driver and executors",
        reads=(DROPS, DATASETS, CURATION),
        writes=(DATASETS, CURATION),
        deletes=(DATASETS, CURATION),
    ),
    Component(
        "trainer",
        "dropforge-trainer",
        "the pods of a training, an evaluation or a checkpoint's export; no drop and no ledger",
        reads=(DATASETS, RUNS),
        writes=(TOKENS, RUNS),
        deletes=(TOKENS, RUNS),
    ),
    Component(
        "mlflow",
        "mlflow",
        # It passes clients' artifacts on (`helm-values/mlflow`), so nobody else needs a right to them.
        "MLflow's server: its artifacts, and models in runs' folders to read",
        reads=(MLFLOW, RUNS),
        writes=(MLFLOW,),
        deletes=(MLFLOW,),
    ),
)
