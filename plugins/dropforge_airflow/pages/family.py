"""What the page of a family shows, as plain JSON values of bounded size. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any
from urllib.parse import quote

from dropforge_airflow.pages.ledgers import Entered, Ledger
from dropforge_airflow.pages.look import Unseen
from dropforge_airflow.pages.shown import cut, plain, run_url, web
from dropforge_airflow.pages.versions import FamilyRun, Registry, Version


def family_page(
    dag: str,
    family: str,
    ledger: Ledger | Unseen | None,
    registry: Registry | Unseen | None,
    states: Mapping[str, str] | Unseen,
    uri: str,
) -> dict[str, Any]:
    """Versions, drops and what became of each, and the newest runs.

    :param states: of the runs that took a drop, by their name; one that Airflow has not (any more) is left out.
    """
    known = registry if isinstance(registry, Registry) else Registry("", (), ())
    entered = ledger if isinstance(ledger, Ledger) else Ledger((), (), 0, True)
    now = {} if isinstance(states, Unseen) else states
    by_dag_run = {run.dag_run: run for run in known.runs if run.dag_run}
    page: dict[str, Any] = plain(
        {
            "dag": dag,
            "family": family,
            "live": any(state in ("running", "queued") for state in now.values()),
            "url": web(f"{uri.rstrip('/')}/#/models/{quote(family, safe='')}") if known.versions else "",
            "versions": [_version(item, known, family, uri) for item in known.versions],
            "drops": [_drop(item, by_dag_run, now, known, uri) for item in entered.entered],
            "more_drops": entered.more,
            "whole": entered.whole,
            "refused": [
                {"name": cut(item.name, 100), "since": _time(item.since), "why": cut(item.why)}
                for item in entered.refused
            ],
            "runs": [_run(item, known, uri) for item in known.runs[:30]],
            "unseen": [part.as_dict() for part in (ledger, registry, states) if isinstance(part, Unseen)],
        }
    )
    return page


def _version(item: Version, known: Registry, family: str, uri: str) -> dict[str, Any]:
    return {
        "number": item.number,
        "made": _time(item.made),
        "run": item.run,
        "aliases": list(item.aliases),
        "verdict": cut(item.verdict),
        "previous": item.previous,
        "rolled_back": bool(item.rolled_back),
        "checkpoint": item.checkpoint,
        "url": web(f"{uri.rstrip('/')}/#/models/{quote(family, safe='')}/versions/{quote(item.number, safe='')}"),
        "run_url": run_url(uri, known.experiment, item.run_id) if known.experiment and item.run_id else "",
    }


def _drop(
    item: Entered, by_dag_run: Mapping[str, FamilyRun], states: Mapping[str, str], known: Registry, uri: str
) -> dict[str, Any]:
    return {
        "id": item.id,
        "name": cut(item.name, 200),
        "entered": _time(item.entered),
        "files": item.files,
        "bytes": item.bytes,
        "waits": item.waits,
        "why": cut(item.why),
        "takers": [
            {
                "dag_run": taker,
                "state": states.get(taker, ""),
                "run": None if (run := by_dag_run.get(taker)) is None else _run(run, known, uri),
            }
            for taker in item.takers
        ],
    }


def _run(item: FamilyRun, known: Registry, uri: str) -> dict[str, Any]:
    return {
        "run": item.run,
        "dag_run": item.dag_run,
        "status": item.status,
        "began": _time(item.began),
        "version": item.version,
        "verdict": cut(item.verdict),
        "loss": item.loss,
        "url": run_url(uri, known.experiment, item.run_id),
    }


def _time(seconds: float) -> str | None:
    try:
        return datetime.fromtimestamp(seconds, UTC).isoformat() if seconds else None
    except (ValueError, OverflowError, OSError):  # beyond the calendar, which MLflow takes
        return None
