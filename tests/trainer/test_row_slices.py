"""Figures of parts of the evaluation rows are those of the same rows measured alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dropforge.run import RunSpec
from dropforge.slices import cuts_of
from dropforge.store import open_store
from trainer import evaluate
from trainer.config import read_settings
from trainer.data.rows import Row
from trainer.evaluate import _sliced
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .toy import Toy, sample_rows, write_dataset

SLICES = [{"by": "source", "top": 2, "min_rows": 5}, {"by": "lang", "top": 3, "min_rows": 5}]


@pytest.fixture(scope="module")
def result(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, dict[str, Any]]:
    """A candidate and a champion on rows of several sources and languages."""
    rows = sample_rows(40, seed=1)
    for number, row in enumerate(rows):
        row["source"] = ("big", "middle", "small", "tiny")[0 if number < 22 else 1 if number < 32 else 2 + number % 2]
        row["extras"] = json.dumps({"lang": "de" if number % 3 else "../en|"} if number % 10 else {})
    root = str(tmp_path_factory.mktemp("bucket"))
    toy = Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": rows}))
    generation = {"rows": 24, "max_new_tokens": 2, "metrics": ["exact-match"]}
    asked: dict[str, Any] = {
        "promote": {"slices": SLICES},
        "data": {"keep_columns": ["lang"]},
        "evaluate": {"max_rows": 40, "generation": generation},
    }
    first, second = toy.run("one", train={"max_steps": 1}), toy.run("two", train={"max_steps": 6}, **asked)
    for uri in (first, second):
        run(uri, StopSignal(), Console(quiet=True))
    files = toy.files("two")
    champion = {"version": "3", "model": f"{toy.files('one').uri}/model", "days": 4.5}
    order = {"run": second, "candidate": f"{files.uri}/model", "champion": champion}
    files.put("evaluate.json", json.dumps(order).encode())
    return toy, evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))


def test_slices_are_measured_for_both_models(result: tuple[Toy, dict[str, Any]]) -> None:
    toy, found = result
    assert json.loads(toy.files("two").get("evaluation.json")) == found
    assert found["champion_days"] == 4.5
    told = [(one["by"], one["name"], one["rows"]) for one in found["slices"]]
    assert told[:3] == [("source", "big", 22), ("source", "middle", 10), ("source", "(rest)", 8)]
    assert sorted(rows for by, _, rows in told if by == "lang") == [4, 12, 24]
    assert [one["name"] for one in found["slices"] if one.get("too_few") == 5] == ["(none)"]
    assert {name.partition("~")[0] for by, name, _ in told if by == "lang"} == {"de", "en", "(none)"}
    for one in found["slices"]:
        for side in ("candidate", "champion"):
            assert ("too_few" in one) is (side not in one)
            assert "eval/loss" in one.get(side, {"eval/loss"})
    few = [one for one in found["slices"] if "candidate" in one and "gen/exact-match" not in one["candidate"]]
    assert all(one["rows"] < 24 for one in few)  # of some too few were asked


def test_size_and_speed_are_measured_of_both_models(result: tuple[Toy, dict[str, Any]]) -> None:
    toy, found = result
    stored = next(item.size for item in toy.files("two").list("model/") if item.key.endswith("/model.safetensors"))
    for side in ("candidate", "champion"):
        assert found[side]["model/bytes"] == stored  # both are of one shape
        assert 0 < found[side]["model/parameters"] * 4 <= stored
        assert found[side]["model/rows_per_second"] > 0


def test_a_slices_figures_are_those_of_its_rows_alone(result: tuple[Toy, dict[str, Any]]) -> None:
    toy, found = result
    spec = RunSpec.from_json(Path(f"{toy.root}/runs/two/run.json").read_bytes())
    settings = read_settings(spec.recipe)
    rows = [row for row in evaluate.evaluation_rows(spec, settings) if row.source == "middle"]
    alone = evaluate.measure_model(
        "model", f"{toy.files('two').uri}/model", rows, settings, StopSignal(), Console(quiet=True)
    )
    [slice_] = [one for one in found["slices"] if one["name"] == "middle"]
    for name in ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/bits_per_byte"):
        assert slice_["candidate"][name] == pytest.approx(alone.figures[name], rel=1e-6)


def test_a_slice_has_both_models_on_the_same_rows_and_one_that_the_champion_does_not_know_has_the_candidate() -> None:
    """As where a champion lacks a label, or its chat template refuses rows."""
    rows = [Row(bytes([at]) * 16, None, "x", source="old" if at < 6 else "new") for at in range(9)]
    (old,) = cuts_of({"slices": [{"by": "source", "top": 2, "min_rows": 3, "guards": []}]})
    right = np.array([0, 0, 0, 1, 1, 1, 1, 1, 1], np.float64)
    all_of_them = {"targets": np.ones(9), "right": right, "nats": right}
    known = np.where(np.arange(9) < 3, 1.0, math.nan)
    champion = {name: known * value for name, value in {**all_of_them, "right": np.ones(9)}.items()}
    shared = {name: known * value for name, value in all_of_them.items()}
    columns = {"candidate": all_of_them, "champion": champion}
    new, found = sorted(_sliced([old], rows, columns, {**columns, "candidate": shared}), key=lambda one: one["name"])
    assert (found["candidate"]["eval/accuracy"], found["champion"]["eval/accuracy"]) == (0.0, 1.0)
    assert (new["candidate"]["eval/accuracy"], new["champion"]) == (1.0, {})
