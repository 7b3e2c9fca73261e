"""`base.start`: a run that goes on from the family's champion, or from a checkpoint of another run.

What stands there is settled once, by the task that plans: the model that is found takes the base's place in the recipe,
and `run.json` holds its digest, so that every rank and every attempt begins alike, wherever the alias has moved since.
Weights only: optimizer, plan and counters are those of a new run. Adapters were merged when the model was written.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Final

from dropforge import layout
from dropforge.errors import DropforgeError, RecipeError
from dropforge.json_objects import MOST_MANIFEST, UNREADABLE, read_object
from dropforge.recipe import Recipe
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec, Start
from dropforge.store import MissingObjectError, Store

if TYPE_CHECKING:
    from dropforge.tracking import Champion

BASE: Final = "base"
_KEY: Final = "recipe key `base.start`"
_LAYOUT: Final = 2  # of checkpoints, see trainer.state.checkpoint

FindChampion = Callable[[str, str], "Champion | None"]  # by family and alias


def settle(recipe: Recipe, store: Store, family: str, find_champion: FindChampion) -> tuple[Recipe, Start | None]:
    """The recipe with the model that it begins with in the place of its base, and where that comes from.

    :param store: the bucket of all runs. :param find_champion: asked only if the recipe wants a champion.
    :return: the recipe as it was and None, if the base it is that it asks for.
    :raises RecipeError: if there is no such model any more, or the recipe goes with another one.
    """
    asked = recipe.base.start
    if asked == BASE:
        return recipe, None
    if asked == "champion":
        found = find_champion(family, recipe.promote.alias)
        if found is None:
            return recipe, Start(asked=asked)
        start, source = _of_champion(store, family, found)
    else:
        _, run, step = asked.split("/")
        start, source = _of_checkpoint(store, asked, run, int(step.removeprefix("step-")))
    _check(recipe, source, start)
    plain = recipe.plain()
    left = [token for token in recipe.base.new_tokens or () if token not in start.tokens]
    base = {**plain["base"], "model": start.model, "revision": None, "scratch": None, "new_tokens": left or None}
    return build_recipe({**plain, "base": base}), start


def model_digest(files: Mapping[str, str]) -> str:
    """Digest of a model's files, as the trainer makes it (`trainer.model.export`)."""
    return hashlib.sha256(json.dumps(dict(files), sort_keys=True).encode()).hexdigest()


def _of_champion(store: Store, family: str, champion: Champion) -> tuple[Start, RunSpec]:
    what = f"version {champion.version} of {family}"
    source = _source(store, champion.run, what)
    found = champion_files(store, champion)
    if found is None:
        raise RecipeError(
            _KEY,
            f"of {what} it is not known which files it has: {champion.model} was not written by a run of this bucket, "
            "or is gone",
            "Name its folder as `base.model`, and set `base.start: base`",
        )
    folder, files = found
    digest = model_digest(files)
    if digest != champion.digest:
        raise RecipeError(
            _KEY,
            f"{what} was registered with the digest {champion.digest[:12] or 'none'}, and {champion.model} has "
            f"{digest[:12]} by now",
            "Move the alias to a version whose files are there",
        )
    _there(store, folder, files, what)
    return (
        Start(
            asked="champion",
            kind="champion",
            model=champion.model,
            digest=digest,
            run=source.run,
            version=champion.version,
            files=dict(files),
            origin=_origin(source),
            tokens=_tokens(source),
        ),
        source,
    )


def _of_checkpoint(store: Store, asked: str, run: str, step: int) -> tuple[Start, RunSpec]:
    source = _source(store, run, asked)
    prefix = layout.run_prefix(run)
    files: Mapping[str, str] = {}
    exported = {
        key: facts
        for key in store.sizes(f"{prefix}exports/step-{step}-")
        if key.endswith(f"/{layout.EXPORT_FACTS}") and (facts := _facts(store, key)) is not None
    }
    digest = _sealed(store, source, step)
    if digest is None and len(exported) == 1:
        (digest,) = (str(facts["checkpoint"]) for facts in exported.values())
    if digest is None:
        raise RecipeError(_KEY, f"there is no {asked} (any more)", _mend(store, source))
    folder = layout.export_prefix(run, step, digest).rstrip("/")
    facts = exported.get(f"{folder}/{layout.EXPORT_FACTS}")
    if facts is not None:
        files = dict(facts["files"])
        _there(store, folder, files, asked)
    return (
        Start(
            asked=asked,
            kind="checkpoint",
            model=f"{store.uri}/{folder}",
            digest=digest,
            run=run,
            step=step,
            files=files,
            origin=_origin(source),
            tokens=_tokens(source),
        ),
        source,
    )


def champion_files(store: Store, champion: Champion) -> tuple[str, Mapping[str, str]] | None:
    """Folder of a registered model, and its files with their SHA-256, as they were when it was written.

    :return: None if no run of this bucket wrote it, or what tells of it is gone.
    """
    folder = champion.model.removeprefix(f"{store.uri}/")
    if not layout.is_run(champion.run) or not folder.startswith(layout.run_prefix(champion.run)):
        return None
    try:
        if folder == f"{layout.run_prefix(champion.run)}model":
            return folder, dict(read_object(store, layout.report_key(champion.run))["model"]["files"])
        return folder, dict(read_object(store, f"{folder}/{layout.EXPORT_FACTS}")["files"])
    except UNREADABLE:
        return None


def _source(store: Store, run: str, what: str) -> RunSpec:
    """The run that a model comes from. :raises RecipeError: if this bucket has none of that name."""
    try:
        if not layout.is_run(run):
            raise MissingObjectError(run)
        source = RunSpec.read(store, layout.run_key(run))
        if source.root != f"{store.uri}/{layout.run_prefix(run)}".rstrip("/"):
            raise MissingObjectError(run)
    except MissingObjectError:
        raise RecipeError(
            _KEY, f"{what} comes from run {run!r}, which is not in {store.uri}", "Name its model as `base.model`"
        ) from None
    except DropforgeError as error:
        raise RecipeError(_KEY, f"{what}: {error.cause}", error.mend) from error
    return source


def _sealed(store: Store, source: RunSpec, step: int) -> str | None:
    """Digest of a checkpoint in the run's own folder; None if there is none, or it lies in a place of its own."""
    if source.checkpoints_root != source.root:
        return None
    try:
        key = f"{layout.run_prefix(source.run)}checkpoints/step-{step}/manifest.json"
        seal = read_object(store, key, most=MOST_MANIFEST)
        if (seal["run"], seal["step"], seal["schema"]) != (source.run, step, _LAYOUT):
            raise ValueError("it is of another run or layout")
        return str(seal["digest"])
    except MissingObjectError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(
            _KEY, f"checkpoint step-{step} of run {source.run} cannot be used ({error})", "Choose another one"
        ) from None


def _mend(store: Store, source: RunSpec) -> str:
    if source.checkpoints_root != source.root:
        place = f"Its checkpoints are in {source.checkpoints_root}, where this cannot look"
        return f"{place}: have one exported, with `dropforge checkpoints {source.run} STEP export`"
    prefix = f"{layout.run_prefix(source.run)}checkpoints/"
    keys = (key.removeprefix(f"{prefix}step-") for key in store.sizes(prefix))
    steps = (key.removesuffix("/manifest.json") for key in keys if key.endswith("/manifest.json"))
    there = sorted({int(step) for step in steps if step.isdecimal()})
    kept = ", ".join(f"step-{step}" for step in there)
    return f"Retention keeps the newest and the best: choose one of {kept}" if kept else "The run has no checkpoint"


def _facts(store: Store, key: str) -> dict[str, Any] | None:
    """What an export says of itself; None if it says nothing that can be used."""
    try:
        facts = read_object(store, key)
        return facts if isinstance(facts["files"], dict) and isinstance(facts["checkpoint"], str) else None
    except UNREADABLE:
        return None


def _there(store: Store, folder: str, files: Mapping[str, str], what: str) -> None:
    """:raises RecipeError: if a file of a model is gone; their bytes are looked at when they are fetched."""
    there = store.sizes(f"{folder}/")
    gone = sorted(name for name in files if f"{folder}/{name}" not in there)
    if gone:
        raise RecipeError(
            _KEY, f"{what} lacks {gone[0]} in {store.uri}/{folder}", "Name another, or set `base.start: base`"
        )


def _origin(source: RunSpec) -> dict[str, Any]:
    """The base that a run goes back to."""
    if source.start is not None and source.start.origin:
        return dict(source.start.origin)
    return {key: (source.recipe.get("base") or {}).get(key) for key in ("model", "scratch")}


def _tokens(source: RunSpec) -> tuple[str, ...]:
    """Tokens that were added to the base's tokenizer by a run and those before it."""
    before = source.start.tokens if source.start is not None else ()
    return (*before, *((source.recipe.get("base") or {}).get("new_tokens") or ()))


def _check(recipe: Recipe, source: RunSpec, start: Start) -> None:
    """:raises RecipeError: if the model is for another task, is no whole one, or goes back to another base."""
    task, what = source.recipe.get("task", "causal-lm"), f"`{start.asked}` is {start}, and"
    if task != recipe.task:
        raise RecipeError(_KEY, f"{what} was trained for `task: {task}`", f"Set `task: {task}`, or `base.start: base`")
    if (source.recipe.get("train") or {}).get("method") == "prefix":
        raise RecipeError(
            _KEY, f"{what} is a prefix, which has no weights to continue training from", "Set `base.start: base`"
        )
    ours = {key: recipe.plain()["base"][key] for key in ("model", "scratch")}
    if _given(ours) != _given(start.origin):
        raise RecipeError(
            _KEY,
            f"{what} goes back to the base {_text(start.origin)}, where the recipe names {_text(ours)}",
            "Name that base, or set `base.start: base` to start again from the recipe's",
        )


def _given(value: Any) -> Any:
    """A value without the keys that are not given: a recipe of an earlier version has fewer of them."""
    if isinstance(value, Mapping):
        return {key: _given(item) for key, item in value.items() if item is not None}
    return value


def _text(base: Mapping[str, Any]) -> str:
    return str(base["model"]) if base.get("model") else json.dumps(_given(base.get("scratch")), sort_keys=True)[:300]
