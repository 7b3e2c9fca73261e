"""Airflow's and MLflow's pages in a real browser. With DROPFORGE_SCREENSHOTS=FOLDER the pictures are kept there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Page, expect

from dropforge.cli.airflow import FINETUNE
from tests.browser import needs_browser, opened
from tests.e2e.harness import Stack, wait

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    needs_browser,
]


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[Page]:
    """A browser that has logged in to Airflow with the login that `dropforge up` prints."""
    airflow = stack.connection.airflow
    with opened() as browser:
        page = browser.new_page(viewport={"width": 1280, "height": 1100})
        page.set_default_timeout(60_000)
        page.goto(airflow.url)
        page.fill('input[name="username"]', airflow.user)
        page.fill('input[name="password"]', airflow.password)
        page.click('button[type="submit"]')
        page.wait_for_url(lambda url: "login" not in url)
        yield page


def keep(page: Page, name: str) -> None:
    folder = os.environ.get("DROPFORGE_SCREENSHOTS")
    if folder:
        page.screenshot(path=Path(folder) / f"{name}.png")


def test_the_form_starts_a_run_and_a_drop_that_is_not_there_is_named(stack: Stack, page: Page) -> None:
    page.goto(f"{stack.connection.airflow.url}/dags/{FINETUNE}")
    page.get_by_role("button", name="Trigger").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("An uploaded drop")).to_be_visible()
    for section in ("Model", "Data", "Training", "Compute", "Evaluation and promotion", "Everything else"):
        expect(dialog.get_by_role("button", name=section, exact=True)).to_be_visible()
    keep(page, "form")
    dialog.locator("#element_preset input").first.fill("tiny")
    page.keyboard.press("Enter")
    dialog.locator("#element_drop").fill("nobody/nothing")
    before = {run["dag_run_id"] for run in stack.connection.airflow.newest_runs(FINETUNE)}
    dialog.get_by_role("button", name="Trigger", exact=True).click()

    def started() -> list[str]:
        runs = stack.connection.airflow.newest_runs(FINETUNE)
        return [run["dag_run_id"] for run in runs if run["dag_run_id"] not in before and run["run_type"] == "manual"]

    (run,) = wait("the run that the form starts", started, 60)
    assert stack.connection.airflow.dag_run(FINETUNE, run)["conf"]["preset"] == "tiny"
    assert stack.end(run) == "failed"
    assert "drop nobody/nothing" in stack.log(run, "plan")
    page.goto(f"{stack.connection.airflow.url}/dags/{FINETUNE}")
    expect(page.get_by_text("dropforge_finetune").first).to_be_visible()
    keep(page, "dag")


def test_mlflow_answers_a_browser(stack: Stack, page: Page) -> None:
    page.goto(stack.connection.settings.tracking_uri)
    expect(page.get_by_text("Experiments").first).to_be_visible()
    keep(page, "mlflow")
