"""What the JSON files of a stranger's model may say, decided before a library acts on them.

The trainer asks it of each base model, and the plan of a model's sizes in a recipe. Pure: nothing here reads a file.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

#: Arguments of tokenizers' classes: transformers opens what they name, or takes them for the tokenizer itself.
_ELSEWHERE: Final = frozenset({"vocab", "merges", "gguf_file", "tokenizer_object", "subfolder", "init_inputs"})
_FILES: Final = ("_file", "_files", "_path", "_spm")
#: Where the one who saved it had it: many models of old releases say so, and nothing opens it.
_STALE: Final = frozenset({"special_tokens_map_file", "name_or_path", "tokenizer_name_or_path"})


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
        if key in _ELSEWHERE:
            return Fault(key, "it would have another file, or what stands there, read as the tokenizer")
        if key.endswith(_FILES):
            for name in value if isinstance(value, list) else [value]:
                if not (isinstance(name, str) and name in names and not name.startswith(".")):
                    return Fault(key, f"it names {str(name)[:100]!r}, which is no file of the model's folder")
        elif key.endswith("_kwargs") and (inner := foreign_file(value, names)):  # arguments for a library below
            return Fault(f"{key}.{inner.key}", inner.cause)
    return None
