"""Whatever a person names as a model, as a folder on this machine."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Final

from dropforge.errors import DropforgeError, RecipeError
from dropforge.hub import check_sizes
from dropforge.store import open_store
from trainer.commands.addresses import open_run, split_checkpoint
from trainer.data.model_cache import takes

_HUB: Final = re.compile(r"([\w.-]+/[\w.-]+|[\w.-]+)(?:@([\w./-]+))?")
_REGISTERED: Final = re.compile(r"models:/([^/@]+)(?:/([^/@]+)|@([^/@]+))")
_WEIGHTS: Final = (".safetensors", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")


def fetch_model(address: str, scratch: Path, say: Callable[[str], None]) -> Path:
    """Bring a model here.

    :param address: a model folder; a run (its `model/`) or one of its checkpoints; `models:/NAME/VERSION` or
        `models:/NAME@ALIAS` of MLflow; an id on the Hugging Face hub, with `@REVISION`.
    :param scratch: a folder for what has to be copied. :param say: takes notices.
    :raises RecipeError: if there is no such model. :raises DataError: if a checkpoint is missing or broken.
    """
    checkpoint = split_checkpoint(address)
    if checkpoint is not None:
        from trainer.restore import Choice, export

        export(open_run(checkpoint[0]), Choice(checkpoint[1]), scratch / "checkpoint", say)
        return scratch / "checkpoint"
    if address.startswith("models:/"):
        return fetch_model(_registered(address), scratch, say)
    if address.startswith(("s3://", "file://", "/", "./", "../")) or Path(address).is_dir():
        return _folder(address.rstrip("/"), scratch)
    return _from_hub(address)


def _folder(address: str, scratch: Path) -> Path:
    from trainer.model.build import fetch_folder

    store = open_store(address)
    if store.stat("config.json") is None and store.stat("run.json") is not None:
        if store.stat("report.json") is None:
            raise RecipeError(
                f"run {address}", "it is not done, so it has no model", "Give one of its checkpoints/step-N instead"
            )
        address = f"{address}/model"
    try:
        return fetch_folder(address, scratch / "model", prefix=True)
    except RecipeError as error:  # it speaks of the recipe
        raise RecipeError(
            f"model {address}",
            error.cause,
            "Give a folder with config.json and safetensors, a run, RUN/checkpoints/step-N, models:/NAME/VERSION, "
            "or the id of a model on the Hugging Face hub",
        ) from None


def _registered(address: str) -> str:
    """Where a registered model lies; a copy of a version names that version as its source."""
    passed: list[str] = []
    while address.startswith("models:/"):
        if address in passed:
            raise RecipeError(f"model {passed[0]}", "it is its own source", "Give the folder of the model")
        passed.append(address)
        address = _source(address)
    return address


def _source(address: str) -> str:
    match = _REGISTERED.fullmatch(address)
    if match is None:
        raise RecipeError(f"model {address}", "it is no registered model", "Write models:/NAME/VERSION or NAME@ALIAS")
    server = os.environ.get("MLFLOW_TRACKING_URI") or os.environ.get("DROPFORGE_TRACKING_URI")
    if not server:
        raise RecipeError(f"model {address}", "no MLflow server is named", "Set MLFLOW_TRACKING_URI")
    from mlflow.exceptions import MlflowException

    from dropforge.tracking import client, short_patience

    name, version, alias = match.groups()
    try:
        with short_patience():
            mlflow = client(server)
            found = (
                mlflow.get_model_version(name, version) if version else mlflow.get_model_version_by_alias(name, alias)
            )
    except MlflowException as error:
        cause = " ".join(str(error).split())[:300]
        raise RecipeError(
            f"model {address}", f"MLflow at {server} does not give it ({cause})", "Look at the page of its models"
        ) from error
    return str(found.source)


def _from_hub(address: str, weights: bool = True) -> Path:
    match = _HUB.fullmatch(address)
    if match is None:
        raise RecipeError(
            f"model {address}", "there is no such folder, and it is no id of the Hugging Face hub", "Check the path"
        )
    from trainer.data.hub import fetch_from_hub

    try:
        return fetch_from_hub(match[1], match[2], weights=weights)
    except DropforgeError as error:  # it speaks of the recipe
        raise RecipeError(f"model {address}", f"there is no such folder here, and {error.cause}", error.mend) from error


def fetch_tokenizer(address: str, revision: str | None, scratch: Path) -> Path:
    """Bring the tokenizer of a model here, without its weights; a checkpoint's is that of its run.

    :param address: as for `fetch_model`, and folders without safetensors too. :raises RecipeError: if there is none.
    """
    checkpoint = split_checkpoint(address)
    if checkpoint is not None:
        address = checkpoint[0]
    if address.startswith("models:/"):
        address = _registered(address)
    if address.startswith(("s3://", "file://", "/", "./", "../")) or Path(address).is_dir():
        store = open_store(address.rstrip("/"))
        if store.stat("run.json") is not None:
            return _tokenizer_of_run(address, scratch)
        there = store.sizes("")
        sizes = {name: size for name, size in there.items() if takes(name) and not name.endswith(_WEIGHTS)}
        if not sizes:
            raise RecipeError(f"model {address}", "nothing is there", "Give a folder with a model and its tokenizer")
        try:
            check_sizes(sizes, address)
        except RecipeError as error:  # it speaks of the recipe
            raise RecipeError(f"model {address}", error.cause, error.mend) from None
        for name in sizes:
            store.download(name, scratch / name)
        return scratch
    return _from_hub(f"{address}@{revision}" if revision else address, weights=False)


def _tokenizer_of_run(address: str, scratch: Path) -> Path:
    from trainer.config import read_settings
    from trainer.data.tokenizer import add_tokens, load_tokenizer
    from trainer.prepare import TOKENIZER, open_tokenizer

    spec = open_run(address)
    settings, run = read_settings(spec.recipe), open_store(spec.root)
    if settings.base.model is not None:
        folder = fetch_tokenizer(settings.base.model, settings.base.revision, scratch)
        if settings.base.new_tokens is None:
            return folder
        tokenizer = load_tokenizer(folder)
        add_tokens(tokenizer, settings.base.new_tokens)
        tokenizer.save_pretrained(scratch)
        return scratch
    if run.stat(TOKENIZER) is None:
        raise RecipeError(f"run {address}", "its tokenizer is not trained yet", "Start it, or give another model")
    open_tokenizer(settings, "", run, "").save_pretrained(scratch)
    return scratch
