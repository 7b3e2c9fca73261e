"""A user's own functions in a training: what they may change is changed, nothing else, and their errors have names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dropforge.errors import RecipeError
from dropforge.promotion import policy_of
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store
from dropforge.wheel import ANSWERS, CALLBACKS, FIGURES, ROWS
from tests.wheels import make_wheel
from trainer.config import Code, read_settings
from trainer.data.rows import Row
from trainer.data.tokens import Tokens
from trainer.data.user_code import UserCode, UserCodeError, bring_code
from trainer.evaluate import evaluate, evaluation_rows
from trainer.rank import ending
from trainer.report.console import Console
from trainer.state.compare import changes, facts
from trainer.state.stop import StopSignal

from .ranks_loop import make_stage
from .test_whole import train
from .toy import Toy, chat, sample_rows, write_dataset

# A model that drops out, so that a number drawn too many shows in its weights.
DROPS = {
    "scratch": {
        "config": {"model_type": "gpt2", "vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 2, "n_positions": 64}
    }
}
SHORT = {"max_steps": 4, "checkpoint_every": 2, "eval_every": 2}
WATCH = """
    import json, random, sys
    from pathlib import Path

    def watch(event, facts):
        import numpy, torch
        with (Path(__file__).parents[1] / "..").resolve().joinpath("events").open("a") as log:
            log.write(json.dumps([event, facts]) + "\\n")
        random.random(), numpy.random.rand(), torch.rand(1)
        facts.clear()
        facts["loss"] = 0.0

    def brief(answer, reference):
        random.seed(0)
        return len(answer) / max(1, len(reference))

    def doubled(figures):
        figures["loss"] *= 2
        return figures["loss"]
"""


@pytest.fixture(autouse=True)
def _as_before() -> Iterator[None]:
    """Each test imports as a process of its own would."""
    path = list(sys.path)
    yield
    sys.path[:] = path


def code(folder: Path, module: str, text: str, groups: dict[str, dict[str, str]]) -> dict[str, str]:
    named = {group: {name: f"{module}.inner:{of}" for name, of in found.items()} for group, found in groups.items()}
    return make_wheel(folder, {f"{module}/__init__.py": "", f"{module}/inner.py": text}, named, module)


def loaded(folder: Path, module: str, text: str, groups: dict[str, dict[str, str]]) -> UserCode:
    return bring_code(Code(**code(folder / "wheels", module, text, groups)), folder / "code")


def report(toy: Toy, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(toy.files(run).get("report.json"))
    return found


def test_callbacks_and_metrics_see_everything_and_change_no_bit(
    toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = {"rows": 4, "max_new_tokens": 4, "metrics": ["rouge-l", "brief"]}
    plain = {"base": DROPS, "train": SHORT}
    wheel = code(tmp_path, "own_watch", WATCH, {
        CALLBACKS: {"watch": "watch"}, ANSWERS: {"brief": "brief"}, FIGURES: {"doubled": "doubled"},
    })  # fmt: skip
    train(toy.run("without", **plain, evaluate={"generation": {**asked, "metrics": ["rouge-l"]}}))
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setenv("DROPFORGE_SCRATCH", str(scratch))
    said = train(toy.run("with", **plain, evaluate={"generation": asked}, code=wheel, promote={"metric": "gen/brief"}))
    files = [
        safetensors.torch.load_file(Path(toy.root) / f"runs/{run}/model/model.safetensors")
        for run in ("without", "with")
    ]
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])

    events = [json.loads(line) for line in (scratch / "code/events").read_text().splitlines()]
    steps = [facts for event, facts in events if event == "step"]
    assert [facts["step"] for facts in steps] == [1, 2, 3, 4]
    assert all(facts["loss"] > 0 and facts["grad_norm"] > 0 and facts["steps"] == 4 for facts in steps)
    found = report(toy, "with")
    assert [facts["step"] for event, facts in events if event == "evaluation"] == [0, 2, 4]
    assert [facts["eval/loss"] for event, facts in events if event == "evaluation"][-1] == found["eval"]["after"][
        "eval/loss"
    ]
    saved = {facts["step"]: facts for event, facts in events if event == "checkpoint"}
    assert saved[4]["digest"] == found["checkpoints"][-1]["digest"]
    assert saved[4]["uri"] == found["checkpoints"][-1]["uri"]
    for side in ("before", "after"):
        figures = found["eval"][side]
        assert figures["eval/doubled"] == 2 * figures["eval/loss"]
        assert figures["gen/brief"] >= 0
    assert found["user_code"]["sha256"] == wheel["sha256"]
    assert found["user_code"]["provides"]["callbacks"] == ["watch"]
    assert any("own code: own_watch-1.0-py3-none-any.whl" in line for line in said)
    card = toy.files("with").get("model/README.md").decode()
    assert "| `eval/doubled` of `own_watch-1.0-py3-none-any.whl` |" in card
    table = json.loads(toy.files("with").get("answers/step-4.json"))
    assert table["columns"][-2:] == ["rouge-l", "brief"]

    # Candidate and champion are measured by the same functions; the answers' metric can decide.
    files_of = toy.files("with")
    champion = {"version": "1", "model": f"{toy.root}/runs/without/model"}
    order = {"run": f"{files_of.uri}/run.json", "candidate": f"{files_of.uri}/model", "champion": champion}
    files_of.put("evaluate.json", json.dumps(order).encode())
    result = evaluate(f"{files_of.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    result["champion"].pop("model/rows_per_second")  # a time
    assert result["champion"].items() <= result["candidate"].items()
    assert result["candidate"]["eval/doubled"] == pytest.approx(found["eval"]["after"]["eval/doubled"], rel=1e-5)
    assert result["candidate"]["gen/brief"] == found["eval"]["after"]["gen/brief"]
    spec = RunSpec.from_json(files_of.get("run.json"))
    policy = policy_of(spec.recipe["promote"], same_tokenizer=False)
    assert (policy.metric, policy.direction) == ("gen/brief", "higher")


SHOUT = """
    def shout(row):
        for message in row["messages"]:
            message["content"] = message["content"].upper()
        return row

    def twice(row):
        row["messages"][-1]["content"] *= 2
        return row
"""


def test_rows_are_what_their_functions_make_of_them_in_training_and_evaluation(toy: Toy, tmp_path: Path) -> None:
    wheel = code(tmp_path, "own_shout", SHOUT, {ROWS: {"a-shout": "shout", "b-twice": "twice"}})
    changed = make_stage(toy, "changed", tmp_path / "one", code=wheel)
    rows = {"train": sample_rows(160), "eval": sample_rows(23, seed=1)}
    by_hand = {
        split: [chat(row["messages"][0]["content"].upper(), row["messages"][1]["content"].upper() * 2) for row in found]
        for split, found in rows.items()
    }
    other = Toy(toy.root, write_dataset(open_store(toy.root), by_hand, "toy"))
    same = make_stage(other, "same", tmp_path / "two")
    for split in ("train", "eval"):
        one, two = (Tokens.load(scratch / "plan" / split) for scratch in (changed.scratch, same.scratch))
        assert one.facts["target_bytes"] == two.facts["target_bytes"]  # the tokenizer was trained on them as well
        documents = [sorted(t.document(i)[0].tolist() for i in range(len(t))) for t in (one, two)]
        assert documents[0] == documents[1]
    loose = bring_code(changed.settings.code, tmp_path / "code")
    for row in evaluation_rows(changed.spec, changed.settings, loose):
        assert row.messages is not None
        assert row.messages[0][1].isupper()
    # Another wheel is another plan; the same one elsewhere is not.
    prefix = {item.key.split("/")[1] for item in toy.files("changed").list("plan/")}
    assert len(prefix) == 1
    recipe = changed.spec.recipe
    moved = {**recipe, "code": {**recipe["code"], "wheel": f"/elsewhere/{Path(wheel['wheel']).name}"}}
    newer = {**recipe, "code": {**recipe["code"], "sha256": "0" * 64}}
    assert [change.safe for change in changes(facts(recipe), facts(moved))] == [True]
    assert [change.safe for change in changes(facts(recipe), facts(newer))] == [False]
    assert not all(change.safe for change in changes(facts(recipe), facts({**recipe, "code": None})))


ROW = Row(b"k" * 16, (("user", "a"), ("assistant", "b")), None, "s")


@pytest.mark.parametrize(
    ("module", "text", "cause"),
    [
        ("own_r1", "def f(row):\n    raise OSError('no\\nway')", r"6b6b.*raised OSError: no way \(inner.py, line 2\)"),
        ("own_r2", "import sys\ndef f(row):\n    sys.exit(0)", r"it raised SystemExit: 0 \(inner.py, line 3\)"),
        ("own_r3", "def f(row):\n    return None", r"it returned None, which is no mapping of messages, text"),
        ("own_r4", "def f(row):\n    return {**row, 'text': 'x'}", r"with both or none of messages and text"),
        ("own_r5", "def f(row):\n    return {**row, 'messages': []}", r"messages that are no list of role and content"),
        ("own_r6", "def f(row):\n    return {**row, 'messages': [{'role': 'user'}]}", r"no list of role and content"),
        ("own_r7", "def f(row):\n    return {**row, 'label': 3}", r"a text, label or source that is none"),
        ("own_r8", "n = []\ndef f(row):\n    n.append(1)\n    return {**row, 'source': str(n)}", r"twice, the rows"),
    ],
)  # fmt: skip
def test_a_row_function_that_does_wrong_is_named_with_the_row(
    tmp_path: Path, module: str, text: str, cause: str
) -> None:
    found = loaded(tmp_path, module, text, {ROWS: {"own": "f"}})
    assert found.rows is not None
    with pytest.raises(
        UserCodeError, match=rf"'own' of the row functions \({module}.inner:f\) in {module}-1.0.*{cause}"
    ) as error:
        found.rows(ROW)
    assert ending(error.value)[0] == ExitCode.BAD_RECIPE


def test_a_row_function_sees_and_changes_what_messages_say_beside_their_contents(tmp_path: Path) -> None:
    text = "def f(row):\n    del row['messages'][1]['train']\n    row['messages'][0]['name'] = 'Ada'\n    return row"
    found = loaded(tmp_path, "own_beside", text, {ROWS: {"own": "f"}})
    assert found.rows is not None
    before = Row(b"k" * 16, (("user", "a"), ("assistant", "b")), None, beside=({}, {"train": False}), tools=({"x": 1},))
    assert found.rows(before) == replace(before, beside=({"name": "Ada"}, {}))
    assert found.rows(replace(before, beside=({}, {"train": True}))).silent == frozenset()


@pytest.mark.parametrize("value", ["float('nan')", "None", "'1'", "True", "[1.0]"])
def test_a_metric_that_is_no_number_is_refused(tmp_path: Path, value: str) -> None:
    module = f"own_m{abs(hash(value))}"
    groups = {ANSWERS: {"own": "f"}, FIGURES: {"own": "f"}}
    found = loaded(tmp_path, module, f"def f(*values):\n    return {value}", groups)
    with pytest.raises(UserCodeError, match=r"'own' of the metrics of answers .*which is no finite number"):
        found.scorers["own"]("a", "b")
    assert found.figures is not None
    with pytest.raises(UserCodeError, match=r"'own' of the metrics of an evaluation .*which is no finite number"):
        found.figures({"loss": 1.0})


@pytest.mark.parametrize(
    ("module", "text", "of", "cause"),
    [
        (
            "own_i1",
            "import no_such_package_here",
            "f",
            r"cannot be imported \(ModuleNotFoundError.*nothing is installed",
        ),
        ("own_i2", "raise SystemExit(0)", "f", r"cannot be imported \(SystemExit"),
        ("own_i3", "f = 1", "f", r"it is no function, but of type int"),
        ("own_i4", "", "f", r"cannot be imported \(AttributeError"),
        ("json", "def f(row):\n    return row", "f", r"in a module 'json', and there is another one of that name here"),
        ("trainer", "def f(row):\n    return row", "f", r"in a module 'trainer', and there is another one"),
    ],
)
def test_what_cannot_be_loaded_is_refused(tmp_path: Path, module: str, text: str, of: str, cause: str) -> None:
    with pytest.raises(RecipeError, match=cause):
        loaded(tmp_path, module, text, {ROWS: {"own": of}})


def test_an_error_of_a_callback_ends_the_run_as_the_users(toy: Toy, tmp_path: Path) -> None:
    text = "def f(event, facts):\n    if event == 'evaluation' and facts['step']:\n        return 1 / 0"
    wheel = code(tmp_path, "own_cb", text, {CALLBACKS: {"own": "f"}})
    with pytest.raises(UserCodeError, match=r"'own' of the callbacks \(own_cb.inner:f\).*ZeroDivisionError") as error:
        train(toy.run("run", train={**SHORT, "max_steps": 2}, code=wheel))
    assert ending(error.value)[0] == ExitCode.BAD_RECIPE


def test_a_wheel_that_is_another_or_lacks_a_metric_ends_the_run_before_its_first_step(toy: Toy, tmp_path: Path) -> None:
    wheel = code(tmp_path, "own_lack", "def f(event, facts): ...", {CALLBACKS: {"own": "f"}})
    with pytest.raises(RecipeError, match=r"`code.sha256`"):
        train(toy.run("one", code={**wheel, "sha256": "0" * 64}))
    with pytest.raises(RecipeError, match=r"there is no metric 'brief'"):
        train(
            toy.run("two", code=wheel, evaluate={"generation": {"rows": 4, "max_new_tokens": 4, "metrics": ["brief"]}})
        )
    spec = RunSpec.from_json(Path(toy.run("three")).read_bytes())
    assert read_settings({**spec.recipe, "code": wheel}).code == Code(**wheel)
    with pytest.raises(RecipeError, match=r"code.tag"):
        read_settings({**spec.recipe, "code": {**wheel, "tag": "x"}})
