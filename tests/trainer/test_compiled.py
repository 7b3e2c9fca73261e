"""Blocks that torch compiles compute what they compute without it, in every way to share a model."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.compiler import find_compiler
from dropforge.errors import DropforgeError, RecipeError
from dropforge.store import open_store
from trainer.__main__ import main
from trainer.compat import compiler_counts
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model import compiled
from trainer.model.loss import LossModel, loss_model
from trainer.model.recompute import recompute
from trainer.model.router import RouterLoss
from trainer.model.shard import find_blocks
from trainer.node.compiler import CACHE, check_compiler, open_cache
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .ranks import Ranks
from .ranks_loop import Outcome, Stage, make_base, make_stage, take_steps, train_in_parts
from .test_loop import bench, trained, weights  # noqa: F401 - a fixture
from .test_mixture import mixture
from .test_model import loss_of, small, tokens
from .test_ranks_parity import apart
from .toy import Toy, write_dataset

STEPS = 3


@pytest.fixture
def traced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs are made and taken apart into operations, which then run as they are: no C++ compiler is waited for."""
    monkeypatch.setattr(compiled, "_BACKEND", "aot_eager")


def packs_of(lengths: list[list[int]]) -> list[Any]:
    """Documents by the row that holds them."""
    ends = np.cumsum([len(row) for row in lengths])
    return [np.arange(end - len(row), end) for row, end in zip(lengths, ends, strict=True)]


def gradients(loss: LossModel, lengths: list[list[int]]) -> tuple[float, dict[str, torch.Tensor]]:
    """Of one micro-batch, given by the lengths of its rows' documents."""
    loss.zero_grad()
    sizes = [length for row in lengths for length in row]
    value = loss_of(loss, make_batch(tokens(sizes), packs_of(lengths), 0))
    value.backward()
    return float(value.detach()), {
        name: weight.grad.clone() for name, weight in loss.model.named_parameters() if weight.grad is not None
    }


def graphs() -> int:
    return compiler_counts()[0]


@pytest.mark.exact
@pytest.mark.usefixtures("traced")
def test_blocks_share_their_code_and_so_do_rows_of_all_lengths() -> None:
    model = small("llama", num_hidden_layers=3, attention_dropout=0.1)
    plain = loss_model(copy.deepcopy(model), True).train()
    compiled.compile_blocks(find_blocks(model))
    loss = loss_model(model, True).train()
    assert (compiled.compiled(loss), compiled.compiled(plain)) == (3, 0)
    before = graphs()
    for count, lengths in (
        (1, [[20, 24], [11, 30]]),
        (1, [[40, 44], [9, 3]]),
        (1, [[7, 5], [9, 3], [64, 8]]),
        (2, [[20, 24]]),  # of the number 1 torch makes code of its own
        (2, [[50, 14]]),
    ):
        torch.manual_seed(3)
        expected = gradients(plain, lengths)
        torch.manual_seed(3)
        found = gradients(loss, lengths)
        assert found[0] == pytest.approx(expected[0], rel=1e-6)
        assert apart(found[1], expected[1]) < 1e-5
        assert graphs() - before == count
    with torch.no_grad():  # an evaluation is of the model's own code
        batch = make_batch(tokens([20, 24, 11]), [np.array([0, 1]), np.array([2])], 0)
        assert float(loss_of(loss.eval(), batch)) == float(loss_of(plain.eval(), batch))
    with compiled.as_written(loss):
        gradients(loss, [[20], [24]])
    assert graphs() - before == 2


@pytest.mark.exact
@pytest.mark.usefixtures("traced")
def test_blocks_of_a_mixture_share_their_code_while_its_router_is_heard() -> None:
    """Also where they are computed again, when nobody listens."""
    plain = RouterLoss(mixture("mixtral", num_hidden_layers=3), True).train()
    loss = RouterLoss(copy.deepcopy(plain.model), True).train()
    compiled.compile_blocks(find_blocks(loss.model))
    recompute(find_blocks(loss.model), "full")
    before = graphs()
    expected, found = (gradients(each, [[20, 24], [11, 30]]) for each in (plain, loss))
    assert graphs() - before == 1
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert apart(found[1], expected[1]) < 1e-5
    assert loss.router is not None
    assert plain.router is not None
    assert float(loss.router) == pytest.approx(float(plain.router), rel=1e-6)


@pytest.mark.exact
@pytest.mark.usefixtures("traced")
def test_a_copied_block_is_compiled_with_its_own_weights_and_within_what_is_computed_again() -> None:
    model = small("llama")
    compiled.compile_blocks(find_blocks(model))
    recompute(find_blocks(model), "full")
    other = copy.deepcopy(model)
    with torch.no_grad():
        for weight in other.parameters():
            weight.mul_(0.5)
    plain = small("llama")
    plain.load_state_dict(other.state_dict())
    assert compiled.compiled(other) == 2
    found, expected = (gradients(loss_model(each, True).eval(), [[20, 24], [11]]) for each in (other, plain))
    assert apart(found[1], expected[1]) < 1e-5
    assert all(weight.grad is None for weight in model.parameters())


@pytest.mark.usefixtures("traced")
def test_a_training_compiles_before_its_first_step_and_says_so(bench: Any) -> None:  # noqa: F811
    one = bench(train={"compile": True, "max_steps": 2})
    loop = trained(one.loop())
    settings = replace(one.settings, train=replace(one.settings.train, compile=False))
    plain = trained(one.loop(settings, folder="plain"))
    assert apart(weights(loop), weights(plain)) < 1e-4
    told = [line for line in one.said if line.startswith("compiled: 2 blocks share")]
    assert len(told) == 1
    found = loop.report()["compiled"]
    assert found["graphs"] >= 2
    assert found["difference"] < 1e-5
    assert found["more"] == 0
    assert loop.report()["distribution"]["compiled"] == "2 blocks"
    assert plain.report()["compiled"] is None


def wrong(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    return lambda *inputs, **named: function(*inputs, **named) * 1.01


def impossible(function: Callable[..., Any], backend: str) -> Callable[..., Any]:
    def fail(*inputs: Any, **named: Any) -> Any:
        from torch._dynamo.exc import Unsupported

        raise Unsupported("an operation\nthat nobody knows")

    return fail


@pytest.mark.parametrize(
    ("code", "cause"),
    [
        (wrong, r"their gradient differs by .* of its norm"),
        (impossible, r"torch cannot compile them: an operation that"),
    ],
)
def test_code_that_is_another_or_cannot_be_made_is_refused_before_the_first_step(
    bench: Any,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    code: Any,
    cause: str,
) -> None:
    loop = bench(train={"compile": True}).loop()
    monkeypatch.setattr(compiled, "_code_of", code)
    with pytest.raises(RecipeError, match=rf"train\.compile.*{cause}.*Leave it out"):
        loop.start()


def test_without_a_compiler_plan_and_run_refuse(
    toy: Toy, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    uri = toy.run(train={"compile": True, "max_steps": 2})
    assert main(["plan", uri.removesuffix("/run.json")]) == 0
    assert "full, fp32, compiled blocks" in capsys.readouterr().out
    monkeypatch.setenv("CXX", "/nowhere/g++ -m64")
    assert main(["plan", uri.removesuffix("/run.json")]) == 10
    assert "train.compile`: `/nowhere/g++` does not run" in " ".join(capsys.readouterr().out.split())
    with pytest.raises(RecipeError, match=r"train\.compile.*does not run.*apt-get install g\+\+.*leave"):
        run(uri, StopSignal(), Console(quiet=True))
    assert not list(toy.files().list("attempts/"))
    check_compiler(False)


def test_a_compiler_without_pythons_headers_is_none(tmp_path: Path) -> None:
    assert find_compiler({})
    with pytest.raises(DropforgeError, match=r"no Python\.h.*python3-dev"):
        find_compiler({}, tmp_path)
    with pytest.raises(DropforgeError, match="does not run"):
        find_compiler({"CXX": "false"})


def test_a_cache_is_a_folder_that_can_be_written(tmp_path: Path) -> None:
    assert open_cache(None) == {}
    assert open_cache(str(tmp_path / "some" / "cache")) == {CACHE: str(tmp_path / "some" / "cache")}
    (tmp_path / "file").touch()
    with pytest.raises(RecipeError, match=r"compute\.compile_cache.*cannot be written on this node.*read_only: false"):
        open_cache(str(tmp_path / "file" / "cache"))


@pytest.fixture(scope="module")
def stages(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> dict[str, Stage]:
    """Three blocks, all weights and adapters with dropout."""
    folder = tmp_path_factory.mktemp("compiled")
    root = str(folder / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    base = make_base(folder / "base")
    return {
        method: make_stage(
            toy,
            method,
            folder / method,
            base={"model": base, "scratch": None},
            train={
                "method": method,
                "lora": {"r": 3, "alpha": 6, "dropout": 0.1, "targets": ["q_proj", "down_proj"]},
                "tokens_per_step": 64 * 5,
                "max_steps": STEPS,
                "schedule": "constant",
                "checkpoint_every": 1,
            },
        )
        for method in ("full", "lora")
    }


def taken_apart(gang: Gang, stage: Stage, *rest: Any) -> Outcome:
    """What `take_steps` gives, with the backend of `traced`."""
    compiled._BACKEND = "aot_eager"  # the process is this test's own
    return take_steps(gang, stage, *rest)


@pytest.mark.dist
@pytest.mark.exact
@pytest.mark.parametrize(
    ("method", "mode", "world", "precision", "packs", "recompute", "work"),
    [  # each value of a factor at least once: code of C++ takes minutes to be made
        ("full", "auto", 1, "fp32", True, "none", take_steps),
        ("full", "fsdp", 2, "fp32", True, "none", taken_apart),
        ("lora", "ddp", 2, "fp16", True, "full", taken_apart),
        ("full", "fsdp-no-reshard", 2, "bf16", False, "none", taken_apart),
        ("full", "hybrid", 4, "fp32", True, "full", taken_apart),
    ],
)
def test_ranks_learn_from_compiled_blocks_what_they_learn_without(
    ranks: Ranks,
    stages: dict[str, Stage],
    method: str,
    mode: str,
    world: int,
    precision: str,
    packs: bool,
    recompute: str,
    work: Any,
) -> None:
    stage = stages[method].change(
        parallel=mode,
        shard_group=2 if mode == "hybrid" else None,
        precision=precision,
        activation_checkpointing=recompute,
    )
    plain, found = (
        ranks(work, world, stage.change(compile=asked), packs, STEPS, limit=280.0)[0] for asked in (False, True)
    )
    assert isinstance(found, Outcome)
    fine = precision == "fp32"
    assert found.ran["compiled"] == "3 blocks"
    assert found.losses == pytest.approx(plain.losses, rel=1e-5 if fine else 1e-2)
    assert found.norms == pytest.approx(plain.norms, rel=1e-5 if fine else 5e-2)
    assert apart(found.gradients, plain.gradients) < (1e-5 if fine else 5e-2)
    assert found.evaluated == plain.evaluated  # to the bit: of the same code


@pytest.mark.dist
@pytest.mark.exact
def test_a_resume_with_compiled_blocks_is_exact_to_the_bit_and_finds_its_code_in_the_cache(
    ranks: Ranks, stages: dict[str, Stage], tmp_path: Path
) -> None:
    stage = stages["lora"].change(compile=True)
    whole = ranks(in_cache, 1, stage, str(tmp_path), "whole", [STEPS], limit=280.0)[0]
    parts = ranks(in_cache, 1, stage, str(tmp_path), "parts", [1, STEPS], limit=280.0)[0]
    for left, right in zip(whole[:2], parts[:2], strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[key], right[key]) for key in left)
    assert (whole[2], parts[2] > 0) == (0, True)


def in_cache(gang: Gang, stage: Stage, cache: str, *rest: Any) -> tuple[Any, Any, int]:
    """What `train_in_parts` gives, and how much of the code was found in the cache."""
    os.environ.update(open_cache(f"{cache}/{gang.rank}"))
    found = train_in_parts(gang, stage, *rest)
    return *found, compiler_counts()[1]
