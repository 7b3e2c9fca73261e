"""A person's word before the alias moves: asked in the browser, kept, and given by the deadline where nobody speaks."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from urllib.parse import quote

import pytest
import yaml
from playwright.sync_api import Page, expect

from dropforge import family_recipe, layout, tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.errors import DropforgeError
from dropforge.recipes.load import merge
from dropforge.stack.state import AIRFLOW_USER
from tests.browser import needs_browser
from tests.e2e.harness import EVALUATE, Stack, typed
from tests.e2e.pages import answer, keep, logged_in

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1800), needs_browser]

FAMILY = "asked"
OTHER = "asked-otherwise"
RECIPE = f"""\
extends: tiny
{EVALUATE}
train: {{max_steps: 3}}
promote: {{better_than_base: false, min_improvement: -0.9, approval: {{deadline_hours: 1}}}}
"""


@pytest.fixture(scope="module")
def page(stack: Stack) -> Iterator[Page]:
    with logged_in(stack) as page:
        yield page


def asked(stack: Stack, run: str) -> None:
    """Wait until a person is asked, which is after all the rest of a run."""
    stack.see(run, "approve", "awaiting_input", 900)


@pytest.fixture(scope="module")
def promoted(stack: Stack, page: Page, samples: dict[int, dict[str, Path]]) -> str:
    """The run of a drop whose question a person answers with yes, in the browser."""
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "one", samples[2], RECIPE))
    asked(stack, run)
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "RUNNING"
    assert tracked.data.tags[tracking.TAG_APPROVAL].startswith("asked until ")
    assert tracked.data.tags[tracking.TAG_VERDICT].startswith("not promoted: awaiting approval")
    assert stack.champion(FAMILY) is None

    page.goto(tracked.data.tags[tracking.TAG_APPROVAL].partition(": ")[2])
    expect(page.get_by_text("better than champion")).to_be_visible()
    expect(page.get_by_text("as the family's first")).to_be_visible()
    keep(page, "approval")
    answer(page, "Promote")
    assert stack.end(run) == "success", stack.log(run, "approve")
    keep(page, "approved")
    return run


def test_a_yes_moves_the_alias_and_stands_everywhere(stack: Stack, promoted: str) -> None:
    (tracked,) = stack.tracked(promoted)
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION]
    version = stack.mlflow.get_model_version(FAMILY, tracked.data.tags[tracking.TAG_VERSION])
    summary = stack.connection.store.get(f"runs/{tracked.data.tags[tracking.TAG_RUN]}/summary.md").decode()
    assert f"- Training {tracked.data.tags[tracking.TAG_HEALTH]}\n" in summary
    for text in (
        tracked.data.tags[tracking.TAG_APPROVAL],
        tracked.data.tags[tracking.TAG_VERDICT],
        version.tags[tracking.TAG_VERDICT],
        summary,
    ):
        assert f"{AIRFLOW_USER} said yes at " in text


def test_a_clear_asks_nobody_again_about_the_champion(stack: Stack, promoted: str) -> None:
    stack.clear(promoted, "champion")  # and so its job of evaluation, `decide`, the question and the version
    assert stack.end(promoted) == "success"
    (tracked,) = stack.tracked(promoted)
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION]
    assert len(stack.mlflow.search_model_versions(f"name = '{FAMILY}'")) == 1


def ask_again(stack: Stack, name: str, files: dict[str, Path], **approval: object) -> str:
    """A run of a family whose recipe has this approval, and the question that it waits with."""
    recipe = merge(yaml.safe_load(RECIPE), {"promote": {"approval": approval}})
    family_recipe.write(stack.connection.store, OTHER, recipe, None, "ann")
    run = wait_for_run(stack.connection, stack.drop(OTHER, name, files, None))
    asked(stack, run)
    return run


def test_only_who_is_named_may_answer_and_a_run_that_waits_can_be_cancelled(
    stack: Stack, samples: dict[int, dict[str, Path]]
) -> None:
    run = ask_again(stack, "one", samples[2], people=["somebody-else"])
    with pytest.raises(DropforgeError, match="is not a respondent for the task"):
        stack.connection.airflow.answer(FINETUNE, run, "approve", "Promote")
    task = f"/api/v2/dags/{FINETUNE}/dagRuns/{quote(run, safe='')}/taskInstances/approve"
    for method, kept in (("PUT", "state-store/answer"), ("PATCH", "xcomEntries/return_value")):
        with pytest.raises(DropforgeError, match="nothing but their tasks writes them"):
            stack.connection.airflow._call(method, f"{task}/{kept}", json={"value": {"yes": True}})
    stack.cancel(run)
    assert stack.end(run) == "failed"
    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "KILLED"
    assert stack.connection.store.stat(layout.turn_key(OTHER)) is None


def test_a_clear_asks_those_who_are_named_now(stack: Stack, samples: dict[int, dict[str, Path]]) -> None:
    less = {name: path for name, path in samples[2].items() if name.endswith(".jsonl")}  # all would be the same drop
    run = ask_again(stack, "three", less, people=["somebody-else"])
    recipe = merge(yaml.safe_load(RECIPE), {"promote": {"approval": {"people": [AIRFLOW_USER]}}})
    family_recipe.write(stack.connection.store, OTHER, recipe, None, "ann")
    stack.clear(run, "approve")
    asked(stack, run)
    stack.connection.airflow.answer(FINETUNE, run, "approve", "Promote")
    assert stack.end(run) == "success"
    (tracked,) = stack.tracked(run)
    assert stack.champion(OTHER) == tracked.data.tags[tracking.TAG_VERSION]


def test_silence_is_what_the_recipe_says_it_is(stack: Stack, samples: dict[int, dict[str, Path]]) -> None:
    run = ask_again(stack, "two", samples[1], deadline_hours=0.01)
    assert stack.end(run) == "success"
    (tracked,) = stack.tracked(run)
    assert "no one answered by " in tracked.data.tags[tracking.TAG_VERDICT]
    assert tracked.data.tags[tracking.TAG_VERSION] == "2"
    assert stack.champion(OTHER) == "1"


def test_a_no_in_the_terminal_keeps_the_champion_and_is_asked_again_after_a_clear(
    stack: Stack, promoted: str, samples: dict[int, dict[str, Path]]
) -> None:
    champion = stack.champion(FAMILY)
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "two", samples[1], RECIPE))
    asked(stack, run)
    done = typed(stack, "approve", f"{FAMILY}/two", "--no")
    assert done.returncode == 0, done.stderr
    assert f"instead of version {champion}" in done.stdout
    assert "| better than champion |" in done.stdout
    assert stack.end(run) == "success"
    assert stack.champion(FAMILY) == champion
    done = typed(stack, "approve", f"{FAMILY}/two", "--yes")
    assert done.returncode == 2
    assert "it awaits no approval" in done.stderr

    (tracked,) = stack.tracked(run)
    refused = tracked.data.tags[tracking.TAG_VERSION]
    done = typed(stack, "rollback", FAMILY, "--to", refused, "--reason", "by hand", "--yes")
    assert done.returncode == 2
    assert "it never was 'champion', and people approve of this family's models" in done.stderr
    assert stack.champion(FAMILY) == champion

    stack.clear(run, "approve")
    asked(stack, run)
    assert typed(stack, "approve", f"{FAMILY}/two", "--yes").returncode == 0
    assert stack.end(run) == "success"
    (tracked,) = stack.tracked(run)
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION] != champion
