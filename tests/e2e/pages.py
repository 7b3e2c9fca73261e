"""A browser for end-to-end tests. With DROPFORGE_SCREENSHOTS=FOLDER pictures are kept there."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Page

from tests.browser import opened
from tests.e2e.harness import Stack


@contextmanager
def logged_in(stack: Stack) -> Iterator[Page]:
    """A page that has logged in to Airflow with the login that `dropforge up` prints."""
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
    """Keep a picture, if somebody wants pictures."""
    folder = os.environ.get("DROPFORGE_SCREENSHOTS")
    if folder:
        Path(folder).mkdir(parents=True, exist_ok=True)
        page.screenshot(path=Path(folder) / f"{name}.png")
