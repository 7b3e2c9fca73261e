"""What the pages' own script draws, in Chromium: hostile texts stay texts, and a large gang fits a narrow window."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow.pages.course import Course
from dropforge_airflow.pages.family import family_page
from dropforge_airflow.pages.folder import Folder, Saved
from dropforge_airflow.pages.gang import Gang
from dropforge_airflow.pages.ledgers import Entered, Ledger, Refused
from dropforge_airflow.pages.lines import by_rank
from dropforge_airflow.pages.look import Unseen
from dropforge_airflow.pages.routes import _ASSETS, _HEADERS, STATIC
from dropforge_airflow.pages.shown import log_view, task_page
from dropforge_airflow.pages.task import Seen, Stage, Try
from dropforge_airflow.pages.versions import FamilyRun, Registry, Version
from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.observation import observe
from playwright.sync_api import Browser, Page, Route, expect

from dropforge import tracking
from tests.browser import needs_browser, opened
from tests.dropforge_airflow.pages.conftest import BEGAN
from tests.kubeflow_training.test_observation import ended, job, running

BAD = "</script><img src=x onerror=\"document.title='hacked'\"><b id=bad>'\"&amp;"
BASE = "http://airflow.test/dropforge"

pytestmark = [needs_browser, pytest.mark.timeout(240)]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as found:
        yield found


def hostile_tab(pods: int) -> dict[str, Any]:
    gang = [ended(rank, 12, message=BAD) if rank == min(900, pods - 1) else running(rank) for rank in range(pods)]
    made = {**job(("Running", "True", BAD, BAD), workers=pods - 1)}
    made["metadata"] = {"name": BAD, "uid": "u", "creationTimestamp": "2026-11-24T10:00:00Z"}
    tails = {f"pod-{rank}": [f"[rank {rank}] {BAD} {number}" for number in range(40)] for rank in range(8)}
    seen = Seen(
        "dropforge_finetune", BAD, "running", "train", -1,
        (Stage(BAD, BAD, 3, BEGAN, None), Stage("train", "running", 1, BEGAN, None)),
        (Try(1, BAD, BEGAN, BEGAN, BAD),), {"run": BAD, "family": BAD}, {"name": BAD, "uid": "u", "gang": 2},
        failures={BAD: BAD},
    )  # fmt: skip
    course = Course(
        BAD, BAD, BAD, {tracking.TAG_VERSION: BAD, tracking.TAG_RESUMED: BAD, tracking.TAG_CHAMPION: BAD}, {},
        {"train/loss": 1.0},
        {"train/loss": tuple((step, 3.0 - step / 1000) for step in range(300)), "eval/loss": ((1, float("nan")),)},
        champion_run=BAD,
    )  # fmt: skip
    figures = {f"eval/{BAD}": 1.0, "eval/loss": 2.0}
    folder = Folder(
        BAD, (Saved(5, 10, True),), ({"attempt": 1, "host": BAD, "ranks": BAD, "resumed_from": BAD},),
        {"candidate": figures, "champion": figures, "champion_version": BAD, "metric_note": BAD},
        {"promote": False, "reason": BAD, "checks": [{"name": BAD, "passed": True, "reason": BAD, "candidate": BAD}]},
        {}, BAD,
    )  # fmt: skip
    snapshot = Snapshot(made, gang, [{"reason": BAD, "message": BAD, "lastTimestamp": "2026-11-24T10:00:00Z"}])
    found = Gang(snapshot, observe(made, gang, ()), tails)
    page = task_page(seen, found, course, folder, f'javascript:alert("{BAD}")')
    page["unseen"] = [Unseen(BAD, BAD).as_dict()]
    return {**page, "log": log_view("pods", [item.as_dict() for item in by_rank(tails)])}


def hostile_family() -> dict[str, Any]:
    ledger = Ledger((Entered("i", BAD, 1.0, 1, 10, False, (BAD,)),), (Refused(BAD, 1.0, BAD),), 3, False)
    run = FamilyRun(BAD, BAD, BAD, BAD, 1.0, BAD, BAD, float("inf"))
    registry = Registry("1", (Version(BAD, 1.0, BAD, BAD, (BAD,), BAD, BAD, BAD, True),), (run,))
    page = family_page("dropforge_finetune", BAD, ledger, registry, {BAD: BAD}, "https://mlflow")
    return {**page, "families": [BAD, "other"]}


def show(browser: Browser, name: str, values: dict[str, Any], width: int = 1300, scheme: Any = "light") -> Page:
    """The page as the routes send it, in a window of its own."""
    page = browser.new_page(viewport={"width": width, "height": 900}, color_scheme=scheme)

    def answer(route: Route) -> None:
        path = route.request.url.removeprefix(BASE).partition("?")[0]
        last = path.rpartition("/")[2]
        if last.endswith(".json"):
            route.fulfill(body=json.dumps(values), headers={"Content-Type": "application/json"})
        elif last in _ASSETS:
            route.fulfill(body=(STATIC / last).read_text(), headers={"Content-Type": _ASSETS[last]})
        elif last == name:
            html = (STATIC / f"{'family' if name == 'families' else name}.html").read_text()
            route.fulfill(body=html, headers={**_HEADERS, "Content-Type": "text/html"})
        else:
            route.abort()

    page.route("**/*", answer)
    page.goto(f"{BASE}/dags/dropforge_finetune/{name}?run_id=x")
    expect(page.locator("h1")).to_be_visible()
    if folder := os.environ.get("DROPFORGE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"drawn-{name}-{width}-{scheme}.png", full_page=True)
    return page


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_hostile_texts_stay_texts_on_the_tab(browser: Browser, scheme: str) -> None:
    page = show(browser, "task", hostile_tab(8), scheme=scheme)
    for part in ("job", "training", "champion", "log", "checkpoints", "tries", "timeline", "failures"):
        expect(page.locator(f"#{part}")).to_be_visible()
    assert page.locator("#bad, img").count() == 0
    assert page.title() == "Training - Dropforge"
    assert page.locator("a[href^='javascript']").count() == 0
    expect(page.locator("#job")).to_contain_text(BAD)
    expect(page.locator("#log")).to_contain_text(f"{BAD} 39")
    expect(page.locator("#curve-train-loss path")).to_have_count(1)
    expect(page.locator("html")).to_have_attribute("data-theme", scheme)


def test_hostile_texts_stay_texts_on_the_page_of_a_family(browser: Browser) -> None:
    page = show(browser, "families", hostile_family())
    for part in ("versions", "refused", "drops", "runs"):
        expect(page.locator(f"#{part}")).to_contain_text(BAD)
    assert page.locator("#bad, img").count() == 0
    assert page.title() == "Families - Dropforge"
    hrefs = page.eval_on_selector_all("a", "links => links.map(link => link.href)")
    assert all(href.startswith(("https://mlflow/", "http://airflow.test/")) for href in hrefs)


@pytest.mark.parametrize(("name", "values"), [("task", hostile_tab(1000)), ("families", hostile_family())])
def test_a_narrow_window_scrolls_only_inside_tables(browser: Browser, name: str, values: dict[str, Any]) -> None:
    assert len(json.dumps(values)) < 400_000  # of a thousand pods a part is shown
    page = show(browser, name, values, width=420)
    if name == "task":
        expect(page.locator("#job")).to_contain_text("and 744 more")
        expect(page.locator("#job tbody tr").first).to_contain_text("failed first")
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")


def test_a_selection_survives_a_look_that_finds_the_same(browser: Browser) -> None:
    values = hostile_tab(2)
    page = show(browser, "task", values)
    page.evaluate("document.querySelector('#champion').dataset.mark = 'old'")
    values["job"]["message"] = "another one"
    expect(page.locator("#job")).to_contain_text("another one", timeout=20_000)
    expect(page.locator("#champion")).to_have_attribute("data-mark", "old")


def test_trouble_is_told_above_what_was_last_seen(browser: Browser) -> None:
    page = show(browser, "task", hostile_tab(2))
    page.unroute("**/*")
    page.route("**/*", lambda route: route.fulfill(status=401, body="{}"))
    expect(page.locator("#trouble")).to_contain_text("Your login has ended", timeout=20_000)
    expect(page.locator("#job")).to_be_visible()
