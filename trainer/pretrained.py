"""Loading what transformers and peft read from a model's folder: the only calls of `from_pretrained` in the trainer.

A model's files come from strangers. Nothing that they bring is run: no Python file of theirs, whichever key names it,
no kernel of a hub, no pickle. Nor is a hub asked for another model that they name. No library asks a person either
whether it may, at a terminal least of all. What needs any of it is refused as a mistake of the recipe.
`model/pyfunc_loader.py`, which has to work without this package, runs none of it either. Nor does a file that is read
as a whole fill the memory: each is held to a bound first (`dropforge.hub`). The header of safetensors is held to 100 MB
by its library.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final

from dropforge.errors import RecipeError
from dropforge.hub import INDEX, check_folder, largest
from dropforge.hub_client import UnwantedRequestError, without_requests
from dropforge.model_files import TOKENIZER, endless_tokenizer, foreign_file, odd_amount, odd_token
from dropforge.whole_file import read_small

_KEY: Final = "recipe key `base.model`"
_SOURCES: Final = ("config.json", "tokenizer_config.json", "adapter_config.json")
_GENERATION: Final = "generation_config.json"
_ADAPTER: Final = "adapter_config.json"
_WEIGHTS: Final = "model.safetensors"
_ADAPTER_WEIGHTS: Final = "adapter_model.safetensors"
_CONFIG: Final = "config.json"
_OTHER_CONFIGS: Final = "configuration_files"  # for other releases of transformers, which chooses one of them
_TOKENIZER_FILES: Final = ("tokenizer_config.json", "special_tokens_map.json")
#: What the library raises for values that it does not expect.
_ODD: Final = (ValueError, ImportError, TypeError, AttributeError, LookupError, ArithmeticError, AssertionError)
_TRUST: Final = "trust_remote_code="  # in the library's own texts


def load_config(folder: str | Path, revision: str | None = None) -> Any:
    """Return the config of a model.

    :raises RecipeError: if it names code that would have to run. :raises OSError, ValueError: if it cannot be read.
    """
    from transformers import AutoConfig

    check_folder(Path(folder))
    _check_settings(Path(folder), _CONFIG)
    _check_amounts(Path(folder), _CONFIG)
    with _no_code(str(folder)):
        config = AutoConfig.from_pretrained(str(folder), revision=revision, trust_remote_code=False)
    check_kernels(config, str(folder))
    made_for = getattr(config, "architectures", None) or []
    if not (isinstance(made_for, list) and all(isinstance(name, str) for name in made_for)):
        raise ValueError("its `architectures` is no list of names")
    return config


def load_tokenizer_files(folder: str | Path, revision: str | None = None) -> Any:
    """Return the tokenizer beside a model, as it stands there; errors as of `load_config`."""
    from transformers import AutoTokenizer

    check_folder(Path(folder))
    _check_settings(Path(folder), _CONFIG, *_TOKENIZER_FILES)
    for path in sorted(Path(folder).glob("*tokenizer.*json")):  # a release may have one of its own
        endless = endless_tokenizer(_json(path))
        if endless is not None:
            raise RecipeError(
                _KEY, f"{folder}: `{endless.key}` of its {path.name}: {endless.cause}", "Name a model with another"
            )
    own, settings = Path(folder) / TOKENIZER, _json(Path(folder) / _TOKENIZER_FILES[0])
    # Old models of the hub say where they once lay; what is given here goes before it, in any release.
    elsewhere = isinstance(settings, dict) and settings.get("tokenizer_file") and own.is_file()
    given = {"tokenizer_file": str(own)} if elsewhere else {}
    with _no_code(str(folder)):
        return AutoTokenizer.from_pretrained(str(folder), revision=revision, trust_remote_code=False, **given)


def load_weights(
    kind: Any, folder: str | Path, revision: str | None = None, config: Any = None
) -> tuple[Any, list[str]]:
    """Return a model in fp32, whatever the files hold, and the sorted names of its weights that they lack.

    :param kind: of transformers' auto classes. :param config: of `load_config`, which is asked without it.
    :raises RuntimeError: if shapes differ; others as of `load_config`.
    """
    import torch

    check_files(Path(folder))
    if config is None:
        config = load_config(folder, revision)
    with _no_code(str(folder)):
        model, loaded = kind.from_pretrained(
            str(folder),
            config=config,  # the one that was checked, not read again
            revision=revision,
            dtype=torch.float32,
            trust_remote_code=False,
            use_safetensors=True,
            output_loading_info=True,
        )
    return model, sorted(loaded["missing_keys"])


def make_random(kind: Any, config: Any) -> Any:
    """Return a model of a config in fp32 with random weights. :param kind: of transformers' auto classes."""
    import torch

    whose = str(config.name_or_path) or "the config"
    check_kernels(config, whose)
    with _no_code(whose):
        return kind.from_config(config, dtype=torch.float32, trust_remote_code=False)


def load_generation_config(folder: str | Path) -> Any:
    """Return how a model writes by default. :raises OSError, ValueError: if no such file is there or can be read."""
    from transformers import GenerationConfig

    check_folder(Path(folder))
    _check_generation(Path(folder))
    return GenerationConfig.from_pretrained(str(folder))


def load_prefix(model: Any, folder: str | Path) -> Any:
    """Return a model with the prefix of a folder before it.

    Some adapters of other kinds load further models, with code of theirs.

    :raises RecipeError: if it is an adapter of another kind, or its weights are no safetensors.
    """
    from peft import PeftModel

    check_folder(Path(folder))
    found = _json(Path(folder) / _ADAPTER)
    _check_amounts(Path(folder), _ADAPTER)
    if not isinstance(found, dict) or found.get("peft_type") != "PREFIX_TUNING":
        raise RecipeError(f"model {folder}", f"its {_ADAPTER} is of no prefix", "Export the run's model again")
    if not (Path(folder) / _ADAPTER_WEIGHTS).is_file():
        raise RecipeError(
            f"model {folder}",
            f"there is no {_ADAPTER_WEIGHTS} in it, and weights in any other form are not read: they could run code",
            "Save the adapter with safetensors",
        )
    _check_whole(Path(folder) / _ADAPTER_WEIGHTS)
    return PeftModel.from_pretrained(model, str(folder))


def check_kernels(config: Any, whose: str) -> None:
    """Refuse a config, or a part of it, that names a kernel of a hub, which are written OWNER/NAME.

    :param whose: for the error. :raises RecipeError: if one is named.
    """
    for key in ("attn_implementation", "experts_implementation"):
        value = getattr(config, f"_{key}", None)
        if isinstance(value, str) and "/" in value:
            raise RecipeError(
                _KEY,
                f"{whose}: its config has `{key}: {value[:100]}`, a kernel that would be fetched from a hub and run, "
                "and no code of a model is run here",
                f"Take `{key}` out of its config.json",
            )
    for name in getattr(config, "sub_configs", None) or ():
        if (part := getattr(config, name, None)) is not None and part is not config:
            check_kernels(part, whose)


def _check_settings(folder: Path, *files: str) -> None:
    """:raises RecipeError: if a tokenizer's settings, or a config's, would have files read that are none of the model.

    transformers holds only those to the folder that a class of tokenizers knows by name.
    """
    names = {path.name for path in folder.iterdir() if path.is_file()} if folder.is_dir() else set()
    for name in files:
        found = _json(folder / name)
        if name == _CONFIG and isinstance(found, dict):  # of its other keys none names a file that is read
            found = {_OTHER_CONFIGS: found.get(_OTHER_CONFIGS)}
        fault = foreign_file(found, names)
        if fault is not None:
            raise RecipeError(
                _KEY,
                f"{folder}: its {name} has `{fault.key}`, and {fault.cause}",
                f"Take `{fault.key}` out of {name}, and keep the files of the model beside its weights",
            )


def _check_amounts(folder: Path, name: str) -> None:
    """:raises RecipeError: if a model's file has amounts that no model has."""
    found = _json(folder / name)
    fault = odd_amount(found) if isinstance(found, dict) else None
    if fault is not None:
        raise RecipeError(
            _KEY, f"{folder}: its {name} has `{fault.key}`, and {fault.cause}", "Name a model whose config is whole"
        )


def _check_generation(folder: Path) -> None:
    """:raises RecipeError: if a model would write up to a token that is none."""
    fault = odd_token(_json(folder / _GENERATION))
    if fault is not None:
        raise RecipeError(
            _KEY,
            f"{folder}: its {_GENERATION} has `{fault.key}`, and {fault.cause}",
            f"Set `{fault.key}` there to the token's number, or take it out",
        )


def check_files(folder: Path) -> None:
    """:raises RecipeError: if weights lie in other files than safetensors of the folder, one of these is torn, or an
    adapter lies beside."""
    check_folder(folder)
    _check_generation(folder)  # which is read beside the weights
    index = _json(folder / INDEX)
    named = index.get("weight_map") if isinstance(index, dict) else None
    files = list(named.values()) if isinstance(named, dict) else [_WEIGHTS]
    for file in files:
        if not isinstance(file, str) or not re.fullmatch(r"[\w.-]+\.safetensors", file):
            raise RecipeError(
                _KEY,
                f"{folder}: its {INDEX} names {str(file)[:100]!r}, which is no safetensors file beside it",
                "Save the model again with safetensors",
            )
    if (folder / _ADAPTER).is_file():
        raise RecipeError(
            _KEY,
            f"{folder} holds an adapter ({_ADAPTER}) beside a model, which would be trained as a part of it",
            "Merge the adapter into the model, or name a folder without it",
        )
    for file in sorted(set(files)):
        _check_whole(folder / file)


def _check_whole(file: Path) -> None:
    """:raises RecipeError: if a file of weights is there and ends before the tensors that it names."""
    from safetensors import SafetensorError, safe_open

    if not file.is_file():
        return
    try:
        with safe_open(file, framework="pt", device="cpu"):
            pass
    except SafetensorError as error:
        raise RecipeError(
            f"model {file.parent}", f"{file.name} cannot be read: {error}", "Write the file there again, whole"
        ) from error


@contextmanager
def _no_code(whose: str) -> Iterator[None]:
    """Tell in our own words that the library would have to run foreign code, or to ask a hub; odd values in configs as
    ValueErrors.

    :param whose: the folder, or what else it is.
    """
    from huggingface_hub.errors import StrictDataclassError

    try:
        with without_requests():
            yield
    except UnwantedRequestError as error:
        raise RecipeError(
            _KEY,
            f"{whose} has transformers ask for {error}, which is no part of it, and only what a recipe names is read",
            "Name a model whose config.json has the configs of all its parts in it (and no `backbone`)",
        ) from None
    except RecursionError:
        raise ValueError("one of its JSON files is nested too deeply") from None
    except MemoryError:
        raise ValueError("it needs more memory than there is") from None
    except (*_ODD, StrictDataclassError) as error:
        if _TRUST not in str(error):
            if isinstance(error, ValueError):
                raise
            raise ValueError(f"{type(error).__name__}: {error}") from error
        files = code_of(whose)
        named_files = f" ({', '.join(files[:3])})" if files else ""
        raise RecipeError(
            _KEY,
            f"{whose} needs code of its own{named_files}, and no code of a model is run here",
            "Name a model whose `model_type` and tokenizer transformers itself has",
        ) from None  # the library's own text tells people to trust it


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
    """A file's values; none if it is not there or no JSON: the library that reads it next tells so.

    :raises RecipeError: if it is larger than any such file is, or a pipe, device or folder.
    """
    try:
        data = read_small(path, largest(path.name) or 0)
    except OSError:
        return None
    except ValueError as error:
        raise RecipeError(_KEY, f"{path}: {error}", "Name another model") from None
    try:
        return json.loads(data)
    except (ValueError, RecursionError):
        return None
