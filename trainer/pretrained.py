"""Loading what transformers and peft read from a model's folder: the only calls of `from_pretrained` in the trainer.

A model's files come from strangers. Nothing that they bring is run: no Python file of theirs, whichever key names it,
no kernel of a hub, no pickle. No library asks a person either whether it may, at a terminal least of all. What needs
any of it is refused as a mistake of the recipe. `model/pyfunc_loader.py`, which has to work without this package, keeps
to the same.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dropforge.errors import RecipeError

_KEY: Final = "recipe key `base.model`"
_SOURCES: Final = ("config.json", "tokenizer_config.json", "adapter_config.json")
_KERNELS: Final = ("attn_implementation", "_attn_implementation", "experts_implementation", "_experts_implementation")
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_LARGEST: Final = 32 << 20  # bytes of a config; the largest known have a few hundred kilobytes


def load_config(folder: str | Path, revision: str | None = None) -> Any:
    """Return the config of a model.

    :raises RecipeError: if it names code that would have to run.
    :raises OSError, ValueError, KeyError: if it cannot be read.
    """
    from transformers import AutoConfig

    with _no_code(folder):
        return AutoConfig.from_pretrained(str(folder), revision=revision, trust_remote_code=False)


def load_tokenizer_files(folder: str | Path, revision: str | None = None) -> Any:
    """Return the tokenizer beside a model, as it stands there; errors as of `load_config`."""
    from transformers import AutoTokenizer

    with _no_code(folder):
        return AutoTokenizer.from_pretrained(str(folder), revision=revision, trust_remote_code=False)


def load_weights(kind: Any, folder: str | Path, revision: str | None = None, **more: Any) -> tuple[Any, list[str]]:
    """Return a model in fp32, whatever the files hold, and the sorted names of its weights that they lack.

    :param kind: of transformers' auto classes. :param more: for the class.
    :raises RuntimeError: if shapes differ; others as of `load_config`.
    """
    import torch

    with _no_code(folder):
        model, loaded = kind.from_pretrained(
            str(folder),
            revision=revision,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
            **more,
        )
    return model, sorted(loaded["missing_keys"])


def make_random(kind: Any, config: Any) -> Any:
    """Return a model of a config in fp32 with random weights. :param kind: of transformers' auto classes."""
    import torch

    with _no_code(str(config.name_or_path) or None):
        return kind.from_config(config, dtype=torch.float32, trust_remote_code=False)


def load_generation_config(folder: str | Path) -> Any:
    """Return how a model writes by default. :raises OSError, ValueError: if no such file is there or can be read."""
    from transformers import GenerationConfig

    return GenerationConfig.from_pretrained(str(folder))


def load_adapter(model: Any, folder: str | Path) -> Any:
    """Return a model with the adapter of a folder on it. :raises RecipeError: if its weights are no safetensors."""
    from peft import PeftModel

    if not (Path(folder) / _ADAPTER_WEIGHTS).is_file():
        raise RecipeError(
            f"model {folder}",
            f"there is no {_ADAPTER_WEIGHTS} in it, and weights in any other form are not read: they could run code",
            "Save the adapter with safetensors",
        )
    return PeftModel.from_pretrained(model, str(folder))


@contextmanager
def _no_code(folder: str | Path | None) -> Iterator[None]:
    """Refuse what names a kernel of a hub, and tell in our own words that the library would have to run foreign code.

    :param folder: None for a config alone.
    """
    named = None if folder is None else kernel_of(folder)
    if named is not None:
        key, value = named
        raise RecipeError(
            _KEY,
            f"{folder}: `{key}: {value}` in its config.json names a kernel that would be fetched from a hub and run, "
            "and no code of a model is run here",
            f"Take `{key}` out of its config.json",
        )
    try:
        yield
    except RecursionError:
        raise ValueError("one of its JSON files is nested too deeply") from None
    except (ValueError, ImportError) as error:
        if "trust_remote_code" not in str(error):
            raise
        files = [] if folder is None else code_of(folder)
        whose = "the config" if folder is None else str(folder)
        named_files = f" ({', '.join(files[:3])})" if files else ""
        raise RecipeError(
            _KEY,
            f"{whose} needs code of its own{named_files}, and no code of a model is run here",
            "Name a model whose `model_type` and tokenizer transformers itself has",
        ) from None  # the library's own text tells people to trust it


def kernel_of(folder: str | Path) -> tuple[str, str] | None:
    """Return the key and value of a config that name a kernel of a hub, which are written OWNER/NAME; None without."""

    def find(values: Any) -> tuple[str, str] | None:
        if isinstance(values, dict):
            for key, value in values.items():
                if key in _KERNELS:
                    for text in value.values() if isinstance(value, dict) else [value]:
                        if isinstance(text, str) and "/" in text:
                            return key, text[:100]
                if (found := find(value)) is not None:
                    return found
        return None

    try:
        return find(_json(Path(folder) / "config.json"))
    except RecursionError:  # the library that reads it next stumbles as well
        return None


def code_of(folder: str | Path) -> list[str]:
    """Return the Python files that the configs of a model's folder name, sorted."""
    found: set[str] = set()
    for name in _SOURCES:
        named = _json(Path(folder) / name)
        classes = named.get("auto_map") if isinstance(named, dict) else None
        for value in classes.values() if isinstance(classes, dict) else [classes]:
            for one in value if isinstance(value, list) else [value]:
                if isinstance(one, str) and re.fullmatch(r"[\w./-]{1,200}", one):
                    found.add(f"{one.split('--')[-1].rpartition('.')[0]}.py")
    return sorted(found)


def _json(path: Path) -> Any:
    """A file's values; none if it is not there, too large or no JSON: the library that reads it next tells so."""
    try:
        if path.stat().st_size > _LARGEST:
            return None
        return json.loads(path.read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
