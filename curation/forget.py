"""Versions without some rows, and versions made again: the drops of a family from the first one on.

Of what is forgotten only hashes are kept. A row that went for the sake of a forgotten one stands for itself again, and
every unit keeps the side that it had.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from curation import increments
from curation.engines.choice import choose, opened
from curation.explain import Fate, explain, named_row
from curation.forgotten import group_names
from curation.holders import Held, groups, held
from curation.pipeline import Desk, follow, prepared, sides_to_keep, step
from curation.plan import make_rules
from curation.reasons import Filtered
from curation.task import Rules
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipes.load import build_recipe
from dropforge.store import Store


def again(
    store: Store,
    family: str,
    *,
    workdir: Path,
    say: Callable[[str], None],
    forget: bytes | None = None,
    check: Callable[[Mapping[str, Any]], None] = lambda _: None,
) -> Manifest:
    """Curate all drops of a family again, with the recipe of its newest version.

    :param forget: content key or name of a group (16 bytes) whose rows end as `forgotten` from now on; without one the
        same versions come out, and what is missing of their state is stored again.
    :param check: looks at the recipe whose kernels will run here; it may raise.
    :raises DataError: if there is no such family, or a drop is gone.
    """
    head = newest(store, family)
    if forget is not None and forget.hex() in head.manifest.rules.get("forgotten", ()):
        return head.manifest
    check(head.recipe)
    recipe = build_recipe(dict(head.recipe))
    rules, sets, own = prepared(store, recipe, workdir)
    if forget is not None and head.manifest.rules.get("version") != rules.version:
        # First by the new rules, which may know the row by another name, or as a copy of what is forgotten.
        made = again(store, family, workdir=workdir, say=say, check=check)
        rows = [*increments.moved(store, head.manifest, made, pc.field("key") == forget)]
        for name in sorted(increments.names_of(rows)) if rows else [forget.hex()]:
            made = again(store, family, workdir=workdir, say=say, forget=bytes.fromhex(name), check=check)
        return made
    rules = _forgetting(rules, head.manifest, forget)
    size = sum(file.size for drop in increments.drops(store, head.manifest) for file in drop.data_files)
    choice = choose(recipe.curation, size)
    say(f"Curation engine {choice.engine}: {choice.why}")
    with opened(choice, recipe.curation, workdir / "engine") as engine:
        desk = Desk(store, engine, recipe, sets, own, workdir, say=say)
        if forget is None:
            _mend_sides(desk, head.manifest, rules)
        return follow(desk, family, None, rules, head.recipe, say, again=forget is None)


def _mend_sides(desk: Desk, version: Manifest, rules: Rules) -> None:
    """Make again what versions left whose sides later ones kept, the oldest first, as far as the rules are the same."""
    same = increments.shared(rules.facts())
    older = [*takewhile(lambda old: increments.shared(old.rules) == same, increments.lineage(desk.store, version))]
    for old in reversed(older):
        forgotten, sides_of = tuple(old.rules.get("forgotten", ())), old.rules.get("sides_of", "")
        then, made = replace(rules, forgotten=forgotten, sides_of=sides_of), None
        kept = sides_to_keep(desk.store, old.family, then)
        for drop in increments.drops(desk.store, old):
            made = step(desk, drop, then, made, repair=True, kept=kept, older=kept or [old])


def _forgetting(rules: Rules, before: Manifest, name: bytes | None) -> Rules:
    if name is None:
        return rules
    forgotten = {*before.rules.get("forgotten", ()), name.hex()}
    return replace(rules, forgotten=tuple(sorted(forgotten)), sides_of=before.digest)


def newest(store: Store, family: str) -> increments.Head:
    """:raises DataError: if the family has no version of all its drops."""
    head = increments.read_head(store, family)
    if head is None:
        raise increments.no_family(family)
    return head


def name_of(store: Store, family: str, group: str) -> bytes:
    """What the rules of the family call a group (16 bytes).

    :raises DropforgeError: if its recipe has a key of pseudonyms that is not in the environment.
    """
    head = newest(store, family)
    names = group_names(group, make_rules(build_recipe(dict(head.recipe))).pii)
    known = head.manifest.rules.get("forgotten", ())
    return next((name for name in names if name.hex() in known), names[0])


def key_of(store: Store, family: str, row: str) -> bytes:
    """The content key (16 bytes) of a row of the newest version's drops, also of one that is forgotten already.

    :param row: as of `explain`.
    :raises DataError: if there is no such row, or there are several.
    """
    named = named_row(row)
    if isinstance(named, bytes):
        return named
    head = newest(store, family).manifest
    fates = explain(store, head, row)
    found = {fate.key: fate.file for fate in fates if fate.key}
    older = increments.lineage(store, head)
    # The ledger keeps no key of a forgotten row; the version before it was forgotten has one.
    while (gone := any(map(_is_gone, fates))) and (version := next(older, None)) is not None:
        try:
            fates = explain(store, version, row)
        except DataError:  # its drop came later
            break
        found |= {fate.key: fate.file for fate in fates if fate.key}
    if len(found) != 1:
        none = "it is forgotten, and no version says by which content" if gone else "the row has no content"
        cause = "several drops have such a row" if found else none
        told = "".join(f"; {key} in {file}" for key, file in [*found.items()][:5])
        mend = f"Name it as `drops/{family}/DROP/FILE:LINE`, or by its content key{told}"
        raise DataError(f"row {row!r}", cause, mend)
    return bytes.fromhex(next(iter(found)))


def _is_gone(fate: Fate) -> bool:
    return fate.end == Filtered.FORGOTTEN and not fate.key


__all__ = ["Held", "again", "groups", "held", "key_of", "name_of", "newest"]
