"""A base model comes from the hub once, whole and as its digests say, however often the connection breaks."""

from __future__ import annotations

import errno
import hashlib
import json
import os
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DropforgeError, RecipeError
from dropforge.hub import LARGEST_CONFIG, StrangeError, UnreachableError, cached, storage
from dropforge.run import RunSpec
from dropforge.store import open_store
from tests.hub_server import Hub, open_hub
from trainer.__main__ import main
from trainer.commands.models import fetch_tokenizer
from trainer.commands.run import write_run
from trainer.config import read_settings
from trainer.data.hub import fetch_from_hub
from trainer.model import build
from trainer.prepare import prepare
from trainer.rank import run as train
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .test_data import TEXTS
from .toy import Toy

MODEL = "some/model"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
FILES = {
    "config.json": b"{}",
    "tokenizer.json": b'{"a": 1}',
    WEIGHTS: bytes(range(256)) * 2000,
    "consolidated.safetensors": b"the same once more",
    "pytorch_model.bin": b"and as a pickle",
    "adapter_config.json": b"{}",
    "onnx/model.onnx": b"and for another runtime",
}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """A hub with a model, and an empty cache."""
    made = Hub()
    made.model(MODEL, FILES)
    with open_hub(made, tmp_path / "cache", monkeypatch):
        monkeypatch.setattr("trainer.data.hub.PAUSE", 0.0)
        yield made


def commit_of(hub: Hub) -> str:
    return hub.repositories[MODEL].refs["main"]


def fetch(hub: Hub) -> Path:
    return fetch_from_hub(MODEL, commit_of(hub))


def test_what_is_needed_comes_once_and_then_no_hub_is_asked(hub: Hub) -> None:
    folder = fetch(hub)
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json", WEIGHTS}
    assert (folder / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    hub.asked.clear()
    hub.status = 500
    assert fetch(hub) == folder
    assert hub.asked == []
    (folder / WEIGHTS).resolve().write_bytes(b"short")  # what is no longer as it was is not taken on trust
    with pytest.raises(DropforgeError, match=r"model\.safetensors in this machine's cache is not what its name says"):
        fetch(hub)


def test_a_connection_cut_in_the_middle_of_a_file_goes_on_there(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1 << 16)  # the client keeps whole ones
    hub.cuts[WEIGHTS] = 1
    assert (fetch(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert hub.ranges == [f"bytes={len(FILES[WEIGHTS]) // 2 >> 16 << 16}-"]


def test_a_connection_that_is_reset_is_made_again(hub: Hub) -> None:
    hub.resets[WEIGHTS] = 2
    assert (fetch(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]


def test_wrong_bytes_are_thrown_away_and_asked_for_again(hub: Hub) -> None:
    hub.spoilt[WEIGHTS] = 1
    assert (fetch(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert hub.gets(WEIGHTS) == 2


def test_a_hub_that_only_sends_wrong_bytes_is_refused_and_what_was_right_stays(hub: Hub) -> None:
    hub.spoilt[WEIGHTS] = 99
    with pytest.raises(DropforgeError, match=r"model\.safetensors came 5 times with other bytes"):
        fetch(hub)
    assert cached(MODEL, commit_of(hub)) is None
    hub.spoilt.clear()
    assert (fetch(hub) / WEIGHTS).read_bytes() == FILES[WEIGHTS]
    assert hub.gets("tokenizer.json") == 1


def test_two_pods_with_one_cache_fetch_a_file_once(hub: Hub) -> None:
    asked = threading.Barrier(2)

    def hold(name: str) -> None:
        if name == "config.json":  # until both have the list of files
            asked.wait(30)

    found: list[Path] = []
    first = threading.Thread(target=lambda: found.append(fetch(hub)))
    hub.hold = hold
    first.start()
    second = threading.Thread(target=lambda: found.append(fetch(hub)))
    second.start()
    while sum(path.startswith("/api/") for _, path in hub.asked) < 2:
        first.join(0.01)
    asked.wait(30)
    first.join(30)
    second.join(30)
    assert len(found) == 2
    assert [hub.gets(name) for name in ("config.json", WEIGHTS)] == [1, 1]


def sharded(*names: str, index: Any = None) -> dict[str, bytes]:
    rest = {name: data for name, data in FILES.items() if name != WEIGHTS}
    weights = {f"w{number}": name for number, name in enumerate(names)}
    told = {"weight_map": weights} if index is None else index
    return {**rest, INDEX: json.dumps(told).encode(), **{name: name.encode() for name in names}}


def test_weights_in_several_files_are_those_that_their_index_names(hub: Hub) -> None:
    hub.repositories[MODEL].commit(sharded("model-1-of-2.safetensors", "model-2-of-2.safetensors"))
    names = {path.name for path in fetch(hub).iterdir()}
    assert names == {"config.json", "tokenizer.json", INDEX, "model-1-of-2.safetensors", "model-2-of-2.safetensors"}


@pytest.mark.parametrize(
    "index", [{"weight_map": {"w": "gone.safetensors"}}, {"weight_map": {"w": "../x.safetensors"}}, []]
)
def test_an_index_that_names_what_is_not_there_is_refused(hub: Hub, index: Any) -> None:
    hub.repositories[MODEL].commit(sharded("model-1-of-1.safetensors", index=index))
    with pytest.raises(DropforgeError, match=r"its model\.safetensors\.index\.json is wrong"):
        fetch(hub)


def test_offline_only_the_cache_counts_and_it_is_looked_through(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    from huggingface_hub import hf_hub_download

    commit = commit_of(hub)
    for name in ("config.json", "tokenizer.json"):
        hf_hub_download(MODEL, name, revision=commit)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE forbids"):  # weights are missing
        fetch(hub)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    hf_hub_download(MODEL, WEIGHTS, revision="main")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    weights = cached(MODEL, commit)
    assert weights is not None
    data = bytearray((weights / WEIGHTS).read_bytes())
    data[5] ^= 1
    (weights / WEIGHTS).resolve().write_bytes(data)
    with pytest.raises(DropforgeError, match="is not what its name says"):
        fetch(hub)
    (weights / WEIGHTS).resolve().write_bytes(FILES[WEIGHTS])
    assert fetch(hub) == weights
    assert fetch_from_hub(MODEL, None) == weights  # its branch is that of the day when it was fetched
    assert hub.asked == []


def test_what_a_killed_fetch_left_half_done_goes_once_nobody_writes_to_it(hub: Hub) -> None:
    blobs = storage(MODEL) / "blobs"
    blobs.mkdir(parents=True)
    for name, age in (("old", 7200), ("new", 10)):
        (blobs / f"x.{name}.incomplete").write_bytes(b"half")
        then = blobs.stat().st_mtime - age
        os.utime(blobs / f"x.{name}.incomplete", (then, then))
    fetch(hub)
    assert [path.name for path in blobs.glob("*.incomplete")] == ["x.new.incomplete"]


def test_a_full_disk_is_no_fault_of_the_hub(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any, **__: Any) -> str:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", full)
    with pytest.raises(DropforgeError, match=r"cannot be written to .*No space left.*HF_HOME"):
        fetch(hub)


def small_model(folder: Path, seed: int) -> dict[str, bytes]:
    """Files of a Llama with random weights."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer

    torch.manual_seed(seed)
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64}
    made = AutoModelForCausalLM.from_config(AutoConfig.for_model("llama", **sizes, **heads))
    made.save_pretrained(folder)
    wrap_tokenizer(train_tokenizer(TEXTS, 320), 64).save_pretrained(folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_run_keeps_the_commit_that_it_was_planned_with(
    hub: Hub, toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """The branch moves and the hub goes away: the run has the weights of its first day, and no trace of the token."""
    token = "hf_" + hashlib.sha256(b"token").hexdigest()[:34]
    monkeypatch.setenv("HF_TOKEN", token)
    model = hub.repositories[MODEL]
    model.gate, model.hidden = token, True
    first = model.commit(small_model(tmp_path / "first", 0))
    recipe = tmp_path / "recipe.yaml"
    limits = "sequence_length: 64, tokens_per_step: 512, max_steps: 2, eval_every: 0"
    recipe.write_text(f"extends: tiny\nbase: {{model: {MODEL}}}\ntrain: {{{limits}}}\nevaluate: {{max_rows: 9}}\n")
    dataset, folder = f"{toy.root}/datasets/toy/{toy.digest}/manifest.json", str(tmp_path / "run")
    uri = write_run(str(recipe), dataset, folder)
    second = model.commit(small_model(tmp_path / "second", 1))
    assert first != second
    assert write_run(str(recipe), dataset, folder) == uri  # the same command goes on with the same run
    spec = RunSpec.from_json(open_store(folder).get("run.json"))
    assert spec.recipe["base"]["revision"] == first

    train(uri, StopSignal(), Console(quiet=True))
    assert hub.tokens == {token}
    assert (storage(MODEL) / "snapshots" / first / WEIGHTS).is_file()
    assert not (storage(MODEL) / "snapshots" / second).exists()
    texts = [path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()]
    out = capfd.readouterr()
    assert f"is commit {first}: so says the hub" in out.err
    assert not any(token.encode() in text for text in [*texts, out.out.encode(), out.err.encode()])

    hub.status = 503  # a later attempt: the cache has it all
    hub.asked.clear()
    prepare(spec, read_settings(spec.recipe), tmp_path / "again", lambda: None, lambda _: None)
    assert hub.asked == []


def test_a_plan_fetches_no_weights_and_the_run_after_it_does(
    hub: Hub, toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    hub.repositories[MODEL].commit(small_model(tmp_path / "model", 0))
    recipe = tmp_path / "recipe.yaml"
    limits = "sequence_length: 64, tokens_per_step: 512, max_steps: 2, eval_every: 0"
    recipe.write_text(f"extends: tiny\nbase: {{model: {MODEL}}}\ntrain: {{{limits}}}\nevaluate: {{max_rows: 9}}\n")
    dataset = f"{toy.root}/datasets/toy/{toy.digest}/manifest.json"
    asked = ["plan", "--recipe", str(recipe), "--dataset", dataset, "--json"]
    assert main(asked) == 0
    assert json.loads(capsys.readouterr().out)["model"]["parameters"] > 10_000
    assert (hub.gets("tokenizer.json"), hub.gets(WEIGHTS)) == (1, 0)
    assert cached(MODEL, commit_of(hub)) is None
    folder = fetch(hub)  # as a run does: what is there is no whole model
    assert (folder / WEIGHTS).is_file()
    assert (hub.gets("tokenizer.json"), hub.gets(WEIGHTS)) == (1, 1)


def test_a_plan_refuses_a_wrong_index_of_weights_that_it_does_not_fetch(hub: Hub) -> None:
    hub.repositories[MODEL].commit(sharded("model-1-of-1.safetensors", index={"weight_map": {"w": "gone.safetensors"}}))
    with pytest.raises(DropforgeError, match=r"index\.json is wrong \(gone\.safetensors is not there\)"):
        fetch_from_hub(MODEL, commit_of(hub), weights=False)


def test_of_a_model_in_s3_a_plan_copies_no_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(str(tmp_path / "bucket"))
    for name in ("config.json", "tokenizer.json", WEIGHTS):
        store.put(name, FILES[name])
    monkeypatch.setattr(build, "open_store", lambda uri: store)
    for weights, names in (
        (False, {"config.json", "tokenizer.json"}),
        (True, {"config.json", "tokenizer.json", WEIGHTS}),
    ):
        folder = build.fetch_base("s3://bucket/model", None, tmp_path / str(weights), weights=weights)
        assert {path.name for path in folder.iterdir()} == names


def test_a_file_without_end_is_fetched_neither_from_the_hub_nor_from_s3(
    hub: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    large = {**FILES, "tokenizer_config.json": b" " * (LARGEST_CONFIG + 1)}
    hub.repositories[MODEL].commit(large)
    told = r"its tokenizer_config\.json has 8,388,609 bytes, and such a file may have 8,388,608 at most"
    with pytest.raises(RecipeError, match=told):
        fetch(hub)
    assert not any(method == "GET" and "/resolve/" in path for method, path in hub.asked)
    store = open_store(str(tmp_path / "bucket"))
    for name, data in large.items():
        store.put(name, data)
    monkeypatch.setattr(build, "open_store", lambda uri: store)
    with pytest.raises(RecipeError, match=told):
        build.fetch_base("s3://bucket/model", None, tmp_path / "copy", weights=False)
    assert not (tmp_path / "copy").exists()


def test_a_run_without_a_commit_does_not_begin(hub: Hub, toy: Toy, tmp_path: Path) -> None:
    toy.run("run", base={"model": MODEL, "revision": "main"})
    spec = RunSpec.from_json(toy.files().get("run.json"))
    with pytest.raises(RecipeError, match=r"`base\.revision`: run\.json names no commit"):
        prepare(spec, read_settings(spec.recipe), tmp_path, lambda: None, lambda _: None)
    assert hub.asked == []


def test_a_hub_that_goes_away_is_tried_again_by_another_attempt(hub: Hub) -> None:
    hub.status = 503
    with pytest.raises(UnreachableError, match="the hub does not answer"):
        fetch(hub)


def test_a_link_out_of_the_cache_is_neither_read_nor_removed(hub: Hub, tmp_path: Path) -> None:
    """An older client made links of whatever a hub called a file's digest."""
    own = tmp_path / "thesis.txt"
    own.write_text("ten years of work")
    folder = storage(MODEL) / "snapshots" / commit_of(hub)
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to(own)
    with pytest.raises(StrangeError, match=r"config\.json became a link out of"):
        fetch(hub)
    for name in (WEIGHTS, "tokenizer.json"):
        (folder / name).write_bytes(FILES[name])
    hub.status = 503
    with pytest.raises(DropforgeError, match="cache is not what its name says"):
        fetch(hub)
    assert own.read_text() == "ten years of work"


def test_what_no_hub_answers_is_not_asked_for_again(hub: Hub) -> None:
    hub.headers = {"ETag": '"../../x"'}
    with pytest.raises(StrangeError, match="a digest that is none"):
        fetch(hub)
    assert sum(method == "HEAD" for method, _ in hub.asked) == 1
    hub.repositories[MODEL].commit({**FILES, "C:evil.json": b"{}"})
    with pytest.raises(StrangeError, match=r"answers what no hub does .*'C:evil\.json'"):
        fetch(hub)


def test_a_tokenizer_that_inspect_shows_comes_within_the_same_bounds(hub: Hub, tmp_path: Path) -> None:
    folder = fetch_tokenizer(MODEL, None, tmp_path / "none")
    assert {path.name for path in folder.iterdir()} == {"config.json", "tokenizer.json"}
    hub.repositories[MODEL].commit({**FILES, "tokenizer.json": b'{"b": 2}'})
    own = tmp_path / "thesis.txt"
    own.write_text("ten years of work")
    hub.headers = {"ETag": f'"{own}"'}
    with pytest.raises(RecipeError, match=r"what no hub does .*a digest that is none"):
        fetch_tokenizer(MODEL, None, tmp_path / "none")
    assert [path.name for path in tmp_path.glob("thesis*")] == ["thesis.txt"]
    assert own.read_text() == "ten years of work"
    model = tmp_path / "model"
    model.mkdir()
    with (model / "tokenizer.json").open("wb") as large:
        large.truncate(10 << 30)
    with pytest.raises(RecipeError, match=r"tokenizer\.json has 10,7"):
        fetch_tokenizer(str(model), None, tmp_path / "copy")


def test_a_file_larger_than_the_hub_lists_ends_there(hub: Hub) -> None:
    data = bytes(1 << 20)

    def answer(handler: BaseHTTPRequestHandler) -> None:
        handler.send_response(200)
        handler.end_headers()
        while True:  # until the client hangs up
            handler.wfile.write(data)

    hub.instead = {f"/{WEIGHTS}": answer}
    with pytest.raises(StrangeError, match="more than the 512,000 bytes"):
        fetch(hub)
