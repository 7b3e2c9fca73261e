"""Tokens and packs in the run's folder: made once, taken over by other nodes and later attempts, never unchecked."""

from __future__ import annotations

import hashlib
import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import trainer.tokenise
from dropforge.errors import DataError, DropforgeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.assembly import make_plan
from trainer.config import Settings, read_settings
from trainer.data.plan_store import PlanStore
from trainer.data.proof import prove
from trainer.gang import Gang
from trainer.prepare import Prepared, await_prepared, prepare

from .toy import Toy


@dataclass
class Nodes:
    """Nodes and attempts of one run, each with a scratch folder of its own."""

    spec: RunSpec
    settings: Settings
    folder: Path
    said: list[str] = field(default_factory=list)

    def start(self, name: str, **more: Any) -> Prepared:
        more = {"share": False} | more  # here the run's own folder alone is looked at
        prepare(self.spec, self.settings, self.folder / name, lambda: None, self.said.append, **more)
        return await_prepared(self.settings, self.spec, self.folder / name, lambda: None)

    def digest(self, prepared: Prepared, packs: bool = True) -> str:
        return make_plan(self.settings, prepared, packs).digest(prepared.plan_content)

    @property
    def stored(self) -> Path:
        (found,) = (Path(self.spec.root) / "plan").iterdir()
        return found

    @property
    def tokenised(self) -> int:
        return sum(line.startswith("tokenising") for line in self.said)


@pytest.fixture
def nodes(toy: Toy, tmp_path: Path) -> Callable[..., Nodes]:
    def make(**overrides: Any) -> Nodes:
        spec = RunSpec.from_json(Path(toy.run("stored", **overrides)).read_bytes())
        return Nodes(spec, read_settings(spec.recipe), tmp_path / "nodes")

    return make


def test_another_attempt_takes_over_what_the_first_one_made(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = nodes()
    first = run.start("a")
    monkeypatch.setattr(trainer.tokenise, "read_rows", None)  # not a row is read again
    second = run.start("b")
    assert run.tokenised == 1
    assert run.digest(first) == run.digest(second)
    assert run.digest(first, False) == run.digest(second, False) != run.digest(first)
    for name in ("ids", "trained", "offsets", "rows", "lengths", "targets"):
        assert np.array_equal(getattr(first.train, name), getattr(second.train, name))
        assert np.array_equal(getattr(first.eval, name), getattr(second.eval, name))
    assert first.row_keys.tobytes() == second.row_keys.tobytes()
    assert first.train.facts == second.train.facts


def test_whoever_makes_it_anew_gets_the_same_bytes(nodes: Any) -> None:
    run = nodes()
    run.start("a")
    before = {path.name: path.read_bytes() for path in run.stored.rglob("*.*")}
    shutil.rmtree(run.stored.parent)
    run.start("b")
    assert {path.name: path.read_bytes() for path in run.stored.rglob("*.*")} == before


def test_other_nodes_wait_for_what_the_first_one_stores(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = nodes()
    made: list[Prepared] = []
    thread = threading.Thread(target=lambda: made.append(run.start("other", first=False)))
    looked = threading.Event()
    fetch = PlanStore.fetch

    def look(self: PlanStore, *arguments: Any) -> bool:
        found = fetch(self, *arguments)
        if threading.current_thread() is thread:
            looked.set()
        return found

    monkeypatch.setattr(PlanStore, "fetch", look)
    keep = PlanStore.keep

    # The first node stores nothing before the other has looked and found nothing.
    def keep_late(self: PlanStore, folder: Path) -> None:
        assert looked.wait(60)
        keep(self, folder)

    monkeypatch.setattr(PlanStore, "keep", keep_late)
    thread.start()
    first = run.start("first")
    thread.join(60)
    assert run.digest(made[0]) == run.digest(first)
    assert run.tokenised == 1


def test_a_node_that_waits_in_vain_makes_it_itself(nodes: Any) -> None:
    run = nodes()
    made = run.start("other", first=False, patience=0.3)
    assert run.digest(run.start("late")) == run.digest(made)
    assert run.tokenised == 1


@pytest.mark.parametrize(
    ("harm", "reason"),
    [
        ("flip", "packs/documents.npy is not what was written"),
        ("truncate", "packs/documents.npy is not what was written"),
        ("delete", "packs/documents.npy is missing"),
        ("torn manifest", "its manifest is torn"),
        ("no manifest", None),
        ("foreign", "its manifest is that of other data"),
        ("outside", "its manifest is torn"),
    ],
)
def test_a_harmed_plan_is_made_anew_and_the_reason_said(nodes: Any, harm: str, reason: str | None) -> None:
    run = nodes()
    first = run.start("a")
    file, manifest = run.stored / "packs" / "documents.npy", run.stored / "plan.json"
    data, values = bytearray(file.read_bytes()), json.loads(manifest.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif harm == "truncate":
        file.write_bytes(data[:-4])
    elif harm == "delete":
        file.unlink()
    elif harm == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    elif harm == "no manifest":
        manifest.unlink()
    else:
        if harm == "foreign":
            values["parts"]["dataset"] = "0" * 64
        else:
            values["files"]["../run.json"] = {"bytes": 1, "sha256": "0"}
        manifest.write_text(json.dumps(values))
    second = run.start("b")
    assert run.tokenised == 2
    assert run.digest(first) == run.digest(second)
    told = [line for line in run.said if "is not used" in line]
    assert reason is None or (len(told) == 1 and reason in told[0])
    assert (reason is None) == (not told)
    run.start("c")  # it was mended
    assert run.tokenised == 2


def test_a_changed_plan_with_checksums_that_fit_its_manifest_only_is_refused(nodes: Any) -> None:
    """A node that makes it anew tells what differs."""
    run = nodes()
    run.start("a")
    manifest = run.stored / "plan.json"
    values = json.loads(manifest.read_bytes())
    values["files"]["train/ids.npy"]["sha256"] = "0" * 64
    manifest.write_text(json.dumps(values))
    with pytest.raises(DropforgeError, match=r"made again from the same rows, train/ids.npy differ"):
        run.start("b")


def test_a_changed_plan_that_fits_its_checksums_is_found_by_the_proof(nodes: Any) -> None:
    run = nodes()
    run.start("a")
    manifest, file = run.stored / "plan.json", run.stored / "packs" / "documents.npy"
    documents = np.load(file)
    documents[0] = documents[-1]
    np.save(file, documents)
    values = json.loads(manifest.read_bytes())
    values["files"]["packs/documents.npy"]["sha256"] = hashlib.sha256(file.read_bytes()).hexdigest()
    manifest.write_text(json.dumps(values))
    changed = run.start("b")
    assert run.tokenised == 1
    with pytest.raises(DataError, match=r"epoch 1: document .* missing"):
        prove(make_plan(run.settings, changed, True), Gang(), 2)


def test_another_length_or_seed_has_its_own_plan(nodes: Any) -> None:
    run = nodes()
    first = run.start("a")
    shorter = replace(run.settings, train=replace(run.settings.train, sequence_length=48))
    other = Nodes(run.spec, shorter, run.folder)
    assert int(other.start("b").train.lengths.max()) <= 48 < int(first.train.lengths.max())
    assert other.tokenised == 1
    seeded = Nodes(run.spec, replace(run.settings, train=replace(run.settings.train, seed=99)), run.folder)
    again = seeded.start("c")
    assert seeded.tokenised == 0, "tokens do not depend on the seed"
    assert seeded.digest(again) != run.digest(first)


def test_rows_that_teach_nothing_are_refused_by_later_attempts_too(nodes: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = nodes()
    run.start("a")
    (facts,) = run.stored.glob("train/facts.json")
    assert json.loads(facts.read_text())["without_targets"] == 0
    stricter = Nodes(run.spec, replace(run.settings, max_left_out=-0.1), run.folder)
    with pytest.raises(DataError, match="rows teach nothing"):
        stricter.start("b")


def test_a_padded_step_has_about_as_many_tokens_as_a_packed_one(nodes: Any) -> None:
    run = nodes()
    prepared = run.start("a")
    packed, padded = (make_plan(run.settings, prepared, packs) for packs in (True, False))
    tokens = [sum(int(plan.lengths[pack].sum()) for pack in plan.epoch(0)) for plan in (packed, padded)]
    assert tokens[0] == tokens[1]
    full = packed.rows * packed.size
    assert tokens[1] / padded.packs_per_epoch * padded.rows == pytest.approx(full, rel=0.06)
    counted = replace(run.settings, train=replace(run.settings.train, tokens_per_step=None, rows_per_step=5))
    assert [make_plan(counted, prepared, packs).rows for packs in (True, False)] == [5, 5]


def test_a_rehearsal_leaves_no_plan(nodes: Any) -> None:
    run = nodes()
    run.start("a", keep=False)
    assert not (Path(run.spec.root) / "plan").exists()
    assert open_store(run.spec.root).stat("report.json") is None
