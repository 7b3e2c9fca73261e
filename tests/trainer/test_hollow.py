"""A base model that is read slice by slice: the same weights, the same training, and no rank that holds all of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from dropforge.errors import RecipeError
from dropforge.store import open_store
from trainer import assembly
from trainer.assembly import begin, frozen_digest, same_loss
from trainer.data.batch import make_batch
from trainer.gang import Gang
from trainer.model import fill, hollow, shard
from trainer.model.build import Built, load_model
from trainer.model.fit import Meter
from trainer.model.hollow import _empty, first_loss
from trainer.model.loss import loss_model
from trainer.model.shard import Sharded, ShardingError, find_blocks, probe_loss
from trainer.model.slices import Slices, UnsliceableError
from trainer.prepare import await_prepared
from trainer.report.console import Console

from .ranks import Ranks, RanksError
from .ranks_loop import Stage, make_base, make_stage, train_whole
from .test_mixture import MIXTURES
from .test_model import loss_of, small, tokens
from .toy import Toy, write_dataset

KINDS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": True},
    "gpt2": {},
    "qwen3": {},
    "gemma2": {"sliding_window": 16},
    **MIXTURES,
}


def saved(folder: Path, kind: str, dtype: torch.dtype = torch.float32, **more: Any) -> Any:
    """A small model as the library loads it from files as a hub has them: in pieces, with its makers' names."""
    small(kind, **{**KINDS.get(kind, {}), **more}).to(dtype).save_pretrained(folder, max_shard_size="20KB")
    return load_model(folder)


@pytest.mark.compat
@pytest.mark.parametrize("kind", KINDS)
def test_each_slice_is_rows_of_the_weight_that_the_library_loads(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path, kind, torch.bfloat16)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    empty = _empty(model.config)
    slices = Slices(tmp_path, empty)
    whole, names = dict(model.named_parameters()), [name for name, _ in empty.named_parameters()]
    assert names == list(whole)  # tied ones once
    for name, weight in whole.items():
        assert torch.equal(slices.read(name), weight), name
        part = slices.read(name, 1, 3)
        assert torch.equal(part, weight[1:3])
        assert part.untyped_storage().nbytes() == part.nbytes  # nothing of the file is held
        assert slices.read(name, len(weight), len(weight)).shape == (0, *weight.shape[1:])
    for left, right in zip(empty.named_buffers(), model.named_buffers(), strict=True):
        assert left[0] == right[0]
        assert torch.equal(left[1], right[1])


@pytest.mark.compat
@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral"])
def test_blocks_that_are_read_one_after_another_give_the_loss_of_the_whole(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path, kind).eval()
    empty = _empty(model.config)
    built = Built(empty, slices=Slices(tmp_path, empty))
    batch = make_batch(tokens([9, 14]), [torch.tensor([0, 1]).numpy()], 0)
    whole = loss_model(model, True, False)
    whole.way = "places"
    held: list[int] = []
    for block in find_blocks(empty):
        block.register_forward_hook(lambda *_: held.append(sum(not weight.is_meta for weight in empty.parameters())))
    assert first_loss(built, same_loss(built, whole), batch, find_blocks(empty)) == float(
        loss_of(whole, batch).detach()
    )
    assert all(weight.is_meta for weight in empty.parameters())
    assert max(held) < sum(1 for _ in empty.parameters())


def test_files_that_do_not_give_each_weight_are_told(tmp_path: Path) -> None:
    model = saved(tmp_path / "whole", "llama", tie_word_embeddings=False)

    def refused(names: Any, **more: Any) -> str:
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        folder.mkdir()
        kept = {name: weight.detach().clone() for name, weight in model.named_parameters() if names(name)}
        save_file({**kept, **more}, folder / "model.safetensors")
        with pytest.raises(UnsliceableError) as caught:
            Slices(folder, _empty(model.config))
        return str(caught.value)

    assert refused(lambda name: "norm" not in name).startswith("its files have no model.layers.0.input_layernorm")
    assert "has the shape (5,)" in refused(
        lambda name: name != "model.norm.weight", **{"model.norm.weight": torch.ones(5)}
    )
    with pytest.raises(UnsliceableError, match="neither"):
        Slices(tmp_path, _empty(model.config))
    tied = saved(tmp_path / "tied", "llama").config
    with pytest.raises(UnsliceableError, match="are one weight of the model, and differ in its files"):
        Slices(tmp_path / "whole", _empty(tied))


@pytest.mark.parametrize("place", ["../whole/{}", "{folder}/whole/{}"])
def test_files_of_another_folder_are_not_read(toy_bucket: Toy, tmp_path: Path, place: str) -> None:
    stage = staged(toy_bucket, tmp_path, "elsewhere", "full")
    model = saved(tmp_path / "whole", "llama")
    other = tmp_path / "other"
    model.config.save_pretrained(other)
    index = json.loads((tmp_path / "whole" / "model.safetensors.index.json").read_text())
    places = {name: place.format(file, folder=tmp_path) for name, file in index["weight_map"].items()}
    (other / "model.safetensors.index.json").write_text(json.dumps({**index, "weight_map": places}))
    with pytest.raises(RecipeError, match="which is no safetensors file beside it"):
        hollow.make_hollow(other, stage.settings)
    assert hollow.make_hollow(tmp_path / "whole", stage.settings).slices is not None


@pytest.fixture(scope="module")
def toy_bucket(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Toy:
    root = str(tmp_path_factory.mktemp("hollow") / "bucket")
    return Toy(root, write_dataset(open_store(root), toy_rows))


def staged(toy: Toy, folder: Path, name: str, method: str, **config: Any) -> Stage:
    base = make_base(folder / "base", **config)
    return make_stage(
        toy,
        name,
        folder / "scratch",
        base={"model": base, "scratch": None},
        train={"method": method, "max_steps": 3, "checkpoint_every": 2, "learning_rate": 2e-2, "eval_every": 2},
    )


def train_it(gang: Gang, stage: Stage, whole: bool) -> int:
    """How many weights were empty when the ranks shared them."""
    empty: list[int] = []
    filled = fill.fill_shards

    def seen(built: Built, mesh: Any) -> None:
        empty.append(sum(weight.to_local().is_meta for weight in built.model.parameters()))
        filled(built, mesh)

    shard.fill_shards = seen  # type: ignore[assignment]
    if whole:
        assembly.why_whole = lambda *_: "the test says so"  # type: ignore[assignment]
    train_whole(gang, stage)
    return sum(empty)


CASES = [("full", "fsdp", 2, {}), ("lora", "hybrid", 4, {})]
MORE = [
    ("full", "fsdp-no-reshard", 2, {"tie_word_embeddings": False}),
    ("lora", "fsdp", 3, {"tie_word_embeddings": False}),
    ("full", "fsdp", 2, {"kind": "mixtral", **MIXTURES["mixtral"]}),
]


@pytest.mark.dist
@pytest.mark.parametrize(
    ("method", "mode", "world", "config"),
    [*CASES, *(pytest.param(*case, marks=pytest.mark.exact) for case in MORE)],
)
def test_a_run_that_reads_slices_is_the_one_that_reads_the_whole_to_the_bit(
    ranks: Ranks, toy_bucket: Toy, tmp_path: Path, method: str, mode: str, world: int, config: dict[str, Any]
) -> None:
    reports, models = [], []
    for whole in (False, True):
        name = f"{method}-{mode}-{world}-{len(config)}-{whole}"
        stage = staged(toy_bucket, tmp_path / name, name, method, **config)
        shared = stage.change(parallel=mode, shard_group=2 if mode == "hybrid" else None)
        empty = ranks(train_it, world, shared, whole)
        assert all(count == 0 for count in empty) is whole
        files = toy_bucket.files(name)
        report = json.loads(files.get("report.json"))
        reports.append([report["train"], report["eval"]["before"], report["eval"]["after"]])
        files.download("model/model.safetensors", tmp_path / f"{whole}.safetensors")
        models.append(load_file(tmp_path / f"{whole}.safetensors"))
    assert reports[0] == reports[1]
    assert models[0].keys() == models[1].keys()
    assert all(torch.equal(models[0][key], models[1][key]) for key in models[0])


def misread(gang: Gang, stage: Stage) -> None:
    read = Slices.read

    def turned(self: Slices, name: str, start: int = 0, stop: int | None = None) -> torch.Tensor:
        found = read(self, name, start, stop)
        return found.flip(0) if start else found  # the rows of the second rank

    Slices.read = turned  # type: ignore[method-assign]
    train_whole(gang, stage)


@pytest.mark.dist
def test_a_shard_that_is_not_the_files_is_refused(ranks: Ranks, toy_bucket: Toy, tmp_path: Path) -> None:
    stage = staged(toy_bucket, tmp_path, "misread", "full").change(parallel="fsdp")
    with pytest.raises(RanksError, match="the ranks together have not read what the files have of model") as caught:
        ranks(misread, 2, stage)
    assert {type(error) for error in caught.value.errors.values()} == {ShardingError}


def frozen(gang: Gang, stage: Stage, whole: bool) -> str | None:
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    if whole:
        assembly.why_whole = lambda *_: "the test says so"  # type: ignore[assignment]
    built, _ = begin(stage.settings, prepared, gang, Console(quiet=True))
    assert (built.slices is None) is whole
    return frozen_digest(built)


@pytest.mark.dist
def test_frozen_weights_have_one_digest_however_they_are_read(ranks: Ranks, toy_bucket: Toy, tmp_path: Path) -> None:
    stage = staged(toy_bucket, tmp_path, "frozen", "lora").change(parallel="fsdp")
    assert ranks(frozen, 2, stage, False) == ranks(frozen, 2, stage, True)


def most(gang: Gang, stage: Stage, whole: bool) -> tuple[int, int]:
    """The most memory of a rank until its model is shared, above what it had before; and bytes of the whole model."""
    meter = Meter(gang.device)
    prepared = await_prepared(stage.settings, stage.spec, stage.scratch, lambda: None)
    before = meter.held()
    meter.begin()
    if whole:
        assembly.why_whole = lambda *_: "the test says so"  # type: ignore[assignment]
    built, look = begin(stage.settings, prepared, gang, Console(quiet=True))
    loss = loss_model(look.model, True, False)
    batch = make_batch(tokens([9, 14]), [torch.tensor([0, 1]).numpy()], 0)
    if look is not built:
        loss = same_loss(built, loss)
        if gang.leader:
            first_loss(built, loss, batch, find_blocks(built.model))
    else:
        probe_loss(loss, batch)
    del look
    size = sum(weight.nbytes for weight in built.model.parameters())
    Sharded(gang, built, loss, "fsdp", gang.world)
    return meter.peak() - before, size


@pytest.mark.dist
@pytest.mark.exact
def test_no_rank_holds_the_whole_model(ranks: Ranks, toy_bucket: Toy, tmp_path: Path) -> None:
    stage = staged(
        toy_bucket, tmp_path, "most", "full", hidden_size=512, intermediate_size=1408, num_hidden_layers=12
    ).change(parallel="fsdp")
    for peak, size in ranks(most, 4, stage, False):
        assert size > 140e6
        assert peak < 0.9 * size  # a quarter of it, its first two blocks, and what reading takes: 0.4 to 0.7 were seen
    for peak, size in ranks(most, 4, stage, True):
        assert peak > size


def test_what_is_read_whole_says_why(toy_bucket: Toy, tmp_path: Path) -> None:
    stage = staged(toy_bucket, tmp_path, "why", "full")
    settings = stage.settings
    assert hollow.why_whole(settings, "fsdp") is None
    assert hollow.why_whole(settings, "ddp")
    dora = stage.change(method="dora").settings
    assert "dora" in str(hollow.why_whole(dora, "hybrid"))
