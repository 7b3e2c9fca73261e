"""`dropforge forget` and `dropforge rebuild` against a real S3 and MLflow."""

from __future__ import annotations

import json
import uuid
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from dropforge import family_recipe, layout, tracking
from dropforge.cli import forget
from dropforge.dataset import Manifest
from dropforge.drop import read_drop
from dropforge.recipe_data import Source
from dropforge.recipes import load_recipe
from dropforge.run import RunSpec
from dropforge.sources import pin
from dropforge.store import S3Store
from dropforge.terminal import Console
from tests.dropforge.cli.conftest import Terminal

curation = pytest.importorskip("curation.pipeline")
ROWS: list[dict[str, Any]] = [{"text": f"row number {n} of the test", "group": f"patient-{n // 5}"} for n in range(40)]


@pytest.fixture
def family(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(forget, "console", Console(width=300))
    return f"fam-{uuid.uuid4().hex[:8]}"


def add(
    store: S3Store, family: str, name: str, rows: list[dict[str, Any]], folder: Path, scope: str = "family"
) -> Manifest:
    store.put(f"drops/{family}/{name}/a.jsonl", b"\n".join(json.dumps(row).encode() for row in rows))
    store.put(f"drops/{family}/{name}/_SUCCESS", b"")
    recipe = load_recipe("tiny", {"curation": {"workers": 1, "scope": scope}})
    made: Manifest = curation.curate(store, read_drop(store, family, name), recipe, workdir=folder / f"{family}-{name}")
    return made


def registered(
    store: S3Store, uri: str, family: str, run: str, digest: str, start: dict[str, Any] | None = None, base: str = "m"
) -> None:
    """A run and its registered model."""
    begun = {"asked": "champion", "kind": "champion", "tokens": [], **start} if start else None
    spec = RunSpec(run, family, 1, "", "", "", digest, {"base": {"model": base}}, "code")
    values = {**json.loads(spec.to_json()), "start": begun}
    store.put(layout.run_key(run), json.dumps(values).encode())
    mlflow = tracking.client(uri)
    if not mlflow.search_registered_models(f"name = '{family}'"):
        mlflow.create_registered_model(family)
    mlflow.create_model_version(
        family, source="s3://bucket/model", tags={tracking.TAG_RUN: run, tracking.TAG_DATASET: digest}, run_id=None
    )


def test_a_model_s_name_is_no_markup(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forget, "console", Console(width=300))
    model: Any = SimpleNamespace(name="team[/x]", version="1", run_id="[red]r")
    forget._tell_models([model], [model])
    named = "team[/x] version 1 (run [red]r)"
    assert capsys.readouterr().out.splitlines() == [f"Trained on them: {named}", f"May know them: {named}"]


def test_a_group_is_forgotten_and_all_models_that_know_it_are_named(
    terminal: Terminal, s3_store: S3Store, mlflow_server: str, tmp_path: Path, family: str
) -> None:
    one = add(s3_store, family, "d1", ROWS[:20], tmp_path)
    two = add(s3_store, family, "d2", ROWS[20:], tmp_path)
    assert one.parent is None
    other, third = f"{family}-b", f"{family}-c"
    recipe = load_recipe("tiny", {"curation": {"workers": 1}})
    source = pin(s3_store, Source(dataset=f"{family}/{two.digest}"), other)
    derived = curation.curate(s3_store, source, recipe, workdir=tmp_path / "derived")
    foreign = add(s3_store, third, "d1", [{"text": f"something else {n}"} for n in range(30)], tmp_path, "drop")
    registered(s3_store, mlflow_server, family, f"{family}-r1", one.digest)
    registered(s3_store, mlflow_server, family, f"{family}-r2", two.digest)
    registered(s3_store, mlflow_server, other, f"{other}-r3", derived.digest)
    registered(s3_store, mlflow_server, third, f"{third}-r4", foreign.digest, {"run": f"{family}-r2"})
    registered(s3_store, mlflow_server, third, f"{third}-r5", foreign.digest, base=f"s3://b/runs/{third}-r4/model")
    registered(s3_store, mlflow_server, third, f"{third}-r6", foreign.digest)
    # r8 ends without a model, r10 is a trial of r7, as if that were a sweep.
    opened: dict[str, str] = {}
    for name, digest in (("r7", two.digest), ("r8", two.digest), ("r9", foreign.digest), ("r10", two.digest)):
        drop = {"sweep": {"by": "sweep__x", "parent": opened["r7"]}} if name == "r10" else {}
        spec = RunSpec(f"{family}-{name}", family, 1, "", "", "", digest, {"base": {"model": "m"}}, "code", drop=drop)
        spec = replace(spec, tracking=tracking.open_run(mlflow_server, spec, {}, {}))
        assert spec.tracking is not None
        opened[name] = spec.tracking.run_id
        s3_store.put(layout.run_key(spec.run), spec.to_json())
        if name == "r7":  # a checkpoint of it was registered by hand
            made = {tracking.TAG_RUN: spec.run, tracking.TAG_DATASET: digest, tracking.TAG_CHECKPOINT: "c"}
            tracking.client(mlflow_server).create_model_version(family, source="s3://bucket/c", tags=made, run_id=None)
        if name in {"r8", "r10"}:
            tracking.client(mlflow_server).set_terminated(opened[name], "FAILED" if name == "r8" else "FINISHED")
    done = terminal("forget", family, "--group", "patient-6")
    assert done.exit_code == 0, done.output
    assert "5 rows of the family are forgotten" in done.output
    for holding in (two, derived):
        assert f"\n  datasets/{holding.family}/{holding.digest}/\n" in done.output
    named = sorted(line.split(": ")[1].split(" (")[0] for line in done.output.splitlines() if "Trained on" in line)
    assert named == [
        f"{family} version 2",
        f"{family} version 3",
        f"{other} version 1",
        f"{third} version 1",
        f"{third} version 2",
    ]
    going = [line for line in done.output.splitlines() if "Still running with them" in line]
    stop = f"`dropforge stop {family}-r7` ends it"
    assert going == [f"Still running with them, to become a model: {family}-r7. {stop}"]
    stopped = [line.rpartition(": ")[2] for line in done.output.splitlines() if line.startswith("Stopped or failed")]
    assert stopped == [f"{family}-r8"]
    trial = f"A trial on them, which its sweep may choose: {family}-r10. End the sweep's run sweep__x in Airflow"
    assert trial in done.output.splitlines()
    # Shards that nothing needs any more are removed, as the pages say; who asks again is told the same, and no less.
    head = json.loads(s3_store.get(layout.head_key(family)))["digest"]
    needed = {shard.key for shard in Manifest.from_json(s3_store.get(layout.manifest_key(family, head))).shards}
    gone = [shard.key for shard in two.shards if shard.key not in needed]
    assert gone
    for key in gone:
        s3_store.delete(key)
    again = terminal("forget", family, "--group", "patient-6")
    assert again.exit_code == 0, again.output
    assert f"{family} version 2" in again.output
    assert json.loads(s3_store.get(layout.head_key(family)))["digest"] == head
    rebuilt = terminal("rebuild", family)
    assert rebuilt.exit_code == 0, rebuilt.output
    assert head in rebuilt.output


def test_what_no_row_is_cannot_be_forgotten(
    terminal: Terminal, s3_store: S3Store, mlflow_server: str, tmp_path: Path, family: str
) -> None:
    one = add(s3_store, family, "d1", ROWS, tmp_path)
    done = terminal("forget", family, "--group", "pateint-6")
    assert "patient-6" in done.output
    assert "no row of its drops is what is to be forgotten" in str(done.exception) + done.output
    none = terminal("forget", family, "0" * 32)
    assert "no row of its drops is what is to be forgotten" in str(none.exception) + none.output
    assert json.loads(s3_store.get(layout.head_key(family)))["digest"] == one.digest


def test_without_mlflow_nothing_is_forgotten(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = add(s3_store, family, "d1", ROWS, tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    done = terminal("forget", family, "--group", "patient-6")
    assert "MLflow at http://127.0.0.1:9" in str(done.exception) + done.output
    assert json.loads(s3_store.get(layout.head_key(family)))["digest"] == one.digest


def test_a_family_of_versions_of_one_drop_says_what_to_do(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, family: str
) -> None:
    add(s3_store, family, "d1", ROWS, tmp_path, scope="drop")
    done = terminal("forget", family, "--group", "patient-6")
    assert "upload the drop again without the rows" in str(done.exception) + done.output


@pytest.mark.parametrize("command", ["forget", "rebuild"])
def test_kernels_that_the_family_did_not_name_are_not_run_here(
    terminal: Terminal, s3_store: S3Store, tmp_path: Path, family: str, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A form may name them for pods, and whoever may write datasets may write a version's recipe."""
    monkeypatch.delenv("DROPFORGE_PRESET", raising=False)
    add(s3_store, family, "d1", ROWS, tmp_path)
    head = json.loads(s3_store.get(layout.head_key(family)))
    wheel = {"wheel": f"{s3_store.uri}/own-1-py3-none-any.whl", "sha256": "ab" * 32}
    head["recipe"] |= {"code": wheel, "curation": {**head["recipe"]["curation"], "kernels": ["tidy"]}}
    s3_store.put(layout.head_key(family), json.dumps(head).encode())
    words = (command, family, *(["--group", "patient-1"] if command == "forget" else []))
    refused = terminal(*words)
    assert "would run here with your keys" in str(refused.exception)
    assert f"`--code {wheel['sha256']}`" in str(refused.exception)
    own = {"extends": "tiny", "code": wheel, "curation": {"scope": "family", "kernels": ["tidy"]}}
    for known in ((*words, "--code", wheel["sha256"]), words):
        assert "own-1-py3-none-any.whl" in str(terminal(*known).exception)  # which is looked for now
        assert "would run here" not in str(terminal(*known).exception)
        family_recipe.write(s3_store, family, own, "tiny", "ann")


def test_a_version_that_comes_meanwhile_brings_no_kernels_along(
    terminal: Terminal, s3_store: S3Store, family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import curation.forget as made

    add(s3_store, family, "d1", ROWS, tmp_path)
    held = made.held

    def later(*given: Any, **named: Any) -> Any:
        head = json.loads(s3_store.get(layout.head_key(family)))
        wheel = {"wheel": f"{s3_store.uri}/own-1-py3-none-any.whl", "sha256": "ab" * 32}
        head["recipe"] |= {"code": wheel, "curation": {**head["recipe"]["curation"], "kernels": ["tidy"]}}
        s3_store.put(layout.head_key(family), json.dumps(head).encode())
        return held(*given, **named)

    monkeypatch.setattr(made, "held", later)
    assert "would run here with your keys" in str(terminal("forget", family, "--group", "patient-1").exception)
