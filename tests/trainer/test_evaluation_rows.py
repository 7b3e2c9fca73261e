"""The rows that models are measured on, and what is told of a model that has no figures."""

from __future__ import annotations

import json
import math
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

import curation
from dropforge.drop import read_drop
from dropforge.errors import DataError
from dropforge.promotion import Policy, decide
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from dropforge.store import FolderStore
from trainer import evaluate
from trainer.__main__ import main
from trainer.config import read_settings
from trainer.data.rows import Row, read_rows
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .test_turns import TOOLS
from .test_whole import train
from .toy import Toy, recipe, sample_rows

_MOST = 5


def test_of_a_large_dataset_only_the_rows_that_are_measured_are_held(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec.from_json(Path(toy.run("many", evaluate={"max_rows": _MOST})).read_bytes())
    alive: weakref.WeakSet[Row] = weakref.WeakSet()
    most = 0

    def counted(*arguments: Any) -> Iterator[Row]:
        nonlocal most
        for row in read_rows(*arguments):
            alive.add(row)
            most = max(most, len(alive))
            yield row

    monkeypatch.setattr(evaluate, "read_rows", counted)
    found = evaluate.evaluation_rows(spec, read_settings(spec.recipe))
    store, manifest = toy.store, evaluate.load_manifest(spec)
    assert [row.key for row in found] == sorted(row.key for row in read_rows(store, manifest, "eval"))[:_MOST]
    assert manifest.counts["train"] > 2 * _MOST < manifest.counts["eval"]
    assert most <= _MOST + 3  # besides them the one at hand, and the one before it


def test_rows_that_are_not_the_datasets_are_refused(toy: Toy, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = RunSpec.from_json(Path(toy.run("fewer")).read_bytes())
    monkeypatch.setattr(
        evaluate, "read_rows", lambda *arguments: (row for at, row in enumerate(read_rows(*arguments)) if at != 1)
    )
    with pytest.raises(DataError, match="rows are missing"):
        evaluate.evaluation_rows(spec, read_settings(spec.recipe))


def test_a_model_without_a_finite_loss_says_so_and_the_other_keeps_its_figures(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = toy.run("sound", train={"max_steps": 1})
    train(uri)
    files = toy.files("sound")
    sound, broken = f"{files.uri}/model", tmp_path / "broken"
    shutil.copytree(sound, broken)
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"][0] = math.nan
    save_file(weights, broken / "model.safetensors", {"format": "pt"})

    champion = {"version": 3, "model": str(broken)}
    files.put("evaluate.json", json.dumps({"run": uri, "candidate": sound, "champion": champion}).encode())
    evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    result = json.loads(files.get("evaluation.json"))
    assert math.isfinite(result["candidate"]["eval/loss"])
    assert result["champion"] == {"problem": "its loss on these rows is nan"}
    policy = Policy()
    verdict = decide(result["candidate"], result["champion"], None, policy)
    assert not verdict.promote
    assert "its loss on these rows is nan. Take its alias away" in verdict.reason
    assert not decide(result["champion"], result["candidate"], None, policy).promote
    order = {"run": uri, "candidate": str(broken), "champion": {"version": 3, "model": sound}}
    files.put("evaluate.json", json.dumps(order).encode())
    evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    turned = json.loads(files.get("evaluation.json"))
    assert turned["champion"]["eval/loss"] == result["candidate"]["eval/loss"]
    assert turned["candidate"]["problem"] == "its loss on these rows is nan"

    assert main(["evaluate", sound, str(broken), "--run", files.uri]) == 0
    table = capsys.readouterr().out
    assert f"{result['candidate']['eval/loss']:.6f}" in table
    assert f"{broken}: its loss on these rows is nan" in table
    assert main(["evaluate", sound, str(broken), "--run", files.uri, "--json"]) == 0
    (good, bad) = json.loads(capsys.readouterr().out)
    assert ("eval/loss" in good, "eval/loss" in bad) == (True, False)


def test_models_that_read_other_rows_are_compared_on_those_that_both_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chat templates refuse rows, those with tools above all: the same weights have the same figures all the same."""
    store = FolderStore(tmp_path / "bucket")
    rows: list[dict[str, Any]] = sample_rows(240)
    for one in rows[::7]:
        call = {"type": "function", "function": {"name": "look", "arguments": {"at": one["messages"][0]["content"]}}}
        one["messages"][1:1] = [
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "seen"},
        ]
    store.put("drops/toy/d/rows.jsonl", "\n".join(map(json.dumps, rows)).encode())
    store.put("drops/toy/d/_SUCCESS", b"")
    wanted = build_recipe(recipe(data={"eval_fraction": 0.3}))
    made = curation.curate(store, read_drop(store, "toy", "d"), wanted, workdir=tmp_path / "work")
    toy = Toy(str(tmp_path / "bucket"), made.digest)
    uri = toy.run(
        "one", train={"max_steps": 1}, evaluate={"max_rows": 100, "generation": {"rows": 9, "max_new_tokens": 4}}
    )
    train(uri)
    files = toy.files("one")
    all_of_them, plain = tmp_path / "all", tmp_path / "plain"
    for folder, template in (
        (all_of_them, TOOLS),
        (plain, "{% if messages | length > 2 %}{{ 1 / 0 }}{% endif %}" + TOOLS),
    ):
        shutil.copytree(f"{files.uri}/model".removeprefix("file://"), folder)
        tokenizer = AutoTokenizer.from_pretrained(folder)
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder)

    def compared(candidate: Path, champion: Path) -> dict[str, Any]:
        order = {"run": uri, "candidate": str(candidate), "champion": {"version": 3, "model": str(champion)}}
        files.put("evaluate.json", json.dumps(order).encode())
        evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console())
        found: dict[str, Any] = json.loads(files.get("evaluation.json"))
        return found

    alone = compared(plain, plain)
    assert alone["shared"] is None
    count, every = alone["rows"], made.counts["eval"]
    assert 10 < count < every - 3
    capsys.readouterr()
    for candidate, champion in ((plain, all_of_them), (all_of_them, plain)):
        found = compared(candidate, champion)
        said = capsys.readouterr().out
        assert f"they are compared on the {count} that both read alike" in said
        assert f"{every - count} of {every} evaluation rows are left out" in said
        assert found["rows"] == (count if candidate == plain else every)
        for metric in ("eval/loss", "eval/bits_per_byte", "eval/accuracy"):
            assert found["champion"][metric] == found["shared"][metric] == alone["candidate"][metric]
        assert (found["candidate"]["eval/loss"] == alone["candidate"]["eval/loss"]) == (candidate == plain)
        assert found["champion"]["gen/ended"] == compared(champion, champion)["candidate"]["gen/ended"]
        each = json.loads(files.get("evaluation-rows.json"))
        assert sum(value is not None for value in each["champion"]["nats"]) in (count, every)

    shorter = tmp_path / "shorter"
    shutil.copytree(plain, shorter)
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 58}))
    capsys.readouterr()
    found = compared(plain, shorter)
    assert f"the candidate reads {count} evaluation rows, the champion {count}: they are" in capsys.readouterr().out
    assert found["champion"]["eval/loss"] == pytest.approx(found["shared"]["eval/loss"], rel=1e-6)
    assert found["candidate"]["eval/loss"] != pytest.approx(found["shared"]["eval/loss"], rel=1e-4)
