"""What pods, other programs and power cuts leave in a store is read in one way: bounded, and told or passed over."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from dropforge_airflow.tasks import turn
from dropforge_airflow.tasks.run import opening

from curation.increments import read_head
from dropforge import (
    approval,
    aside,
    confirmation,
    gangs,
    intake_ledger,
    layout,
    ledger,
    lineage,
    moves,
    retrains,
    start,
    sweeps,
)
from dropforge.cli.explain import find
from dropforge.errors import DropforgeError
from dropforge.json_objects import MOST_MANIFEST, UnreadableError, parse_object, read_as, read_object
from dropforge.run import RunSpec
from dropforge.store import FolderStore, MissingObjectError, Store
from dropforge.tracking import Champion
from dropforge.watching import trainings
from trainer.state.checkpoint import Checkpoints

NESTED = b'{"a": ' + b"[" * 100_000 + b"]" * 100_000 + b"}"
BAD = {
    "empty": (b"", "no JSON"),
    "torn": (b'{"a": ', "no JSON"),
    "no text": (b"\xff\xfe\xfa", "no JSON"),
    "list": (b"[]", "a list and no object"),
    "null": (b"null", "null and no object"),
    "nested": (NESTED, "more than 100 deep"),
    "deep": (b'{"a": ' + b"[" * 100 + b"]" * 100 + b"}", "more than 100 deep"),
    "number": (b'{"a": ' + b"9" * 400 + b"}", "a number of 400 digits"),
    "long number": (b'{"a": ' + b"9" * 9000 + b"}", "a number of 9,000 digits"),
}
DROP, PAIR = "0" * 32, approval.Pair("c" * 64, None)
CHAMPION = Champion("1", "/x/runs/fam-1/model", "r", "fam-1", "d")


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path / "bucket")


@pytest.mark.parametrize("kind", BAD)
def test_what_is_no_object_is_told_with_its_name_and_mend(store: FolderStore, kind: str) -> None:
    body, cause = BAD[kind]
    store.put("runs/r/x.json", body)
    with pytest.raises(UnreadableError, match=rf"bucket/runs/r/x\.json: it cannot be read.*{cause}.*\. Write it anew"):
        read_object(store, "runs/r/x.json", "Write it anew")


def test_an_object_is_read_to_its_bound_and_no_further(store: FolderStore) -> None:
    body = b'{"a": [1, 2.5, "x"]}'
    store.put("x.json", body)
    assert read_object(store, "x.json", most=len(body)) == parse_object(body, "x") == {"a": [1, 2.5, "x"]}
    with pytest.raises(UnreadableError, match=f"more than {len(body) - 1} bytes"):
        read_object(store, "x.json", most=len(body) - 1)
    with pytest.raises(MissingObjectError):
        read_object(store, "y.json")
    with pytest.raises(UnreadableError, match=r"x\.json: it cannot be read \(KeyError\('b'\)\)"):
        read_as(store, "x.json", lambda values: values["b"])
    deep = b'{"a": ' + b"[" * 99 + b"]" * 99 + b"}"
    assert parse_object(deep, "x")


#: How state is read, below which key, and whether what cannot be read is told to a person.
READERS: dict[str, tuple[str, Callable[[Store], Any], bool]] = {
    "run": (layout.run_key("fam-1"), lambda store: RunSpec.read(store, layout.run_key("fam-1")), True),
    "explain": (layout.run_key("fam-1"), lambda store: find(store, "fam-1"), True),
    "runs": (layout.run_key("fam-1"), lineage.runs, False),
    "trained": (layout.run_key("fam-1"), lambda store: retrains.trained(store, "fam", CHAMPION).drops, False),
    "place": (layout.run_key("fam-1"), lambda store: trainings._elsewhere(store, "fam-1"), False),
    "manifest": (layout.manifest_key("fam", "0" * 64), lambda store: find(store, "fam/0000"), True),
    "entry": (layout.ledger_key("fam", DROP), lambda store: ledger.read(store, "fam", DROP), True),
    "entries": (layout.ledger_key("fam", DROP), lambda store: ledger.arrived(store, "fam"), True),
    "champion": (
        layout.report_key("fam-1"),
        lambda store: start.champion_files(store, Champion("1", f"{store.uri}/runs/fam-1/model", "r", "fam-1", "d")),
        False,
    ),
    "began": ("runs/fam-1/began.json", lambda store: trainings._moment(store, "runs/fam-1/began.json"), False),
    "gang": ("runs/fam-1/gangs/u.json", lambda store: gangs.kept(store, "fam-1"), True),
    "confirmation": (layout.confirmation_key("fam-1"), lambda store: confirmation.read(store, "fam-1"), True),
    "approval": (
        layout.approval_key("fam-1", PAIR.candidate, None),
        lambda store: approval.read(store, "fam-1", PAIR),
        True,
    ),
    "retrain": (layout.retrain_key("fam"), lambda store: retrains.begun(store, "fam"), False),
    "retrains": (f"{layout.retrains_prefix('fam')}x.json", lambda store: retrains.ended(store, "fam"), False),
    "head": (layout.head_key("fam"), lambda store: read_head(store, "fam"), True),
    "move": (layout.move_key("fam"), lambda store: moves.moving(store, "fam", "me").__enter__(), True),
    "opening": (layout.opening_key("fam"), lambda store: opening(store, "fam", "me").__enter__(), True),
    "turn": (layout.turn_key("fam"), lambda store: turn.take(store, "fam", "me", lambda _: False), True),
    "intake": (layout.rules_key("fam"), lambda store: intake_ledger.read_state(store, "fam").until, False),
    "claim": (layout.claim_key("fam", DROP, 1), lambda store: ledger.claim(store, "fam", DROP, "me"), True),
    "owner": (layout.claim_key("fam", DROP, 1), lambda store: ledger.owner_of(store, "fam", DROP), True),
    "pending": (layout.pending_key("fam", DROP), lambda store: ledger.held(store, "fam", DROP), False),
}


@pytest.mark.parametrize("body", [b"", b"[]", NESTED, b'{"x": 1}'], ids=["empty", "list", "nested", "other"])
@pytest.mark.parametrize("reader", READERS)
def test_torn_state_is_told_or_counts_as_none(store: FolderStore, reader: str, body: bytes) -> None:
    key, read, told = READERS[reader]
    store.put(key, body)
    if not told:
        assert not read(store)
        return
    with pytest.raises(DropforgeError, match=r"cannot be read") as caught:
        read(store)
    assert key in caught.value.thing


@pytest.mark.parametrize(
    "body",
    [b"", b"[]", NESTED, b'{"check": 1, "eval_loss": []}', b'{"check": "x"' + b" " * MOST_MANIFEST + b"}"],
    ids=["empty", "list", "nested", "other", "large"],
)
def test_a_checkpoints_manifest_of_another_shape_is_passed_over(store: FolderStore, body: bytes) -> None:
    store.put("checkpoints/step-1/manifest.json", body)
    store.put("checkpoints/step-2/manifest.json", b'{"check": "c"}')
    assert [item.step for item in aside.sealed(store)] == [2]
    said: list[str] = []
    assert list(Checkpoints(store, "fam-1", "p", {}, said.append).candidates()) == []
    assert "step-1 is broken (its manifest cannot be read" in said[1]


@pytest.mark.parametrize(
    "body",
    [
        *(b"", b"[]", NESTED, b'{"eval": []}', b'{"steps": Infinity, "seconds": 1}'),
        b'{"eval": {"after": {"eval/loss": ' + b"9" * 400 + b'}}, "steps": 1, "seconds": 1}',
    ],
    ids=["empty", "list", "nested", "other", "infinite", "number"],
)
def test_a_trial_whose_report_cannot_be_read_has_failed(store: FolderStore, body: bytes) -> None:
    good = {"eval": {"after": {"eval/loss": 2.0}}, "steps": 1, "seconds": 1}
    for number, report in enumerate((body, json.dumps(good).encode())):
        sweeps.note(store, "fam", {"by": "s", "parent": "", "trial": number, "candidate": False}, f"fam-{number}", "r")
        store.put(layout.report_key(f"fam-{number}"), report)
    bad, done = sweeps.outcomes(store, "fam", "s", 2, "eval/loss")
    assert (bad.state, done.state, done.value) == ("failed", "done", 2.0)
    assert "its report cannot be read" in bad.told


@pytest.mark.parametrize(
    "other",
    [{"recipe": [1]}, {"recipe": {"base": "m"}}, {"dataset_digest": ["x"]}, {"start": {"asked": "x", "tokens": 1}}],
    ids=["recipe", "base", "digest", "start"],
)
def test_a_run_of_another_shape_stands_in_the_way_of_no_forgetting(store: FolderStore, other: dict[str, Any]) -> None:
    run = {"run": "fam-1", "family": "fam", "counter": 1, "root": "r", "data_root": "d", "dataset": "m", "code": "c"}
    good = {**run, "dataset_digest": "x", "recipe": {"base": {"model": "m"}, "train": {}}}
    store.put(layout.run_key("fam-1"), json.dumps(good).encode())
    store.put(layout.run_key("fam-2"), json.dumps(good | other).encode())
    found = lineage.runs(store)
    assert set(found) == {"fam-1"}
    assert lineage.knowing({"x"}, found, []) == []


#: Reads without a bound that stay: what is read there lies not below `runs/`, or is no state that pods write.
UNBOUNDED = {
    "dropforge/cli/probe.py": 1,  # what the watcher answers
    "curation/local.py": 2,
    "curation/spark_job/__init__.py": 1,
    "trainer/prepare.py": 1,  # a tokenizer's file, read by the run's own pods
    "trainer/node/watchdog.py": 2,  # PyTorch's store, in which ranks meet
    "plugins/dropforge_airflow/asking.py": 3,  # Airflow's own store of a task's state
    "plugins/dropforge_airflow/trials.py": 1,
    "plugins/dropforge_airflow/tasks/run.py": 1,
}
_STORES = {"store", "ledger", "_store", "place", "folder", "bucket", "run", "runs"}
_READ = re.compile(rf"(\b_?({'|'.join(sorted(_STORES))})|open_store\(.*\))\.get\(")


def whole_reads(source: str) -> int:
    """Calls of `get` with one argument that is no plain word, of what is named as a store is, or was just opened."""
    found = 0
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr == "get"):
            continue
        of = node.func.value
        name = of.id if isinstance(of, ast.Name) else of.attr if isinstance(of, ast.Attribute) else ""
        opened = isinstance(of, ast.Call) and isinstance(of.func, ast.Name) and of.func.id == "open_store"
        plain = len(node.args) != 1 or (isinstance(node.args[0], ast.Constant) and name == "run")
        found += (name in _STORES or opened) and not plain
    return found


def test_nothing_below_runs_is_read_without_a_bound() -> None:
    """A new read of a whole object is `read_object`, or stands above with its reason."""
    sample = "store.get(key); self._store.get(f'{a}/x'); open_store(root).get(key); read_object(store, key)"
    assert whole_reads(sample) == 3
    root = Path(__file__).parents[2]
    files = (
        path
        for folder in ("dropforge", "curation", "trainer", "plugins/dropforge_airflow")
        for path in sorted((root / folder).rglob("*.py"))
    )
    texts = {path.relative_to(root).as_posix(): path.read_text() for path in files}
    counts = {name: whole_reads(text) for name, text in texts.items() if _READ.search(text)}
    assert {name: count for name, count in counts.items() if count} == UNBOUNDED
