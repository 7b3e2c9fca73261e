"""Which dataset versions hold a row or the rows of a group, as far as the bucket still tells."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final, NamedTuple

import pyarrow.compute as pc

from curation import increments
from curation.pii import make_scrub
from curation.plan import make_rules
from curation.spellings import names_so_far
from curation.stored_rows import stored_rows
from dropforge import layout, lineage
from dropforge.dataset import SPLITS, Manifest, read_manifest
from dropforge.errors import DataError, DropforgeError
from dropforge.recipes.load import build_recipe
from dropforge.store import MissingObjectError, Store

#: Rules by which rows stay or go to a side, whatever they are called.
_CHOOSING: Final = frozenset(
    {"scope", "eval_per_million", "split_salt", "exact_duplicates", "near", "prefer", "label_conflicts"}
    | {"max_rows_per_source", "limit_rows", "limit_bytes"}
)


class Held(NamedTuple):
    """Versions of any family. :param unsure: of these nobody can tell any more: their shards are gone, or the key of
    their masks is, or the ledger that would tell what other rules made of the row."""

    holding: tuple[Manifest, ...]
    unsure: tuple[Manifest, ...] = ()


def held(store: Store, family: str, *, key: bytes | None = None, group: str | None = None) -> Held:
    """All versions that train on or evaluate with such a row, and those that were made of their shards.

    :param key: its content key; versions of other rules, which gave it another one, are found by the places of the row
        and its copies. :param group: or its group; where a mask stands for its name in the rows, versions with
        rows of other groups that have the same mask are among them.
    :raises DataError: if a manifest of the family cannot be read.
    """
    every = list(_manifests(store, family))
    names = {} if group is None else _names(store, family, group)
    look = _Look(store, key, group, names, every)
    if key is not None:
        look.translate(family, every)
    told = [(version, look.holds(version)) for version in every if version.family == family]
    holding = [version for version, answer in told if answer]
    unsure = [version for version, answer in told if answer is None]
    sure = _with_derived(holding, every, look.shard)
    perhaps = _with_derived([*sure, *unsure], every, lambda _: None)
    return Held(tuple(sure), tuple(version for version in perhaps if version not in sure))


def groups(store: Store, manifest: Manifest) -> set[str]:
    """Names of the groups in a version's rows, as they stand there."""
    found: set[str] = set()
    for shard in manifest.shards:
        with suppress(MissingObjectError):
            found |= {name for name in read_column(store, shard.key, None, "group") if name is not None}
    return found


def read_column(store: Store, key: str, wanted: pc.Expression | None, column: str) -> list[Any]:
    """A column of the rows of a Parquet object that are wanted. :raises MissingObjectError: if it is gone."""
    return [row[column] for row in stored_rows(store, key, wanted, [column])]


class _Look:
    """Looks into versions, each object once."""

    def __init__(
        self, store: Store, key: bytes | None, group: str | None, names: dict[str, str], every: Sequence[Manifest]
    ) -> None:
        self._store, self._group, self._names = store, group, names
        self._in_shards: dict[str, bool | None] = {}
        self._in_ledgers: dict[str, bool | None] = {}
        self._keys = {key} if key is not None else set()
        self._rules: list[dict[str, Any]] = []  # by which the row has one of these keys, if it is there at all
        self._certain: set[str] = set()  # ledgers in which it has none but these, whatever their rules are
        if group is not None:  # what is known of its rows tells of versions whose shards are gone
            for shard in {shard.key for version in every for shard in version.shards}:
                self.shard(shard)

    def translate(self, family: str, every: Sequence[Manifest]) -> None:
        """Add the keys that the rules of other versions gave to the rows at the places of this one and its copies."""
        head = increments.read_head(self._store, family)
        self._rules = [_naming(head.manifest)] if head else []
        versions = [version for version in every if version.family == family]
        placed = {version.digest: self._placed(version, pc.field("key").isin(list(self._keys))) for version in versions}
        self._rules += [_naming(version) for version in versions if placed[version.digest]]
        places = {place for found in placed.values() for place in found or ()}  # in which bytes, and where in them
        looked = {
            content
            for version in versions
            if placed[version.digest] is not None and _naming(version) in self._rules
            for content in _contents(version)
        }
        contents, here = {content for content, _ in places}, pc.field("position").isin([at for _, at in places])
        for version in versions:
            if looked.issuperset(_contents(version)):  # no copy is in it beside these places
                self._certain.add(version.files["ledger"])
            if placed[version.digest] or contents.isdisjoint(_contents(version)):
                continue
            found = self._placed(version, here) or {}
            if keys := {key for place, key in found.items() if place in places and key is not None}:
                self._keys |= keys
                self._rules.append(_naming(version))

    def _placed(self, version: Manifest, wanted: pc.Expression) -> dict[tuple[str, int], bytes | None] | None:
        """Keys of the rows of a version's own ledger that are wanted, by their place; None if it is gone."""
        contents = {item["key"]: item["content"] for item in version.inputs}
        try:
            rows = stored_rows(self._store, version.files["ledger"], wanted, ["file", "position", "key"])
        except MissingObjectError:
            return None
        return {(contents[row["file"]], row["position"]): row["key"] for row in rows if row["file"] in contents}

    def holds(self, version: Manifest) -> bool | None:
        """None if nobody can tell."""
        ledgers = [step.files["ledger"] for step in version.steps] or [version.files["ledger"]]
        if self._group is None:
            told = [self._ledger(ledger) for ledger in ledgers]
            known = _naming(version) in self._rules or self._certain.issuperset(ledgers)
            if True in told or (None not in told and known):
                return True in told
        pieces = [self.shard(shard.key) for split in SPLITS for shard in version.shards if shard.split == split]
        if True in pieces:
            return True
        pii = version.rules.get("pii")
        if self._group is None:
            other = _naming(version) not in self._rules
        else:
            other = pii is not None and _facts(pii) not in self._names
        if None not in pieces and not other:
            return False
        return True if True in [self._ledger(ledger) for ledger in ledgers] else None

    def shard(self, key: str) -> bool | None:
        if key not in self._in_shards:
            if self._group is None:
                wanted = pc.field("key").isin(list(self._keys))
            else:
                wanted = pc.field("group").isin([*names_so_far(self._group), *self._names.values()])
            self._in_shards[key] = self._found(key, wanted, keep=self._group is not None)
        return self._in_shards[key]

    def _ledger(self, key: str) -> bool | None:
        if key not in self._in_ledgers:
            wanted = pc.field("key").isin(list(self._keys)) & pc.field("end").isin(list(SPLITS))
            self._in_ledgers[key] = self._found(key, wanted) if self._keys else False
        return self._in_ledgers[key]

    def _found(self, key: str, wanted: pc.Expression, *, keep: bool = False) -> bool | None:
        try:
            keys = read_column(self._store, key, wanted, "key")
        except MissingObjectError:
            return None
        if keep:
            self._keys.update(keys)
        return bool(keys)


def _naming(version: Manifest) -> dict[str, Any]:
    """The rules that a row's key may depend on."""
    return {name: value for name, value in increments.shared(version.rules).items() if name not in _CHOOSING}


def _contents(version: Manifest) -> set[str]:
    """Of the files of the drop that a version added."""
    return {item["content"] for item in version.inputs}


def _with_derived(
    versions: Iterable[Manifest], every: Sequence[Manifest], holds: Callable[[str], bool | None]
) -> list[Manifest]:
    """These and what `data.source.dataset` made of them. :param holds: whether a shard of `versions` does."""
    found = list(versions)
    read = {item["content"] for version in every for item in version.inputs}
    shards = {(shard.sha256, shard.key) for version in found for shard in version.shards}
    tainted = {f"sha256:{sha}" for sha, key in shards if f"sha256:{sha}" in read and holds(key) is not False}
    digests: set[str] = set()
    while True:
        more = [
            version
            for version in every
            if version not in found
            and (
                any(item["content"] in tainted for item in version.inputs)
                or any(step.digest in digests for step in version.steps)
            )
        ]
        if not more:
            return found
        found += more
        digests |= {version.digest for version in more}
        tainted |= {f"sha256:{shard.sha256}" for version in more for shard in version.shards}


def _manifests(store: Store, family: str) -> Iterator[Manifest]:
    for info in store.list("datasets/"):
        if not layout.is_manifest(info.key):
            continue
        try:
            yield read_manifest(store, info.key)
        except DataError:
            if info.key.startswith(f"datasets/{family}/"):
                raise


def _names(store: Store, family: str, group: str) -> dict[str, str]:
    """What a group is called in shards, by the rules of masks that the family's recipes, old and new, had."""
    head = increments.read_head(store, family)
    recipes = [head.recipe] if head else []
    recipes += [spec.recipe for spec in lineage.runs(store).values() if spec.family == family]
    found: dict[str, str] = {}
    for values in recipes:
        with suppress(DropforgeError):  # an old recipe or a key that is gone: its versions are told as unsure
            if (pii := make_rules(build_recipe(dict(values))).pii) is not None:
                found[_facts(pii.facts())] = make_scrub(pii, os.environ)(group)
    return found


def _facts(pii: Mapping[str, Any]) -> str:
    return json.dumps(pii, sort_keys=True)
