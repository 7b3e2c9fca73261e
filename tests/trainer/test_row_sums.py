"""What each row adds to the figures of candidate and champion, and the gain's interval that follows from it."""

from __future__ import annotations

import hashlib
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dropforge.promotion import decide, gain_from, policy_of
from dropforge.store import open_store
from trainer.evaluate import evaluate
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .classes import classifier_base, labelled_toy
from .test_whole import train
from .toy import Toy, sample_rows, write_dataset

ASKED = {"rows": 24, "max_new_tokens": 4, "metrics": ["token-f1"], "batch": 8}
SURE = {"confidence": 0.95, "better_than_base": False}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """A dataset whose evaluation rows are of several documents each, because some texts are longer than a row."""
    root = str(tmp_path_factory.mktemp("rows") / "bucket")
    texts = [{"text": f"{place} " + "the cat sees the red house and " * (3 * place)} for place in range(1, 9)]
    held = [*sample_rows(30, seed=1), *texts]
    return Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": held}))


@pytest.fixture(scope="module")
def model(toy: Toy) -> str:
    train(toy.run("made", train={"max_steps": 6}, evaluate={"max_rows": 100}))
    return f"{toy.files('made').uri}/model"


def shaken(model: str, folder: Path, much: float, *, by: int = 0) -> str:
    """The same model with weights that are off."""
    shutil.copytree(model, folder)
    weights = load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(by)
    moved = {name: weight + much * torch.randn(weight.shape, generator=generator) for name, weight in weights.items()}
    save_file(moved, folder / "model.safetensors", {"format": "pt"})
    return str(folder)


def compared(toy: Toy, name: str, candidate: str, champion: str | None, **overrides: Any) -> dict[str, Any]:
    """The result of the comparison, as the task `decide` finds it."""
    uri = toy.run(name, **{"evaluate": {"max_rows": 100}, **overrides})
    files = toy.files(name)
    other = None if champion is None else {"version": "1", "model": champion}
    files.put("evaluate.json", json.dumps({"run": uri, "candidate": candidate, "champion": other}).encode())
    evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    return dict(json.loads(files.get("evaluation.json")))


def columns(toy: Toy, name: str, result: dict[str, Any]) -> dict[str, Any]:
    """What each row adds, which must be the bytes that the result tells of."""
    data = toy.files(name).get("evaluation-rows.json")
    assert hashlib.sha256(data).hexdigest() == result["rows_sha256"]
    return dict(json.loads(data))


def total(column: list[float | None]) -> float:
    return math.fsum(value for value in column if value is not None)


def promoted(toy: Toy, name: str, result: dict[str, Any]) -> tuple[bool, str]:
    recipe = json.loads(toy.files(name).get("run.json"))["recipe"]
    policy = policy_of(recipe["promote"], same_tokenizer=result["same_tokenizer"], task=recipe["task"])
    verdict = decide(result["candidate"], result["champion"], None, policy, gain_from(result["gain"]))
    return verdict.promote, verdict.reason


def test_rows_add_up_to_the_figures_of_both_models(toy: Toy, model: str, tmp_path: Path) -> None:
    champion = shaken(model, tmp_path / "champion", 0.05)
    result = compared(toy, "both", model, champion, evaluate={"max_rows": 100, "generation": ASKED})
    found = columns(toy, "both", result)
    assert len(set(found["rows"])) == len(found["rows"]) == result["rows"] == 38
    assert sorted(found["rows"]) == found["rows"]
    for side in ("candidate", "champion"):
        each, told = found[side], result[side]
        assert {len(column) for column in each.values()} == {38}
        nats, targets, score = total(each["nats"]), total(each["targets"]), each["gen/token-f1"]
        assert told["eval/loss"] == pytest.approx(nats / targets, rel=1e-12)
        assert told["eval/accuracy"] == pytest.approx(total(each["right"]) / targets, rel=1e-12)
        assert told["eval/bits_per_byte"] == pytest.approx(nats / math.log(2) / total(each["bytes"]), rel=1e-12)
        assert sum(value is not None for value in score) == 24
        assert told["gen/token-f1"] == pytest.approx(total(score) / 24, abs=1e-12)
    assert found["candidate"]["nats"] != found["champion"]["nats"]
    assert max(found["candidate"]["targets"]) > 64  # a text of several documents is one row
    assert result["gain"] is None  # nobody asked for it


def untimed(result: dict[str, Any]) -> dict[str, Any]:
    """What was measured, less what is a matter of time."""
    sides = ("candidate", "champion")
    return {**result, **{side: {**result[side], "model/rows_per_second": None} for side in sides}}


@pytest.mark.parametrize("metric", ["eval/loss", "eval/perplexity", "eval/accuracy", "eval/bits_per_byte"])
def test_a_gain_that_holds_on_other_draws_of_the_rows_promotes(
    toy: Toy, model: str, tmp_path: Path, metric: str
) -> None:
    worse = shaken(model, tmp_path / "worse", 0.3)
    result = compared(toy, "sure", model, worse, promote={**SURE, "metric": metric})
    gain = result["gain"]
    assert 0 < gain["low"] < gain["value"] < gain["high"]
    mine, theirs = (result[side][metric] for side in ("candidate", "champion"))
    assert gain["value"] == pytest.approx(abs(mine - theirs) / theirs)
    assert (gain["metric"], gain["confidence"], gain["rows"]) == (metric, 0.95, 38)
    assert promoted(toy, "sure", result)[0]
    cleared = compared(toy, "sure", model, worse, promote={**SURE, "metric": metric})
    assert untimed(cleared) == untimed(result)
    back = compared(toy, "back", worse, model, promote={**SURE, "metric": metric})
    assert back["gain"]["high"] < 0
    assert not promoted(toy, "back", back)[0]


def test_a_gain_that_other_draws_may_miss_keeps_the_champion(toy: Toy, model: str, tmp_path: Path) -> None:
    worse = shaken(model, tmp_path / "worse", 0.3)
    gain = compared(toy, "measured", model, worse, promote=SURE)["gain"]
    needed = (gain["low"] + gain["value"]) / 2  # the gain on these rows is more, and not for sure
    told = {}
    for confidence in (None, 0.95):
        policy = {**SURE, "confidence": confidence, "min_improvement": needed}
        told[confidence] = promoted(toy, "chance", compared(toy, "chance", model, worse, promote=policy))
    assert told[None][0]
    assert not told[0.95][0]
    assert f"with 95% confidence, by 38 rows; more than {needed:.2%} is needed" in told[0.95][1]


def test_few_rows_say_so(toy: Toy, model: str, tmp_path: Path) -> None:
    worse = shaken(model, tmp_path / "worse", 0.3)
    data = {"train": sample_rows(20), "eval": sample_rows(11, seed=2)}
    few = Toy(toy.root, write_dataset(toy.store, data))
    result = compared(few, "few", model, worse, promote=SURE)
    assert (result["gain"]["rows"], result["gain"]["low"]) == (11, None)
    promote, reason = promoted(few, "few", result)
    assert not promote
    assert "11 rows are too few to say anything with 95% confidence" in reason


def test_without_a_champion_nothing_has_to_be_sure(toy: Toy, model: str) -> None:
    result = compared(toy, "first", model, None, promote=SURE)
    assert result["gain"] is None
    assert set(columns(toy, "first", result)) == {"rows", "candidate"}
    assert promoted(toy, "first", result)[0]


def test_rows_of_a_classifier_tell_its_macro_f1(tmp_path: Path) -> None:
    toy = labelled_toy(str(tmp_path / "bucket"), held=40)
    base = classifier_base(tmp_path / "base", "distilbert")
    kind = {"task": "classification", "base": {"model": base, "scratch": None}, "evaluate": {"max_rows": 100}}
    steps = {"rows_per_step": 8, "tokens_per_step": None, "max_steps": 30}
    train(toy.run("made", train=steps, **kind))
    model = f"{toy.files('made').uri}/model"
    worse = shaken(model, tmp_path / "worse", 0.3)
    promote = {**SURE, "metric": "eval/macro_f1"}
    result = compared(toy, "classes", model, worse, train=steps, promote=promote, **kind)
    found = columns(toy, "classes", result)
    for side in ("candidate", "champion"):
        each, told = found[side], result[side]
        assert told["eval/accuracy"] == pytest.approx(
            sum(map(float.__eq__, each["label"], each["given"])) / len(found["rows"])
        )
        assert told["eval/loss"] == pytest.approx(total(each["nats"]) / 40, rel=1e-12)
    mine, theirs = (result[side]["eval/macro_f1"] for side in ("candidate", "champion"))
    gain = result["gain"]
    assert mine != theirs
    assert gain["value"] == pytest.approx((mine - theirs) / theirs)
    assert gain["low"] < gain["value"] < gain["high"]
    assert promoted(toy, "classes", result)[0] is (gain["low"] > 0)
