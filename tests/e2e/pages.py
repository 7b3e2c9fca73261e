"""A browser for end-to-end tests. With DROPFORGE_SCREENSHOTS=FOLDER pictures are kept there."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Locator, Page, expect
from playwright.sync_api import TimeoutError as PlaywrightTimeout

from dropforge.client.airflow import FINETUNE
from dropforge.stack.state import read_state
from tests.browser import EXPECTED, opened
from tests.e2e.harness import Stack, wait


@contextmanager
def logged_in(stack: Stack) -> Iterator[Page]:
    """A page that has logged in to Airflow, and answers MLflow's question, with what `dropforge up` prints."""
    airflow, running = stack.connection.airflow, read_state(stack.folder)
    assert running is not None
    user, password = running.mlflow_login
    with opened() as browser:
        page = browser.new_page(
            viewport={"width": 1280, "height": 800},
            http_credentials={"username": user, "password": password, "origin": running.settings.tracking_uri},
        )
        page.set_default_timeout(EXPECTED)
        page.goto(airflow.url)
        page.fill('input[name="username"]', airflow.user)
        keep(page, "login")
        page.fill('input[name="password"]', airflow.password)
        page.click('button[type="submit"]')
        page.wait_for_url(lambda url: "login" not in url)
        yield page


def open_form(stack: Stack, page: Page) -> Locator:
    """Open the form; its preset stays empty, so the family's recipe counts."""
    page.goto(f"{stack.connection.airflow.url}/dags/{FINETUNE}")
    page.get_by_role("button", name="Trigger").first.click()
    dialog = page.get_by_role("dialog")
    expect(dialog.get_by_text("What to train on")).to_be_visible()
    return dialog


def number(dialog: Locator, section: str, name: str, value: str) -> None:
    field = dialog.locator(f'input[name="element_{name}"]')
    if not field.is_visible():
        dialog.get_by_role("button", name=section, exact=True).click()
    field.fill(value)


def send(stack: Stack, dialog: Locator, seconds: float = 600) -> str:
    """Press the form's button; return the run that starts."""
    before = {run["dag_run_id"] for run in stack.connection.airflow.newest_runs(FINETUNE)}
    dialog.get_by_role("button", name="Trigger", exact=True).click()

    def started() -> list[str]:
        runs = stack.connection.airflow.newest_runs(FINETUNE)
        return [run["dag_run_id"] for run in runs if run["dag_run_id"] not in before and run["run_type"] == "manual"]

    (run,) = wait("the run that the form starts", started, seconds)
    return str(run)


def answer(page: Page, option: str) -> None:
    """Answer Airflow's question with one of its buttons; what Airflow did not take is clicked again, as a person does.

    The page may draw the button anew in the moment of the click, and Airflow's database in a file may be locked.
    """
    said = []
    for _ in range(3):
        try:
            with page.expect_response(
                lambda one: one.request.method == "PATCH" and "hitlDetails" in one.url, timeout=20_000
            ) as answered:
                page.get_by_role("button", name=option, exact=True).click()
        except PlaywrightTimeout as error:
            said.append(str(error))
        else:
            if answered.value.ok:
                return
            said.append(f"{answered.value.status} {answered.value.text()}")
    raise AssertionError(f"Airflow did not take the answer {option}: {said}")


def keep(page: Page, name: str) -> None:
    """Keep a picture, if somebody wants pictures; few colours make it small."""
    folder = os.environ.get("DROPFORGE_SCREENSHOTS")
    if folder:
        from PIL import Image

        Path(folder).mkdir(parents=True, exist_ok=True)
        page.wait_for_timeout(1500)  # what moves has come to rest
        picture = Image.open(io.BytesIO(page.screenshot())).convert("RGB")
        picture.quantize(128, dither=Image.Dither.NONE).save(Path(folder) / f"{name}.png", optimize=True)
