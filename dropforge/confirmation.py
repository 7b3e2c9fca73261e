"""A person's word on whether a run may begin: kept in the ledger, so that it holds when tasks are cleared.

A run's name follows from recipe, data and code, so a yes is for exactly that work.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from dropforge import layout
from dropforge.approval import said
from dropforge.json_objects import read_as, typed
from dropforge.store import MissingObjectError, Store


@dataclass(frozen=True)
class Word:
    """:param by: the user; None if the deadline passed. :param at: when, as ISO 8601 in UTC."""

    start: bool
    by: str | None
    at: str

    @property
    def told(self) -> str:
        return said(self.start, self.by, self.at)


def read(store: Store, run: str) -> Word | None:
    """The last word; None if there is none."""

    def word(kept: Mapping[str, Any]) -> Word:
        return typed(Word(kept["start"], kept["by"], str(kept["at"])))

    try:
        return read_as(store, layout.confirmation_key(run), word, "Delete it, and answer again")
    except MissingObjectError:
        return None


def write(store: Store, run: str, word: Word, plan: Mapping[str, Any]) -> None:
    """Keep a word, with what it was said to; a later one takes its place."""
    body = json.dumps({**asdict(word), "plan": dict(plan)}, indent=1, ensure_ascii=False)
    store.put(layout.confirmation_key(run), body.encode())
