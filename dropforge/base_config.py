"""The config of a base model that is no model of the hub: looked for where the recipe says, before anything starts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from dropforge.errors import RecipeError
from dropforge.hub import CONFIG, LARGEST_CONFIG, at_folder, is_hub_id
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe
from dropforge.store import MissingObjectError, Store, TooLargeError, out_of_reach, read_bounded

_KEY = "recipe key `base.model`"


def check_folder_there(recipe: Recipe, folders: Sequence[str]) -> None:
    """See that a base that is a folder here holds a model.

    :param folders: that recipes may read; one that is not on this machine is the pods' own, and nothing is known of it.
    :raises RecipeError: if the folder has no config, or is missing below one of `folders`.
    """
    model = recipe.base.model
    if model is None or recipe.base.start != "base" or model.startswith("s3://") or is_hub_id(model):
        return
    path = Path(model.removeprefix("file://"))
    below = any(path.is_relative_to(folder) and Path(folder).is_dir() for folder in folders)
    if (path.is_dir() or below) and not (path / CONFIG).is_file():
        raise RecipeError(_KEY, f"{model} has no config.json", "Name a folder with a model")


@contextmanager
def from_bucket(recipe: Recipe, store: Store, bucket: str) -> Iterator[Recipe]:
    """The recipe with the config of its base in a folder here, where the base is in this bucket; else as it is.

    :raises RecipeError: if the base is in this bucket and has no config.
    """
    model, own = recipe.base.model or "", f"s3://{bucket}/"
    if not model.startswith(own) or recipe.base.start != "base":
        yield recipe
        return
    config = _read(store, model, f"{model.removeprefix(own).rstrip('/')}/{CONFIG}")
    if config is None:
        yield recipe
        return
    with TemporaryDirectory(prefix="base-") as folder:
        (Path(folder) / CONFIG).write_bytes(config)
        yield build_recipe(at_folder(recipe.plain(), folder))


def _read(store: Store, model: str, key: str) -> bytes | None:
    """None where it cannot be read here: the pods may have other rights."""
    try:
        return read_bounded(store, key, LARGEST_CONFIG)
    except MissingObjectError:
        raise RecipeError(_KEY, f"{model} has no config.json and safetensors", "Upload the model with both") from None
    except Exception as error:
        if isinstance(error, TooLargeError) or out_of_reach(error):
            return None
        raise
