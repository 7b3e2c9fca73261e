"""What a recipe may have read with the installation's rights: models and data, by who may be asked for them.

Without more, that is any model and data set of the hub, and what lies in the installation's bucket outside the folders
of other families. `DROPFORGE_READABLE` where Airflow runs says it anew, as `hub:meta-llama/* s3://models/ /models/
family:base-models`: patterns of the hub, prefixes of buckets, folders, and families whose models and data others may
use. Base models and evaluation sets that a preset names may be read, too: presets are the installation's own.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Final

from dropforge import layout
from dropforge.errors import DropforgeError, RecipeError
from dropforge.hub import is_hub_id
from dropforge.recipe import Recipe
from dropforge.recipes.load import presets, resolve
from dropforge.recipes.self_service_rules import at_path
from dropforge.run import RunSpec
from dropforge.settings import READABLE, split
from dropforge.store import MissingObjectError, Store

DEFAULT: Final = "hub:*"
_THING: Final = f"environment variable {READABLE}"
#: Folders of the bucket whose second part is a family.
_OF_FAMILIES: Final = frozenset({"drops", "datasets", "sweeps", "curation"})
#: Those that nobody's recipe reads.
_CLOSED: Final = frozenset({"ledger", "network", "mlflow", "airflow"})
_HUB_NAME: Final = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")

FamilyOfRun = Callable[[str], str | None]  # by the run's name; None if it is not known


@dataclass(frozen=True)
class Readable:
    """
    :param hub: patterns of names on the hub. :param prefixes: of other buckets, with a slash at the end.
    :param folders: of this machine and the pods. :param families: patterns of families that others may read from.
    """

    hub: tuple[str, ...] = ("*",)
    prefixes: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    families: tuple[str, ...] = ()

    @property
    def words(self) -> tuple[str, ...]:
        """As `DROPFORGE_READABLE` has them."""
        hub, families = (f"hub:{one}" for one in self.hub), (f"family:{one}" for one in self.families)
        return (*hub, *self.prefixes, *self.folders, *families)

    def check(
        self,
        recipe: Recipe,
        family: str,
        bucket: str,
        family_of_run: FamilyOfRun,
        of_presets: Callable[[], Container[str]] = tuple,
    ) -> None:
        """Hold all that a recipe names to be read to what may be read.

        :param family: of the run. :param bucket: of the installation.
        :param of_presets: finds the models and sets that presets name; asked only if one is not allowed otherwise.
        :raises RecipeError: naming the key, and what may be read.
        """
        look = _Look(self, family, bucket, family_of_run)
        model, source = recipe.base.model, recipe.data.source
        if model is not None:
            with _unless_named(model, of_presets):
                if is_hub_id(model):
                    look.at_hub("base.model", model, recipe.base.revision)
                else:
                    look.at_place("base.model", model)
        if recipe.base.start.startswith(layout.RUNS):
            look.at_key("base.start", recipe.base.start)
        for name, place in (recipe.curation.decontaminate.sets if recipe.curation.decontaminate else {}).items():
            with _unless_named(place, of_presets):
                at = look.at_place if place.startswith(("s3://", "file://", "/")) else look.at_key
                at(f"curation.decontaminate.sets.{name}", place)
        if source is not None and source.prefix is not None:
            look.at_key("data.source.prefix", source.prefix)
        if source is not None and source.dataset is not None:
            look.at_key("data.source.dataset", f"datasets/{source.dataset}")
        if recipe.evaluate.holdout is not None:
            with _unless_named(recipe.evaluate.holdout, of_presets):
                look.at_key("evaluate.holdout", f"datasets/{recipe.evaluate.holdout}")
        if source is not None and source.hub is not None:
            look.at_hub("data.source.hub", source.hub, source.revision)
        _check_written("train.checkpoints", recipe.train.checkpoints, bucket)


@dataclass(frozen=True)
class _Look:
    """One look at a recipe."""

    allowed: Readable
    family: str
    bucket: str
    family_of_run: FamilyOfRun

    def at_place(self, key: str, place: str) -> None:
        """:param place: an address or a folder."""
        if place.startswith(f"s3://{self.bucket}/"):
            self.at_key(key, place.removeprefix(f"s3://{self.bucket}/"))
        elif place.startswith("s3://"):
            odd = _odd(place.removeprefix("s3://"))
            if odd or not f"{place}/".startswith(self.allowed.prefixes):
                raise self._refused(key, place, word="" if odd else place)
        else:
            self._at_folder(key, place)

    def at_hub(self, key: str, name: str, revision: str | None) -> None:
        """:param name: as `OWNER/NAME`. :param revision: of it, if one is named."""
        patterns = [pattern.lower() for pattern in self.allowed.hub]
        if not _HUB_NAME.fullmatch(name) or not any(fnmatchcase(name.lower(), pattern) for pattern in patterns):
            raise self._refused(key, name)
        if (revision or "").startswith("refs/pr/") and "*" not in patterns:
            raise self._refused(key, name, f"{revision} is what any user proposed there, not the owner's")

    def at_key(self, key: str, place: str) -> None:
        """:param place: a key of the installation's bucket."""
        first, _, rest = place.partition("/")
        owner: str | None = self.family
        named = f"s3://{self.bucket}/{place.rstrip('/')}/".startswith(self.allowed.prefixes)
        if _odd(place) or (first in _CLOSED and not named):
            raise self._refused(key, place)
        if named:
            return
        if first in _OF_FAMILIES:
            owner = rest.partition("/")[0] or None
        elif first == layout.RUNS.rstrip("/"):
            owner = self.family_of_run(rest.partition("/")[0])
            if owner is None and key == "base.start":
                return  # there is no such run, as whoever looks for it says
        if owner is None:
            raise self._refused(key, place)
        if owner != self.family and not any(fnmatchcase(owner, pattern) for pattern in self.allowed.families):
            raise self._refused(key, place, f"it is of family {owner}")

    def _at_folder(self, key: str, place: str) -> None:
        path = Path(place.removeprefix("file://"))
        if not path.is_absolute() or ".." in path.parts:  # behind a link it leads elsewhere than it says
            raise self._refused(key, place)
        for folder in map(Path, self.allowed.folders):
            # As it stands there, and behind the links of this machine.
            if path.is_relative_to(folder) and path.resolve().is_relative_to(folder.resolve()):
                return
        raise self._refused(key, place, word=str(path))

    def _refused(self, key: str, place: str, why: str = "", word: str = "") -> RecipeError:
        """:param word: that lets it be read where it is named; empty if none does, or it is not known."""
        cause = why or "it is not among what recipes may have read here"
        whose = "by the installation's administrator"
        if word and split(word) == (word,):
            line = f"{READABLE}={shlex.quote(' '.join((*self.allowed.words, word)))} dropforge up -d"
            whose += f"; on a machine of your own: `dropforge down`, then `{line}`"
        else:
            whose += ", or for `dropforge up` in its environment"
        mend = f"Name another, or have it named in {READABLE} {whose}. {self._told()}"
        return RecipeError(f"recipe key `{key}`", f"{place:.200}: {cause}", mend)

    def _told(self) -> str:
        hub = (f"hub:{pattern}" for pattern in self.allowed.hub)
        others = "".join(f", {word}" for word in (*hub, *self.allowed.prefixes, *self.allowed.folders))
        return f"May be read: bucket {self.bucket}, outside the folders of other families{others}"


def readable(env: Mapping[str, str] = os.environ) -> Readable:
    """Read what the environment names. :raises DropforgeError: naming the word that is none of it."""
    hub: list[str] = []
    prefixes: list[str] = []
    folders: list[str] = []
    families: list[str] = []
    for word in split(env.get(READABLE) or DEFAULT):
        if word.startswith("hub:") and len(word) > len("hub:"):
            hub.append(word.removeprefix("hub:"))
        elif word.startswith("family:") and len(word) > len("family:"):
            families.append(word.removeprefix("family:"))
        elif word.startswith("s3://") and len(word) > len("s3://") and not _odd(word.removeprefix("s3://").rstrip("/")):
            prefixes.append(f"{word.rstrip('/')}/")
        elif word.startswith("/"):
            folders.append(os.path.normpath(word))
        else:
            raise DropforgeError(
                _THING,
                f"{word!r:.80} names nothing to read",
                "Write hub:OWNER/NAME with stars as you need, s3://BUCKET/PREFIX/, a folder from / on, or family:NAME",
            )
    return Readable(tuple(hub), tuple(prefixes), tuple(folders), tuple(families))


def check_reads(store: Store, bucket: str, family: str, recipe: Recipe, allowed: Readable) -> None:
    """:raises RecipeError: naming a key whose model or data may not be read."""

    def family_of_run(run: str) -> str | None:
        try:
            return RunSpec.read(store, layout.run_key(run)).family if layout.is_run(run) else None
        except MissingObjectError:
            return None

    allowed.check(recipe, family, bucket, family_of_run, _named_by_presets)


def _named_by_presets() -> frozenset[str]:
    """Base models and evaluation sets that presets name."""
    named: set[str] = set()
    for preset in presets():
        values = resolve({"extends": preset})
        named |= {str(at_path(values, key)) for key in ("base.model", "evaluate.holdout")}
        named.update(map(str, (at_path(values, "curation.decontaminate.sets") or {}).values()))
    return frozenset(named)


def _check_written(key: str, place: str | None, bucket: str) -> None:
    """:raises RecipeError: if a place for checkpoints is among what Dropforge itself keeps in its bucket."""
    if place is None or not f"{place}/".startswith(f"s3://{bucket}/"):
        return
    inside = place.removeprefix(f"s3://{bucket}").strip("/")
    if inside and (_odd(inside) or inside.partition("/")[0] in _CLOSED | _OF_FAMILIES | {layout.RUNS.rstrip("/")}):
        mend = "Leave it out, for the run's own folder, or name another bucket or folder"
        raise RecipeError(f"recipe key `{key}`", f"{place:.200}: it is among what Dropforge keeps for itself", mend)


@contextmanager
def _unless_named(place: str, of_presets: Callable[[], Container[str]]) -> Iterator[None]:
    """Let pass what a preset names."""
    try:
        yield
    except RecipeError:
        if place not in of_presets():
            raise


def _odd(place: str) -> bool:
    """Whether a key could mean another one to whoever reads it: as a path, or taken apart as an address."""
    parts = place.rstrip("/").split("/")
    return any(part in {"", ".", ".."} for part in parts) or any(sign in "?#\\\x7f" or sign < " " for sign in place)
