"""What readers of transformers 4 need in an exported folder, as serving engines still do; version 5 reads past it.

Version 5 writes positions as `rope_parameters`, which version 4 does not know: it takes its defaults instead, without a
word. Of tokenizers it writes a class and a list of special tokens under names that version 4 refuses. What a base's
config says of generation by task, version 4 puts before what generation_config.json says.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

_NEW_CLASS: Final = "TokenizersBackend"
_OLD_CLASS: Final = "PreTrainedTokenizerFast"  # which version 5 takes for the same
_INPUTS: Final = ["input_ids", "attention_mask"]  # of the new class
_PER_TASK: Final = "task_specific_params"  # by which a pipeline of version 4 generates, as GPT-2's by lot
_BESIDE: Final = {"rope_theta", "partial_rotary_factor"}


def make_readable(folder: Path) -> None:
    """Add to a folder's configs, written by transformers 5, what version 4 reads."""
    for name, change in (("config.json", positions), ("tokenizer_config.json", tokenizer)):
        path = folder / name
        if path.is_file():
            config = json.loads(path.read_text(encoding="utf-8"))
            # As version 5 writes each: a config of others may hold half of a character, which no UTF-8 has.
            text = json.dumps(change(config), indent=2, ensure_ascii=name == "config.json")
            path.write_text(f"{text}\n", encoding="utf-8")


def positions(config: dict[str, Any]) -> dict[str, Any]:
    """A model's config with version 4's names of rotary positions and nothing to generate by; nested configs too."""
    nested = {
        key: positions(value) for key, value in config.items() if key.endswith("_config") and isinstance(value, dict)
    }
    found = config.get("rope_parameters") or {}
    # Gemma 3 has two kinds of layers, each with its own.
    main = found.get("full_attention", found)
    added: dict[str, Any] = {key: main[key] for key in _BESIDE if key in main}
    if main.get("rope_type", "default") != "default":
        added["rope_scaling"] = {key: value for key, value in main.items() if key not in _BESIDE}
    if "rope_theta" in (local := found.get("sliding_attention") or {}):
        added["rope_local_base_freq"] = local["rope_theta"]
    kept = {key: value for key, value in config.items() if key != _PER_TASK}
    return {**kept, **nested, **added}


def tokenizer(config: dict[str, Any]) -> dict[str, Any]:
    """A tokenizer's config with version 4's class and name of further special tokens."""
    changed = dict(config)
    if changed.get("tokenizer_class") == _NEW_CLASS:
        changed["tokenizer_class"] = _OLD_CLASS
        changed.setdefault("model_input_names", _INPUTS)  # there also token types, which most models refuse
    if isinstance(tokens := changed.get("extra_special_tokens"), list):
        del changed["extra_special_tokens"]  # there a mapping by name
        changed.setdefault("additional_special_tokens", tokens)
    return changed
