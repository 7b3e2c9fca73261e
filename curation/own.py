"""Kernels of a user's own: functions from the recipe's wheel that change the texts of a row, or end it.

A kernel is given one row, so that no cut of the rows into batches can change what it does, and answers with the new
texts, in the same order, or with a word for why the row goes:

    def kernel(passages: list[tuple[str | None, str]]) -> list[str] | str

Each passage is a role and its content; the role of a plain text is None. A kernel that raises, or answers with
something else, ends the row in quarantine with the kernel's name.
"""

from __future__ import annotations

import importlib
import re
import sys
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any, Final

import pyarrow as pa

from curation.columns import strings
from curation.reasons import Filtered, Reason
from curation.stage import Stage, Staged, refusals
from dropforge.code import check_kernels
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.store import Store
from dropforge.wheel import GROUPS, KERNELS, fetch, unpack

Kernel = Callable[[list[tuple[str | None, str]]], Any]

#: No digits and no spaces: the word is shown, and quotes nothing of the row.
_WORD: Final = re.compile(r"[a-z_]{1,40}")


@dataclass(frozen=True)
class Own:
    """Which kernels take part. :param sha256: of the wheel. :param kernels: (name, `module:function`), in order."""

    sha256: str
    kernels: tuple[tuple[str, str], ...]


def prepare_own(recipe: Recipe, folder: Path, store: Store) -> tuple[Own | None, Path | None]:
    """The kernels that a recipe names and the folder where they are unpacked; neither, if it names none.

    The wheel is fetched for kernels alone: others of its functions may lie where only the training's pods see them.

    :raises RecipeError: if the wheel is not there or is another one, or a kernel is not in it or cannot be loaded.
    """
    code = recipe.code
    if code is None or not recipe.curation.kernels:
        return None, None
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "wheel"
    wheel = fetch(code.wheel, code.sha256, path, store if code.wheel.startswith(f"{store.uri}/") else None)
    check_kernels(recipe, wheel)
    unpacked = folder / wheel.sha256
    unpack(path, unpacked)
    own = Own(wheel.sha256, tuple((name, wheel.provides[KERNELS][name]) for name in recipe.curation.kernels))
    make_own(own, unpacked)  # what cannot be loaded is told before anything is read
    return own, unpacked


def make_own(own: Own, unpacked: Path) -> list[Stage]:
    """A stage for each kernel, in the recipe's order.

    :raises RecipeError: if one cannot be loaded.
    """
    return [partial(_put_through, name, _load(name, target, unpacked)) for name, target in own.kernels]


def _load(name: str, target: str, unpacked: Path) -> Kernel:
    if str(unpacked) not in sys.path:
        sys.path.append(str(unpacked))  # behind all others: it may replace nothing
    importlib.invalidate_caches()
    module, _, attribute = target.partition(":")
    try:
        found: Any = importlib.import_module(module)
        origin = Path(found.__file__ or "")
        for part in attribute.split("."):
            found = getattr(found, part)
    except (Exception, SystemExit) as error:
        raise _refused(name, target, f"it cannot be loaded ({type(error).__name__}: {str(error)[:300]})") from error
    if unpacked.name not in origin.parts:  # the wheel's digest; another work folder may hold the same wheel
        raise _refused(name, target, f"another module has the name `{module}`: {origin}")
    if not callable(found):
        raise _refused(name, target, "it is no function")
    kernel: Kernel = found
    return kernel


def _refused(name: str, target: str, cause: str) -> RecipeError:
    return RecipeError(f"{name!r} of the {GROUPS[KERNELS]} ({target})", cause, "Fix it, and name the new wheel")


def _put_through(name: str, kernel: Kernel, passages: pa.RecordBatch) -> Staged:
    """A kernel over a batch of passages."""
    contents: list[str] = []
    ended: list[tuple[int, str, str]] = []
    counts: Counter[str] = Counter()
    columns = (passages.column(column).to_pylist() for column in ("row", "role", "content"))
    for row, group in groupby(zip(*columns, strict=True), lambda p: p[0]):
        given = [(role, content) for _, role, content in group]
        before = [content for _, content in given]
        texts, end = _answer(name, kernel, given)
        if end is not None:
            ended.append((row, *end))
        counts[f"own_{name}"] += texts != before
        contents += texts
    refused = refusals(*([end[at] for end in ended] for at in range(3)))  # type: ignore[arg-type]
    return Staged(passages.set_column(2, "content", strings(contents)), refused, +counts)


def _answer(name: str, kernel: Kernel, given: list[tuple[str | None, str]]) -> tuple[list[str], tuple[str, str] | None]:
    """The row's texts after the kernel, and (code, detail) if it ends. No detail quotes the row."""
    before = [content for _, content in given]
    try:
        found = kernel(list(given))
    except (Exception, SystemExit) as error:
        return before, (Reason.OWN_KERNEL, f"{name} raised {type(error).__name__}")
    if isinstance(found, str):
        if _WORD.fullmatch(found):
            return before, (Filtered.OWN_KERNEL, f"{name}: {found}")
        return before, (Reason.OWN_KERNEL, f"{name} gave a text, which is no word of lower-case letters and `_`")
    if not isinstance(found, list) or not all(type(text) is str for text in found):
        return before, (Reason.OWN_KERNEL, f"{name} gave {type(found).__name__}, not a list of texts")
    if len(found) != len(before):
        return before, (Reason.OWN_KERNEL, f"{name} gave {len(found)} texts for {len(before)}")
    if not all(map(_whole, found)):
        return before, (Reason.OWN_KERNEL, f"{name} gave half of a surrogate pair")
    return found, None


def _whole(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
