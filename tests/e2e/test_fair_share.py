"""A family whose runs take long holds up nobody else, and its next drop begins when a run has ended, however it did."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dropforge import in_flight, ledger
from dropforge.client.airflow import FINETUNE
from dropforge.client.drops import wait_for_run
from dropforge.drop import Drop
from tests.e2e.harness import Stack, wait

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(900)]

FAMILY = "crowded"


def rows(folder: Path, name: str) -> dict[str, Path]:
    path = folder / f"{name}.jsonl"
    said = (f"Row {n} of {name} waits behind {n % 7} others, and before {n + 1} more." for n in range(60))
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in said))
    return {"rows.jsonl": path}


def no(stack: Stack, run: str) -> None:
    """A person's word, by which the run ends."""
    stack.see(run, "confirm", "awaiting_input", 240)
    stack.connection.airflow.answer(FINETUNE, run, "confirm", "Do not start")
    assert stack.end(run) == "failed"


def test_drops_wait_for_their_own_family_s_runs_and_for_no_other_s(stack: Stack, tmp_path: Path) -> None:
    store = stack.connection.store

    def waits(drop: Drop) -> str | None:
        return ledger.held(store, FAMILY, drop.id)

    first = stack.drop(FAMILY, "first", rows(tmp_path, "first"), None)
    run = wait_for_run(stack.connection, first)
    # Its recipe is refused by `plan`, so that its run ends without a teardown.
    refused = stack.drop(FAMILY, "refused", rows(tmp_path, "refused"), "promote: {min_improvement: -1}\n")
    assert "at most 1 of its family (intake.max_active_runs)" in str(wait("why it waits", lambda: waits(refused), 120))
    third = stack.drop(FAMILY, "third", rows(tmp_path, "third"), None)
    wait("that the third waits", lambda: waits(third), 120)
    other = stack.drop("uncrowded", "one", rows(tmp_path, "other"), "extends: nowhere\n")
    assert stack.end(wait_for_run(stack.connection, other)) == "failed"
    assert ledger.owner_of(store, FAMILY, refused.id) is None
    no(stack, run)
    assert stack.end(wait_for_run(stack.connection, refused)) == "failed"
    last = wait_for_run(stack.connection, third)
    assert (FAMILY, third.id) in in_flight.entries(store)
    no(stack, last)
    wait("its end to be noted", lambda: not in_flight.entries(store), 60)
