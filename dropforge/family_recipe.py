"""The recipe of a family: what its drops are trained with, and who decides that.

The family's file comes first, then the recipe in the ledger, which `dropforge family set` writes or, where the
installation allows it, the family's first drop leaves; a family without either has the installation's preset. Writing
to the ledger takes rights that an upload does not: a drop can only be the first.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from dropforge import layout
from dropforge.drop import Drop
from dropforge.errors import DropforgeError, RecipeError
from dropforge.families import ENDING, Family
from dropforge.recipes.drop_rules import Authority
from dropforge.recipes.load import (
    RECIPE_LIMIT,
    build_recipe,
    merge,
    preset_values,
    put_drop_over,
    put_first_drop_over,
    read_yaml,
    resolve,
)
from dropforge.recipes.self_service_rules import check_chosen, check_kept
from dropforge.store import MissingObjectError, Store, TooLargeError, read_bounded, written_by_others

_LIMIT: Final = 256 * 1024  # bytes of the object; a recipe's text has 64 KiB at most
_TRIES: Final = 5


@dataclass(frozen=True)
class Kept:
    """A family's recipe in the ledger.

    :param recipe: as in a `recipe.yaml`, `extends` not resolved. :param preset: over which it stands, if any.
    :param origin: the family's first drop, or a person. :param by: name of the drop, or of the person.
    :param at: when, in ISO 8601.
    """

    recipe: dict[str, Any]
    preset: str | None
    origin: Literal["drop", "person"]
    by: str
    at: str

    @property
    def told(self) -> str:
        what = f"its first drop, {self.by}" if self.origin == "drop" else self.by
        return f"set by {what}, {self.at[:16].replace('T', ' ')} UTC"

    def resolved(self) -> dict[str, Any]:
        """The values, over the preset that they stood over when they were kept."""
        return merge(preset_values(self.preset), resolve(self.recipe))


@dataclass(frozen=True)
class Ruling:
    """What holds for a family's drops.

    :param values: the recipe, `extends` resolved; empty if neither the family nor the installation has one.
    :param own: whether it is the family's, not the installation's.
    """

    values: dict[str, Any]
    authority: Authority
    own: bool


def rule(store: Store, family: str, preset: str | None, file: Family | None = None) -> Ruling:
    """Find what holds for a family.

    :param preset: of the installation, if it has one. :param file: the family's file, if it has one.
    :raises RecipeError: if what stands there is no recipe (any more).
    """
    if file is not None and file.governs:
        name = f"family {family} (its file {family}{ENDING})"
        return Ruling(file.resolved(), Authority(name, "the file changes it for all its drops"), own=True)
    kept = read(store, family)
    if kept is None:
        return without(family, preset)
    under = preset_values(preset)
    change = f"`dropforge family set {family} --recipe FILE` changes it for all its drops"
    authority = Authority(f"family {family} ({kept.told})", change)
    try:
        values = kept.resolved()
        if kept.origin == "drop":
            # Again, and not only when it was kept: the installation's preset may have become stricter since.
            check_chosen(kept.recipe)
            check_kept(under, values)
        build_recipe(values)
        return Ruling(values, authority, own=True)
    except RecipeError as error:
        mend = f"Set it again: `dropforge family set {family} --recipe FILE`. {error.mend}"
        raise RecipeError(f"the recipe of family {family} ({kept.told}), {error.thing}", error.cause, mend) from None


def without(family: str, preset: str | None) -> Ruling:
    """What holds for a family that has no recipe: the installation's preset. :raises RecipeError: if it is none."""
    change = f"`dropforge family set {family} --recipe FILE` gives the family another recipe"
    name = f"family {family}" if preset is None else f"preset {preset}, which {family} goes by,"
    return Ruling(preset_values(preset), Authority(name, change), own=False)


def read_own(store: Store, drop: Drop, below: str = "") -> dict[str, Any] | None:
    """Read what the drop's own recipe says, `extends` not resolved; None if it has none.

    :param below: prefix that the store's keys lack.
    :raises RecipeError: if it is no recipe. :raises DataError: if S3 does not give it.
    """
    own = next((file for file in drop.files if file.key == layout.RECIPE), None)
    if own is None:
        return None
    if own.size > RECIPE_LIMIT:
        cause = f"it has {own.size} bytes"
        raise RecipeError(of_drop(drop), cause, "A recipe holds settings, not data: at most 64 KiB")
    try:
        with written_by_others(of_drop(drop)):
            stream = store.open((drop.prefix + own.key).removeprefix(below), own.etag, own.version_id)
        with stream:
            return read_yaml(stream.read())
    except RecipeError as error:
        raise RecipeError(f"{of_drop(drop)}, {error.thing}", error.cause, error.mend) from None


def of_drop(drop: Drop) -> str:
    """The drop's own recipe, by name."""
    return f"{layout.RECIPE} of drop {drop.family}/{drop.drop}"


def put_drop(ruling: Ruling, own: Mapping[str, Any], *, sets_it: bool) -> dict[str, Any]:
    """The values of what holds with those of a drop's own recipe over them.

    :param own: as `read_yaml` gives it. :param sets_it: whether it sets the family's recipe.
    :raises RecipeError: if it asks for what is not the drop's to say.
    """
    if sets_it:
        return put_first_drop_over(ruling.values, own)
    if not ruling.values:
        if not own:
            return {}
        cause = "this drop may not set what is trained, and nothing else sets it"
        raise RecipeError(ruling.authority.name, cause, ruling.authority.change)
    return put_drop_over(ruling.values, own, ruling.authority)


def read(store: Store, family: str) -> Kept | None:
    """The family's recipe in the ledger; None if there is none. :raises RecipeError: if it cannot be read."""
    return _read(store, family)[0]


def sets_recipe(store: Store, family: str, ruling: Ruling, *, self_service: bool) -> bool:
    """Tell whether the recipe of the family's next drop becomes the family's.

    A family with a dataset version has had its first drop, whether or not that one set a recipe.
    """
    if not self_service or ruling.own:
        return False
    # Not any key: pods of trainings may write some there.
    folders = store.folders(layout.datasets_prefix(family))
    manifests = filter(layout.is_manifest, (layout.manifest_key(family, name) for name in folders))
    return not any(store.stat(key) is not None for key in (layout.head_key(family), *manifests))


def keep_first(store: Store, family: str, kept: Kept) -> bool:
    """Make the recipe of a family's first drop the family's; False if the family has one by now."""
    return store.put_if_absent(layout.family_recipe_key(family), _json(kept))


def first(recipe: Mapping[str, Any], preset: str | None, drop: str) -> Kept:
    """What a first drop leaves. :param recipe: its own, empty if it has none."""
    return Kept(dict(recipe), preset, "drop", drop, _now())


def write(store: Store, family: str, recipe: Mapping[str, Any], preset: str | None, by: str) -> Kept | None:
    """Set a family's recipe.

    :param preset: over which it stands, if any. :param by: who sets it. :return: what it was before.
    :raises DropforgeError: if others write at the same time.
    """
    key, data = layout.family_recipe_key(family), _json(Kept(dict(recipe), preset, "person", by, _now()))
    for _ in range(_TRIES):
        try:
            before, etag = _read(store, family)
        except RecipeError:  # what cannot be read is what this mends
            info = store.stat(key)
            before, etag = None, info.etag if info is not None else None
        if store.put_if_absent(key, data) if etag is None else store.put_if_match(key, data, etag):
            return before
    raise DropforgeError(f"the recipe of family {family}", "others set it at the same time", "Look at it, and set it")


def _read(store: Store, family: str) -> tuple[Kept | None, str | None]:
    key = layout.family_recipe_key(family)
    info = store.stat(key)
    if info is None:
        return None, None
    thing, mend = f"the recipe of family {family} ({key})", f"Set it: `dropforge family set {family} --recipe FILE`"
    try:
        values = json.loads(read_bounded(store, key, _LIMIT))
        if not isinstance(values["recipe"], dict) or values["origin"] not in {"drop", "person"}:
            raise ValueError("a part has another type")
        preset = values["preset"]
        if not isinstance(preset, str | None):
            raise ValueError("a part has another type")
        kept = Kept(values["recipe"], preset, values["origin"], str(values["by"]), str(values["at"]))
        return kept, info.etag
    except MissingObjectError:
        raise RecipeError(thing, "it went while it was read", "Try again") from None
    except TooLargeError as error:
        raise RecipeError(thing, error.cause, mend) from None
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecipeError(thing, f"it cannot be read ({error!r})", mend) from None


def _json(kept: Kept) -> bytes:
    return json.dumps(asdict(kept), indent=1, ensure_ascii=False, allow_nan=False).encode()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")
