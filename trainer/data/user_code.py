"""A user's own functions in the training: loaded from the wheel that the recipe names, and called with plain values.

What they are given are copies, and generators of random numbers are as before once a metric or callback has returned:
of a training they change only what they return. What one raises ends the run with its name; `sys.exit` too.
"""

from __future__ import annotations

import copy
import importlib
import importlib.util
import math
import random
import sys
import tempfile
import traceback
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

import numpy as np

from dropforge.errors import RecipeError
from dropforge.wheel import ANSWERS, CALLBACKS, FIGURES, GROUPS, KERNELS, ROWS, Wheel, fetch, inspect, unpack
from trainer.config import Code, Generation
from trainer.data.rows import Row
from trainer.scores import SCORES

_UNPACKED: Final = "unpacked"
_TWICE: Final = 16  # rows that row functions are given twice, to see that they return the same
_SAID: Final = {"role", "content"}
_ROW: Final = ("messages", "text", "label", "source")

Function = Callable[..., Any]
Scorer = Callable[[str, str], float]


class UserCodeError(RecipeError):
    """A user's function raised, or returned what it may not."""


@dataclass
class UserCode:
    """The functions of a wheel, by name; none without one.

    :param wheel: what they came from. :param functions: by group of `dropforge.wheel`, in the order of their names.
    """

    wheel: Wheel | None = None
    functions: Mapping[str, Mapping[str, Function]] = field(default_factory=dict)
    _seen: int = 0

    def of(self, group: str) -> Mapping[str, Function]:
        return self.functions.get(group, {})

    @property
    def rows(self) -> Callable[[Row], Row] | None:
        """What changes a row before anything reads it; None if nothing does."""
        return self._change if self.of(ROWS) else None

    @property
    def rows_facts(self) -> dict[str, Any] | None:
        """What rows depend on besides the dataset, as JSON values; None if on nothing."""
        return {"wheel": self.wheel.sha256, "functions": list(self.of(ROWS))} if self.wheel and self.of(ROWS) else None

    @property
    def scorers(self) -> Mapping[str, Scorer]:
        """Metrics of an answer and its reference, ours and the user's."""
        return {**SCORES, **{name: self._scorer(name) for name in self.of(ANSWERS)}}

    @property
    def figures(self) -> Callable[[Mapping[str, Any]], dict[str, float]] | None:
        """The user's metrics of an evaluation, from what was counted in it (`trainer.measure`); None without any."""
        return self._figures if self.of(FIGURES) else None

    def _figures(self, facts: Mapping[str, Any]) -> dict[str, float]:
        return {name: self._number(FIGURES, name, copy.deepcopy(dict(facts))) for name in self.of(FIGURES)}

    def call_back(self, event: str, facts: Mapping[str, Any]) -> None:
        """Tell all callbacks of an event. :param facts: JSON values."""
        for name in self.of(CALLBACKS):
            self._call(CALLBACKS, name, event, copy.deepcopy(dict(facts)))

    def check_metrics(self, asked: Generation | None) -> None:
        """:raises RecipeError: if an answer's metric is asked for that nobody has."""
        for name in asked.metrics if asked else ():
            if name not in SCORES and name not in self.of(ANSWERS):
                there = ", ".join([*SCORES, *self.of(ANSWERS)])
                raise RecipeError(
                    "recipe key `evaluate.generation.metrics`", f"there is no metric {name!r}", f"There are {there}"
                )

    def _scorer(self, name: str) -> Scorer:
        return lambda answer, reference: self._number(ANSWERS, name, answer, reference)

    def _number(self, group: str, name: str, *values: Any) -> float:
        found = self._call(group, name, *values)
        if isinstance(found, bool) or not isinstance(found, int | float) or not math.isfinite(found):
            raise self._wrong(group, name, f"it returned {found!r:.80}, which is no finite number")
        return float(found)

    def _change(self, row: Row) -> Row:
        """A row as all row functions leave it, one after another."""
        changed = self._changed(row)
        if self._seen < _TWICE:
            self._seen += 1
            if self._changed(row) != changed:
                raise self._wrong(ROWS, next(iter(self.of(ROWS))), f"given row {row.key.hex()} twice, the rows differ")
        return changed

    def _changed(self, row: Row) -> Row:
        for name in self.of(ROWS):
            messages = None if row.messages is None else row.said
            given = {"messages": messages, "text": row.text, "label": row.label, "source": row.source}
            found = self._call(ROWS, name, given, about=f"row {row.key.hex()}: ")
            problem = _problem(found)
            if problem is not None:
                raise self._wrong(ROWS, name, f"row {row.key.hex()}: {problem}")
            said = found["messages"] or ()
            more = tuple({key: value for key, value in item.items() if key not in _SAID} for item in said)
            row = replace(
                row,
                messages=None
                if found["messages"] is None
                else tuple((item["role"], item["content"]) for item in found["messages"]),
                beside=more if any(more) else (),
                text=found["text"],
                label=found["label"],
                source=found["source"],
            )
        return row

    def _call(self, group: str, name: str, *values: Any, about: str = "") -> Any:
        # What rows are made of is made before any generator is seeded, and there are millions of them.
        with nullcontext() if group == ROWS else _generators_as_before():
            try:
                return self.of(group)[name](*values)
            except (Exception, SystemExit) as error:
                frame = traceback.extract_tb(error.__traceback__)[-1]
                at = f"{Path(frame.filename).name}, line {frame.lineno}"
                cause = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
                raise self._wrong(group, name, f"{about}it raised {cause} ({at})") from error

    def _wrong(self, group: str, name: str, cause: str) -> UserCodeError:
        assert self.wheel is not None
        target = self.wheel.provides[group][name]
        return UserCodeError(
            f"{name!r} of the {GROUPS[group]} ({target}) in {self.wheel.name}",
            cause,
            "Fix it, and name the new wheel with its digest",
        )


def bring_code(code: Code | None, folder: Path) -> UserCode:
    """Fetch a wheel into a folder, unpack it there, and load its functions.

    :raises RecipeError: if it is not there, is another one, may not be used, or cannot be imported.
    """
    if code is None:
        return UserCode()
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / code.wheel.rpartition("/")[2]
    fetch(code.wheel, code.sha256, path)
    unpack(path, folder / _UNPACKED)
    return load_code(code, folder)


@contextmanager
def user_code(code: Code | None) -> Iterator[UserCode]:
    """A wheel's functions, for as long as what uses them; see `bring_code`."""
    with tempfile.TemporaryDirectory(prefix="dropforge-code-") as name:
        yield bring_code(code, Path(name))


def load_code(code: Code | None, folder: Path) -> UserCode:
    """The functions of a wheel that `bring_code` left in a folder."""
    if code is None:
        return UserCode()
    path = folder / code.wheel.rpartition("/")[2]
    wheel, unpacked = inspect(path, path.name), (folder / _UNPACKED).resolve()
    if wheel.sha256 not in _imported:
        _check_names(wheel, unpacked)
    if str(unpacked) not in sys.path:
        sys.path.append(str(unpacked))  # behind all others: it may replace nothing
        importlib.invalidate_caches()
    if wheel.sha256 not in _imported:
        _imported[wheel.sha256] = {
            group: {name: _load(wheel, group, name, unpacked) for name in wheel.names(group)}
            for group in GROUPS
            if group != KERNELS  # those are the curation's
        }
    return UserCode(wheel, _imported[wheel.sha256])


_imported: dict[str, Mapping[str, Mapping[str, Function]]] = {}  # by digest: a process imports a module once


def _check_names(wheel: Wheel, unpacked: Path) -> None:
    """:raises RecipeError: if a module of that name is here already, which would be taken in its place."""
    targets = (target for group in wheel.provides.values() for target in group.values())
    for top in sorted({target.partition(":")[0].partition(".")[0] for target in targets}):
        try:
            spec = importlib.util.find_spec(top)
            taken = spec is not None and unpacked not in Path(spec.origin or "/").resolve().parents
        except ValueError:  # a module that knows no place of its own, as __main__
            taken = True
        if taken:
            raise RecipeError(
                "recipe key `code.wheel`",
                f"{wheel.name} has its functions in a module {top!r}, and there is another one of that name here",
                "Give the package a name of its own",
            )


def _load(wheel: Wheel, group: str, name: str, unpacked: Path) -> Function:
    target = wheel.provides[group][name]
    module, _, attributes = target.partition(":")
    thing = f"{name!r} of the {GROUPS[group]} ({target}) in {wheel.name}"
    try:
        found: Any = importlib.import_module(module)
        if unpacked not in Path(found.__file__ or "/").resolve().parents:
            raise ImportError(f"{module} was imported from {found.__file__}")
        for attribute in attributes.split("."):
            found = getattr(found, attribute)
    except (Exception, SystemExit) as error:
        cause = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        mend = "Fix it; what it imports besides must be in the trainer's image, because nothing is installed"
        raise UserCodeError(thing, f"it cannot be imported ({cause})", mend) from error
    if not callable(found):
        raise UserCodeError(thing, f"it is no function, but of type {type(found).__name__}", "Name a function")
    return found  # type: ignore[no-any-return]


def _problem(found: Any) -> str | None:
    """What is wrong with what a row function returned; None if nothing is."""
    if not isinstance(found, Mapping) or set(found) != set(_ROW):
        return f"it returned {found!r:.80}, which is no mapping of {', '.join(_ROW)}"
    messages, text, label = found["messages"], found["text"], found["label"]
    if (messages is None) == (text is None):
        return "it returned a row with both or none of messages and text"
    if messages is not None and (
        not isinstance(messages, list | tuple)
        or not messages
        or not all(isinstance(item, Mapping) and set(item) >= _SAID for item in messages)
        or not all(isinstance(item[key], str) for item in messages for key in _SAID)
    ):
        return "it returned messages that are no list of role and content"
    if not (isinstance(text, str | None) and isinstance(label, str | None) and isinstance(found["source"], str)):
        return "it returned a text, label or source that is none"
    return None


@contextmanager
def _generators_as_before() -> Iterator[None]:
    """Undo what happens to the generators of random numbers: dropout goes on as if nothing had been called."""
    torch = sys.modules.get("torch")  # whoever has not imported it draws nothing from it
    python, numbers = random.getstate(), np.random.get_state()
    own = torch.get_rng_state() if torch is not None else None
    devices = torch.cuda.get_rng_state_all() if torch is not None and torch.cuda.is_initialized() else []
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numbers)
        if torch is not None and own is not None:
            torch.set_rng_state(own)
            if devices:
                torch.cuda.set_rng_state_all(devices)
