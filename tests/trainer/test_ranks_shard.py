"""What was asked for is what ran: the mode, the shards, the devices; anything else is an error that says so."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dropforge.errors import RecipeError
from dropforge.run import ExitCode
from dropforge.store import open_store
from trainer import gang
from trainer.assembly import weights_digest
from trainer.config import Lora, Parallel
from trainer.data.batch import make_batch
from trainer.gang import Gang, gang_from_env
from trainer.measure import measure
from trainer.model import shard
from trainer.model.adapters import add_adapters
from trainer.model.build import Built
from trainer.model.loss import loss_model
from trainer.model.shard import Sharded, ShardingError, check_dtypes, choose, find_blocks, probe_loss
from trainer.node.device_errors import NodeError
from trainer.rank import ending

from .ranks import Ranks, RanksError
from .ranks_loop import Stage, make_base, make_loop, make_stage, train_whole
from .test_model import small
from .toy import Toy, write_dataset

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def toy_bucket(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Toy:
    root = str(tmp_path_factory.mktemp("shard") / "bucket")
    return Toy(root, write_dataset(open_store(root), toy_rows))


@pytest.fixture(scope="module")
def stage(toy_bucket: Toy, tmp_path_factory: pytest.TempPathFactory) -> Stage:
    return make_stage(toy_bucket, "asked", tmp_path_factory.mktemp("asked") / "scratch")


@pytest.mark.parametrize(
    ("asked", "group", "world", "pod", "found"),
    [
        ("auto", None, 1, 1, ("auto", 1)),
        ("auto", None, 4, 2, ("ddp", 1)),
        ("ddp", None, 2, 2, ("ddp", 1)),
        ("fsdp", None, 3, 1, ("fsdp", 3)),
        ("fsdp-no-reshard", None, 2, 2, ("fsdp-no-reshard", 2)),
        ("hybrid", None, 8, 4, ("hybrid", 4)),
        ("hybrid", 2, 8, 4, ("hybrid", 2)),
        ("ddp", None, 1, 1, "needs several ranks"),
        ("fsdp", None, 1, 1, "needs several ranks"),
        ("hybrid", None, 4, 4, "several groups of 4.*Use 2"),
        ("hybrid", 3, 4, 1, "several groups of 3.*Use 2"),
        ("hybrid", None, 3, 1, "several groups of 1.*Use `fsdp`"),
    ],
)
def test_the_mode_is_what_was_asked_for_or_an_error(
    asked: Parallel, group: int | None, world: int, pod: int, found: Any
) -> None:
    gang = Gang(world=world, local_world=pod)
    if isinstance(found, str):
        with pytest.raises(RecipeError, match=found):
            choose(asked, group, gang)
    else:
        assert choose(asked, group, gang) == found


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gemma2", "opt", "bloom", "mamba"])
def test_blocks_are_those_of_the_model(kind: str) -> None:
    blocks = find_blocks(small(kind))
    assert len(blocks) == 2
    assert len({type(block) for block in blocks}) == 1


def test_blocks_are_found_without_the_models_word_for_them() -> None:
    model = small("llama")
    model._no_split_modules = None
    assert find_blocks(model) == list(model.model.layers)
    with pytest.raises(RecipeError, match="Linear has no blocks"):
        find_blocks(nn.Linear(2, 2))


def test_trainable_weights_of_a_block_must_have_one_type() -> None:
    model = small("llama")
    layer = model.model.layers[1]
    layer.mlp.up_proj.to(torch.bfloat16)
    with pytest.raises(RecipeError, match=r"layers\.1\..* is torch\.float32, .*up_proj\.weight is torch\.bfloat16"):
        check_dtypes(model, find_blocks(model))
    layer.mlp.up_proj.weight.requires_grad_(False)  # a frozen weight is reduced with nobody
    check_dtypes(model, find_blocks(model))


def test_gpus_that_are_asked_for_and_not_there_are_an_error(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gang, "GPUS", tmp_path)
    (tmp_path / "0000:17:00.0").mkdir()  # all that the driver knows
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with pytest.raises(RecipeError, match=r"compute\.gpus.*2 are asked for, and rank 1 of this node finds 1"):
        gang_from_env(2, {"LOCAL_RANK": "1"})
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    with pytest.raises(RecipeError, match="finds 0"):
        gang_from_env(1, {})
    assert gang_from_env(0, {}).device.type == "cpu"


@pytest.mark.parametrize("sign", ["driver", "pod"])
def test_a_gpu_that_the_driver_knows_or_that_a_pod_asked_for_is_the_nodes_fault_if_it_is_missing(
    sign: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its driver or a GPU broke: the next attempt takes another node, and nobody changes a recipe."""
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gang, "GPUS", tmp_path)
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    if sign == "driver":
        (tmp_path / "0000:17:00.0").mkdir()
    else:
        monkeypatch.setenv("KUBERNETES_SERVICE_HOST", "10.96.0.1")
    with pytest.raises(NodeError, match=r"8 are asked for, and rank 3 of this node finds 0 \(.+\)") as caught:
        gang_from_env(8, {"LOCAL_RANK": "3"})
    assert ending(caught.value)[0] == ExitCode.NODE
    monkeypatch.setattr(torch.version, "cuda", None)
    with pytest.raises(RecipeError, match="this torch was built without CUDA"):
        gang_from_env(8, {"LOCAL_RANK": "3"})


def test_ranks_with_different_frozen_weights_are_told_apart() -> None:
    built = add_adapters(small("llama"), Lora(2, 4, 0.0, "all-linear"), seed=1)
    before = weights_digest(built)
    assert weights_digest(built) == before
    with torch.no_grad():
        dict(built.model.named_parameters())["model.norm.weight"][0] += 1e-3
    assert weights_digest(built) != before


def holds(gang: Gang, stage: Stage) -> dict[str, Any]:
    shard.TIMEOUT = timedelta(minutes=7)  # type: ignore[misc]  # another one than that of the library
    loop = make_loop(gang, stage, True)
    loop.start()
    loop.evaluate("before")
    loop.loss.train()
    loop.step.take(0, 1e-3)
    assert isinstance(loop.wrapped, Sharded)
    backends = [group._get_backend(torch.device("cpu")) for group in loop.wrapped.mesh.get_all_groups()]
    return {
        **loop.wrapped.ran(),
        "limits": [backend.options._timeout for backend in backends],
        "moments": sum(
            state[key].to_local().untyped_storage().nbytes()
            for state in loop.optimizer.state.values()
            for key in ("exp_avg", "exp_avg_sq")
        ),
    }


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "world"), [("fsdp", 2), ("fsdp-no-reshard", 2), ("hybrid", 4)])
def test_each_rank_holds_its_shard_of_weights_and_moments(ranks: Ranks, stage: Stage, mode: str, world: int) -> None:
    group = 2 if mode == "hybrid" else None
    for found in ranks(holds, world, stage.change(parallel=mode, shard_group=group)):
        assert found["parallel"] == mode
        assert found["mesh"] == ({"replicate": 2, "shard": 2} if group else {"shard": 2})
        assert found["units"] == 3  # two blocks and the rest
        assert found["limits"] == [timedelta(minutes=7)] * (2 if group else 1)
        assert found["weight_bytes_of_rank"] <= 0.51 * found["weight_bytes"]
        assert found["moments"] == 2 * found["weight_bytes_of_rank"]


def not_sharded(gang: Gang, stage: Stage) -> None:
    """With a library that takes the request and does nothing."""
    shard.fully_shard = lambda module, **options: module  # type: ignore[assignment]
    make_loop(gang, stage, True)


@pytest.mark.dist
def test_a_request_that_was_ignored_is_an_error(ranks: Ranks, stage: Stage) -> None:
    with pytest.raises(RanksError) as caught:
        ranks(not_sharded, 2, stage.change(parallel="fsdp"))
    assert all(isinstance(error, ShardingError) for error in caught.value.errors.values())
    assert len(caught.value.errors) == 2


def other_after_sharding(gang: Gang, stage: Stage) -> None:
    loop = make_loop(gang, stage, True)
    batch = make_batch(loop.train, loop.plan.step(0)[:2], loop.pad)
    expected = probe_loss(loop.loss, batch)
    loop.wrapped.prove(batch, expected)
    loop.loss.model.model.norm.register_forward_hook(lambda module, inputs, output: output * 1.1)
    loop.wrapped.prove(batch, expected)


@pytest.mark.dist
def test_a_model_that_sharding_changes_is_refused(ranks: Ranks, stage: Stage) -> None:
    with pytest.raises(RanksError, match="its loss on the first rows is") as caught:
        ranks(other_after_sharding, 2, stage.change(parallel="fsdp"))
    assert {type(error) for error in caught.value.errors.values()} == {ShardingError}


def few_rows(gang: Gang, stage: Stage) -> float | None:
    """An evaluation with fewer batches than ranks."""
    loop = make_loop(gang, stage, True)
    found = measure(loop.loss, loop.eval, gang, size=64, micro=1000, pad=loop.pad)
    return found.loss if found else None


@pytest.mark.dist
def test_ranks_without_evaluation_rows_keep_step(ranks: Ranks, stage: Stage) -> None:
    [one] = ranks(few_rows, 1, stage)
    assert ranks(few_rows, 3, stage.change(parallel="fsdp"), limit=30) == [pytest.approx(one, rel=1e-6)] * 3


def skeleton_of_tied(gang: Gang) -> tuple[bool, float]:
    model = small("llama", tie_word_embeddings=True)
    ids = torch.arange(12)[None]
    before = model(input_ids=ids).logits
    sharded = Sharded(gang, Built(model), loss_model(model, True, False), "fsdp", gang.world)
    whole = sharded.whole()
    if whole is None:
        return True, 0.0
    tied = whole.model.lm_head.weight is whole.model.model.embed_tokens.weight
    return tied, float((whole.model(input_ids=ids).logits - before).detach().abs().max())


@pytest.mark.dist
def test_the_gathered_model_is_the_one_that_was_sharded_and_stays_tied(ranks: Ranks) -> None:
    assert ranks(skeleton_of_tied, 2) == [(True, 0.0)] * 2


@pytest.mark.dist
@pytest.mark.parametrize("method", ["full", "lora"])
def test_a_sharded_run_writes_the_model_that_it_evaluated(
    ranks: Ranks, toy_bucket: Toy, tmp_path_factory: pytest.TempPathFactory, method: str
) -> None:
    folder = tmp_path_factory.mktemp(method)
    base = {"base": {"model": make_base(folder / "base"), "scratch": None}} if method == "lora" else {}
    stage = make_stage(
        toy_bucket,
        f"whole-{method}",
        folder / "scratch",
        **base,
        train={"method": method, "max_steps": 4, "checkpoint_every": 2, "learning_rate": 2e-2},
    )
    ranks(train_whole, 2, stage.change(parallel="fsdp"))
    files = toy_bucket.files(f"whole-{method}")
    report = json.loads(files.get("report.json"))
    assert report["distribution"]["parallel"] == "fsdp"
    assert report["distribution"]["weight_bytes_of_rank"] < 0.6 * report["distribution"]["weight_bytes"]
    assert report["eval"]["after"]["eval/loss"] < report["eval"]["before"]["eval/loss"]
    assert ("adapter/adapter_model.safetensors" in report["model"]["files"]) is (method == "lora")
    [again] = ranks(loss_of_written, 1, stage, f"{files.uri}/model")
    assert again == pytest.approx(report["eval"]["after"]["eval/loss"], rel=1e-5)


def loss_of_written(gang: Gang, stage: Stage, folder: str) -> float:
    from trainer.model.build import load_model
    from trainer.prepare import await_prepared

    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    loss = loss_model(load_model(folder), True, False)
    found = measure(loss, prepared.eval, gang, size=64, micro=4, pad=0)
    assert found is not None
    return found.loss


def proven(gang: Gang, stage: Stage, leaks: bool) -> tuple[float | None, dict[str, Any]]:
    """Isolation of the model as it is trained; with a leak on the last rank alone, which the others must hear of."""
    loop = make_loop(gang, stage, stage.settings.train.packing != "off")
    if leaks and gang.rank == gang.world - 1:
        loop.loss._inputs = lambda ids, positions: {"input_ids": ids, "use_cache": False}  # type: ignore[method-assign]
    return loop.wrapped.prove_isolation(64), loop.wrapped.ran()


@pytest.mark.dist
@pytest.mark.parametrize(("mode", "precision"), [("fsdp", "bf16"), ("fsdp", "fp32"), ("ddp", "bf16")])
def test_packed_documents_are_apart_in_what_trains(ranks: Ranks, stage: Stage, mode: str, precision: str) -> None:
    shared = stage.change(parallel=mode, precision=precision)
    for difference, ran in ranks(proven, 2, shared, False):
        assert difference <= (5e-2 if precision == "bf16" else 1e-4)
        assert (ran["attention"], ran["packing"]) == ("sdpa", "positions")
    with pytest.raises(RanksError, match=r"on rank 1 packed documents see each other.*packing: off") as caught:
        ranks(proven, 2, shared, True)
    assert [type(error) for error in caught.value.errors.values()] == [ShardingError] * 2


@pytest.mark.dist
def test_padded_rows_have_nothing_to_prove(ranks: Ranks, stage: Stage) -> None:
    [(difference, ran)] = ranks(proven, 1, stage.change(packing="off"), False)
    assert difference is None
    assert ran["packing"] == "padded"
