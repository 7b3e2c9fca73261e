"""Versions that hold the rows of all drops of a family: which drop is added to which version.

A version is a fold over drops: each is settled against what the ones before it left (`curation.state`), and makes a
version of its own, whose digest covers that of its parent. The same drops in the same order give the same digests,
whether they came one by one or are all curated again.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Final

import pyarrow.compute as pc

from curation.page import first_of, visible
from curation.reasons import Filtered
from curation.stored_rows import stored_rows
from curation.task import Rules
from dropforge import layout, ledger
from dropforge.dataset import SPLITS, Manifest, Step, read_manifest
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError, DropforgeError
from dropforge.json_objects import UnreadableError, read_object
from dropforge.store import MissingObjectError, Store

#: What the rules of a version say beyond the recipe.
_OWN: Final = frozenset({"exact", "parent", "drop", "forgotten", "sides_of"})
#: A drop that loses one row in so many is told, and at most so many ends by which it does.
_LOST: Final = 20
_ENDS: Final = 3
#: Lines that are told of drops that were curated again, of each and of all.
_OF_A_DROP: Final = 5
_OF_DROPS: Final = 20
#: Those that say on which side a row stands.
_SPLIT: Final = ("eval_per_million", "split_salt")


@dataclass(frozen=True)
class Head:
    """The newest version of a family, and the recipe that it was made with. :param etag: of the pointer to it."""

    manifest: Manifest
    recipe: Mapping[str, Any]
    etag: str


@dataclass(frozen=True)
class Plan:
    """What is to be done.

    :param parent: the version that drops are added to, or None for an empty one. :param drops: in their order.
    :param why: in a sentence, if drops that were curated before are curated again.
    """

    parent: Manifest | None
    drops: tuple[Drop, ...]
    rules: Rules
    why: str = ""


def read_head(store: Store, family: str) -> Head | None:
    """The family's newest version, or None. :raises DataError: if the pointer to it cannot be read."""
    key = layout.head_key(family)
    try:
        while True:
            info = store.stat(key)
            if info is None:
                return None
            try:
                values = read_object(store, key, etag=info.etag)
                break
            except DropforgeError:  # it may have moved meanwhile
                now = store.stat(key)
                if now is not None and now.etag == info.etag:
                    raise
        manifest = read(store, family, values["digest"])
        return Head(manifest, dict(values["recipe"]), info.etag)
    except (ValueError, KeyError, TypeError) as error:
        mend = "Restore it from the bucket's versions; it names the newest version with `curation.scope: family`"
        cause = error.cause if isinstance(error, UnreadableError) else f"it cannot be read ({error!r})"
        raise DataError(f"object {key}", cause, mend) from error


def read(store: Store, family: str, digest: str) -> Manifest:
    """:raises DataError: if the version is not there."""
    try:
        return read_manifest(store, layout.manifest_key(family, digest))
    except MissingObjectError as error:
        mend = "Restore it from the bucket's versions, or curate the drops under another family"
        raise DataError(f"dataset {family}/{digest[:12]}", "its manifest is missing", mend) from error


def move(store: Store, family: str, head: Head | None, made: Manifest, recipe: Mapping[str, Any]) -> bool:
    """Make a version the newest one; False if another was faster."""
    data = json.dumps({"digest": made.digest, "recipe": recipe}, sort_keys=True, ensure_ascii=False).encode()
    key = layout.head_key(family)
    if head is None:
        return store.put_if_absent(key, data)
    return head.manifest.digest == made.digest or store.put_if_match(key, data, head.etag)


def aside(store: Store, manifest: Manifest) -> bool:
    """Whether the last drop of a version is not in the newest one, because the gate refused it."""
    if not manifest.steps:
        return False
    head = read_head(store, manifest.family)
    return head is None or manifest.steps[-1].drop not in {step.drop for step in head.manifest.steps}


def check_unforgotten(store: Store, family: str) -> None:
    """:raises DataError: if rows of the family are forgotten, which a version of one drop would have again."""
    head = read_head(store, family)
    if head is not None and (names := head.manifest.rules.get("forgotten", ())):
        raise DataError(
            "recipe key `curation.scope`",
            f"{len(names):,} rows or groups of family {family} are forgotten, and a drop's own version has them again",
            "Set it to `family`, as in the recipe of the version that forgot them",
        )


def plan(store: Store, head: Head | None, rules: Rules, drop: Drop | None, *, again: bool = False) -> Plan:
    """What has to be curated for a version with the family's drops and this one.

    :param drop: None for the drops that are there.
    """
    new: tuple[Drop, ...] = () if drop is None else (drop,)
    if head is None:
        return Plan(None, new, rules)
    before = head.manifest
    # Both: another forgetting may have become the newest version meanwhile.
    forgotten = tuple(sorted({*rules.forgotten, *before.rules.get("forgotten", ())}))
    same = shared(before.rules) == shared(rules.facts())
    # Other rules keep the sides too, unless they are about these: an old row never changes its side.
    split = all(before.rules.get(name) == rules.facts().get(name) for name in _SPLIT)
    anew = rules.sides_of or (split and not same)
    sides_of = before.digest if anew else (before.rules.get("sides_of", "") if same else "")
    rules = replace(rules, forgotten=forgotten, sides_of=sides_of)
    known = {step.drop for step in before.steps}
    new = tuple(one for one in new if one.id not in known)
    if again and same:
        return Plan(None, (*drops(store, before), *new), rules)
    if same and tuple(before.rules.get("forgotten", ())) == forgotten:
        return Plan(before, new, rules)
    changed = sorted(name for name in _names(before.rules, rules.facts()))
    why = f"all {len(before.steps)} drops of the family are curated again, because {', '.join(changed)} changed"
    return Plan(None, (*drops(store, before), *new), rules, why)


def shared(rules: Mapping[str, Any]) -> dict[str, Any]:
    """What the recipe says of a version's rules."""
    return {name: value for name, value in rules.items() if name not in _OWN}


def _names(before: Mapping[str, Any], after: Mapping[str, Any]) -> set[str]:
    names = (before.keys() | after.keys()) - (_OWN - {"forgotten"})
    return {name for name in names if before.get(name) != after.get(name)}


def drops(store: Store, manifest: Manifest) -> tuple[Drop, ...]:
    """The drops of a version, as they were read."""
    return tuple(step_drop(store, manifest.family, step) for step in manifest.steps)


def step_drop(store: Store, family: str, step: Step) -> Drop:
    """The drop that a version adds to its parent."""
    # Of a drop that was read under a limit the version names only the files that were within it.
    with suppress(MissingObjectError):
        known = ledger.read(store, family, step.drop)
        if known.prefix == step.prefix:
            return known
    return last_drop(read(store, family, step.digest), step.prefix, step.name, step.drop)


def last_drop(manifest: Manifest, prefix: str, name: str = "", drop_id: str = "") -> Drop:
    """The last drop of a version, as it was read. :param prefix: where its files lie."""
    files = tuple(
        DropFile(**{field: item[field] for field in ("key", "size", "content", "etag", "version_id")})
        for item in manifest.inputs
    )
    return Drop(family=manifest.family, drop=name, id=drop_id, bucket="", files=files, root=prefix)


def sums(parent: Manifest | None, ends: Mapping[str, int]) -> dict[str, int]:
    """Counts of a version. :param ends: of the rows of the drop that it adds to its parent."""
    counts = Counter(parent.counts if parent else {})
    counts.update(ends)
    if parent is None:
        return dict(ends)
    return {name: counts[name] for name in ("input", *sorted(counts)) if counts[name] or name in SPLITS}


def on_card(manifest: Manifest, earlier: Sequence[Step], name: str, ends: Mapping[str, int]) -> dict[str, Any]:
    """What the card of a drop says of the version that it made. :param ends: counts of the drop's own rows."""
    return {
        "parent": manifest.parent,
        "drops": [*({"name": old.name, "counts": dict(old.counts)} for old in earlier), {"name": name, "counts": ends}],
        "counts": dict(manifest.counts),
        "shards": len(manifest.shards),
    }


def renamed(store: Store, before: Manifest, made: Manifest) -> set[str]:
    """Names (hexadecimal content keys) by which another version of the program knows rows that are forgotten."""
    if before.rules.get("version") == made.rules.get("version"):
        return set()
    return names_of(moved(store, before, made, pc.field("end") == Filtered.FORGOTTEN))


def names_of(rows: Iterable[Mapping[str, Any]]) -> set[str]:
    """By which rows of a ledger can be forgotten, without those that are."""
    return {row["key"].hex() for row in rows if row["end"] != Filtered.FORGOTTEN and row["key"]}


def moved(store: Store, before: Manifest, made: Manifest, wanted: pc.Expression) -> Iterator[dict[str, Any]]:
    """Rows of a version's ledgers that stand where those are that are wanted in the ledgers of another one.

    They are found by their places in the drops' files, where both ledgers are there.
    """
    later = {step.drop: step for step in made.steps}
    for step in before.steps:
        if step.drop in later:
            with suppress(MissingObjectError):
                yield from _at(store, step, later[step.drop], wanted)


def _at(store: Store, step: Step, later: Step, wanted: pc.Expression) -> Iterator[dict[str, Any]]:
    """:raises MissingObjectError: if a ledger is gone."""
    placed = ["file", "position", "key", "end"]
    places = {(row["file"], row["position"]) for row in stored_rows(store, step.files["ledger"], wanted, placed)}
    if places:
        there = pc.field("position").isin(sorted({position for _, position in places}))
        for row in stored_rows(store, later.files["ledger"], there, placed):
            if (row["file"], row["position"]) in places:
                yield row


def emptied(before: Step | None, ends: Mapping[str, int]) -> list[str]:
    """What is told of a drop that loses one row in 20 or more by other rules. :param before: what it was."""
    then = before.counts if before is not None else {}
    held, left = (sum(one.get(split, 0) for split in SPLITS) for one in (then, ends))
    more = Counter(ends) - Counter(then)
    lost = held - left - more.pop(Filtered.FORGOTTEN, 0)  # which somebody asked for
    if not held or lost * _LOST < held:
        return []
    gone = [(end, rows) for end, rows in more.most_common() if end not in ("input", *SPLITS)][:_ENDS]
    why = f": {', '.join(f'{end} {rows:,}' for end, rows in gone)}" if gone else ""
    return [f"by the rules of now {left:,} of {held:,} rows of the version before are left{why}"]


def told_anew(store: Store, before: Sequence[Step], after: Sequence[Step]) -> list[str]:
    """What cards of drops that were curated again tell, and those of before did not."""
    now = {step.drop: step for step in after}
    lines: list[str] = []
    for old in before:
        if (new := now.get(old.drop)) is not None and new.files["card_json"] != old.files["card_json"]:
            known = set(_warnings(store, old))
            more = [line for line in _warnings(store, new) if line not in known]
            told = [f"drop {old.name}: {line}" for line in first_of(more, _OF_A_DROP, "lines on its card")]
            lines += map(visible, told)  # sources and labels of strangers, which go to the log
    return first_of(lines, _OF_DROPS, "such lines on the cards of its drops")


def _warnings(store: Store, step: Step) -> list[str]:
    """Nothing where the card is gone, or is none."""
    with suppress(DropforgeError):
        lines = read_object(store, step.files["card_json"]).get("warnings")
        return [str(line) for line in lines] if isinstance(lines, list) else []
    return []


def forgotten_places(store: Store, steps: Iterable[Step]) -> dict[str, frozenset[int]]:
    """Where rows of a drop stand that ended as forgotten, by file. :param steps: of the drop, in versions before."""
    found: dict[str, set[int]] = {}
    for step in steps:
        if step.counts.get(Filtered.FORGOTTEN, 0):
            with suppress(MissingObjectError):
                for row in stored_rows(store, step.files["ledger"], _forgotten(), ["file", "position"]):
                    found.setdefault(row["file"], set()).add(row["position"])
    return {file: frozenset(positions) for file, positions in found.items()}


def check_forgotten(store: Store, before: Manifest, made: Manifest, asked: Collection[str]) -> None:
    """Rows are forgotten by what the rules made of them: other rules can make something else.

    :param asked: names that are to be forgotten now, beside those of before.
    :raises DataError: if rows that ended as forgotten would be learned, or nothing is what was asked for now; the
        version is not the newest one then.
    """
    was = before.counts.get(Filtered.FORGOTTEN, 0)
    versions = and_before(store, before)
    if back := sum(_brought_back(store, steps_of(versions, step.drop), made) for step in before.steps):
        raise DataError(
            f"family {before.family}",
            f"{max(was, back)} rows are forgotten, and other rules would bring {back} of them back",
            "Take the rules of before, or replace the drops that hold those rows and begin another family",
        )
    more = set(asked) - set(before.rules.get("forgotten", ()))
    # Whatever else changed, as the kernel's version does. A drop that came meanwhile does not count.
    known = {step.drop for step in before.steps}
    now = sum(step.counts.get(Filtered.FORGOTTEN, 0) for step in made.steps if step.drop in known)
    if more and now == was:
        mend = "Name it as the rows do, before masks and with its case, or a row by its place as on the card"
        raise DataError(f"family {before.family}", "no row of its drops is what is to be forgotten", mend)


def _brought_back(store: Store, steps: Sequence[Step], made: Manifest) -> int:
    """How many rows of a drop ended as forgotten and would be learned in another version.

    What other rules filter or cannot read does not come back. Where a ledger or a place is gone, numbers count.

    :param steps: of the drop in the versions before, the newest first.
    """
    step, *older = steps
    later = next((one for one in made.steps if one.drop == step.drop), None)
    if later and later.files["ledger"] == step.files["ledger"]:
        return 0
    then, now = (one.counts.get(Filtered.FORGOTTEN, 0) if one else 0 for one in (step, later))
    if later is None:
        return then
    try:
        rows = [*_at(store, step, later, _forgotten())] if then else []
    except MissingObjectError:
        return max(0, then - now)
    back = _learned(rows)
    missing = then - len(rows)
    # Rules between may have filtered them, and then they no longer ended as forgotten.
    for earlier in older:
        if earlier.counts.get(Filtered.FORGOTTEN, 0):
            with suppress(MissingObjectError):
                back |= _learned(_at(store, earlier, later, _forgotten()))
    return len(back) + max(0, missing)


def _learned(rows: Iterable[Mapping[str, Any]]) -> set[tuple[str, int]]:
    """Places of a ledger's rows that are neither forgotten nor filtered."""
    return {(row["file"], row["position"]) for row in rows if row["key"] and row["end"] != Filtered.FORGOTTEN}


def _forgotten() -> pc.Expression:
    """Rows of a ledger that ended so. Not made at import: comparing loads pandas."""
    return pc.field("end") == Filtered.FORGOTTEN


def lineage(store: Store, version: Manifest) -> Iterator[Manifest]:
    """Versions whose sides were kept, by this one and by each in turn. :raises DataError: if one is gone."""
    seen = {version.digest}
    while (digest := version.rules.get("sides_of")) and digest not in seen:
        seen.add(digest)
        version = read(store, version.family, digest)
        yield version


def and_before(store: Store, version: Manifest) -> list[Manifest]:
    """A version and those whose sides were kept by it, the newest first, as far back as they are there."""
    found = [version]
    with suppress(DataError):
        for earlier in lineage(store, version):
            found.append(earlier)  # one by one: what came before one that is gone counts
    return found


def steps_of(versions: Iterable[Manifest], drop: str) -> list[Step]:
    """What a drop was in versions, each ledger once."""
    found: dict[str, Step] = {}
    for version in versions:
        for step in version.steps:
            if step.drop == drop:
                found.setdefault(step.files["ledger"], step)
    return [*found.values()]


def no_family(family: str) -> DataError:
    mend = (
        "Curate one with `curation.scope: family`; where each version is of one drop, upload the drop again without "
        "the rows, and remove the old drop and its versions"
    )
    return DataError(f"family {family}", "it has no version of all its drops", mend)
