"""What the JSON files of a stranger's model may say, decided before a library acts on them.

The trainer asks it of each base model, and the plan of a model's sizes in a recipe. Pure: nothing here reads a file.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Final

#: Arguments of tokenizers' classes: transformers opens what they name, or takes them for the tokenizer itself.
_ELSEWHERE: Final = frozenset({"vocab", "merges", "gguf_file", "tokenizer_object", "subfolder", "init_inputs"})
TOKENIZER: Final = "tokenizer.json"
_FILES: Final = ("_file", "_files", "_path", "_spm")
#: Where the one who saved it had it: many models of old releases say so, and nothing opens it.
_STALE: Final = frozenset({"special_tokens_map_file", "name_or_path", "tokenizer_name_or_path"})

_NAME: Final = 200  # characters of a key's path: it is one per value
#: The contexts of some models have 10,485,760 tokens; no other size of a model comes near it.
LARGEST_SIZE: Final = 1 << 24
LARGEST_COUNT: Final = 20_000  # of layers, experts and what else is built one by one
LARGEST_LABELS: Final = 100_000
_LABELS: Final = ("num_labels", "_num_labels", "id2label", "label2id")
_COUNTED: Final = re.compile(r"layer|(block|expert|stage|depth)s?$")
_WIDE: Final = re.compile(r"size|dim|width|features")
_MEASURED: Final = re.compile(r"^(num|n|d)_|(size|dim|heads|layers|experts|labels)$")
#: They size nothing: the base of rotary positions, seeds, how much a training was, the longest answer.
_NO_SIZE: Final = re.compile(r"theta|base|seed|param|flop|max_length|date|version")

#: Of a tokenizer: parts of one kind in a row, how much longer they may make a text together, and tokens around it.
LARGEST_CHAIN: Final = 64
LARGEST_GROWTH: Final = 1000
LARGEST_FRAME: Final = 64
_CHAINS: Final = ("normalizer", "pre_tokenizer", "post_processor", "decoder")


@dataclass(frozen=True)
class Fault:
    """What is wrong with a file. :param key: that says it, as `text_config.num_hidden_layers`. :param cause: why."""

    key: str
    cause: str


def foreign_file(values: object, names: Collection[str]) -> Fault | None:
    """Return the first key of a tokenizer's settings by which a file outside the model's folder would be read.

    :param values: of tokenizer_config.json or special_tokens_map.json. :param names: of the files in the folder.
    """
    for key, value in values.items() if isinstance(values, Mapping) else ():
        if value in (None, "", [], {}) or key in _STALE:
            continue
        if key == "tokenizer_file" and TOKENIZER in names:  # that one is read, whoever saved it elsewhere
            continue
        if key in _ELSEWHERE:
            return Fault(key, "it would have another file, or what is there, read as the tokenizer")
        if key.endswith(_FILES):
            for name in value if isinstance(value, list) else [value]:
                if not (isinstance(name, str) and name in names and not name.startswith(".")):
                    return Fault(key, f"it names {str(name)[:100]!r}, which is no file of the model's folder")
        elif key.endswith("_kwargs") and (inner := foreign_file(value, names)):  # arguments for a library below
            return Fault(f"{key}.{inner.key}", inner.cause)
    return None


def odd_amount(config: Mapping[str, Any]) -> Fault | None:
    """Return an amount of a model's config that no model has, in its parts' configs too.

    A library makes lists and layers of such numbers before it sees that the weights have other shapes.
    """
    left: list[tuple[str, Any]] = list(config.items())
    while left:  # no recursion: JSON may be nested as deep as the stack is
        name, value = left.pop()
        key = name.rpartition(".")[2]
        if isinstance(value, Mapping) and key not in _LABELS:
            left += [(f"{name}.{inner}"[-_NAME:], item) for inner, item in value.items()]
        elif isinstance(value, list | tuple):
            left += [(name, item) for item in value if not isinstance(item, str)]
        elif isinstance(value, str):
            if _MEASURED.search(key):
                return Fault(name, f"{value[:100]!r} is a text where a number belongs")
        elif isinstance(value, int | Mapping) and not _NO_SIZE.search(key):
            amount, most = len(value) if isinstance(value, Mapping) else value, _largest(key)
            if amount > most:
                told = f"{amount:,}" if amount < 10**18 else "a number of more than 18 digits"
                return Fault(name, f"{told} is more than the {most:,} that a model may have")
    return None


def _largest(key: str) -> int:
    if key in _LABELS:
        return LARGEST_LABELS
    return LARGEST_COUNT if _COUNTED.search(key) and not _WIDE.search(key) else LARGEST_SIZE


def odd_token(generation: object) -> Fault | None:
    """Return a key of a generation_config.json that names a token by something else than its number.

    The library takes it as it stands, and fails once the model writes.
    """
    for key, value in generation.items() if isinstance(generation, Mapping) else ():
        if not key.endswith("_token_id") or value is None:
            continue
        for one in value if isinstance(value, list) else [value]:
            if not isinstance(one, int) or isinstance(one, bool) or not -1 <= one <= LARGEST_SIZE:  # -1: none
                return Fault(key, f"{str(one)[:100]} is no number of a token")
    return None


def endless_tokenizer(tokenizer: object) -> Fault | None:
    """Return the part of a tokenizer.json that makes many tokens of a short text.

    To be asked before it is loaded: added tokens are normalised then.
    """
    if not isinstance(tokenizer, Mapping):
        return None
    for name in _CHAINS:
        try:
            parts = _chain(tokenizer.get(name))
            growth, added = math.prod(_growth(part) for part in parts), sum(_added(part) for part in parts)
        except (TypeError, KeyError, AttributeError):  # the library also takes lists in place of names and values
            return Fault(name, "it is written in a form that no tokenizer is saved in")
        if len(parts) > LARGEST_CHAIN:
            return Fault(name, f"it chains more than {LARGEST_CHAIN} parts")
        if growth > LARGEST_GROWTH:
            return Fault(name, f"it may make a text {growth:.3g} times as long")
        if added > LARGEST_FRAME:
            return Fault(name, f"it puts more than {LARGEST_FRAME} tokens or characters around a text")
    return None


def _chain(part: Any) -> list[Mapping[str, Any]]:
    """A part and those within it, in any order; of more than the bound only one more."""
    found: list[Mapping[str, Any]] = []
    left = [part] if part else []
    while left and len(found) <= LARGEST_CHAIN:
        part = left.pop()
        found.append(part)
        for key in ("normalizers", "pretokenizers", "processors", "decoders"):
            left += (part.get(key) or [])[: LARGEST_CHAIN + 1]
    return found


def _growth(part: Mapping[str, Any]) -> float:
    """How many times as long a part may make a text. It is known by its keys: old files leave out its type."""
    if part.get("type") == "ByteLevel":  # two bytes for some of one
        return 2
    if "content" in part and "pattern" in part:
        content, pattern = str(part["content"]), part["pattern"]
        if literal := pattern.get("String"):
            return max(1.0, len(content) / len(literal))
        return len(content) + 1  # of a regular expression, which may match nothing at all
    texts = [Counter(str(piece["Sequence"]["id"]) for piece in form if "Sequence" in piece) for form in _forms(part)]
    return max((count for counts in texts for count in counts.values()), default=1)


def _added(part: Mapping[str, Any]) -> int:
    """How many tokens or characters a part puts around a text."""
    named = [[piece["SpecialToken"]["id"] for piece in form if "SpecialToken" in piece] for form in _forms(part)]
    special = part.get("special_tokens") or {}
    tokens = [sum(len(special[name]["ids"]) if name in special else 1 for name in form) for form in named]
    return max(tokens, default=0) + len(part.get("prepend") or "")


def _forms(part: Mapping[str, Any]) -> list[list[Mapping[str, Any]]]:
    """What a template makes of one text and of two, piece by piece."""
    return [part[key] for key in ("single", "pair") if key in part]
