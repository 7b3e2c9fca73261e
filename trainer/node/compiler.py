"""Whether blocks can be compiled on this node, and where what was compiled is kept."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Final

from dropforge.compiler import find_compiler
from dropforge.errors import DropforgeError, RecipeError

CACHE: Final = "TORCHINDUCTOR_CACHE_DIR"


def check_compiler(asked: bool) -> None:
    """:raises RecipeError: if compiled blocks are asked for and nothing here can compile them."""
    if not asked:
        return
    try:
        find_compiler()
    except DropforgeError as error:
        raise RecipeError("recipe key `train.compile`", error.cause, error.mend) from error


def open_cache(folder: str | None) -> dict[str, str]:
    """Environment that has torch keep what it compiles in a folder, which is made; nothing without one.

    :raises RecipeError: if it cannot be written.
    """
    if folder is None:
        return {}
    try:
        Path(folder).mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            pass
    except OSError as error:
        raise RecipeError(
            "recipe key `compute.compile_cache`",
            f"{folder} cannot be written on this node ({error.strerror or error})",
            "Name a folder that can, as one of a volume with `read_only: false`, or leave it out",
        ) from error
    return {CACHE: folder}
