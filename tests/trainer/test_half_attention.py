"""Attention that knows 16 bits only, as flash-attn's: bf16 runs train by it, and checks and evaluations are in fp32."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.store import open_store
from trainer import evaluate
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model.attention import choose
from trainer.model.loss import choose_way, loss_model
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .half_attention import NAME, flash_attention
from .ranks import Ranks
from .ranks_loop import Stage, make_stage, train_whole
from .test_model import small, tokens
from .test_whole import train
from .toy import Toy, sample_rows, write_dataset


def test_passes_in_fp32_attend_by_another_one_on_the_same_rows() -> None:
    with flash_attention() as called:
        model = small("llama")
        found = choose(model, asked="auto", precision="bf16", length=116, pack=True)
        assert (found.name, found.exact, found.packing) == (NAME, "sdpa", "positions")
        assert (found.plain()["in_fp32"], str(found).count("in fp32 sdpa")) == ("sdpa", 1)
        loss = loss_model(model, found.packs, True)
        batch = make_batch(tokens([9, 14, 30, 5]), [torch.tensor([0, 1]).numpy(), torch.tensor([2, 3]).numpy()], 0)
        with pytest.raises(RuntimeError, match="only support fp16 and bf16"):
            choose_way(loss, batch)
        loss.exact = found.exact
        choose_way(loss, batch)
        assert model.config._attn_implementation == NAME
        assert torch.bfloat16 in called


def test_it_is_passed_over_where_nothing_does_the_same_in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    with flash_attention():
        monkeypatch.setattr("trainer.model.attention._exact", lambda *_: None)
        found = choose(small("llama"), asked="auto", precision="bf16", length=116, pack=True)
        assert found.name == "sdpa"
        assert found.passed_over == (
            f"{NAME}: nothing else keeps documents apart 'positions' in fp32, for checks and evaluations",
        )
        with pytest.raises(RecipeError, match="does not run `flash_attention_2`: nothing else"):
            choose(small("llama"), asked=NAME, precision="bf16", length=116, pack=True)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_bf16_run_trains_measures_exports_and_is_compared(tmp_path: Path, precision: str) -> None:
    root = str(tmp_path)
    toy = Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": sample_rows(20, seed=1)}))
    measures: dict[str, Any] = {"precision": precision, "generation": {"rows": 3, "max_new_tokens": 4}}
    uri = toy.run("one", train={"max_steps": 3, "precision": "bf16", "eval_every": 2}, evaluate=measures)
    with flash_attention() as called:
        train(uri)
        files = toy.files("one")
        report = json.loads(files.get("report.json"))
        assert report["packing"]["attention"] == NAME
        assert called
        model = f"{files.uri}/model"
        order = {"run": uri, "candidate": model, "champion": {"version": "3", "model": model}}
        files.put("evaluate.json", json.dumps(order).encode())
        called.clear()
        result = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
        assert bool(called) == (precision == "bf16")
    assert result["candidate"]["eval/loss"] == result["champion"]["eval/loss"]
    plain = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    close = 1e-6 if precision == "fp32" else 1e-2
    assert plain["candidate"]["eval/loss"] == pytest.approx(result["candidate"]["eval/loss"], rel=close)


def sharded(gang: Gang, stage: Stage) -> None:
    with flash_attention() as called:
        train_whole(gang, stage)
        assert called


@pytest.mark.dist
def test_so_does_a_run_in_shards(tmp_path: Path, ranks: Ranks) -> None:
    root = str(tmp_path)
    toy = Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": sample_rows(20, seed=1)}))
    stage = make_stage(toy, "one", tmp_path / "s", train={"max_steps": 3, "precision": "bf16", "eval_every": 2})
    ranks(sharded, 2, stage.change(parallel="fsdp"))
    report = json.loads(toy.files("one").get("report.json"))
    assert (report["packing"]["attention"], report["distribution"]["parallel"]) == (NAME, "fsdp")
