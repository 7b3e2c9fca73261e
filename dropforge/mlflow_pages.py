"""Addresses of MLflow's pages."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from typing import Final
from urllib.parse import quote

from dropforge.settings import without_login

VARIABLE: Final = "DROPFORGE_MLFLOW_URL"


def server(uri: str, env: Mapping[str, str] = os.environ) -> str:
    """The server's address for people's browsers: `DROPFORGE_MLFLOW_URL`, where the services' network has a name of its
    own for it (`MLFLOW_TRACKING_URI`). :raises DropforgeError: if it carries a login."""
    shown = env.get(VARIABLE)
    if shown and uri.rstrip("/") == env.get("MLFLOW_TRACKING_URI", "").rstrip("/"):
        return without_login(shown, VARIABLE).rstrip("/")
    return uri.rstrip("/")


def compare_view(uri: str, runs: Sequence[str], experiments: Sequence[str]) -> str:
    """MLflow's own comparison of exactly these runs. :param runs: their ids. :param experiments: theirs."""
    return f"{server(uri)}/#/compare-runs?runs={_list(runs)}&experiments={_list(sorted(set(experiments)))}"


def run_page(uri: str, experiment: str, run_id: str) -> str:
    """The page of a run. :param experiment: id of its experiment."""
    return f"{server(uri)}/#/experiments/{quote(experiment, safe='')}/runs/{quote(run_id, safe='')}"


def artifact_page(page: str, path: str) -> str:
    """The page of a run's artifact. :param page: the run's, as of `run_page`."""
    return f"{page}/artifacts/{quote(path)}"


def version_page(uri: str, family: str, number: int | str) -> str:
    """The page of a registered version."""
    return f"{server(uri)}/#/models/{quote(family, safe='')}/versions/{number}"


def _list(texts: Sequence[str]) -> str:
    return quote(json.dumps(list(texts), separators=(",", ":")), safe="")
