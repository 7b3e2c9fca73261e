"""The exported folder in plain transformers, 5 and 4: it answers and stops as the model did that was measured."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaTokenizer,
)

from trainer.data.chat import make_encoder
from trainer.data.prompts import make_prompts, stops
from trainer.data.rows import Row
from trainer.data.seq2seq import for_seq2seq
from trainer.data.tokenizer import load_tokenizer, reading_digest, train_tokenizer, wrap_tokenizer
from trainer.model.export import as_measured, as_reads
from trainer.model.transformers4 import make_readable

from .test_template import CHATML, tokenizer

#: The last release of version 4, on which serving engines stand.
BEFORE = "4.57.6"
ASKED = [{"role": "user", "content": "on?"}]
ROPES: dict[str, dict[str, Any]] = {
    "llama": {"rope_theta": 5e5},
    "qwen3": {"rope_theta": 1e6, "head_dim": 8},
    "gemma3_text": {"head_dim": 8},
    "phi3": {"pad_token_id": 0},
    "llama-3": {
        "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}  # fmt: skip
_LONG: dict[str, Any] = {"short_factor": [1.1] * 4, "long_factor": [2.0] * 4}
_T5: dict[str, Any] = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_heads": 4,
    "num_layers": 2,
    "decoder_start_token_id": 0,
}
#: By base and architecture what version 4 publishes in keys that version 5 reads and writes otherwise.
PUBLISHED: dict[tuple[str, str], dict[str, Any]] = {
    ("FLAN-T5", "t5"): {"tie_word_embeddings": False, "feed_forward_proj": "gated-gelu", **_T5},
    ("mT5", "mt5"): {"tie_word_embeddings": False, **_T5},
    ("LongT5", "longt5"): {"tie_word_embeddings": False, **_T5},
    ("T5", "t5"): _T5,
    ("RedPajama", "gpt_neox"): {"rotary_pct": 1.0},
    ("mmBERT", "modernbert"): {"local_rope_theta": 160000.0, "local_attention": 64},
    ("Qwen3-Coder", "qwen3_moe"): {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16},
    ("Phi-3.5", "phi3"): {"rope_scaling": {"type": "longrope", **_LONG}, "original_max_position_embeddings": 32},
    ("Granite-4", "granitemoehybrid"): {
        "layer_types": ["attention"] * 2, "num_local_experts": 0, "shared_intermediate_size": 64, "mamba_n_heads": 8,
        "position_embedding_type": "rope",
    },
}  # fmt: skip


def published(name: tuple[str, str]) -> Any:
    """The config of a small model of a base's kind."""
    common = {
        "vocab_size": 128, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 256, "pad_token_id": 0, "bos_token_id": 1,
        "eos_token_id": 2,
    }  # fmt: skip
    return AutoConfig.for_model(name[1], **{**common, **copy.deepcopy(PUBLISHED[name])})


def save(model: Any, folder: Path, made: Any = None, new_tokens: int = 24) -> None:
    """As the export does it."""
    made = as_reads(model, made or tokenizer(CHATML))
    model.generation_config = as_measured(model, made, new_tokens)
    model.save_pretrained(folder)
    made.save_pretrained(folder)
    make_readable(folder)


def ending() -> Any:
    """A model that says its chat template's end and nothing else; its base's own end is another token, as most have it
    that get a chat template later, and its base wrote by lot.
    """
    made = tokenizer(CHATML)
    config = GPT2Config(
        vocab_size=len(made), n_embd=16, n_layer=1, n_head=2, n_positions=128, eos_token_id=made.eos_token_id
    )
    model = GPT2LMHeadModel(config).eval()
    with torch.no_grad():
        model.transformer.ln_f.weight.zero_()
        model.transformer.ln_f.bias.fill_(1.0)
        model.lm_head.weight.zero_()
        model.lm_head.weight[made.convert_tokens_to_ids("<|im_end|>")] = 1.0
    model.generation_config.update(do_sample=True, temperature=0.7, top_k=3, repetition_penalty=1.5)
    return model


def test_what_evaluation_stops_at_the_export_stops_at(tmp_path: Path) -> None:
    made, model = tokenizer(CHATML), ending()
    end = made.convert_tokens_to_ids("<|im_end|>")
    assert set(stops(model, made)) == {made.eos_token_id, end}
    save(model, tmp_path)
    plain, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    asked = words.apply_chat_template(ASKED, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    [prompt] = make_prompts(made, [Row(b"k", (("user", "on?"), ("assistant", "yes")), None)], 1)
    assert tuple(asked["input_ids"][0].tolist()) == prompt.ids
    [found] = plain.generate(**asked, max_new_tokens=20)
    assert found[len(prompt.ids) :].tolist() == [end]
    told = json.loads((tmp_path / "generation_config.json").read_text())
    assert not {"temperature", "top_k", "repetition_penalty"} & set(told)
    assert told["do_sample"] is False


def test_a_plain_text_begins_as_it_was_trained_to(tmp_path: Path) -> None:
    made = wrap_tokenizer(train_tokenizer(["The lamp is on. The pump is off."] * 50, 300), 128)
    before, digest = make_encoder(made, "answers"), reading_digest(made)
    [[read]] = before.encode([Row(b"k", None, "The lamp is on.")])
    save(llama(made), tmp_path, made)
    words = AutoTokenizer.from_pretrained(tmp_path)
    assert words("The lamp is on.")["input_ids"] == list(read.ids)[:-1]  # all but the end, which it is to write
    chat = [Row(b"k", (("user", "on?"), ("assistant", "yes")), None)]
    [prompt] = make_prompts(words, chat, 1)
    assert tuple(words.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]) == prompt.ids
    assert prompt.ids == make_prompts(made, chat, 1)[0].ids
    # A run that goes on from it, or compares with it, reads the same.
    [[again]] = make_encoder(words, "answers").encode([Row(b"k", None, "The lamp is on.")])
    assert list(again.ids) == list(read.ids)
    assert reading_digest(words) == digest


def bare() -> Any:
    """A tokenizer without padding, which tidies what it decodes."""
    made = tokenizer(CHATML)
    made.pad_token, made.clean_up_tokenization_spaces = None, True
    return made


def llama(made: Any) -> Any:
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "llama", vocab_size=len(made), hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=512, eos_token_id=made.eos_token_id,
    )  # fmt: skip
    return AutoModelForCausalLM.from_config(config).eval()


def test_an_answer_has_the_length_that_was_measured_and_is_the_same_beside_others(tmp_path: Path) -> None:
    """Nothing is given but the prompts."""
    made = bare()
    model = llama(made)
    save(model, tmp_path, made)
    plain, words = AutoModelForCausalLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    told = [ASKED, [{"role": "user", "content": "Is the big green machine on today, tell me?"}]]
    more = {"add_generation_prompt": True, "return_tensors": "pt", "return_dict": True}
    alone = words.apply_chat_template(told[0], **more)
    [found] = plain.generate(**alone)
    answer = found[alone["input_ids"].shape[1] :].tolist()
    assert len(answer) == 24
    both = words.apply_chat_template(told, padding=True, **more)
    assert plain.generate(**both)[0, both["input_ids"].shape[1] :].tolist() == answer
    saved = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert saved["clean_up_tokenization_spaces"] is False
    assert (words.padding_side, words.pad_token) == ("left", words.eos_token)
    assert plain.generation_config.pad_token_id == words.eos_token_id
    assert plain.config.pad_token_id is None  # or an end token's row would not be learned when it is trained on


def test_what_a_base_says_of_a_task_is_not_what_a_pipeline_of_version_4_generates_by(tmp_path: Path) -> None:
    model = ending()
    model.config.task_specific_params = {"text-generation": {"do_sample": True, "max_length": 50}}  # GPT-2's own
    save(model, tmp_path)
    assert "task_specific_params" not in json.loads((tmp_path / "config.json").read_text())


@pytest.mark.parametrize("name", PUBLISHED, ids="-".join)
def test_a_config_that_version_5_writes_otherwise_has_version_4_s_keys_too(
    name: tuple[str, str], tmp_path: Path
) -> None:
    config = published(name)
    config.prefix = " "  # as BART's
    config.save_pretrained(tmp_path)
    before = AutoConfig.from_pretrained(tmp_path)
    make_readable(tmp_path)
    written, again = json.loads((tmp_path / "config.json").read_text()), AutoConfig.from_pretrained(tmp_path)
    asked = PUBLISHED[name]
    assert {key: written.get(key) for key in asked} == asked
    assert "prefix" not in written
    for key in ("rope_parameters", "tie_word_embeddings", "scale_decoder_outputs", "num_local_experts", "layer_types"):
        assert getattr(again, key, None) == getattr(before, key, None), key


@pytest.mark.parametrize("legacy", [True, False])
def test_a_tokenizer_reads_an_export_as_it_read_the_base(tmp_path: Path, legacy: bool) -> None:
    """Llama's puts a space behind each special token or not, and a begin token before a text or not."""
    letters = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), "\u2581", *"yes"]
    base = LlamaTokenizer(
        {letter: number for number, letter in enumerate(letters)}, [], legacy=legacy, add_bos_token=False
    )
    base.save_pretrained(tmp_path / "base")
    path = tmp_path / "base" / "tokenizer_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "legacy": legacy, "add_bos_token": False}))
    made = load_tokenizer(tmp_path / "base")
    folder = tmp_path / "export"
    as_reads(llama(made), made).save_pretrained(folder)
    make_readable(folder)
    asked = "yes</s>yes"
    tokens = made.convert_ids_to_tokens(made(asked)["input_ids"])
    assert tokens == ["\u2581", *"yes", "</s>", *(["\u2581"] if legacy else []), *"yes"]
    assert AutoTokenizer.from_pretrained(folder)(asked)["input_ids"] == made(asked)["input_ids"]
    told = json.loads((folder / "tokenizer_config.json").read_text())
    assert (told["legacy"], told["add_bos_token"], told["add_eos_token"]) == (legacy, False, False)


def test_an_encoder_decoder_pads_on_the_right_and_writes_where_its_halves_differ_in_depth(tmp_path: Path) -> None:
    made = bare()
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "t5", vocab_size=len(made), d_model=16, d_kv=8, d_ff=32, num_heads=2, num_layers=1, num_decoder_layers=3,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=made.eos_token_id,
    )  # fmt: skip
    model = AutoModelForSeq2SeqLM.from_config(config).eval()
    save(model, tmp_path, for_seq2seq(made), 3)
    words, plain = AutoTokenizer.from_pretrained(tmp_path), AutoModelForSeq2SeqLM.from_pretrained(tmp_path)
    assert words.padding_side == "right"
    found = plain.generate(**words(["on?", "Is the big green machine on?"], padding=True, return_tensors="pt"))
    assert found.shape[1] == 1 + 3


@pytest.fixture(scope="module")
def before(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The Python of an environment of its own with transformers 4, and behind it the packages here for their torch."""
    folder = tmp_path_factory.mktemp("transformers-4")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = folder / "bin" / "python"
    uv = Path(sys.executable).with_name("uv")
    subprocess.run(
        [uv, "pip", "install", "--quiet", "--python", python, f"transformers=={BEFORE}", "jinja2"], check=True
    )
    [packages] = folder.glob("lib/python*/site-packages")
    (packages / "torch.pth").write_text(f"{Path(torch.__file__).parents[1]}\n")
    return python


READ = """
import json, sys, torch, transformers
from transformers import AutoModelForCausalLM, AutoTokenizer
assert transformers.__version__ == sys.argv[1]
found = {}
for folder in sys.argv[3:]:
    model, words = AutoModelForCausalLM.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    asked = words.apply_chat_template(
        json.loads(sys.argv[2]), add_generation_prompt=True, return_tensors="pt", return_dict=True
    )
    with torch.no_grad():
        torch.save(model(torch.arange(3, 103)[None]).logits, folder + "/read.pt")
        answer = model.generate(**asked)[0].tolist()
    found[folder] = {
        "text": words.decode(words("yes , it is n't on .")["input_ids"]),
        "ids": words("Hello <|im_start|>user a  b \\u00e9")["input_ids"],
        "special": sorted(words.all_special_tokens),
        "asked": asked["input_ids"][0].tolist(),
        "answer": answer,
    }
print(json.dumps(found))
"""


def test_version_4_answers_and_stops_as_the_model_did_that_was_measured(before: Path, tmp_path: Path) -> None:
    """At positions beyond those that a scaled rotation was made for, too."""
    models = {"ending": ending()}
    made = as_reads(models["ending"], bare())
    for name, more in ROPES.items():
        config = AutoConfig.for_model(
            name.partition("-")[0], vocab_size=len(made), hidden_size=32, intermediate_size=64,
            num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=256, **more,
        )  # fmt: skip
        models[name] = AutoModelForCausalLM.from_config(config).eval()
    for name, model in models.items():
        save(model, tmp_path / name, bare())
    done = subprocess.run(
        [before, "-c", READ, BEFORE, json.dumps(ASKED), *(tmp_path / name for name in models)],
        capture_output=True, text=True,
    )  # fmt: skip
    assert not done.returncode, done.stderr
    found = {Path(folder).name: read for folder, read in json.loads(done.stdout.splitlines()[-1]).items()}
    for name, model in models.items():
        read, ids = found[name], torch.arange(3, 103)[None]
        assert read["ids"] == made("Hello <|im_start|>user a  b é")["input_ids"]
        assert read["special"] == sorted(made.all_special_tokens)
        asked = made.apply_chat_template(ASKED, add_generation_prompt=True)["input_ids"]
        assert read["asked"] == asked
        with torch.no_grad():
            live = model(ids).logits
            answer = model.generate(torch.tensor([asked]), max_new_tokens=24)[0].tolist()
            again = AutoModelForCausalLM.from_pretrained(tmp_path / name).eval()(ids).logits
        assert torch.equal(again, live), name
        torch.testing.assert_close(torch.load(tmp_path / name / "read.pt"), live, rtol=0, atol=1e-6, msg=name)
        assert read["answer"] == answer, name
        assert read["text"] == "yes , it is n't on ."
    assert found["ending"]["answer"][len(asked) :] == [made.convert_tokens_to_ids("<|im_end|>")]


LOGITS = """
import json, sys, torch, transformers
assert transformers.__version__ == sys.argv[1]
ids = torch.arange(3, 103)[None]
for folder in sys.argv[2:]:
    [kind] = json.loads(open(folder + "/config.json").read())["architectures"]
    model = getattr(transformers, kind).from_pretrained(folder).eval()
    more = {"decoder_input_ids": ids[:, :20]} if model.config.is_encoder_decoder else {}
    with torch.no_grad():
        torch.save(model(ids, **more).logits, folder + "/read.pt")
"""


def test_version_4_computes_what_the_model_did_that_was_measured(before: Path, tmp_path: Path) -> None:
    """A head of T5 1.1 has weights of its own, and nothing scales what goes into it."""
    ids, live = torch.arange(3, 103)[None], {}
    for name in PUBLISHED:
        config, folder = published(name), tmp_path / name[0]
        if config.model_type == "modernbert":
            model = AutoModelForSequenceClassification.from_config(config)
        else:
            model = (AutoModelForSeq2SeqLM if config.is_encoder_decoder else AutoModelForCausalLM).from_config(config)
        torch.manual_seed(0)
        for weight in model.parameters():
            weight.data = weight.data * 5 if weight.dim() > 1 else weight.data
        if "tie_word_embeddings" in PUBLISHED[name]:
            state = {**model.state_dict(), "lm_head.weight": torch.randn_like(model.lm_head.weight)}
            model = type(model).from_pretrained(None, config=config, state_dict=state)
        model.eval()
        more = {"decoder_input_ids": ids[:, :20]} if config.is_encoder_decoder else {}
        with torch.no_grad():
            live[folder] = model(ids, **more).logits
        model.save_pretrained(folder)
        make_readable(folder)
    done = subprocess.run([before, "-c", LOGITS, BEFORE, *live], capture_output=True, text=True)
    assert not done.returncode, done.stderr
    for folder, logits in live.items():
        read, most = torch.load(folder / "read.pt"), float(logits.abs().max())
        torch.testing.assert_close(read / most, logits / most, rtol=0, atol=1e-4, msg=folder.name)
