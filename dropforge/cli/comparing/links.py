"""Addresses in MLflow's pages."""

from __future__ import annotations

from collections.abc import Sequence
from urllib.parse import quote

from dropforge import mlflow_pages
from dropforge.comparison import ComparedRun


def compare_view(uri: str, runs: Sequence[ComparedRun]) -> str:
    """MLflow's own comparison of exactly these runs."""
    return mlflow_pages.compare_view(uri, [run.run_id for run in runs], [run.experiment for run in runs])


def run_page(uri: str, run: ComparedRun) -> str:
    return mlflow_pages.run_page(uri, run.experiment, run.run_id)


def artifact_page(uri: str, run: ComparedRun, path: str) -> str:
    """Where MLflow shows a file of a run."""
    return f"{run_page(uri, run)}/artifacts/{quote(path)}"
