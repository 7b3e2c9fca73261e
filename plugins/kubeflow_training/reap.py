"""`python -m kubeflow_training.reap`: the reaper as a command, for a machine that is no worker of Airflow.

It asks Airflow's REST API. AIRFLOW_API_URL, and AIRFLOW_API_TOKEN or AIRFLOW_API_USERNAME with AIRFLOW_API_PASSWORD,
come from the environment. The cluster is that of KUBECONFIG, or the local one of KUBEFLOW_TRAINING_HOME.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta

from kubeflow_training.asking.states import FromRest
from kubeflow_training.jobs.backend import Backend
from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.kinds import KNOWN, kind_named
from kubeflow_training.jobs.reaping.reaper import GRACE, AirflowSilentError, JobReaper, Summary


def main(arguments: Sequence[str] | None = None) -> int:
    """Reap once. The exit status is 0, 1 if something could not be looked at or deleted, 2 if Airflow is silent."""
    given = _parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stderr)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    try:
        reaper = JobReaper(
            _backends(given.backend, given.kind, given.home),
            FromRest.from_env(),
            namespaces=None if given.all_namespaces else given.namespace or ["default"],
            grace=timedelta(seconds=given.grace),
            dry_run=given.dry_run,
        )
        summary = reaper.visit()
        if summary.waiting and not given.dry_run:
            summary = _again(reaper, summary)
    except (AirflowSilentError, JobError) as error:
        print(f"nothing is deleted: {error}", file=sys.stderr)
        return 2
    print(json.dumps({"dry_run": given.dry_run, **summary.to_dict()}))
    return 1 if summary.problems else 0


def _again(reaper: JobReaper, before: Summary) -> Summary:
    """The second look, when the grace of the first look's orphans is over."""
    patience = max(0.0, max(reaper.seen.values()) + reaper.grace - time.time())
    logging.info("looking again in %.0f s", patience)
    time.sleep(min(patience, reaper.grace) + 0.1)
    after = reaper.visit()
    after.deleted = [*before.deleted, *after.deleted]
    return after


def _backends(backend: str, kinds: Sequence[str] | None, home: str | None) -> dict[str, Callable[[], Backend]]:
    if backend == "local":
        from kubeflow_training.jobs.local import LocalCluster

        return {"the local cluster": lambda: LocalCluster(home)}
    from kubeflow_training.jobs.kubernetes import KubernetesCluster

    wanted = [kind_named(name) for name in kinds or ["PyTorchJob"]]
    return {kind.name: lambda kind=kind: KubernetesCluster(kind=kind) for kind in wanted}  # type: ignore[misc]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m kubeflow_training.reap", description=(__doc__ or "").split("\n\n", 1)[1]
    )
    parser.add_argument("--backend", choices=["kubernetes", "local"], default="kubernetes")
    parser.add_argument("--namespace", action="append", help="where to look; may be repeated (default: default)")
    parser.add_argument("--all-namespaces", action="store_true", help="look everywhere; needs rights for the cluster")
    parser.add_argument(
        "--kind", action="append", choices=[kind.name for kind in KNOWN], help="may be repeated (default: PyTorchJob)"
    )
    parser.add_argument("--home", help="folder of the local cluster (default: KUBEFLOW_TRAINING_HOME)")
    parser.add_argument(
        "--grace",
        type=float,
        default=GRACE.total_seconds(),
        metavar="SECONDS",
        help="how long a task must have been over (default: %(default)g); it waits where Airflow does not report that",
    )
    parser.add_argument("--dry-run", action="store_true", help="say what would be deleted, and delete nothing")
    return parser


if __name__ == "__main__":
    sys.exit(main())
