"""The tab in Airflow's own UI while a gang of two ranks trains, and who may not see it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import httpx
import jwt
import pytest
from playwright.sync_api import Page, expect

from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.stack.secrets import read_secrets
from tests.browser import EXPECTED, needs_browser
from tests.e2e.harness import EVALUATE, Stack, wait
from tests.e2e.pages import keep, logged_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(600), needs_browser]

FAMILY = "tab"
RECIPE = f"extends: tiny\n{EVALUATE}train: {{max_steps: 3000}}\ncompute: {{processes_per_node: 2}}\n"


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[Page]:
    expect.set_options(timeout=120_000)
    with logged_in(stack) as page:
        yield page
    expect.set_options(timeout=EXPECTED)


@pytest.fixture(scope="module")
def training(stack: Stack, samples: dict[int, dict[str, Path]]) -> str:
    """A run whose ranks are at work, until the last test cancels it."""
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "one", samples[1], RECIPE))
    wait("training to begin", stack.ranks)
    return run


def token(stack: Stack, **user: Any) -> str:
    """A login as Airflow's auth manager makes one, for a user that this stack has not."""
    import time

    secret, now = read_secrets(stack.folder).jwt_secret, int(time.time())
    claims = {"aud": "apache-airflow", "iat": now, "nbf": now, "exp": now + 600, "jti": str(now), **user}
    return jwt.encode(claims, secret, algorithm="HS512")


def ask(stack: Stack, run: str, login: str | None, page: str = "task.json") -> httpx.Response:
    address = f"{stack.connection.airflow.url}/dropforge/dags/{FINETUNE}/{page}"
    headers = {} if login is None else {"Authorization": f"Bearer {login}"}
    return httpx.get(address, params={"run_id": run, "task_id": "train"}, headers=headers, timeout=60)


def test_the_tab_shows_ranks_and_a_falling_loss(stack: Stack, training: str, page: Page) -> None:
    url = stack.connection.airflow.url
    page.goto(f"{url}/dags/{FINETUNE}/runs/{quote(training, safe='')}/tasks/train")
    page.get_by_role("link", name="Training", exact=True).click()
    tab = page.frame_locator("iframe[title=Dropforge]")
    expect(tab.locator("#job")).to_contain_text("1 of 1 pods run")
    expect(tab.locator("#job table")).to_contain_text("master-0")
    expect(tab.locator("#log summary", has_text="rank 0")).to_be_visible()  # the other one prints nothing

    def points() -> int:
        (tracked,) = stack.tracked(training)
        return len(stack.mlflow.get_metric_history(tracked.info.run_id, "train/loss"))

    wait("a curve", lambda: points() > 1, progress=points)
    expect(tab.locator("#curve-train-loss path")).to_be_visible()
    expect(tab.locator("#checkpoints")).to_contain_text("would resume from step")
    keep(page, "tab")
    with page.context.expect_page() as beside:  # out of the frame, which a sandbox would not let
        tab.get_by_role("link", name="MLflow run").click()
    expect(beside.value.get_by_text(f"{FAMILY}/one").first).to_be_visible()
    beside.value.close()

    # On the run the same page chooses the task at work; by the UI's own theme it is dark.
    page.evaluate("localStorage.setItem('theme', 'dark')")
    page.goto(f"{url}/dags/{FINETUNE}/runs/{quote(training, safe='')}")
    page.get_by_role("link", name="Dropforge", exact=True).click()
    expect(tab.locator("html")).to_have_attribute("data-theme", "dark")
    expect(tab.locator("#job")).to_contain_text("master-0")
    keep(page, "tab-of-run")

    tab.get_by_role("link", name=FAMILY, exact=True).click()
    expect(tab.locator("#drops")).to_contain_text("one")
    page.goto(f"{url}/plugin/dropforge-families")
    tab.get_by_role("link", name=FAMILY, exact=True).click()
    expect(tab.locator("#drops")).to_contain_text("running")
    keep(page, "families")
    page.evaluate("localStorage.setItem('theme', 'light')")


def test_only_with_login_and_rights(stack: Stack, training: str) -> None:
    for page in ("task", "task.json", "families", "family.json"):
        assert ask(stack, training, None, page).status_code == 401
        assert ask(stack, training, token(stack, sub="viewer", role="VIEWER", teams=[]), page).status_code == 200
        # Someone without any right on DAGs; rights per DAG are held by tests/dropforge_airflow/pages.
        assert ask(stack, training, token(stack, sub="nobody", role="", teams=[]), page).status_code == 403
    shown = ask(stack, training, token(stack, sub="viewer", role="VIEWER", teams=[])).text
    secrets = json.loads((stack.folder / "secrets.json").read_text())
    assert not [name for name, value in secrets.items() if value in shown]


def test_a_run_that_is_cancelled_is_shown_as_such(stack: Stack, training: str, page: Page) -> None:
    page.goto(f"{stack.connection.airflow.url}/dropforge/dags/{FINETUNE}/task?run_id={quote(training)}")
    expect(page.locator("#job")).to_contain_text("running")
    stack.cancel(training)
    expect(page.locator("header")).to_contain_text("failed")
    expect(page.locator("#job")).not_to_contain_text("running")
    wait("the end of its processes", lambda: not stack.ranks())
