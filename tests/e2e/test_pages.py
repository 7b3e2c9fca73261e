"""Airflow's and MLflow's pages in a real browser."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from playwright.sync_api import Page, expect

from dropforge.client.airflow import FINETUNE
from tests.browser import needs_browser
from tests.e2e.harness import Stack
from tests.e2e.pages import keep, logged_in, open_form, send

pytestmark = [
    pytest.mark.e2e,
    pytest.mark.timeout(300),
    needs_browser,
]


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[Page]:
    with logged_in(stack) as page:
        yield page


def test_the_form_starts_a_run_and_a_drop_that_is_not_there_is_named(stack: Stack, page: Page) -> None:
    dialog = open_form(stack, page)
    for section in ("Model", "Data", "Training", "Compute", "Evaluation and promotion", "Costs", "Everything else"):
        expect(dialog.get_by_role("button", name=section, exact=True)).to_be_visible()
    keep(page, "form")
    dialog.locator("#element_data").fill("nobody/nothing")
    run = send(stack, dialog, 60)
    conf = stack.connection.airflow.dag_run(FINETUNE, run)["conf"]
    assert conf.get("preset") is None  # that of the family, or the default
    assert stack.end(run) == "failed"
    assert "drop nobody/nothing" in stack.log(run, "plan")
    page.goto(f"{stack.connection.airflow.url}/dags/{FINETUNE}")
    expect(page.get_by_text("Dropforge: fine-tune").first).to_be_visible()
    keep(page, "dag")


def test_mlflow_answers_a_browser(stack: Stack, page: Page) -> None:
    page.goto(stack.connection.settings.tracking_uri)
    expect(page.get_by_text("Experiments").first).to_be_visible()
    keep(page, "mlflow")
