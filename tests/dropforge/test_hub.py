"""What a base model's name on the hub stands for is asked once, and each no has its word and its mend."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from dropforge.cli.app import app
from dropforge.errors import RecipeError
from dropforge.hub import LARGEST_CONFIG, LARGEST_INDEX, LARGEST_OTHER, UnreachableError, asking, pin, pin_base, shards
from dropforge.recipes import load_recipe
from tests.hub_server import Hub, open_hub

MODEL = "some/model"
FILES = {"config.json": b"{}", "model.safetensors": b"weights", "training_args.bin": b"a pickle of no weights"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    made = Hub()
    made.model(MODEL, FILES)
    with open_hub(made, tmp_path / "cache", monkeypatch):
        yield made


def test_branch_tag_and_commit_stand_for_a_commit(hub: Hub) -> None:
    repository = hub.repositories[MODEL]
    first = repository.refs["main"]
    repository.refs["v1"] = first
    second = repository.commit(FILES)
    third = repository.commit(FILES, "refs/pr/4")
    asked = {None: second, "main": second, "v1": first, first: first, "refs/pr/4": third}
    assert {revision: pin(MODEL, revision).commit for revision in asked} == asked


def test_a_recipe_gets_the_commit_and_nothing_else_changes(hub: Hub) -> None:
    plain = load_recipe("lora", {"base": {"model": MODEL}}).plain()
    pinned, line = pin_base(plain)
    commit = hub.repositories[MODEL].refs["main"]
    assert pinned == {**plain, "base": {**plain["base"], "revision": commit}}
    assert line == f"Base model {MODEL} (its default branch) is commit {commit}: so says the hub"
    assert pin_base(pinned) == (pinned, f"Base model {MODEL} is commit {commit}: so says the hub")


@pytest.mark.parametrize("base", ["s3://bucket/model", "/models/x", "./x"])
def test_what_is_none_of_the_hub_is_left_alone(hub: Hub, base: str) -> None:
    plain = load_recipe("lora", {"base": {"model": base}}).plain()
    assert pin_base(plain) == (plain, "")
    assert pin_base(load_recipe("tiny").plain())[1] == ""
    assert hub.asked == []


def test_a_gated_model_needs_the_token_of_somebody_who_may(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    hub.repositories[MODEL].gate = "hf_right"  # its names are there for everybody, as on the hub
    with pytest.raises(RecipeError, match=r"only to those who accepted its terms.*HF_TOKEN"):
        pin(MODEL)
    monkeypatch.setenv("HF_TOKEN", "hf_wrong")
    with pytest.raises(RecipeError, match="accepted its terms") as refused:
        pin(MODEL)
    assert "hf_wrong" not in str(refused.value)
    monkeypatch.setenv("HF_TOKEN", "hf_right")
    assert pin(MODEL).commit == hub.repositories[MODEL].refs["main"]


def test_a_model_that_is_missing_or_hidden_is_refused(hub: Hub) -> None:
    with pytest.raises(RecipeError, match=r"`base\.model`: the hub has no some/other, or hides it from us.*HF_TOKEN"):
        pin("some/other")
    hub.repositories[MODEL].hidden, hub.repositories[MODEL].gate = True, "hf_right"
    with pytest.raises(RecipeError, match="or hides it from us"):
        pin(MODEL)


@pytest.mark.parametrize("revision", ["v9", "0" * 40])
def test_a_revision_that_is_missing_is_refused(hub: Hub, revision: str) -> None:
    with pytest.raises(RecipeError, match=rf"`base\.revision`: the hub has no some/model at {revision}"):
        pin(MODEL, revision)


@pytest.mark.parametrize(
    ("files", "cause"),
    [
        ({"config.json": b"{}", "pytorch_model.bin": b""}, r"as pickles only \(pytorch_model\.bin\).*safetensors"),
        ({"adapter_config.json": b"{}", "adapter_model.safetensors": b""}, "is an adapter of another model"),
        ({"model.safetensors": b""}, "has no config.json"),
        ({"config.json": b"{}", "model.gguf": b""}, r"has no weights in model\.safetensors"),
        ({"config.json": b"{}", "fp32/model.safetensors": b""}, r"has no weights in model\.safetensors"),
    ],
)
def test_what_cannot_be_loaded_is_refused_by_its_names(hub: Hub, files: dict[str, bytes], cause: str) -> None:
    hub.repositories[MODEL].commit(files)
    with pytest.raises(RecipeError, match=cause):
        pin(MODEL)


def test_a_folder_of_pickles_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model-00001-of-00002.bin").write_bytes(b"")
    plain = load_recipe("lora", {"base": {"model": str(tmp_path)}}).plain()
    with pytest.raises(RecipeError, match="as pickles only"):
        pin_base(plain)
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert pin_base(plain) == (plain, "")


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("config.json", LARGEST_CONFIG),
        ("chat_template.jinja", LARGEST_CONFIG),
        ("tokenizer.json", LARGEST_OTHER),
        ("model.safetensors.index.json", LARGEST_INDEX),
        ("vocab.txt", LARGEST_OTHER),
        ("spiece.model", LARGEST_OTHER),
    ],
)
def test_a_file_without_end_is_refused_by_its_size(tmp_path: Path, name: str, most: int) -> None:
    """A gigabyte of JSON would be many in memory."""
    (tmp_path / "model.safetensors").write_bytes(b"")
    with (tmp_path / name).open("wb") as file:
        file.truncate(most)
    recipe = load_recipe("lora", {"base": {"model": str(tmp_path)}}).plain()
    assert pin_base(recipe) == (recipe, "")
    with (tmp_path / name).open("ab") as file:
        file.truncate(most + 1)
    told = rf"{name} has {most + 1:,} bytes, and such a file may have {most:,} at most.*Name another model"
    with pytest.raises(RecipeError, match=told):
        pin_base(recipe)


def test_a_file_without_end_on_the_hub_is_refused_before_any_is_fetched(hub: Hub) -> None:
    hub.model("some/large", {**FILES, "config.json": b" " * (LARGEST_CONFIG + 1), "deep/config.json": b"{}"})
    with pytest.raises(RecipeError, match=r"some/large: its config\.json has 8,388,609 bytes"):
        pin("some/large")
    assert not hub.gets("config.json")


def fill_cache(*names: str) -> None:
    """Have files of the model in this machine's cache, all that are needed unless some are named."""
    from huggingface_hub import hf_hub_download

    for name in names or ("config.json", "model.safetensors"):
        hf_hub_download(MODEL, name)


@pytest.mark.parametrize("status", [500, 503, 429])
def test_a_hub_that_does_not_answer_needs_the_model_in_the_cache(hub: Hub, status: int) -> None:
    hub.status = status
    with pytest.raises(UnreachableError, match=r"the hub does not answer.*S3"):
        pin(MODEL)
    hub.status = None
    fill_cache("config.json")
    hub.status = status
    with pytest.raises(UnreachableError):  # half of it does not count
        pin(MODEL)
    hub.status = None
    fill_cache()
    hub.status = status
    found = pin(MODEL)
    assert found.commit == pin(MODEL, found.commit).commit == hub.repositories[MODEL].refs["main"]
    assert "this machine's cache holds it; the hub does not answer" in found.told
    with pytest.raises(UnreachableError):
        pin(MODEL, "v2")


def test_nobody_there_is_told_in_time(hub: Hub) -> None:
    with pytest.raises(UnreachableError, match="does not answer"):
        pin(MODEL, endpoint="http://127.0.0.1:9")


def test_offline_nobody_is_asked(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(RecipeError, match=r"not in the cache of this machine, and HF_HUB_OFFLINE forbids"):
        pin(MODEL)
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    fill_cache()
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    hub.asked.clear()
    assert pin(MODEL).told == "HF_HUB_OFFLINE is set, and this machine's cache holds it"
    with pytest.raises(RecipeError, match="HF_HUB_OFFLINE"):  # no path leads out of the cache
        pin(MODEL, "../../../etc")
    assert hub.asked == []


def test_a_signed_address_loses_its_signature(hub: Hub) -> None:
    with pytest.raises(UnreachableError) as told, asking(MODEL):
        raise OSError("GET https://cdn.example/blob?X-Signature=secret&Expires=9 failed")
    assert "https://cdn.example/blob?... failed" in str(told.value)
    assert "secret" not in str(told.value)


def test_an_answer_that_is_no_hub_s_is_told_as_such(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    def page(*_: Any, **__: Any) -> Any:
        raise ValueError("Expecting value: line 1 column 1 (char 0)")

    monkeypatch.setattr("huggingface_hub.HfApi.model_info", page)
    with pytest.raises(UnreachableError, match="Expecting value"):
        pin(MODEL)


def test_a_login_in_an_address_is_not_told() -> None:
    with pytest.raises(UnreachableError) as caught, asking("some/model"):
        raise OSError("no answer of https://user:hunter2@mirror.example/api?token=1 nor of https://b.example/x@y")
    assert "hunter2" not in str(caught.value)
    assert "token" not in str(caught.value)
    assert "https://mirror.example/api?... nor of https://b.example/x@y" in str(caught.value)


def plan_on(folder: Path, model: str, code: int = 0) -> Result:
    """What `dropforge plan` prints of a recipe for a base of the hub. :param code: that it ends with."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(f"extends: lora\nbase: {{model: {model}}}\n")
    done = CliRunner().invoke(app, ["plan", str(recipe)])
    assert done.exit_code == code, done.output
    return done


def test_plan_knows_the_sizes_of_any_base_of_the_hub(hub: Hub, tmp_path: Path) -> None:
    size = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 320, "max_position_embeddings": 2048, **size}
    hub.model("org/small", {**FILES, "config.json": json.dumps(config).encode()})
    done = plan_on(tmp_path, "org/small")
    assert "org/small" in done.stdout
    assert "parameters      123,200" in done.stdout
    assert not done.stderr
    hub.model("org/short", {**FILES, "config.json": json.dumps(config | {"max_position_embeddings": 512}).encode()})
    short = plan_on(tmp_path, "org/short", code=1).exception
    assert "1024 is longer than the base model's context of 512. Set it to 512 or less" in str(short)
    unknown = plan_on(tmp_path, "org/none")  # Airflow's machines may have another token
    assert "Base model org/none: Its sizes stay unknown: " in unknown.stderr


def test_plan_goes_on_where_no_hub_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "cache"))
    done = plan_on(tmp_path, "org/small")
    assert "Base model org/small: Its sizes stay unknown" in done.stderr
    assert "parameters      unknown: the base model's config is not available" in done.stdout


@pytest.mark.parametrize(
    "index",
    [
        b"[]",
        b"{}",
        b"[" * 200_000,
        b'{"weight_map": {"a": []}}',
        b'{"weight_map": {"a": 1, "b": "c.safetensors"}}',
        b'{"weight_map": {"a": "../c.safetensors"}}',
    ],
)
def test_an_index_that_names_no_files_is_none(index: bytes) -> None:
    with pytest.raises(ValueError, match=r"it names|its brackets"):
        shards(index)
