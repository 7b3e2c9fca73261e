"""The model that a run goes on from (`base.start`), as it was settled when the run was planned, and no other."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Final

from dropforge.errors import RecipeError
from dropforge.run import Start
from trainer.config import Base

BASE: Final = "base"
_KEY: Final = "recipe key `base.start`"


def check_start(base: Base, start: Start | None) -> None:
    """:raises RecipeError: if the recipe begins elsewhere than with its base, and nobody has settled where."""
    if base.start == BASE and start is None:
        return
    if start is None or start.asked != base.start:
        raise RecipeError(
            _KEY,
            f"it says {base.start!r}, and run.json does not hold which model that is",
            "Start the run from the form, a drop or `python -m trainer run`, which find out",
        )
    if start.kind != BASE and start.model != base.model:
        raise RecipeError(
            _KEY, f"it was resolved to {start.model}, and the recipe names {base.model}", "Start a new run"
        )


def check_files(start: Start | None, folder: Path) -> None:
    """Compare the model that was fetched with what it was when the run was planned.

    :raises RecipeError: if a file is missing or another by now.
    """
    if start is None:
        return
    for name, digest in sorted(start.files.items()):
        if "/" in name:  # its adapters, which nothing here reads
            continue
        path = folder / name
        problem = "is gone"
        if path.is_file():
            with path.open("rb") as stream:
                if hashlib.file_digest(stream, "sha256").hexdigest() == digest:
                    continue
            problem = "has other bytes than when the run was planned"
        raise RecipeError(_KEY, f"{start.model}/{name} {problem}", "Start a new run, from a model that is whole")
