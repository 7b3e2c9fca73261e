"""Personal data and secrets leave the text before anything is computed from it: no key or card holds any."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final

import pyarrow as pa
import pyarrow.compute as pc

from curation.columns import strings
from curation.pii.contacts import emails, hosts
from curation.pii.hits import KINDS, Hit, settle
from curation.pii.masks import fingerprint, read_key, replaced
from curation.pii.numbers import ibans, numbers, phones, written
from curation.pii.prefilter import PATTERNS, Prefilter
from curation.pii.secrets import secrets
from curation.reasons import Filtered
from curation.stage import Stage, Staged, refusals
from curation.turns import hidden
from dropforge.errors import DropforgeError

#: Raised when what is found or how it is masked changes: part of the rules, so of the digest.
VERSION: Final = 1
#: A mask may set free what stood beside it: a text is looked through again until nothing is found.
_ROUNDS: Final = 8
_SHORT: Final = 1000  # characters of a text that is kept with its mask: whole rows would fill the memory


@dataclass(frozen=True)
class Pii:
    """What is looked for and what becomes of it. Part of the rules.

    :param kinds: some of `KINDS`, in their order.
    :param action: `mask`, or `drop-row`.
    :param key_env: the environment variable with the key of pseudonyms, or None for plain masks.
    :param key: the key's fingerprint, so that another key makes another version.
    """

    kinds: tuple[str, ...] = KINDS
    action: str = "mask"
    key_env: str | None = None
    key: str | None = None
    version: int = VERSION

    def facts(self) -> dict[str, Any]:
        """JSON values for the digest: the key's fingerprint, and not where the key is found."""
        return {"kinds": list(self.kinds), "action": self.action, "key": self.key, "version": self.version}


def make_pii(settings: Pii, env: Mapping[str, str] = os.environ) -> Stage:
    """The stage; called once per worker.

    :raises DropforgeError: if the key in this process's environment is not the one of the settings.
    """
    key = _key(settings, env)
    prefilter = Prefilter(settings.kinds)
    look = _finder(settings.kinds, key, prefilter)

    def stage(passages: pa.RecordBatch) -> Staged:
        texts, beside = passages.column("content"), passages.column("beside")
        hits: dict[int, list[Hit]] = {}
        masked = _masked(texts, settings.kinds, key, prefilter, hits)
        found = {place: [hit.kind for hit in some] for place, some in hits.items()}
        said: dict[int, str] = {}
        for place in pc.indices_nonzero(pc.is_valid(beside)).to_pylist():
            left, named, settled = _within(beside[place].as_py(), look)
            if named:
                said[place] = left
                found.setdefault(place, []).extend(named)
            if not settled:
                masked[place] = None
        rows = passages.column("row").to_pylist()
        kinds: dict[int, set[str]] = {}
        counts: dict[str, int] = {}
        for place, named in found.items():
            kinds.setdefault(rows[place], set()).update(named)
            for kind in named:
                counts[f"pii_{kind}"] = counts.get(f"pii_{kind}", 0) + 1
        if kinds:
            counts["pii_rows"] = len(kinds)
        stuck = {rows[place] for place in found if masked.get(place, "") is None}
        gone = sorted(kinds if settings.action == "drop-row" else stuck)
        details = [", ".join(kind for kind in KINDS if kind in kinds[row]) for row in gone]
        refused = refusals(gone, [Filtered.PERSONAL_DATA] * len(gone), details)
        if masked:
            whole = texts.to_pylist()
            contents = [masked[place] or "" if place in masked else text for place, text in enumerate(whole)]
            passages = passages.set_column(2, "content", strings(contents))
        if said:
            given = [said.get(place, text) for place, text in enumerate(beside.to_pylist())]
            passages = passages.set_column(3, "beside", strings(given))
        return Staged(passages, refused, counts)

    return stage


def make_scrub(settings: Pii, env: Mapping[str, str] = os.environ) -> Callable[[str], str]:
    """For the few texts that are no passage, such as a row's source or what a fault's detail quotes: with masks.

    :raises DropforgeError: as `make_pii` does.
    """
    look = _finder(settings.kinds, _key(settings, env), Prefilter(settings.kinds))
    return lambda text: look(text)[0] or ""  # what does not settle is no text to show


_Look = Callable[[str], tuple[str | None, tuple[str, ...]]]


def _within(said: str, look: _Look) -> tuple[str, list[str], bool]:
    """What a message says beside its content, with masks; the kinds of what it held; and whether all of it settled."""
    named: list[str] = []
    settled = True

    def scrub(text: str) -> str:
        nonlocal settled
        left, kinds = look(text)
        named.extend(kinds)
        settled = settled and left is not None
        return left or ""

    return hidden(said, scrub), named, settled


def _finder(kinds: Collection[str], key: bytes | None, prefilter: Prefilter) -> _Look:
    """One text at a time: with masks, or None if it does not settle, and the kinds of what it held."""

    def look(text: str) -> tuple[str | None, tuple[str, ...]]:
        found: dict[int, list[Hit]] = {}
        masked = _masked(strings([text]), kinds, key, prefilter, found)
        return masked.get(0, text), tuple(hit.kind for hit in found.get(0, ()))

    again = lru_cache(maxsize=4096)(look)  # sources, labels and keys come again and again
    return lambda text: again(text) if len(text) <= _SHORT else look(text)


def find(text: str, kinds: Collection[str] = KINDS) -> list[Hit]:
    """What a text holds, without overlaps, in order."""
    return settle(text, _detected(text, kinds, PATTERNS))


def _masked(
    texts: pa.Array, kinds: Collection[str], key: bytes | None, prefilter: Prefilter, found: dict[int, list[Hit]]
) -> dict[int, str | None]:
    """The texts that change, by place, and what was found in them; None for one that does not settle."""
    masked: dict[int, str | None] = {}
    places: Sequence[int] = range(len(texts))
    for _ in range(_ROUNDS):
        suspects = prefilter.suspects(texts)
        changed: list[tuple[int, str]] = []
        for index, groups in suspects:
            text = texts[index].as_py()
            hits = settle(text, _detected(text, kinds, groups))
            if hits:
                changed.append((places[index], replaced(text, hits, key)))
                found.setdefault(places[index], []).extend(hits)
        if not changed:
            return masked
        masked.update(changed)
        places, texts = [place for place, _ in changed], strings([text for _, text in changed])
    return masked | dict.fromkeys(places)


def _detected(text: str, kinds: Collection[str], groups: Collection[str]) -> Iterator[Hit]:
    """All hits. :param groups: the groups of the prefilter that may hold something."""
    if "secret" in kinds:
        yield from secrets(text, groups)
    if "iban" in kinds and "iban" in groups:
        yield from ibans(text)
    if not {"card", "national_id"}.isdisjoint(kinds) and "digits" in groups:
        yield from numbers(text, "card" in kinds, "national_id" in kinds)
    if "national_id" in kinds and "written" in groups:
        yield from written(text)
    if "email" in kinds and "email" in groups:
        yield from emails(text)
    if "ip" in kinds and "ip" in groups:
        yield from hosts(text)
    if "phone" in kinds and "digits" in groups:
        yield from phones(text)


def _key(settings: Pii, env: Mapping[str, str]) -> bytes | None:
    if settings.key_env is None:
        return None
    key = read_key(settings.key_env, env)
    if fingerprint(key) != settings.key:
        raise DropforgeError(
            f"environment variable {settings.key_env}",
            "this worker's key is not the one that curation began with",
            "Give all workers the same key",
        )
    return key
