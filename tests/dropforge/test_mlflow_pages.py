"""Links into MLflow, for browsers that reach it by another name than the services do."""

from __future__ import annotations

import pytest

from dropforge import mlflow_pages
from dropforge.errors import DropforgeError


def test_links_name_the_server_that_the_services_use() -> None:
    assert mlflow_pages.server("http://mlflow:5000/", {}) == "http://mlflow:5000"


def test_links_name_the_address_for_browsers_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://mlflow:5000")
    monkeypatch.setenv("DROPFORGE_MLFLOW_URL", "https://mlflow.example/")
    assert mlflow_pages.run_page("http://mlflow:5000", "1", "abc") == "https://mlflow.example/#/experiments/1/runs/abc"
    assert mlflow_pages.compare_view("http://mlflow:5000", ["a"], ["1"]).startswith("https://mlflow.example/#/compare")
    # Another server's pages are where they are.
    assert mlflow_pages.run_page("http://other:5000", "1", "abc").startswith("http://other:5000/#")


def test_a_login_does_not_get_into_links() -> None:
    env = {"MLFLOW_TRACKING_URI": "http://mlflow:5000", "DROPFORGE_MLFLOW_URL": "https://me:secret@mlflow.example"}
    with pytest.raises(DropforgeError) as raised:
        mlflow_pages.server("http://mlflow:5000", env)
    assert "DROPFORGE_MLFLOW_URL" in str(raised.value)
    assert "secret@" not in str(raised.value)
