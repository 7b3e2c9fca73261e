"""A user's own functions on several ranks that share the model: told once, and the same bits as without."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import safetensors.torch
import torch

from dropforge.wheel import ANSWERS, CALLBACKS, FIGURES

from .ranks import Ranks, RanksError
from .ranks_loop import make_stage, train_whole
from .test_user_code import DROPS, SHORT, WATCH, code
from .toy import Toy

pytestmark = [pytest.mark.dist, pytest.mark.exact]


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_ranks_with_own_code_learn_the_same_bits_and_tell_once(
    ranks: Ranks, toy: Toy, tmp_path: Path, parallel: str
) -> None:
    asked = {"rows": 4, "max_new_tokens": 4, "metrics": ["rouge-l"]}
    plain = {"base": DROPS, "train": SHORT, "compute": {"processes_per_node": 2, "parallel": parallel}}
    # Fetched and unpacked by the node's first process alone, and imported by both ranks.
    wheel = code(tmp_path, f"own_{parallel}", WATCH, {
        CALLBACKS: {"watch": "watch"}, ANSWERS: {"brief": "brief"}, FIGURES: {"doubled": "doubled"},
    })  # fmt: skip
    without = make_stage(toy, "without", tmp_path / "a", **plain, evaluate={"generation": asked})
    own = {"generation": {**asked, "metrics": ["rouge-l", "brief"]}}
    stage = make_stage(toy, "with", tmp_path / "b", **plain, evaluate=own, code=wheel)
    for one in (without, stage):
        ranks(train_whole, 2, one)
    files = [Path(toy.root) / f"runs/{run}/model/model.safetensors" for run in ("without", "with")]
    first, second = (safetensors.torch.load_file(file) for file in files)
    assert all(torch.equal(first[name], second[name]) for name in first)
    events = [json.loads(line) for line in (tmp_path / "b/code/events").read_text().splitlines()]
    assert [facts["step"] for event, facts in events if event == "step"] == [1, 2, 3, 4]
    assert [facts["step"] for event, facts in events if event == "evaluation"] == [0, 2, 4]
    report = json.loads(toy.files("with").get("report.json"))
    assert report["eval"]["after"]["eval/doubled"] == 2 * report["eval"]["after"]["eval/loss"]


def test_an_error_on_the_rank_that_is_told_is_the_users_and_ends_all(ranks: Ranks, toy: Toy, tmp_path: Path) -> None:
    text = "def f(event, facts):\n    if event == 'step':\n        raise LookupError('of mine')"
    wheel = code(tmp_path, "own_raises", text, {CALLBACKS: {"own": "f"}})
    stage = make_stage(toy, "raises", tmp_path / "a", code=wheel, compute={"processes_per_node": 2})
    with pytest.raises(RanksError) as caught:
        ranks(train_whole, 2, stage)
    assert "'own' of the callbacks (own_raises.inner:f)" in str(caught.value.errors[0])
