"""The product once, whole: a drop of which a rank is killed becomes a model that a person lets in, in the browser.

It is the end-to-end part of `make test`; the other files here are run by `make test-slow`.
"""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from playwright.sync_api import expect

from dropforge import tracking
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.rest import DeniedError, Rest
from dropforge.stack import mlflow_accounts
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import AIRFLOW_USER
from tests.browser import needs_browser
from tests.e2e.harness import EVALUATE, Stack, wait
from tests.e2e.pages import answer, keep, logged_in, number, open_form, send

pytestmark = [pytest.mark.e2e, pytest.mark.smoke, pytest.mark.timeout(1200), needs_browser]

FAMILY = "smoke"
RECIPE = f"""\
extends: tiny
{EVALUATE}
train: {{max_steps: 30, checkpoint_every: 5}}
promote: {{better_than_base: false, min_improvement: -0.9, approval: {{deadline_hours: 1}}}}
"""


def test_a_drop_becomes_a_model_although_a_rank_is_killed_and_a_person_is_asked(
    stack: Stack, samples: dict[int, dict[str, Path]], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = wait_for_run(stack.connection, stack.drop(FAMILY, "one", samples[2], RECIPE))
    with logged_in(stack) as page:
        # Meanwhile the form: what cannot work is refused before anything trains.
        dialog = open_form(stack, page)
        dialog.locator("#element_data").fill(f"{FAMILY}/one")
        dialog.locator('label:has(input[name="element_again"])').click()
        number(dialog, "Training", "train_sequence_length", "4096")
        refused = send(stack, dialog)

        stack.see_checkpoint(run)
        wait("a training process", stack.ranks)[0].send_signal(signal.SIGKILL)

        assert stack.end(refused) == "failed"
        assert stack.tasks(refused)["plan"]["try_number"] == 1
        page.goto(f"{stack.connection.airflow.page(FINETUNE, refused)}/tasks/plan")
        expect(page.get_by_text("4096 is longer than the model's context of 128").first).to_be_visible()

        stack.see(run, "approve", "awaiting_input")
        assert stack.champion(FAMILY) is None
        page.goto(f"{stack.connection.airflow.page(FINETUNE, run)}/required_actions")
        expect(page.get_by_text("better than champion")).to_be_visible()
        keep(page, "smoke-approval")
        answer(page, "Promote")
        assert stack.end(run) == "success", stack.log(run, "approve")

    (tracked,) = stack.tracked(run)
    assert tracked.info.status == "FINISHED"
    assert tracked.data.tags[tracking.TAG_ATTEMPT] == "2"
    assert int(tracked.data.tags[tracking.TAG_RESUMED]) >= 5
    assert "resuming from checkpoint step-" in stack.log(run, "train")
    assert stack.champion(FAMILY) == tracked.data.tags[tracking.TAG_VERSION]
    assert f"{AIRFLOW_USER} said yes at " in tracked.data.tags[tracking.TAG_VERDICT]
    secrets = read_secrets(stack.folder)
    for login in ({}, mlflow_accounts.login(mlflow_accounts.TRAINER, secrets)):
        for name in mlflow_accounts.login(mlflow_accounts.PERSON, secrets):
            monkeypatch.setenv(name, login.get(name, ""))
        with pytest.raises(DeniedError, match=r"HTTP 40[13]"):
            Rest(stack.connection.settings.tracking_uri).call(
                "POST", "registered-models/alias", {"name": FAMILY, "alias": "champion", "version": "1"}
            )
