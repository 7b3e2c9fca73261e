"""Where a run's weights begin is settled once: the champion, a checkpoint, or a refusal that says what to do."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from dropforge import layout
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipes import parse_recipe
from dropforge.run import RunSpec, Start
from dropforge.start import FindChampion, model_digest, settle
from dropforge.store import FolderStore
from dropforge.tracking import Champion

FILES = {"config.json": "1" * 64, "model.safetensors": "2" * 64}
DIGEST = "d" * 64


class Bucket:
    """Runs as trainings leave them, without their weights."""

    def __init__(self, root: Path) -> None:
        self.store = FolderStore(root)

    def run(self, name: str, text: str = "base: {model: org/m}", start: Start | None = None, **more: Any) -> Champion:
        recipe = {**parse_recipe(text).plain(), **more}
        root = f"{self.store.uri}/runs/{name}"
        spec = RunSpec(name, "fam", 1, root, self.store.uri, "m.json", "ab", recipe, "code", start=start)
        self.store.put(layout.run_key(name), spec.to_json())
        self.store.put(layout.report_key(name), json.dumps({"model": {"files": FILES}}).encode())
        self.files(f"runs/{name}/model", FILES)
        return Champion("3", f"{root}/model", "mlflow", name, model_digest(FILES))

    def files(self, folder: str, files: Mapping[str, str]) -> None:
        for file in files:
            self.store.put(f"{folder}/{file}", b"")

    def checkpoint(self, name: str, step: int, **more: Any) -> None:
        seal = {"run": name, "step": step, "schema": 2, "digest": DIGEST, **more}
        self.store.put(f"runs/{name}/checkpoints/step-{step}/manifest.json", json.dumps(seal).encode())

    def export(self, run: str, step: int, digest: str = DIGEST) -> str:
        folder = layout.export_prefix(run, step, digest)
        self.files(folder.rstrip("/"), FILES)
        self.store.put(f"{folder}{layout.EXPORT_FACTS}", json.dumps({"files": FILES, "checkpoint": digest}).encode())
        return folder


@pytest.fixture
def bucket(tmp_path: Path) -> Bucket:
    return Bucket(tmp_path)


def recipe(start: str, text: str = "base: {model: org/m}") -> Recipe:
    return parse_recipe(text, {"base": {"start": start}})


def holding(champion: Champion | None) -> FindChampion:
    def find(family: str, alias: str) -> Champion | None:
        assert (family, alias) == ("fam", "champion")
        return champion

    return find


def nobody(*_: str) -> Champion | None:
    raise AssertionError("nobody asked for a champion")


def test_the_base_is_the_base_and_nobody_is_asked(bucket: Bucket) -> None:
    asked = recipe("base")
    assert settle(asked, bucket.store, "fam", nobody) == (asked, None)


def test_a_champion_takes_the_bases_place(bucket: Bucket) -> None:
    champion = bucket.run("one")
    found, start = settle(recipe("champion"), bucket.store, "fam", holding(champion))
    assert start is not None
    assert (found.base.model, found.base.revision, found.base.start) == (champion.model, None, "champion")
    assert (start.kind, start.run, start.version, start.digest) == ("champion", "one", "3", model_digest(FILES))
    assert (start.files, start.origin) == (FILES, {"model": "org/m", "scratch": None})
    assert str(start) == f"version 3, run one, digest {model_digest(FILES)[:12]}"


def test_a_family_without_a_champion_begins_with_the_base(bucket: Bucket) -> None:
    asked = recipe("champion", "base: {scratch: {}}")
    found, start = settle(asked, bucket.store, "fam", holding(None))
    assert (found, start) == (asked, Start(asked="champion"))
    assert start is not None
    assert "had no champion" in str(start)


def test_a_line_of_champions_goes_back_to_one_base_and_keeps_its_tokens(bucket: Bucket) -> None:
    text = "base: {model: org/m, new_tokens: [<a>, <b>]}"
    first = bucket.run("one", "base: {model: org/m, new_tokens: [<a>]}")
    made, start = settle(recipe("champion", text), bucket.store, "fam", holding(first))
    assert start is not None
    assert (start.tokens, made.base.new_tokens) == (("<a>",), ("<b>",))
    bucket.run("two", start=start)
    spec = RunSpec.from_json(bucket.store.get("runs/two/run.json"))
    assert spec.start == start
    bucket.store.put("runs/two/run.json", replace(spec, recipe=made.plain()).to_json())
    second = Champion("4", f"{bucket.store.uri}/runs/two/model", "", "two", model_digest(FILES))
    made, start = settle(recipe("champion", text), bucket.store, "fam", holding(second))
    assert start is not None
    assert (start.origin["model"], start.tokens, made.base.new_tokens) == ("org/m", ("<a>", "<b>"), None)


def test_a_new_model_goes_on_as_the_champion_that_it_became(bucket: Bucket) -> None:
    small = "base: {scratch: {layers: 2}}"
    champion = bucket.run("one", small)
    found, _ = settle(recipe("champion", small), bucket.store, "fam", holding(champion))
    assert (found.base.scratch, found.base.model) == (None, champion.model)
    with pytest.raises(RecipeError, match=r'goes back to the base .*"layers": 2.* names .*"layers": 3'):
        settle(recipe("champion", "base: {scratch: {layers: 3}}"), bucket.store, "fam", holding(champion))


def champion_of(bucket: Bucket, **more: Any) -> Champion:
    return replace(bucket.run("one"), **more)


@pytest.mark.parametrize(
    ("spoil", "cause"),
    [
        (lambda b: b.run("one", task="classification"), r"trained for `task: classification`.*or `base.start: base`"),
        (lambda b: b.run("one", "base: {model: org/m}\ntrain: {method: prefix}"), r"is a prefix, which has no weights"),
        (lambda b: b.run("one", "base: {model: org/other}"), r"goes back to the base org/other, .* names org/m"),
        (lambda b: champion_of(b, digest="0" * 64), r"registered with the digest 000000000000, and .* has"),
        (lambda b: champion_of(b, digest=""), r"registered with the digest none"),
        (lambda b: champion_of(b, model="s3://elsewhere/model"), r"not written by a run of this bucket"),
        (lambda b: champion_of(b, run="gone"), r"comes from run 'gone', which is not in"),
        (lambda b: champion_of(b, run="../x"), r"comes from run '../x', which is not in"),
    ],
)
def test_a_champion_that_cannot_go_on_is_refused_with_the_mend(bucket: Bucket, spoil: Any, cause: str) -> None:
    with pytest.raises(RecipeError, match=rf"recipe key `base.start`: .*{cause}"):
        settle(recipe("champion"), bucket.store, "fam", holding(spoil(bucket)))


def test_a_champion_whose_file_was_deleted_is_refused(bucket: Bucket) -> None:
    champion = bucket.run("one")
    bucket.store.delete("runs/one/model/model.safetensors")
    with pytest.raises(RecipeError, match=r"lacks model.safetensors in"):
        settle(recipe("champion"), bucket.store, "fam", holding(champion))


def test_a_checkpoint_becomes_a_model_beside_its_run(bucket: Bucket) -> None:
    bucket.run("one")
    bucket.checkpoint("one", 50)
    found, start = settle(recipe("runs/one/step-50"), bucket.store, "fam", nobody)
    assert start is not None
    assert found.base.model == f"{bucket.store.uri}/runs/one/exports/step-50-{DIGEST[:12]}"
    assert (start.kind, start.run, start.step, start.digest, start.files) == ("checkpoint", "one", 50, DIGEST, {})
    assert str(start) == f"checkpoint step-50 of run one, digest {DIGEST[:12]}"
    bucket.export("one", 50)
    _, start = settle(recipe("runs/one/step-50"), bucket.store, "fam", nobody)
    assert start is not None
    assert start.files == FILES


def test_a_checkpoint_that_retention_deleted_is_refused_unless_it_was_exported(bucket: Bucket) -> None:
    bucket.run("one")
    bucket.checkpoint("one", 75)
    bucket.checkpoint("one", 100)
    for name in ("notes", "step-", "step-²", "7", "step-9/more", "my-step-8"):  # whatever a pod writes beside them
        bucket.store.put(f"runs/one/checkpoints/{name}/manifest.json", b"{}")
    with pytest.raises(RecipeError, match=r"no runs/one/step-50 \(any more\).*choose one of step-75, step-100\b"):
        settle(recipe("runs/one/step-50"), bucket.store, "fam", nobody)
    folder = bucket.export("one", 50)
    _, start = settle(recipe("runs/one/step-50"), bucket.store, "fam", nobody)
    assert start is not None
    assert (start.digest, start.files) == (DIGEST, FILES)
    bucket.store.delete(f"{folder}config.json")
    with pytest.raises(RecipeError, match=r"lacks config.json"):
        settle(recipe("runs/one/step-50"), bucket.store, "fam", nobody)


@pytest.mark.parametrize(
    ("text", "seal", "asked", "cause"),
    [
        ("base: {model: org/m}", None, "runs/one/step-50", r"any more\)\. The run has no checkpoint"),
        ("base: {model: org/m}", {}, "runs/two/step-50", r"comes from run 'two', which is not in"),
        ("base: {model: org/m}", {"schema": 1}, "runs/one/step-50", r"of another run or layout"),
        ("base: {model: org/m}", {"run": "two"}, "runs/one/step-50", r"of another run or layout"),
        ("base: {model: org/x}\ntrain: {method: lora}", {}, "runs/one/step-50", r"back to the base org/x, .* org/m"),
        ("base: {model: org/m}\ntrain: {checkpoints: /nfs}", {}, "runs/one/step-50", r"in /nfs/one.*one STEP export"),
    ],
)
def test_a_checkpoint_that_cannot_go_on_is_refused_with_the_mend(
    bucket: Bucket, text: str, seal: dict[str, Any] | None, asked: str, cause: str
) -> None:
    bucket.run("one", text)
    if seal is not None:
        bucket.checkpoint("one", 50, **seal)
    with pytest.raises(RecipeError, match=rf"recipe key `base.start`: .*{cause}"):
        settle(recipe(asked), bucket.store, "fam", nobody)


@pytest.mark.parametrize("asked", ["champ", "runs/one", "runs/one/step-0", "runs/../x/step-1", "runs/a/b/step-1", ""])
def test_what_names_no_start_is_refused_by_the_recipe(asked: str) -> None:
    with pytest.raises(RecipeError, match=r"`base.start`"):
        recipe(asked)
