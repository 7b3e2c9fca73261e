"""Answers on a run's whole way: each evaluation, MLflow, the report, the pipeline's comparison and the command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DataError
from dropforge.promotion import decide, policy_of
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store
from trainer import evaluate
from trainer.__main__ import main
from trainer.rank import run as train
from trainer.report.card import model_card
from trainer.report.console import Console
from trainer.report.samples import name_of, tables_tag
from trainer.state.compare import changes, facts
from trainer.state.stop import StopSignal

from .toy import Toy, recipe, sample_rows, write_dataset

METRICS = ["exact-match", "token-f1", "rouge-l", "valid-json"]
ASKED = {"rows": 6, "max_new_tokens": 8, "metrics": METRICS, "batch": 4}
NAMES = {f"gen/{name}" for name in METRICS}


@pytest.fixture(scope="module")
def toy(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    root = str(tmp_path_factory.mktemp("answers") / "bucket")
    return Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": sample_rows(12, seed=1)}))


@pytest.fixture(scope="module")
def done(toy: Toy) -> dict[str, Any]:
    """The report of a run of four steps with answers at 0, 2 and 4."""
    settings = {"max_steps": 4, "eval_every": 1, "checkpoint_every": 2}
    asked = {"generation": {**ASKED, "every": 2}}
    uri = toy.run("run", train=settings, evaluate=asked, promote={"metric": "gen/rouge-l"})
    train(uri, StopSignal(), Console(quiet=True))
    found: dict[str, Any] = json.loads(toy.files().get("report.json"))
    return found


def test_answers_stand_in_the_report_the_card_and_a_table(toy: Toy, done: dict[str, Any]) -> None:
    for side in ("before", "after"):
        assert set(done["eval"][side]) >= NAMES | {"gen/ended", "gen/tokens", "asked_rows"}
    files = toy.files()
    assert sorted(item.key for item in files.list("answers/")) == [f"answers/step-{step}.json" for step in (0, 2, 4)]
    table = json.loads(files.get("answers/step-4.json"))
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert len(rows) == 6
    for row in rows:
        question = row["prompt"].removeprefix("<|bos|><|im_start|>user\n").partition("<|im_end|>")[0]
        assert row["reference"].split() == question.split()[::-1]  # what the toy's rows have to be answered with
        assert row["step"] == 4
    for name in METRICS:
        mean = sum(row[name] for row in rows) / len(rows)
        assert done["eval"]["after"][f"gen/{name}"] == pytest.approx(mean, abs=1e-12)
    card = model_card(RunSpec.from_json(files.get("run.json")), done)
    assert "ROUGE-L of generated answers" in card
    assert "for 6 of these rows" in card


def test_candidate_and_champion_answer_the_same_rows_and_the_rule_goes_by_that(toy: Toy, done: dict[str, Any]) -> None:
    files = toy.files()
    order = {"run": f"{files.uri}/run.json", "candidate": f"{files.uri}/model"}
    champion = {"version": "1", "model": order["candidate"]}
    files.put("evaluate.json", json.dumps({**order, "champion": champion}).encode())
    found = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    for name in NAMES:
        assert found["candidate"][name] == found["champion"][name] == done["eval"]["after"][name]
    rows = {name: json.loads(files.get(f"answers/{name}.json"))["data"] for name in ("candidate", "champion")}
    assert rows["candidate"] == rows["champion"]
    assert [row[1:] for row in json.loads(files.get("answers/step-4.json"))["data"]] == rows["candidate"]
    policy = policy_of(RunSpec.from_json(files.get("run.json")).recipe["promote"], same_tokenizer=False)
    verdict = decide(found["candidate"], found["champion"], done["eval"]["before"], policy)
    assert [check.name for check in verdict.checks] == ["measured", "better than base", "better than champion"]
    assert not verdict.promote  # it is no better than itself
    assert "gen/rouge-l" in verdict.reason


def test_the_command_has_any_model_answer(toy: Toy, done: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    address = f"{toy.root}/runs/run"
    assert main(["evaluate", address, "--run", address, "--json"]) == 0
    [found] = json.loads(capsys.readouterr().out)
    assert {name: found[name] for name in NAMES} == {name: done["eval"]["after"][name] for name in NAMES}
    assert [row["row"] for row in found["answers"]] == sorted(row["row"] for row in found["answers"])
    words = ["evaluate", f"{address}/checkpoints/step-2", "--dataset", f"{toy.root}/datasets/toy/{toy.digest}"]
    assert main([*words, "--length", "64", "--answers", "2", "--max-new-tokens", "3"]) == 0
    table = capsys.readouterr().out.splitlines()
    assert set(table[0].split()) > NAMES
    assert main([*words, "--max-new-tokens", "3"]) == ExitCode.BAD_RECIPE
    assert "Give --answers too" in capsys.readouterr().err


def test_the_plan_tells_what_will_be_answered(
    toy: Toy, done: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", f"{toy.root}/runs/run"]) == 0
    assert "of 6 eval rows, with up to 8 tokens; the longest prompt has" in capsys.readouterr().out


def test_a_drop_without_answers_is_refused_before_the_first_step(tmp_path: Path) -> None:
    root = str(tmp_path / "bucket")
    texts = [{"text": row["messages"][0]["content"]} for row in sample_rows(30)]
    texts = [{"text": f"{place} {row['text']}"} for place, row in enumerate(texts)]
    toy = Toy(root, write_dataset(open_store(root), {"train": texts[:20], "eval": texts[20:]}))
    uri = toy.run(evaluate={"generation": {**ASKED, "every": 1}})
    with pytest.raises(DataError, match=r"leave `evaluate\.generation` out"):
        train(uri, StopSignal(), Console(quiet=True))
    assert not list(toy.files().list("checkpoints/"))


def test_other_answers_are_another_recipe_for_a_resume() -> None:
    old = facts(recipe(evaluate={"generation": ASKED}))
    for change in (None, {**ASKED, "rows": 5}, {**ASKED, "metrics": ["rouge-l"]}):
        found = changes(old, facts(recipe(evaluate={"generation": change})))
        assert any(not item.safe for item in found)
    [batch] = changes(old, facts(recipe(evaluate={"generation": {**ASKED, "batch": 2}})))
    assert batch.safe


def test_the_newest_tables_fit_into_mlflows_tag() -> None:
    rows = [{"step": step, "asked_rows": 3} for step in range(0, 5000, 10)] + [{"step": 5001}]
    tag = tables_tag(rows)
    assert len(tag) <= 5000
    assert json.loads(tag)[-1] == {"path": name_of(4990), "type": "table"}
