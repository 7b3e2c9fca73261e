"""Code of strangers: a base model brings some, and none of it runs, at a terminal least of all."""

from __future__ import annotations

import ast
import json
import os
import pty
import select
import socket
import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError, safe_open
from transformers import AutoConfig, AutoModelForCausalLM

from dropforge.errors import RecipeError
from dropforge.hub import LARGEST_CONFIG, LARGEST_INDEX, LARGEST_OTHER
from dropforge.run import ExitCode
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer
from trainer.model.prefix import open_model
from trainer.model.pyfunc_loader import Reader
from trainer.pretrained import (
    load_config,
    load_generation_config,
    load_prefix,
    load_tokenizer_files,
    load_weights,
    make_random,
)

from .ranks_loop import make_base
from .toy import REPOSITORY, Toy

#: The only files that may call a library's loaders: the second one works without Dropforge.
LOADERS = ("trainer/pretrained.py", "trainer/model/pyfunc_loader.py")
SAFE = {"trust_remote_code": False, "use_safetensors": True}


def write(path: Path, **values: Any) -> None:
    old = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(old | values))


def at_a_terminal(command: list[str], folder: Path) -> tuple[int, str]:
    """Run a command whose terminal answers every question with yes; its exit code and what it showed."""
    ours, theirs = pty.openpty()
    environment = os.environ | {"PYTHONPATH": str(REPOSITORY), "HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1"}
    with subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, start_new_session=True
    ) as process:
        os.close(theirs)
        os.write(ours, b"y\n" * 20)
        shown = b""
        while True:
            select.select([ours], [], [])
            try:
                part = os.read(ours, 1 << 16)
            except OSError:  # the other end is closed
                break
            shown += part
        os.close(ours)
    return process.returncode, " ".join(shown.decode(errors="replace").split())


def test_a_terminal_that_says_yes_to_all_runs_no_code_of_a_base_model(toy: Toy, tmp_path: Path) -> None:
    base = Path(make_base(tmp_path / "base"))
    ran = tmp_path / "ran"
    (base / "evil.py").write_text(f"open({str(ran)!r}, 'w')\nclass Tokenizer: pass\n")
    write(base / "tokenizer_config.json", tokenizer_class="Evil", auto_map={"AutoTokenizer": ["evil.Tokenizer", None]})
    uri = toy.run("evil", base={"model": str(base), "scratch": None}, train={"max_steps": 1})
    code, shown = at_a_terminal([sys.executable, "-m", "trainer", "plan", uri], tmp_path)
    assert code == ExitCode.BAD_RECIPE, shown[-2000:]
    assert "needs code of its own (evil.py), and no code of a model is run here" in shown
    assert "trust_remote_code" not in shown
    assert "[y/N]" not in shown
    assert not ran.exists()


def test_weights_of_an_adapter_are_safetensors_alone(tmp_path: Path) -> None:
    base = make_base(tmp_path / "base")
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "PREFIX_TUNING", "base_model_name_or_path": base})
    )
    (adapter / "adapter_model.bin").write_bytes(b"a pickle")
    with pytest.raises(RecipeError, match=r"no adapter_model\.safetensors in it"):
        open_model(str(adapter))
    for kind in ("SHADOW", "MULTITASK_PROMPT_TUNING", None):  # which load further models and files
        (adapter / "adapter_config.json").write_text(json.dumps({"peft_type": kind, "base_model_name_or_path": base}))
        with pytest.raises(RecipeError, match="is of no prefix"):
            load_prefix(None, adapter)


def test_a_random_model_has_no_kernel_of_a_hub_either() -> None:
    for key in ("attn_implementation", "_attn_implementation", "experts_implementation"):
        config = AutoConfig.for_model("llama", **{key: "someone/kernel"})
        with pytest.raises(RecipeError, match="a kernel that would be fetched"):
            make_random(AutoModelForCausalLM, config)


def test_a_kernel_that_a_part_of_a_config_names_is_refused_by_the_trainer_and_beside_a_model(tmp_path: Path) -> None:
    named = {"text_config": "someone/kernel"}
    write(tmp_path / "config.json", model_type="gemma3", attn_implementation=named)
    with pytest.raises(RecipeError, match="a kernel that would be fetched"):
        load_config(tmp_path)
    with pytest.raises(ValueError, match="names a kernel of a hub"):
        object.__new__(Reader).weights(str(tmp_path))


def test_a_config_that_is_nested_without_end_is_an_error_of_its_file(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"a":' * 100_000 + "1" + "}" * 100_000)
    with pytest.raises((ValueError, OSError)):
        load_config(tmp_path)


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("config.json", LARGEST_CONFIG),
        ("tokenizer.json", LARGEST_OTHER),
        ("generation_config.json", LARGEST_CONFIG),
        ("model.safetensors.index.json", LARGEST_INDEX),
        ("adapter_config.json", LARGEST_CONFIG),
    ],
)
def test_a_file_without_end_is_refused_before_a_library_reads_it(tmp_path: Path, name: str, most: int) -> None:
    with (tmp_path / name).open("wb") as file:
        file.truncate(most + 1)
    readers = {
        "config": load_config,
        "tokenizer": load_tokenizer_files,
        "weights": partial(load_weights, AutoModelForCausalLM),
        "generation": load_generation_config,
        "prefix": partial(load_prefix, None),
    }
    for reader in readers.values():
        with pytest.raises(RecipeError, match=rf"its {name} has {most + 1:,} bytes, and such a file may have {most:,}"):
            reader(tmp_path)


@pytest.fixture
def words(tmp_path: Path) -> Path:
    """A tokenizer without tokenizer.json, as BERT had them; and a secret beside its folder."""
    (tmp_path / "secret.txt").write_text("[UNK]\nhunter2\n</s>\n")
    folder = tmp_path / "words"
    folder.mkdir()
    (folder / "vocab.txt").write_text("[UNK]\n[PAD]\nhello\n</s>\n")
    write(folder / "config.json", model_type="bert")
    write(folder / "tokenizer_config.json", tokenizer_class="BertTokenizer", eos_token="</s>")
    return folder


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("vocab", "/proc/self/environ"),
        ("vocab", "../secret.txt"),
        ("merges", "/etc/passwd"),
        ("gguf_file", "../secret.txt"),
        ("tokenizer_object", "x"),
        ("init_inputs", ["/proc/self/environ"]),
        ("vocab_file", "/etc/passwd"),
        ("vocab_file", "nowhere.txt"),
        ("vocab_file", 7),
        ("fast_tokenizer_files", ["../other/tokenizer.5.0.0.json"]),
        ("model_path", "vocab.txt/../../secret.txt"),
        ("sp_model_kwargs", {"model_file": "/etc/passwd"}),
    ],
)
def test_a_tokenizer_reads_no_file_outside_its_folder(words: Path, name: str, key: str, value: Any) -> None:
    write(words / name, **{key: value})
    with pytest.raises(RecipeError, match=rf"its {name} has `{key}.*Take `{key}.* out of {name}"):
        load_tokenizer_files(words)


def test_a_config_is_read_from_no_other_folder(words: Path) -> None:
    write(words / "config.json", configuration_files=["../other/config.5.0.0.json"])
    with pytest.raises(RecipeError, match=r"config\.json has `configuration_files`"):
        load_config(words)


@pytest.mark.parametrize("within", [False, True])
def test_a_config_that_names_another_model_has_no_hub_asked(
    words: Path, monkeypatch: pytest.MonkeyPatch, within: bool
) -> None:
    """With the installation's token that could be what `DROPFORGE_READABLE` does not name."""
    asked: list[object] = []
    here, really = threading.get_ident(), socket.getaddrinfo

    def look_up(host: Any, *words: Any, **more: Any) -> Any:
        if threading.get_ident() != here:  # of other tests in this process, whose services answer
            return really(host, *words, **more)
        asked.append(host)
        raise OSError("no network")

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    named = {"model_type": "maskformer", "backbone": "victim/private"}
    detector = {"model_type": "detr", "use_timm_backbone": False, "backbone": "victim/private"}
    write(words / "config.json", **({"model_type": "llava", "vision_config": detector} if within else named))
    for load in (load_config, load_tokenizer_files):
        with pytest.raises(RecipeError, match=r"ask for .*victim/private.*only what a recipe names is read"):
            load(words)
    assert not asked


def test_where_an_old_release_had_its_tokenizer_is_not_read(tmp_path: Path) -> None:
    """Beside a tokenizer.json, which is: thousands of models of the hub say it."""
    other = wrap_tokenizer(train_tokenizer(["quite other words"] * 9, 300), 128)
    other.save_pretrained(tmp_path / "other")
    made = wrap_tokenizer(train_tokenizer(["these words"] * 9, 290), 128)
    made.save_pretrained(tmp_path / "words")
    settings = json.loads((tmp_path / "words" / "tokenizer_config.json").read_text())
    for elsewhere in ("/root/.cache/huggingface/transformers/abc", str(tmp_path / "other" / "tokenizer.json")):
        write(tmp_path / "words" / "tokenizer_config.json", **settings, tokenizer_file=elsewhere)
        assert load_tokenizer_files(tmp_path / "words").get_vocab() == made.get_vocab()
    (tmp_path / "words" / "tokenizer.json").unlink()
    with pytest.raises(RecipeError, match="`tokenizer_file`"):
        load_tokenizer_files(tmp_path / "words")


def test_a_tokenizer_that_names_its_own_files_is_loaded(words: Path) -> None:
    """As many models of the hub do, with nulls, and with the path where another release saved it."""
    write(
        words / "tokenizer_config.json",
        name_or_path="someone/model",
        special_tokens_map_file="/home/someone/special_tokens_map.json",
        tokenizer_file=None,
        full_tokenizer_file=None,
        vocab_file="vocab.txt",
        fast_tokenizer_files=["vocab.txt"],
        sp_model_kwargs={},
        init_inputs=[],
    )
    assert load_tokenizer_files(words).get_vocab()["hello"] == 2


def test_the_header_of_safetensors_that_says_it_is_huge_is_not_read(tmp_path: Path) -> None:
    """The library's own bound: 100 MB, whatever the file says and has."""
    path = tmp_path / "model.safetensors"
    with path.open("wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(200_000_000)
    with pytest.raises(SafetensorError, match="header too large"), safe_open(path, framework="pt"):
        pass


@pytest.mark.parametrize("size", [0, 5, 1000])
def test_weights_that_are_torn_are_an_error_that_names_the_file(tmp_path: Path, size: int) -> None:
    base = Path(make_base(tmp_path / "base"))
    (base / "consolidated.safetensors").write_bytes(b"which nobody reads")
    load_weights(AutoModelForCausalLM, base)
    os.truncate(base / "model.safetensors", size)
    with pytest.raises(RecipeError, match=r"model\.safetensors cannot be read: .*Write the file there again"):
        load_weights(AutoModelForCausalLM, base)


def test_all_loading_goes_through_one_place_that_runs_no_code() -> None:
    """The auto classes ask at a terminal where `trust_remote_code` is left out."""
    calls = 0
    for package in ("dropforge", "curation", "trainer", "plugins", "dags", "images"):
        for path in (REPOSITORY / package).rglob("*.py"):
            name = str(path.relative_to(REPOSITORY))
            for node in ast.walk(ast.parse(path.read_text())):
                if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute)):
                    continue
                if node.func.attr not in ("from_pretrained", "from_config"):
                    continue
                of = ast.unparse(node.func.value)
                if of in ("GenerationConfig", "PeftModel"):  # the first has no code, the second is given prefixes alone
                    assert name in LOADERS, f"{name}:{node.lineno}"
                    continue
                calls += 1
                assert name in LOADERS, f"{name}:{node.lineno}: {of} loads a model by itself"
                given = {word.arg: ast.literal_eval(word.value) for word in node.keywords if word.arg in SAFE}
                wanted = ["trust_remote_code"]
                if of == "kind" and node.func.attr == "from_pretrained":
                    wanted.append("use_safetensors")
                assert given == {key: SAFE[key] for key in wanted}, f"{name}:{node.lineno}"
    assert calls > 4
