"""A base model that cannot be had, or not be trained: the right word, the mend and the exit code."""

from __future__ import annotations

import json
import os
import shutil
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from botocore.exceptions import ClientError

from dropforge.errors import DataError, RecipeError
from dropforge.model_files import endless_tokenizer, odd_amount
from dropforge.run import ExitCode
from dropforge.store import S3Store
from trainer.assembly import pad_id
from trainer.data.chat import OwnEncoder, TemplateEncoder
from trainer.data.hub import UnreachableError, fetch_from_hub
from trainer.data.rows import Row
from trainer.data.tokenizer import BOS, core, load_tokenizer, train_tokenizer, wrap_tokenizer
from trainer.model.build import fetch_folder, load_model
from trainer.pretrained import load_generation_config
from trainer.rank import ending

from .ranks_loop import make_base
from .test_data import TEXTS


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Start a hub that answers everything with one status; its address."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    servers = []

    def start(status: int, code: str = "") -> str:
        class Answer(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                self.send_response(status)
                self.send_header("X-Error-Code", code)
                self.send_header("Content-Length", "2")
                self.end_headers()
                self.wfile.write(b"{}")

            def log_message(self, *_: Any) -> None:
                pass

        server = ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        servers.append(server)
        return f"http://127.0.0.1:{server.server_port}"

    yield start
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.mark.parametrize(
    ("status", "code", "word", "exit_code"),
    [
        (404, "RepoNotFound", "the hub has no some/model", ExitCode.BAD_RECIPE),
        (404, "RevisionNotFound", "base.revision", ExitCode.BAD_RECIPE),
        (403, "GatedRepo", "accepted its terms", ExitCode.BAD_RECIPE),
        (401, "", "does not give us", ExitCode.BAD_RECIPE),
        (500, "", "does not answer", 1),
        (429, "", "does not answer", 1),
    ],
)
def test_each_no_of_the_hub_has_its_word_and_exit_code(
    hub: Any, status: int, code: str, word: str, exit_code: int
) -> None:
    with pytest.raises((RecipeError, UnreachableError), match=word) as caught:
        fetch_from_hub("some/model", None, hub(status, code))
    assert ending(caught.value)[0] == exit_code  # 1 is tried again, a bad recipe is not


def test_a_hub_that_is_not_there_is_tried_again(hub: Any) -> None:
    with pytest.raises(UnreachableError, match=r"does not answer.*S3") as caught:
        fetch_from_hub("some/model", None, "http://127.0.0.1:9")
    assert ending(caught.value)[0] == 1


def test_a_name_that_is_none_is_refused(hub: Any) -> None:
    with pytest.raises(RecipeError, match=r"base\.model"):
        fetch_from_hub("a/b/c/d", None, hub(404))


def saved(folder: Path, **without: None) -> Path:
    wrap_tokenizer(train_tokenizer(TEXTS, 320), 64).save_pretrained(folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | without))
    return folder


def test_a_tokenizer_without_an_end_token_is_refused_with_the_mend(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no end token.*`eos_token`") as caught:
        load_tokenizer(saved(tmp_path, eos_token=None))
    assert ending(caught.value)[0] == ExitCode.BAD_DATA


def test_a_tokenizer_without_a_padding_token_fills_rows_with_its_end(tmp_path: Path) -> None:
    found = load_tokenizer(saved(tmp_path, pad_token=None))
    assert found.pad_token_id is None
    assert pad_id(found) == found.eos_token_id


def test_a_folder_without_a_tokenizer_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="a tokenizer beside it"):
        load_tokenizer(tmp_path)


def test_a_bucket_that_is_not_there_is_the_recipe_s_error_and_no_gang_s(tmp_path: Path, s3_store: S3Store) -> None:
    with pytest.raises(RecipeError, match=r"`base.model`: s3://none-of-ours/model .*\(NoSuchBucket\)") as told:
        fetch_folder("s3://none-of-ours/model", tmp_path)
    assert ending(told.value)[0] == ExitCode.BAD_RECIPE


@pytest.mark.parametrize(("code", "of_user"), [("AccessDenied", True), ("403", True), ("SlowDown", False)])
def test_what_the_credentials_may_not_read_is_the_recipe_s_error_and_a_busy_s3_is_not(
    tmp_path: Path, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch, code: str, of_user: bool
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ClientError({"Error": {"Code": code, "Message": "no"}}, "GetObject")

    for name in ("config.json", "model.safetensors"):
        s3_store.put(f"model/{name}", b"{}")
    monkeypatch.setattr(S3Store, "download", refuse)  # it may be listed, and not read
    with pytest.raises(RecipeError if of_user else ClientError, match=code):
        fetch_folder(f"{s3_store.uri}/model", tmp_path)


def test_a_base_in_an_archive_is_the_recipe_s_error(tmp_path: Path, s3_store: S3Store) -> None:
    for name in ("config.json", "model.safetensors"):
        s3_store.client.put_object(Bucket=s3_store.bucket, Key=f"model/{name}", Body=b"{}", StorageClass="GLACIER")
    with pytest.raises(RecipeError, match=r"`base.model`: a file of .*/model cannot be read: it is archived"):
        fetch_folder(f"{s3_store.uri}/model", tmp_path)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return Path(make_base(tmp_path_factory.mktemp("base"), num_hidden_layers=1))


@pytest.fixture
def spoiled(base: Path, tmp_path: Path) -> Callable[..., Path]:
    """Return a copy of a base model with other values in one of its JSON files."""

    def spoil(name: str, **values: Any) -> Path:
        folder = Path(shutil.copytree(base, tmp_path / "spoiled"))
        path = folder / name
        path.write_text(json.dumps((json.loads(path.read_text()) if path.is_file() else {}) | values))
        return folder

    return spoil


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"num_labels": 300_000_000}, "`num_labels`, and 300,000,000 is more than the 100,000"),
        ({"num_hidden_layers": 30_000}, "`num_hidden_layers`, and 30,000 is more than the 20,000"),
        ({"vocab_size": 10**9}, "`vocab_size`, and 1,000,000,000 is more than the 16,777,216"),
        ({"text_config": {"sizes": [1, 10**30]}}, r"`text_config\.sizes`"),
        ({"num_hidden_layers": "x"}, "`num_hidden_layers`, and 'x' is a text where a number belongs"),
        ({"num_hidden_layers": None}, "has no config that can be read"),
        ({"hidden_size": -32}, "negative dimension"),
        ({"num_attention_heads": 0}, "ZeroDivisionError"),
        ({"architectures": 5}, "`architectures` is no list of names"),
        ({"num_hidden_layers": 3}, r"lacks \d+ of its weights, as model\.layers\.1\."),
        ({"tie_word_embeddings": False}, r"lacks 1 of its weights, as lm_head\.weight"),
    ],
)
def test_a_config_with_amounts_of_no_model_is_refused_and_nothing_is_made_up(
    spoiled: Callable[..., Path], values: dict[str, Any], word: str
) -> None:
    with pytest.raises(RecipeError, match=word):
        load_model(spoiled("config.json", **values))


def test_amounts_that_models_have_pass() -> None:
    labels = {str(number): f"label {number}" for number in range(21_843)}
    known = {
        "max_position_embeddings": 10_485_760,
        "rope_theta": 100_000_000_000,
        "seed": 2**60,
        "num_labels": 21_843,
        "id2label": labels,
        "vocab_size_per_layer_input": 262_144,
        "num_experts": 16_384,
        "pad_val": 1.1e9,
        "layer_types": ["full_attention"] * 80,
        "time_step_rank": "auto",
    }
    assert odd_amount(known) is None
    assert odd_amount({"label2id": dict.fromkeys(range(100_001), 0)}) is not None


def replaces(count: int, content: str = "aa") -> dict[str, Any]:
    part = {"type": "Replace", "pattern": {"String": "a"}, "content": content}
    return {"type": "Sequence", "normalizers": [part] * count}


def template(tokens: int, texts: int = 1) -> dict[str, Any]:
    begin = {"SpecialToken": {"id": BOS, "type_id": 0}}
    text = {"Sequence": {"id": "A", "type_id": 0}}
    special = {BOS: {"id": BOS, "ids": [1] * tokens, "tokens": [BOS] * tokens}}
    return {
        "type": "TemplateProcessing",
        "single": [begin, *[text] * texts],
        "pair": [text, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": special,
    }


BYTES = {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": False}
ENDLESS = [
    ("normalizer", replaces(40), "may make a text 1.1e\\+12 times as long"),
    ("normalizer", replaces(1, "a" * 2000), "2e\\+03 times"),
    ("normalizer", {"type": "Prepend", "prepend": "a" * 1000}, "more than 64 tokens or characters"),
    ("normalizer", {"type": "Sequence", "normalizers": [{"type": "NFC"}] * 100}, "chains more than 64 parts"),
    ("pre_tokenizer", {"type": "Sequence", "pretokenizers": [BYTES] * 20}, "1.05e\\+06 times"),
    ("post_processor", template(3000), "more than 64 tokens"),
    ("post_processor", template(1, texts=2000), "2e\\+03 times"),
    ("normalizer", {"normalizers": [{"pattern": {"String": "a"}, "content": "aa"}] * 40}, "1.1e\\+12 times"),
    ("decoder", {"type": "Sequence", "decoders": replaces(40)["normalizers"]}, "1.1e\\+12 times"),
]


@pytest.mark.parametrize(("part", "value", "word"), ENDLESS)
def test_a_tokenizer_that_makes_a_text_endless_is_refused_before_it_is_loaded(
    spoiled: Callable[..., Path], part: str, value: dict[str, Any], word: str
) -> None:
    with pytest.raises(RecipeError, match=f"`{part}` of its tokenizer.json: .*{word}"):
        load_tokenizer(spoiled("tokenizer.json", **{part: value}))


def test_parts_that_tokenizers_have_pass() -> None:
    known = [
        {"type": "Prepend", "prepend": "▁"},
        {"type": "Replace", "pattern": {"String": " "}, "content": "▁"},
        {"type": "Replace", "pattern": {"Regex": " {2,}"}, "content": "▁"},
        {"type": "NFKC"},
    ]
    strip = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
    split = {"type": "Split", "pattern": {"Regex": r"\s+"}, "behavior": "Isolated", "invert": False}
    whole = {
        "normalizer": {"type": "Sequence", "normalizers": known},
        "pre_tokenizer": BYTES,
        "post_processor": {"type": "Sequence", "processors": [BYTES, template(1)]},
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}, strip]},
    }
    assert endless_tokenizer(whole) is None
    bert = {"type": "BertProcessing", "sep": ["[SEP]", 102], "cls": ["[CLS]", 101]}
    assert endless_tokenizer({"normalizer": None, "pre_tokenizer": split, "post_processor": bert}) is None
    assert endless_tokenizer([]) is None
    assert endless_tokenizer({}) is None


@pytest.mark.parametrize(
    ("part", "value"),
    [
        ("normalizer", [[{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 40]),
        ("normalizer", {"normalizers": [[{"String": "a"}, "a" * 2000]]}),
        ("normalizer", 7),
        ("post_processor", template(1) | {"special_tokens": {BOS: [BOS, [1] * 3000, [BOS] * 3000]}}),
        ("post_processor", template(1) | {"single": [{"SpecialToken": [BOS, 0]}]}),
    ],
)
def test_a_tokenizer_that_is_written_in_another_form_is_not_loaded(part: str, value: Any) -> None:
    fault = endless_tokenizer({part: value})
    assert fault is not None
    assert "in a form that no tokenizer is saved in" in fault.cause


def test_a_tokenizer_of_many_tokens_is_refused_by_their_number(spoiled: Callable[..., Path]) -> None:
    with pytest.raises(DataError, match=r"it makes [\d,]+ tokens of \d+ bytes"):
        load_tokenizer(spoiled("tokenizer.json", normalizer=replaces(9)))


def test_a_tokenizer_that_gives_up_on_a_row_is_an_error_of_the_base(spoiled: Callable[..., Path]) -> None:
    split = {"type": "Split", "pattern": {"Regex": "(a+)+$"}, "behavior": "Isolated", "invert": False}
    folder = spoiled("tokenizer.json", pre_tokenizer=split)
    with pytest.raises(DataError, match=r"gave up on a text .*Name a base model"):
        TemplateEncoder(load_tokenizer(folder), "all").encode([Row(b"", None, "a" * 30 + "b")])


def test_padding_of_a_stranger_pads_no_row(spoiled: Callable[..., Path]) -> None:
    padding = {"strategy": {"Fixed": 5000}, "direction": "Right", "pad_to_multiple_of": None, "pad_id": 0}
    folder = spoiled("tokenizer.json", padding={**padding, "pad_type_id": 0, "pad_token": "<|pad|>"})
    [[row]] = OwnEncoder(core(load_tokenizer(folder)), "all").encode([Row(b"", None, "the red cat")])
    assert not isinstance(row, str)
    assert len(row.ids) < 20


@pytest.mark.parametrize(
    ("name", "values", "word"),
    [
        ("tokenizer.json", {"model": None}, "tokenizer of"),
        ("tokenizer.json", {"model": {"type": "BPE"}}, "tokenizer of"),
        (
            "tokenizer.json",
            {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "(("}, "behavior": "Isolated", "invert": False}},
            "unmatched parenthesis",
        ),
        ("tokenizer_config.json", {"model_max_length": "long"}, "its `model_max_length` is 'long'"),
    ],
)
def test_an_odd_tokenizer_is_the_base_s_error(
    spoiled: Callable[..., Path], name: str, values: dict[str, Any], word: str
) -> None:
    with pytest.raises(DataError, match=word):
        load_tokenizer(spoiled(name, **values))


@pytest.mark.parametrize("kind", ["pipe", "device"])
@pytest.mark.parametrize(
    ("name", "load"),
    [
        ("config.json", load_model),
        ("tokenizer.json", load_tokenizer),
        ("generation_config.json", load_generation_config),
        ("model.safetensors", load_model),
        ("model.safetensors.index.json", load_model),
    ],
)
def test_a_pipe_or_device_in_a_base_is_neither_waited_for_nor_read(
    base: Path, tmp_path: Path, name: str, load: Callable[[Path], Any], kind: str
) -> None:
    folder = Path(shutil.copytree(base, tmp_path / "odd"))
    path = folder / name
    path.unlink(missing_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero")
    with pytest.raises(RecipeError, match="is a pipe or a device"):
        load(folder)


@pytest.mark.parametrize("end", ["abc", ["a"], {"a": 1}, [2, 2.5], True, 2**70, -2])
def test_an_end_token_that_is_no_number_is_refused_by_its_name(spoiled: Callable[..., Path], end: Any) -> None:
    folder = spoiled("generation_config.json", eos_token_id=end)
    for load in (load_model, load_generation_config):
        with pytest.raises(RecipeError, match=r"generation_config\.json has `eos_token_id`, and .*Set `eos_token_id`"):
            load(folder)


def test_end_tokens_that_are_numbers_pass(spoiled: Callable[..., Path]) -> None:
    folder = spoiled("generation_config.json", eos_token_id=[2, 4], pad_token_id=-1, bos_token_id=None)
    assert load_model(folder).generation_config.eos_token_id == [2, 4]
