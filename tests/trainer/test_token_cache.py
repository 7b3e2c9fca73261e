"""Tokens beside the dataset: made by the first run, taken over by others, never damaged, stale or of other data."""

from __future__ import annotations

import json
import shutil
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

import trainer.prepare
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store
from trainer.ahead import main as ahead
from trainer.ahead import tokenise_ahead
from trainer.assembly import make_plan
from trainer.config import read_settings
from trainer.data.rows import load_manifest
from trainer.prepare import await_prepared, prepare
from trainer.token_cache import TokenCache

from .ranks_loop import make_base
from .toy import Toy, chat, write_dataset


@dataclass
class Runs:
    """Runs on one dataset, each with a folder of its own."""

    toy: Toy
    folder: Path
    said: list[str] = field(default_factory=list)

    def start(self, name: str, **overrides: Any) -> str:
        """Prepare a run; the digest of its plan."""
        spec = RunSpec.from_json(Path(self.toy.run(name, **overrides)).read_bytes())
        settings = read_settings(spec.recipe)
        prepare(spec, settings, self.folder / name, lambda: None, self.said.append)
        prepared = await_prepared(settings, spec, self.folder / name, lambda: None)
        return make_plan(settings, prepared, True).digest(prepared.plan_content)

    @property
    def cache(self) -> Path:
        (found,) = Path(self.toy.root).glob("datasets/toy/*/tokens")
        return found

    @property
    def tokenised(self) -> int:
        return sum(line.startswith("tokenising") for line in self.said)

    def files(self) -> dict[str, bytes]:
        return {str(path.relative_to(self.cache)): path.read_bytes() for path in self.cache.rglob("*.*")}


@pytest.fixture
def runs(toy: Toy, tmp_path: Path) -> Runs:
    for old in Path(toy.root).glob("datasets/toy/*/tokens"):
        shutil.rmtree(old)
    for name in "abc":
        shutil.rmtree(Path(toy.root) / "runs" / name, ignore_errors=True)
    return Runs(toy, tmp_path / "nodes")


def test_another_run_takes_over_tokens_and_has_the_same_plan(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    first = runs.start("a")
    monkeypatch.setattr(trainer.prepare, "tokenise", None)  # it is not called again
    assert runs.start("b") == first
    assert runs.tokenised == 1


def test_what_only_packs_follow_from_makes_no_tokens_anew(runs: Runs) -> None:
    runs.start("a")
    runs.start("b", train={"packing": "off"})
    assert runs.tokenised == 1


def test_another_length_has_tokens_of_its_own(runs: Runs) -> None:
    runs.start("a")
    runs.start("b", train={"sequence_length": 32})
    assert runs.tokenised == 2
    assert len(list(runs.cache.iterdir())) == 2


@pytest.mark.parametrize("part", ["tokenizer", "chat_template", "special_tokens", "code", "versions", "dataset"])
def test_each_part_that_tokens_follow_from_is_in_the_key(runs: Runs, part: str) -> None:
    spec = RunSpec.from_json(Path(runs.toy.run("a")).read_bytes())
    manifest = load_manifest(spec)
    parts: dict[str, Any] = {part: "one", "packing": "auto", "mix": None}
    one = TokenCache.of(spec, manifest, parts).stored.prefix
    assert TokenCache.of(spec, manifest, parts | {part: "other"}).stored.prefix != one
    assert TokenCache.of(spec, manifest, parts | {"packing": "off"}).stored.prefix == one
    assert TokenCache.of(spec, _one_row_changed(manifest), parts).stored.prefix != one


def test_another_vocabulary_and_another_template_have_tokens_of_their_own(runs: Runs, tmp_path: Path) -> None:
    runs.start("a")
    runs.start("b", base={"scratch": {"vocab_size": 300}})
    assert runs.tokenised == 2
    first = runs.start("a", base=(base := {"model": make_base(tmp_path / "base"), "scratch": None}))
    template = tmp_path / "base" / "chat_template.jinja"
    template.write_text(template.read_text() + "{# another #}")
    runs.start("b", base=base)
    assert runs.tokenised == 4
    template.write_text(template.read_text().replace("{# another #}", ""))
    assert runs.start("c", base=base) == first
    assert runs.tokenised == 4


@pytest.mark.parametrize("setting", [{"truncation_side": "left"}, {"split_special_tokens": True}])
def test_another_setting_of_the_tokenizer_has_tokens_of_its_own(
    runs: Runs, tmp_path: Path, setting: dict[str, Any]
) -> None:
    base = {"model": make_base(tmp_path / "base"), "scratch": None}
    runs.start("a", base=base)
    config = tmp_path / "base" / "tokenizer_config.json"
    before = config.read_text()
    config.write_text(json.dumps({**json.loads(before), **setting}))
    runs.start("b", base=base)
    assert runs.tokenised == 2
    config.write_text(before)
    runs.start("c", base=base)
    assert runs.tokenised == 2


def test_one_other_row_is_another_dataset_with_tokens_of_its_own(runs: Runs, toy_rows: dict[str, list[Any]]) -> None:
    first = runs.start("a")
    rows = toy_rows | {"train": [chat("red", "blue"), *toy_rows["train"][1:]]}
    other = Runs(Toy(runs.toy.root, write_dataset(runs.toy.store, rows)), runs.folder, runs.said)
    assert other.start("b") != first
    assert runs.tokenised == 2


def test_rows_that_changed_under_their_digest_are_refused_and_their_tokens_not_used(runs: Runs) -> None:
    """The tokens would be in order, but they are those of other bytes than the manifest lists now."""
    base = {"model": make_base(runs.folder / "base"), "scratch": None}  # whose tokenizer reads no rows
    runs.start("a", base=base)
    path = Path(runs.toy.root) / "datasets" / "toy" / runs.toy.digest / "manifest.json"
    whole = path.read_bytes()
    path.write_bytes(_one_row_changed(Manifest.from_json(whole)).to_json())
    with pytest.raises(DataError, match="SHA-256"):
        runs.start("b", base=base)
    path.write_bytes(whole)
    runs.start("c", base=base)
    assert runs.tokenised == 2


def _one_row_changed(manifest: Manifest) -> Manifest:
    return replace(manifest, shards=(replace(manifest.shards[0], sha256="0" * 64), *manifest.shards[1:]))


@pytest.mark.parametrize("harm", ["flip", "truncate", "delete", "torn manifest", "foreign"])
def test_damaged_tokens_are_made_anew_and_mended(runs: Runs, harm: str) -> None:
    first = runs.start("a")
    whole = runs.files()
    (file,), (manifest,) = runs.cache.glob("*/train/ids.npy"), runs.cache.glob("*/plan.json")
    data = bytearray(file.read_bytes())
    if harm == "flip":
        data[-1] ^= 1
        file.write_bytes(data)
    elif harm == "truncate":
        file.write_bytes(data[:-4])
    elif harm == "delete":
        file.unlink()
    elif harm == "torn manifest":
        manifest.write_bytes(manifest.read_bytes()[:100])
    else:
        values = json.loads(manifest.read_bytes())
        values["parts"]["tokenizer"] = "0" * 64
        manifest.write_text(json.dumps(values))
    assert runs.start("b") == first
    assert runs.tokenised == 2
    assert [line for line in runs.said if "are not used" in line]
    assert runs.files() == whole
    runs.start("c")
    assert runs.tokenised == 2


def test_tokens_without_their_manifest_are_none(runs: Runs) -> None:
    """So a writer that was killed before the end leaves nothing that is used."""
    first = runs.start("a")
    (manifest,) = runs.cache.glob("*/plan.json")
    manifest.unlink()
    assert runs.start("b") == first
    assert runs.tokenised == 2
    assert manifest.exists()


def test_two_runs_that_race_leave_one_whole_set(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    both, tokenise = threading.Barrier(2), trainer.prepare.tokenise

    def together(*arguments: Any) -> None:
        tokenise(*arguments)
        both.wait(60)  # neither has stored anything before both have made theirs

    monkeypatch.setattr(trainer.prepare, "tokenise", together)
    digests: list[str] = []
    threads = [threading.Thread(target=lambda name=name: digests.append(runs.start(name))) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert len(digests) == 2
    assert len(set(digests)) == 1
    monkeypatch.setattr(trainer.prepare, "tokenise", None)
    assert runs.start("c") == digests[0]


def test_a_rehearsal_leaves_no_tokens(runs: Runs) -> None:
    spec = RunSpec.from_json(Path(runs.toy.run("a")).read_bytes())
    call: Callable[..., None] = prepare
    call(spec, read_settings(spec.recipe), runs.folder / "a", lambda: None, runs.said.append, keep=False)
    assert not [key for key in open_store(runs.toy.root).sizes("datasets/") if "/tokens/" in key]


def test_what_is_made_ahead_is_what_the_run_would_make(runs: Runs, monkeypatch: pytest.MonkeyPatch) -> None:
    """The pod without GPUs leaves nothing to do but to take it over; without a model's weights, too."""
    base = {"model": make_base(runs.folder / "base"), "scratch": None}
    alone = runs.start("a", base=base)
    shutil.rmtree(runs.cache)
    spec = RunSpec.from_json(Path(runs.toy.run("b", base=base)).read_bytes())
    tokenise_ahead(spec, lambda: None, runs.said.append)
    assert runs.tokenised == 2
    monkeypatch.setattr(trainer.prepare, "tokenise", None)
    assert runs.start("b", base=base) == alone
    assert [line for line in runs.said if line.startswith("tokens and plan are those of")]


def test_the_command_in_a_pod_prepares_a_run_and_tells_how_it_went(runs: Runs, tmp_path: Path) -> None:
    message = tmp_path / "termination.json"
    assert ahead([runs.toy.run("a")], {"TERMINATION_LOG": str(message)}) == 0
    assert list(runs.cache.glob("*/plan.json"))
    uri = runs.toy.run("b")
    next(Path(runs.toy.root).glob("datasets/toy/shards/*")).unlink()
    shutil.rmtree(runs.cache)
    assert ahead([uri], {"TERMINATION_LOG": str(message)}) == ExitCode.BAD_DATA
    assert json.loads(message.read_bytes())["exit_code"] == ExitCode.BAD_DATA
