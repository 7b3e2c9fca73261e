"""All bad input in one table: refused before the first step, with its exit code, the thing, the cause and the mend."""

from __future__ import annotations

import errno
import json
import os
import re
import shutil
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from dropforge.layout import dataset_prefix
from dropforge.recipes.rules import SIZES
from dropforge.run import ExitCode
from dropforge.store import FolderStore
from trainer.model import fit
from trainer.rank import ending, main

from .classes import labelled_rows
from .pairs import pair_base
from .ranks_loop import make_base
from .toy import Toy, sample_rows, write_dataset

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


class Bad:
    """A run to be harmed. :param patch: undone after the test."""

    def __init__(self, toy: Toy, folder: Path, base: str, patch: pytest.MonkeyPatch) -> None:
        self.toy, self.patch = toy, patch
        self.base = str(shutil.copytree(base, folder / "base"))
        self.uri = toy.run("bad", train={"max_steps": 2})

    def run(self, **overrides: Any) -> None:
        self.uri = self.toy.run("bad", **overrides)

    def on_base(self, **train: Any) -> None:
        self.run(base={"model": self.base, "scratch": None}, train={"max_steps": 2, **train})

    def change(self, change: Callable[[dict[str, Any]], Any]) -> None:
        path = Path(self.uri)
        values = json.loads(path.read_text())
        change(values)
        path.write_text(json.dumps(values))

    def tokenizer(self, **values: Any) -> None:
        path = Path(self.base) / "tokenizer_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))
        self.on_base()

    def dataset(self, rows: dict[str, list[dict[str, Any]]]) -> None:
        found = write_dataset(self.toy.store, rows)
        address = f"{self.toy.root}/{dataset_prefix('toy', found)}manifest.json"
        self.change(lambda values: values.update(dataset=address, dataset_digest=found))


def no_run(bad: Bad) -> None:
    bad.uri += ".not"


def unknown_key(bad: Bad) -> None:
    bad.change(lambda values: values["recipe"]["train"].update(learning_rat=1))


def longer_than_the_model(bad: Bad) -> None:
    bad.on_base(sequence_length=128)


def attention_it_has_not(bad: Bad) -> None:
    path = Path(bad.base) / "config.json"
    config = {"model_type": "bloom", "vocab_size": 320, "hidden_size": 32, "n_layer": 1, "n_head": 2}
    path.write_text(json.dumps(config))
    (Path(bad.base) / "model.safetensors").unlink()
    from transformers import AutoConfig, AutoModelForCausalLM

    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(bad.base)).save_pretrained(bad.base)
    bad.on_base(attention="sdpa")


def a_target_it_has_not(bad: Bad) -> None:
    bad.on_base(method="dora", lora={"targets": ["q_proj", "c_attn"]})


def more_blocks_than_there_are(bad: Bad) -> None:
    bad.on_base(freeze={"blocks": 4})


def four_bits_of_a_model_without_linear_layers(bad: Bad) -> None:
    bad.base = make_base(Path(bad.base) / "gpt2", kind="gpt2")
    bad.on_base(method="qlora")


def four_bits_without_their_library(bad: Bad) -> None:
    def absent(name: str) -> str:
        if name == "bitsandbytes":
            raise PackageNotFoundError(name)
        return version(name)

    bad.patch.setattr("trainer.compat.version", absent)
    bad.on_base(method="qlora")


def a_key_that_no_config_has(bad: Bad) -> None:
    config = {"model_type": "llama", "vocab_size": 320, "hidden_sise": 32}
    bad.change(lambda values: values["recipe"]["base"].update(scratch={**dict.fromkeys(SIZES), "config": config}))


def narrower_than_is_done(bad: Bad) -> None:
    bad.change(lambda values: values["recipe"]["train"].update(precision="fp8"))


def learns_from_preferences(bad: Bad) -> None:
    bad.change(lambda values: values["recipe"]["train"].update(method="dpo"))


def a_token_that_is_there(bad: Bad) -> None:
    bad.run(base={"model": bad.base, "scratch": None, "new_tokens": ["<x>", "<|im_end|>"]}, train={"max_steps": 2})


def more_than_the_memory(bad: Bad) -> None:
    bad.patch.setattr(fit, "memory_room", lambda device: 10_000)


def no_end_token(bad: Bad) -> None:
    bad.tokenizer(eos_token=None)


def neither_pad_nor_end_token(bad: Bad) -> None:
    bad.tokenizer(eos_token=None, pad_token=None)


def questions_alone(bad: Bad) -> None:
    rows = [{"messages": [{"role": "user", "content": f"question {index}"}]} for index in range(30)]
    bad.dataset({"train": rows, "eval": sample_rows(5)})


def many_questions_alone(bad: Bad) -> None:
    rows = [{"messages": [{"role": "user", "content": f"question {index}"}]} for index in range(30)]
    bad.dataset({"train": [*rows, *sample_rows(30)], "eval": sample_rows(5)})


def template_without_markers(bad: Bad) -> None:
    """Nor does it end an answer by any token, so that nothing tells where one ends."""
    found = AutoTokenizer.from_pretrained(bad.base)
    found.chat_template = CHATML.replace("<|im_end|>", "")
    found.save_pretrained(bad.base)
    bad.on_base()


def manifest_gone(bad: Bad) -> None:
    bad.change(lambda values: values.update(dataset=values["dataset"].replace("manifest", "another")))


def other_rows_than_planned(bad: Bad) -> None:
    planned = json.loads(Path(bad.uri).read_text())["dataset_digest"]
    bad.dataset({"train": sample_rows(40, seed=7), "eval": sample_rows(5)})
    bad.change(lambda values: values.update(dataset_digest=planned))


def harmed_shard(bad: Bad) -> None:
    shard = next(item.key for item in bad.toy.store.list("datasets/toy/shards/"))
    bad.toy.store.put(shard, bad.toy.store.get(shard)[:-1] + b"!")


def trained(bad: Bad) -> None:
    """A run that ended after its checkpoint and before its report."""
    assert main([bad.uri]) == 0
    (Path(bad.toy.files("bad").uri) / "report.json").unlink()


def checkpoint_of_another_recipe(bad: Bad) -> None:
    trained(bad)
    bad.change(lambda values: values["recipe"]["train"].update(learning_rate=1e-4, log_every=1))


def with_a_head(bad: Bad) -> None:
    """Of two labels that no row has."""
    AutoModelForSequenceClassification.from_pretrained(bad.base).save_pretrained(bad.base)


def a_head_where_text_is_asked_for(bad: Bad) -> None:
    with_a_head(bad)
    bad.on_base()


def a_head_of_other_labels(bad: Bad) -> None:
    with_a_head(bad)
    bad.run(task="classification", base={"model": bad.base, "scratch": None}, train={"max_steps": 2})
    bad.dataset({"train": labelled_rows(40, 0), "eval": labelled_rows(9, 1)})


def labels_for_an_encoder_decoder(bad: Bad) -> None:
    base = pair_base(Path(bad.base) / "t5", "t5")
    bad.run(task="classification", base={"model": base, "scratch": None}, train={"max_steps": 2})
    bad.dataset({"train": labelled_rows(40, 0), "eval": labelled_rows(9, 1)})


def a_classifiers_labels_that_changed(bad: Bad) -> None:
    """Of a run that goes on: its head knows the labels that it began with."""
    bad.run(task="classification", train={"max_steps": 2})
    rows = labelled_rows(40, 0)
    bad.dataset({"train": rows, "eval": labelled_rows(9, 1)})
    trained(bad)
    renamed = {"animal": "beast"}
    bad.dataset({"train": [{**row, "label": renamed.get(row["label"], row["label"])} for row in rows], "eval": rows})


def labels_that_changed(bad: Bad) -> None:
    """Rows with the same text and another label make another dataset, which a language model does not read."""
    rows = sample_rows(40)
    bad.dataset({"train": [{**row, "label": "good"} for row in rows], "eval": sample_rows(5)})
    trained(bad)
    bad.dataset({"train": [{**row, "label": "bad"} for row in rows], "eval": sample_rows(5)})


def deaf_hub(bad: Bad) -> None:
    """Its socket is open, takes what is sent, and answers nothing."""
    deaf = socket.create_server(("127.0.0.1", 0))
    bad.patch.setattr("huggingface_hub.constants.ENDPOINT", f"http://127.0.0.1:{deaf.getsockname()[1]}")
    bad.patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    bad.patch.setattr("huggingface_hub.constants.HF_HUB_CACHE", f"{bad.base}/cache")
    bad.patch.setattr("dropforge.hub.SECONDS", 0.2)
    bad.patch.setattr(Bad, "deaf", deaf, raising=False)  # as long as the test
    bad.run(base={"model": "some/model", "revision": "0" * 40, "scratch": None})


def a_branch_of_the_hub(bad: Bad) -> None:
    bad.run(base={"model": "some/model", "revision": "main", "scratch": None})


def pickled_weights(bad: Bad) -> None:
    (Path(bad.base) / "model.safetensors").rename(Path(bad.base) / "pytorch_model.bin")
    bad.on_base()


def change_base(bad: Bad, **values: Any) -> None:
    path = Path(bad.base) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))
    (path.parent / "evil.py").write_text("raise SystemExit('the code of a base model ran')")
    bad.on_base()


def a_config_of_its_own(bad: Bad) -> None:
    change_base(bad, model_type="evil", auto_map={"AutoConfig": "evil.Config"})


def a_model_of_its_own(bad: Bad) -> None:
    """transformers has its config, and no language model for it."""
    change_base(bad, model_type="dpr", auto_map={"AutoModelForCausalLM": "evil.Model"})


def a_tokenizer_of_anothers(bad: Bad) -> None:
    bad.tokenizer(tokenizer_class="Evil", auto_map={"AutoTokenizer": [None, "someone/else--evil.Fast"]})


def a_kernel_of_a_hub(bad: Bad) -> None:
    change_base(bad, attn_implementation="someone/kernel")


def a_kernel_by_a_detour(bad: Bad) -> None:
    change_base(bad, attribute_map={"other": "_attn_implementation"}, other="someone/kernel")


def a_quantised_base(bad: Bad) -> None:
    change_base(bad, quantization_config={"quant_method": "gptq", "bits": 4})


def weights_that_are_no_safetensors(bad: Bad) -> None:
    """The index of the weights names a pickle under an innocent name, outside the folder."""
    base = Path(bad.base)
    (base / "model.safetensors").unlink()
    torch.save({}, base.parent / "outside.txt")
    (base / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": {"lm_head.weight": "../outside.txt"}})
    )
    bad.on_base()


def an_adapter_beside_the_base(bad: Bad) -> None:
    (Path(bad.base) / "adapter_config.json").write_text('{"peft_type": "LORA"}')
    bad.on_base()


def a_config_of_odd_values(bad: Bad) -> None:
    change_base(bad, model_type=["llama"])


TABLE: list[tuple[Callable[[Bad], None], int, str, str]] = [
    (no_run, ExitCode.BAD_RECIPE, "no such object", "Check the address"),
    (unknown_key, ExitCode.BAD_RECIPE, "train.learning_rat`: the trainer does not know it", "Fix the recipe"),
    (longer_than_the_model, ExitCode.BAD_RECIPE, "128 is longer than the base model's context of 64", "Set it to 64"),
    (attention_it_has_not, ExitCode.BAD_RECIPE, "train.attention`: BloomForCausalLM does not run `sdpa`", "Use `auto`"),
    (a_target_it_has_not, ExitCode.BAD_RECIPE, "no linear layer of LlamaForCausalLM has the name `c_attn`", "v_proj"),
    (more_blocks_than_there_are, ExitCode.BAD_RECIPE, "4 are to be frozen, and the model has 3", "Set it to 3"),
    (four_bits_of_a_model_without_linear_layers, ExitCode.BAD_RECIPE, "`qlora` puts linear layers", "Use `lora`"),
    (four_bits_without_their_library, ExitCode.BAD_RECIPE, "needs the package bitsandbytes", "dropforge[quantised]"),
    (a_key_that_no_config_has, ExitCode.BAD_RECIPE, "config.hidden_sise`: llama has no such key", "`hidden_size`"),
    (narrower_than_is_done, ExitCode.BAD_RECIPE, "train.precision`: `fp8` is not done", "Use `bf16`"),
    (learns_from_preferences, ExitCode.BAD_RECIPE, "learns from preferences or rewards", "TRL's DPOTrainer"),
    (a_token_that_is_there, ExitCode.BAD_RECIPE, "'<|im_end|>' is token 4 of the base", "Leave it out"),
    (more_than_the_memory, ExitCode.BAD_RECIPE, "train.micro_batch`: forward and backward pass of 2 rows", "Set `"),
    (no_end_token, ExitCode.BAD_DATA, "it has no end token", "Set `eos_token`"),
    (neither_pad_nor_end_token, ExitCode.BAD_DATA, "it has no end token", "Set `eos_token`"),
    (questions_alone, ExitCode.BAD_DATA, "no training row has a token to learn from", "Check the roles"),
    (many_questions_alone, ExitCode.BAD_DATA, "30 of 60", "raise `data.max_left_out`"),
    (template_without_markers, ExitCode.BAD_DATA, "no end token follows", "template"),
    (manifest_gone, ExitCode.BAD_DATA, "manifest is not there", "Curate the drop again"),
    (other_rows_than_planned, ExitCode.BAD_DATA, "the run was planned for toy/", "Start a new run for this dataset"),
    (harmed_shard, ExitCode.BAD_DATA, "its SHA-256 is", "Curate again"),
    (checkpoint_of_another_recipe, ExitCode.BAD_RECIPE, "train.learning_rate: 0.005 -> 0.0001", "Free to change are"),
    (a_head_where_text_is_asked_for, ExitCode.BAD_RECIPE, "gives labels and no text", "Set `task: classification`"),
    (a_head_of_other_labels, ExitCode.BAD_RECIPE, "knows the labels 'LABEL_0', 'LABEL_1'", "Name"),
    (labels_for_an_encoder_decoder, ExitCode.BAD_RECIPE, "learns answers here and no labels", "sequence-to-sequence"),
    (a_classifiers_labels_that_changed, ExitCode.BAD_RECIPE, "dataset: ", "or start a new run"),
    (labels_that_changed, ExitCode.BAD_RECIPE, "dataset: ", "or start a new run"),
    (deaf_hub, 1, "does not answer", "S3"),
    (a_branch_of_the_hub, ExitCode.BAD_RECIPE, "names no commit of the hub", "Start a new run"),
    (pickled_weights, ExitCode.BAD_RECIPE, "as pickles only (pytorch_model.bin)", "Save the model with safetensors"),
    (a_config_of_its_own, ExitCode.BAD_RECIPE, "needs code of its own (evil.py), and no code", "Name a model whose"),
    (a_model_of_its_own, ExitCode.BAD_RECIPE, "needs code of its own (evil.py), and no code", "Name a model whose"),
    (a_tokenizer_of_anothers, ExitCode.BAD_RECIPE, "needs code of its own (evil.py)", "Name a model whose"),
    (a_kernel_of_a_hub, ExitCode.BAD_RECIPE, "`attn_implementation: someone/kernel`, a kernel", "Take `attn"),
    (a_quantised_base, ExitCode.BAD_RECIPE, "are quantised already (gptq)", "Name the model that they were made of"),
    (a_kernel_by_a_detour, ExitCode.BAD_RECIPE, "`attn_implementation: someone/kernel`, a kernel", "Take `attn"),
    (weights_that_are_no_safetensors, ExitCode.BAD_RECIPE, "'../outside.txt', which is no safetensors", "Save the"),
    (an_adapter_beside_the_base, ExitCode.BAD_RECIPE, "holds an adapter (adapter_config.json) beside", "Merge the"),
    (a_config_of_odd_values, ExitCode.BAD_DATA, "TypeError: ", "Name a base model with a tokenizer beside it"),
]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_base(tmp_path_factory.mktemp("bad") / "base")


@pytest.fixture
def bad(toy: Toy, tmp_path: Path, base: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bad]:
    before = signal.getsignal(signal.SIGTERM)
    made = Bad(toy, tmp_path, base, monkeypatch)
    yield made
    signal.signal(signal.SIGTERM, before)
    if (deaf := getattr(made, "deaf", None)) is not None:
        deaf.close()


@pytest.mark.parametrize(
    ("harm", "code", "cause", "mend"),
    # A deaf hub is waited for.
    [pytest.param(*row, id=row[0].__name__, marks=[pytest.mark.slow] * (row[0] is deaf_hub)) for row in TABLE],
)
def test_bad_input_is_refused_before_the_first_step(
    bad: Bad, capfd: pytest.CaptureFixture[str], harm: Callable[[Bad], None], code: int, cause: str, mend: str
) -> None:
    harm(bad)
    capfd.readouterr()
    assert main([bad.uri]) == code
    out, err = capfd.readouterr()
    message = err if code != 1 else err.splitlines()[-1]  # what may be mended by another try has its trace
    assert cause in message
    assert mend in message
    assert "Traceback" not in message
    assert "trust_remote_code" not in out + err
    assert '"loss"' not in out  # of a step
    assert bad.toy.files("bad").stat("report.json") is None


def test_a_tokenizer_without_a_padding_token_trains_as_its_end_token_pads(bad: Bad) -> None:
    bad.tokenizer(pad_token=None)
    assert main([bad.uri]) == 0


def test_a_full_disk_is_named_with_its_mend_and_the_run_goes_on_when_there_is_room(
    bad: Bad, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: FolderStore, key: str, data: bytes | memoryview) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.root / key))

    with monkeypatch.context() as patched:
        patched.setattr(FolderStore, "put", full)
        assert main([bad.uri]) == 1
    _, err = capfd.readouterr()
    assert re.search(r"file .*: .*[Nn]o (space|room).*another try continues", err)
    assert "Traceback" not in err
    assert main([bad.uri]) == 0


def test_no_place_for_temporary_files_is_told_and_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.setattr(tempfile, "_candidate_tempdir_list", lambda: ["/proc/none"])
    with pytest.raises(FileNotFoundError) as told, tempfile.TemporaryDirectory():
        pass
    code, message = ending(told.value)
    assert code == ExitCode.BAD_RECIPE
    assert message.endswith("Mount a folder at /tmp, or name one in TMPDIR")
