"""TensorBoard's event files of a run, on request: written on this machine, copied into the run's folder at times."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

from dropforge.errors import RecipeError
from dropforge.store import Store

FOLDER: Final = "tensorboard/"


def check_board(asked: bool) -> None:
    """:raises RecipeError: if the package that writes event files is asked for and missing."""
    if asked and find_spec("tensorboard") is None:
        raise RecipeError(
            "recipe key `train.tensorboard`",
            "the package tensorboard is not installed where the ranks run",
            "Install the extra `dropforge[tensorboard]` there, or leave the key out",
        )


class Board:
    """The event file of this attempt. Whatever fails is said once, and ends nothing.

    Nothing is written before `begin`.
    """

    def __init__(self, store: Store, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._folder = Path(tempfile.mkdtemp(prefix="dropforge-tensorboard-"))
        self._writer: Any = None

    def begin(self, resumed_from: int | None) -> None:
        """Open the file; TensorBoard forgets what earlier attempts wrote of steps after `resumed_from`."""
        try:
            from torch.utils.tensorboard import SummaryWriter

            purge = None if resumed_from is None else resumed_from + 1
            self._writer = SummaryWriter(self._folder, purge_step=purge)
        except Exception as error:
            self._trouble("started", error)

    def scalars(self, values: Mapping[str, float], step: int) -> None:
        """Add values at an optimizer step; another thread writes them."""
        if self._writer is None:
            return
        try:
            for name, value in values.items():
                self._writer.add_scalar(name, value, step)
        except Exception as error:
            self._trouble("written", error)

    def copy(self) -> None:
        """Put what was written so far into the run's folder, under the same name as before."""
        if self._writer is None:
            return
        try:
            self._writer.flush()
            for path in self._folder.iterdir():
                self._store.put(f"{FOLDER}{path.name}", path.read_bytes())
        except Exception as error:  # a store that is away may be back at the next copy
            self._say(f"TensorBoard's files were not copied ({type(error).__name__}: {error})")

    def close(self) -> None:
        """The last copy; afterwards nothing is left on this machine."""
        self.copy()
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        shutil.rmtree(self._folder, ignore_errors=True)

    def _trouble(self, what: str, error: Exception) -> None:
        self._writer = None
        self._say(f"TensorBoard's files cannot be {what} ({type(error).__name__}: {error})")
