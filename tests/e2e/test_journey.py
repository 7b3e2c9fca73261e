"""What a person does in the browser, from the login to the comparison; the pictures of it are those of the docs.

`make screenshots` runs this and takes over the pictures that `docs/images/` has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
from playwright.sync_api import Page, expect

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from tests.browser import needs_browser
from tests.e2e.harness import Stack, typed, wait
from tests.e2e.pages import answer, keep, logged_in, number, open_form, send

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200), needs_browser]

FAMILY, DROP = "support-answers", "2026-11-24"
RECIPE = """\
extends: tiny
evaluate: {max_rows: 40, generation: {rows: 4, max_new_tokens: 12}}
train: {max_steps: 30}
promote: {better_than_base: false, min_improvement: -0.9, approval: {deadline_hours: 24}}
"""


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[Page]:
    with logged_in(stack) as page:
        yield page


@pytest.fixture(scope="module")
def dropped(stack: Stack, samples: dict[int, dict[str, Path]]) -> str:
    """The run that an upload started. Its recipe asks for a person's yes."""
    return wait_for_run(stack.connection, stack.drop(FAMILY, DROP, samples[2], RECIPE), 300)


def test_a_combination_that_cannot_work_is_refused_with_the_mend(stack: Stack, page: Page, dropped: str) -> None:
    dialog = open_form(stack, page)
    dialog.locator("#element_data").fill(f"{FAMILY}/{DROP}")
    keep(page, "form")
    dialog.locator('label:has(input[name="element_again"])').click()
    number(dialog, "Training", "train_sequence_length", "4096")
    keep(page, "form-training")
    run = send(stack, dialog)
    assert stack.end(run) == "failed"
    assert stack.tasks(run)["plan"]["try_number"] == 1
    page.goto(f"{stack.connection.airflow.page(FINETUNE, run)}/tasks/plan")
    expect(page.get_by_text("4096 is longer than the model's context of 128").first).to_be_visible()
    expect(page.get_by_text("or shorten the sequence").first).to_be_visible()
    keep(page, "refusal")


@pytest.fixture(scope="module")
def watched(stack: Stack, page: Page, dropped: str) -> str:
    """A run that is started in the form and watched on the tab of its training."""
    dialog = open_form(stack, page)
    dialog.locator("#element_data").fill(f"{FAMILY}/{DROP}")
    dialog.locator('label:has(input[name="element_again"])').click()
    number(dialog, "Training", "train_max_steps", "5000")
    number(dialog, "Training", "train_learning_rate", "0.002")
    run = send(stack, dialog)
    watch(stack, page, run)
    return run


def watch(stack: Stack, page: Page, run: str) -> None:
    def losses() -> int:
        found = stack.tracked(run)
        return len(stack.mlflow.get_metric_history(found[0].info.run_id, "train/loss")) if found else 0

    wait("training", lambda: losses() > 3, 900)
    page.goto(f"{stack.connection.airflow.page(FINETUNE, run)}/tasks/train/plugin/dropforge-task")
    tab = page.frame_locator("iframe").first
    expect(tab.get_by_text(re.compile("training loss", re.IGNORECASE)).first).to_be_visible()
    keep(page, "tab")


@pytest.fixture(scope="module")
def cancelled(stack: Stack, page: Page, watched: str) -> str:
    """The same run, after somebody has marked it as failed."""
    page.goto(stack.connection.airflow.page(FINETUNE, watched))
    page.locator('[aria-label="Mark Dag Run as..."]').first.click()
    page.get_by_role("menuitem", name="Failed").click()
    page.get_by_role("dialog").get_by_role("button", name=re.compile("Confirm|Failed")).last.click()
    assert stack.end(watched) == "failed"
    keep(page, "cancelled")
    return watched


def test_a_run_that_is_cancelled_in_the_browser_frees_the_machine(stack: Stack, cancelled: str) -> None:
    wait("the end of its processes", lambda: not stack.ranks())
    (tracked,) = stack.tracked(cancelled)
    assert tracked.info.status == "KILLED"


@pytest.fixture(scope="module")
def approved(stack: Stack, page: Page, dropped: str) -> str:
    """The run of the upload, to which a person says yes."""
    wait("the question", lambda: stack.tasks(dropped)["approve"]["state"] == "awaiting_input", 600)
    page.goto(f"{stack.connection.airflow.page(FINETUNE, dropped)}/required_actions")
    expect(page.get_by_text("as the family's first").first).to_be_visible()
    expect(page.get_by_text("better than champion")).to_be_visible()
    keep(page, "required-action")
    answer(page, "Promote")
    assert stack.end(dropped) == "success", stack.log(dropped, "approve")
    page.goto(stack.connection.airflow.page(FINETUNE, dropped))
    expect(page.get_by_text("close_run").first).to_be_visible()
    keep(page, "run")
    return dropped


def test_the_champion_is_found_in_the_pages_of_mlflow(stack: Stack, page: Page, approved: str, cancelled: str) -> None:
    uri = stack.connection.settings.tracking_uri
    (tracked,) = stack.tracked(approved)
    page.goto(f"{uri}/#/experiments/{tracked.info.experiment_id}/runs")
    page.get_by_role("button", name="Close", exact=True).click()  # MLflow's assistant opens by itself
    for run in (approved, cancelled):
        name = stack.tracked(run)[0].info.run_name
        expect(page.get_by_role("link", name=name)).to_be_visible()
    keep(page, "mlflow-runs")
    page.goto(f"{uri}/#/models/{FAMILY}/versions/{tracked.data.tags[tracking.TAG_VERSION]}")
    expect(page.get_by_role("status", name="champion")).to_be_visible()
    keep(page, "mlflow-version")


def test_two_runs_are_compared(stack: Stack, page: Page, approved: str, cancelled: str, tmp_path: Path) -> None:
    names = [stack.tracked(run)[0].data.tags[tracking.TAG_RUN] for run in (approved, cancelled)]
    file = tmp_path / "comparison.html"
    done = typed(stack, "compare", *names, "--html", str(file), "--keep")
    assert done.returncode == 0, done.stderr
    (link,) = re.findall(r"http\S+compare-runs\S+", done.stdout.replace("\n", ""))[-1:]
    page.goto(link)
    for name in names:
        expect(page.get_by_text(name).first).to_be_visible()
    keep(page, "mlflow-compare")
    page.goto(file.as_uri())
    expect(page.get_by_text("train/loss").first).to_be_visible()
    keep(page, "comparison")


def test_the_pages_of_families_and_of_the_calendar(stack: Stack, page: Page, approved: str) -> None:
    url = stack.connection.airflow.url
    page.goto(f"{url}/dropforge/dags/{FINETUNE}/families?family={quote(FAMILY)}")
    expect(page.get_by_text("champion").first).to_be_visible()
    keep(page, "family")
    page.goto(f"{url}/dags/dropforge_retrain_by-calendar")
    expect(page.get_by_text("dropforge_retrain_by-calendar").first).to_be_visible()
    expect(page.get_by_text("finetune").first).to_be_visible()
    keep(page, "retrain")
