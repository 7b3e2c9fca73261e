"""What readers of transformers 4 need in an exported folder, as serving engines still do; version 5 reads past it.

Version 5 writes positions as `rope_parameters`, and some other keys under new names, which version 4 does not know: it
takes its defaults instead, without a word. Of tokenizers it writes a class and a list of special tokens under names
that version 4 refuses, and not what they put around a text, which some classes of version 4 decide anew. What a base's
config says of generation by task, version 4 puts before what generation_config.json says.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, Final

_NEW_CLASS: Final = "TokenizersBackend"
_OLD_CLASS: Final = "PreTrainedTokenizerFast"  # which version 5 takes for the same
_INPUTS: Final = ["input_ids", "attention_mask"]  # of the new class
#: What a pipeline of version 4 generates by, as GPT-2 by lot, and puts before each text, as BART a space.
_OF_PIPELINES: Final = {"task_specific_params", "prefix"}
_BESIDE: Final = {"rope_theta", "partial_rotary_factor"}
_PARTIAL: Final = {"rotary_pct": ("rope_parameters", "partial_rotary_factor")}
#: By `model_type` the keys of version 4 that version 5 writes elsewhere, and where.
_RENAMED: Final[Mapping[str, Mapping[str, tuple[str, ...]]]] = {
    "gpt_neox": _PARTIAL,
    "gpt_neox_japanese": _PARTIAL,
    "modernbert": {"local_rope_theta": ("rope_parameters", "sliding_attention", "rope_theta")},
    "qwen3_moe": {"num_experts": ("num_local_experts",)},
}
_LONG_ROPE: Final = ("short_factor", "long_factor")  # beside the type, in Phi 3
_LAYERS: Final = {"full_attention": "attention", "linear_attention": "mamba"}  # of Granite 4
#: Tokenizers of version 4 that put begin and end token around a text by these keys, whatever tokenizer.json says.
_FRAMES: Final = {"LlamaTokenizer", "CodeLlamaTokenizer", "GemmaTokenizer", "CohereTokenizer", "GPTNeoXTokenizer"}


def make_readable(folder: Path) -> None:
    """Add to a folder's configs, written by transformers 5, what version 4 reads."""
    reads = partial(tokenizer, folder=folder)
    for name, change in (("config.json", model), ("tokenizer_config.json", reads)):
        path = folder / name
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            # As version 5 writes each: a config of others may hold half of a character, which no UTF-8 has.
            text = json.dumps(change(config), indent=2, ensure_ascii=name == "config.json")
            path.write_text(f"{text}\n", encoding="utf-8")


def model(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with version 4's names and nothing to generate by; nested configs too."""
    nested = {key: model(value) for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)}
    kept = {key: value for key, value in config.items() if key not in _OF_PIPELINES}
    return {**kept, **nested, **_positions(config), **_renamed(config)}


def _positions(config: Mapping[str, Any]) -> dict[str, Any]:
    """Version 4's names of rotary positions."""
    found = config.get("rope_parameters") or {}
    # Gemma 3 has two kinds of layers, each with its own.
    main = found.get("full_attention", found)
    added: dict[str, Any] = {key: main[key] for key in _BESIDE if key in main}
    if main.get("rope_type", "default") != "default":
        scaling = {key: value for key, value in main.items() if key not in _BESIDE}
        if config.get("model_type") == "phi3":  # which refuses any other key
            scaling = {"type": main["rope_type"], **{key: scaling[key] for key in _LONG_ROPE if key in scaling}}
        added["rope_scaling"] = scaling
    if "rope_theta" in (local := found.get("sliding_attention") or {}):
        added["rope_local_base_freq"] = local["rope_theta"]
    return added


def _renamed(config: Mapping[str, Any]) -> dict[str, Any]:
    """What else version 4 reads by another name."""
    kind, added = config.get("model_type"), {}
    for key, path in _RENAMED.get(str(kind), {}).items():
        value: Any = config
        for name in path:
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            added[key] = value
    if kind == "granitemoehybrid" and config.get("layer_types"):
        added["layer_types"] = [_LAYERS.get(layer, layer) for layer in config["layer_types"]]
    if kind == "mt5" or config.get("scale_decoder_outputs") is False:
        added["tie_word_embeddings"] = False  # by which version 4 knows T5 1.1, whose head is one of its own, unscaled
    return added


def tokenizer(config: dict[str, Any], folder: Path) -> dict[str, Any]:
    """A tokenizer's config with version 4's class, names of special tokens and what it puts around a text.

    :param folder: with its `tokenizer.json`.
    """
    changed = dict(config)
    if str(changed.get("tokenizer_class")).removesuffix("Fast") in _FRAMES:
        changed |= _frame(json.loads((folder / "tokenizer.json").read_text(encoding="utf-8")))
    if changed.get("tokenizer_class") == _NEW_CLASS:
        changed["tokenizer_class"] = _OLD_CLASS
        changed.setdefault("model_input_names", _INPUTS)  # there also token types, which most models refuse
    if isinstance(tokens := changed.get("extra_special_tokens"), list):
        del changed["extra_special_tokens"]  # there a mapping by name
        changed.setdefault("additional_special_tokens", tokens)
    return changed


def _frame(content: Mapping[str, Any]) -> dict[str, bool]:
    """Whether a tokenizer puts a begin and an end token around a text. :param content: of `tokenizer.json`."""
    first = content.get("post_processor") or {}
    parts = [part for part in (first, *first.get("processors", ())) if part.get("type") == "TemplateProcessing"]
    single = parts[0]["single"] if parts else [{}]
    return {"add_bos_token": "SpecialToken" in single[0], "add_eos_token": "SpecialToken" in single[-1]}
