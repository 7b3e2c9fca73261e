"""Addresses in MLflow's pages."""

from __future__ import annotations

import json
from collections.abc import Sequence
from urllib.parse import quote

from dropforge.comparison import ComparedRun


def compare_view(uri: str, runs: Sequence[ComparedRun]) -> str:
    """MLflow's own comparison of exactly these runs."""
    return (
        f"{uri.rstrip('/')}/#/compare-runs?runs={_list([run.run_id for run in runs])}"
        f"&experiments={_list(sorted({run.experiment for run in runs}))}"
    )


def run_page(uri: str, run: ComparedRun) -> str:
    return f"{uri.rstrip('/')}/#/experiments/{quote(run.experiment, safe='')}/runs/{quote(run.run_id, safe='')}"


def artifact_page(uri: str, run: ComparedRun, path: str) -> str:
    """Where MLflow shows a file of a run."""
    return f"{run_page(uri, run)}/artifacts/{quote(path)}"


def _list(texts: Sequence[str]) -> str:
    return quote(json.dumps(texts, separators=(",", ":")), safe="")
