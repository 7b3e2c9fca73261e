"""A checkpoint of a run as a model folder: whole, read back and compared, or not there at all."""

from __future__ import annotations

import json
import shutil
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.json_objects import read_object
from dropforge.layout import EXPORT_FACTS
from dropforge.run import RunSpec
from dropforge.store import MissingObjectError, Store, open_store
from trainer.assembly import build, frozen_digest
from trainer.compat import quiet_libraries
from trainer.config import read_settings
from trainer.data.batch import Batch
from trainer.data.labels import read_labels
from trainer.data.node_cache import NodeCache
from trainer.data.tokenizer import load_tokenizer
from trainer.data.tokens import collect
from trainer.data.user_code import UserCode
from trainer.gang import Gang
from trainer.model.build import Built, fetch_base, upload_folder
from trainer.model.export import Exported, export_model
from trainer.model.packaged import packaging
from trainer.prepare import PATIENCE, TOKENIZER, Prepared, comes, open_tokenizer
from trainer.state.checkpoint import WEIGHT, Checkpoints, Seal
from trainer.state.reader import BlockReader, Copies, fill
from trainer.state.retention import best_steps
from trainer.training import FROZEN, portable

_PROBE: Final = 16  # tokens that the model is compared on after it was read back


@dataclass(frozen=True)
class Choice:
    """Which checkpoint: that of a step, the one with the lowest evaluation loss, or else the newest."""

    step: int | None = None
    best: bool = False


def open_checkpoints(spec: RunSpec, say: Callable[[str], None]) -> Checkpoints:
    """The checkpoints of a run, for reading: whether a resume may go on from them is not looked at."""
    return Checkpoints(open_store(spec.checkpoints_root), spec.run, "", {}, say)


def choose(spec: RunSpec, seals: list[Seal], choice: Choice) -> Seal:
    """The checkpoint that is asked for; a pure function.

    :param seals: those that exist, oldest first. :raises DataError: if there is no such one.
    """
    if not seals:
        raise DataError(
            f"run {spec.run}",
            f"it has no checkpoint in {spec.checkpoints_root}/checkpoints",
            "Wait for its first one; `train.checkpoint_every` says when it comes",
        )
    there = ", ".join(str(seal.step) for seal in seals)
    if choice.step is not None:
        found = [seal for seal in seals if seal.step == choice.step]
        if not found:
            raise DataError(f"run {spec.run}", f"it has no checkpoint of step {choice.step}", f"It has: {there}")
        return found[0]
    if choice.best:
        best = best_steps(seals, 1)
        if not best:
            raise DataError(
                f"run {spec.run}",
                "none of its checkpoints has an evaluation loss",
                f"Choose one with --step: {there}, and set `train.eval_every` in the next run",
            )
        return next(seal for seal in seals if seal.step == best[0])
    return seals[-1]


def restore(
    spec: RunSpec,
    seal: Seal,
    checkpoints: Checkpoints,
    scratch: Path,
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Built, Any, str]:
    """The model of a checkpoint, its tokenizer and the folder of its base (empty if it has none), on the CPU.

    :param scratch: where a base model in a store is copied to. :param node, check: as of `fetch_base`.
    :raises DataError: if the checkpoint's bytes are broken. :raises RecipeError: if the base model is not there.
    """
    settings = read_settings(spec.recipe)
    thing = f"checkpoint {spec.checkpoints_root}/checkpoints/step-{seal.step}"
    try:
        reader = BlockReader(Copies(checkpoints, seal))
    except (DropforgeError, ValueError, KeyError) as error:
        raise _broken(thing, error) from error
    base = settings.base.model or ""
    if base:
        base = str(fetch_base(base, settings.base.revision, scratch / "base", node=node, check=check))
    try:
        tokenizer = open_tokenizer(settings, base, open_store(spec.root), spec.date)
    except MissingObjectError:
        raise DataError(f"run {spec.run}", f"its {TOKENIZER} is gone", "Without it the model says nothing") from None
    none = collect([], {})
    labels = read_labels(open_store(spec.root)) if settings.task == "classification" else None
    built = build(settings, Prepared(none, none, tokenizer, base, "", np.empty(0, np.void), labels=labels), Gang())
    named = dict(built.trainable())
    kept = {name.removeprefix(WEIGHT): found.size for name, found in reader.tensors.items() if name.startswith(WEIGHT)}
    if FROZEN in seal.recipe:
        for name in named.keys() - kept.keys():  # those that no text reaches; their digest tells of them
            named.pop(name).requires_grad_(False)
    frozen = frozen_digest(built)
    same = {name: weight.shape for name, weight in named.items()} == kept
    if not same or frozen != seal.recipe.get(FROZEN, frozen):
        raise RecipeError(thing, "its weights are not those of the run's base model", "Give back the base model")
    try:  # one tensor after the other, and no moments: the model is all that has to fit
        fill(reader, {f"{WEIGHT}{name}": weight for name, weight in named.items()})
    except (DropforgeError, ValueError, KeyError) as error:
        raise _broken(thing, error) from error
    return built, tokenizer, base


def _broken(thing: str, error: Exception) -> DataError:
    return DataError(thing, f"it is broken ({error})", "Choose an older one with --step")


def export(
    spec: RunSpec,
    choice: Choice,
    folder: Path,
    say: Callable[[str], None],
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> tuple[Seal, Exported]:
    """Write a checkpoint's model into a folder that is empty or not there; it appears whole or not at all.

    :param node, check: as of `fetch_base`, for the run's base model.
    :raises RecipeError: if something lies there. :raises DataError: if the checkpoint is missing or broken.
    :raises ExportError: if what was read back is another model.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise RecipeError(f"folder {folder}", "there is something in it", "Name a new folder, or remove what is in it")
    quiet_libraries()
    checkpoints = open_checkpoints(spec, say)
    seal = choose(spec, checkpoints.seals(), choice)
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="dropforge-export-") as scratch:
        built, tokenizer, local = restore(spec, seal, checkpoints, Path(scratch), node, check)
        staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
        try:
            tokenizer = portable(tokenizer)
            settings = read_settings(spec.recipe)
            about = packaging(spec, UserCode(), local, say)  # nobody's code runs for an export
            name, commit, target = settings.base.model or "", settings.base.revision, open_store(str(staging))
            exported = export_model(built, tokenizer, target, "", _probe(built), name, commit, about, local)
            _check_tokenizer(tokenizer, staging)
            staging.chmod(0o755)  # made for one user; a model is for those who may enter its parent
            for path in staging.rglob("*"):
                path.chmod(0o755 if path.is_dir() else 0o644)
            staging.replace(folder)
        except BaseException:
            shutil.rmtree(staging, ignore_errors=True)
            raise
    return seal, exported


def export_sealed(
    spec: RunSpec,
    step: int,
    digest: str,
    folder: Path,
    say: Callable[[str], None],
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Write a checkpoint's model into a folder, if the checkpoint is the one that is meant. :param digest: of it.

    :param node, check: as of `fetch_base`, for the run's base model.
    :raises DataError: if it is missing, broken or another one by now.
    """
    seal, exported = export(spec, Choice(step), folder, say, node, check)
    if seal.digest != digest:
        raise DataError(f"checkpoint step-{step} of {spec.run}", "it holds other bytes than asked for", "Ask again")
    return exported.plain()


def export_to(
    spec: RunSpec,
    step: int,
    digest: str,
    to: str,
    say: Callable[[str], None],
    folder: Path | None = None,
    node: NodeCache | None = None,
    check: Callable[[], None] = lambda: None,
) -> dict[str, Any]:
    """Put a checkpoint's model where it belongs, unless an earlier try has; what is known of it, its `files` too.

    :param digest: of the checkpoint. :param to: address of the model's folder.
    :param folder: an empty place for it instead; nothing is stored then.
    :param node, check: as of `fetch_base`, for the run's base model.
    :raises DataError: if the checkpoint is missing, broken or another one by now.
    """
    store = open_store(to)
    there = _exported(store, digest)
    if there is not None:
        say(f"model {to} is there already")
        return there
    with tempfile.TemporaryDirectory(prefix="dropforge-asked-") as name:
        made = folder or Path(name) / "model"
        facts = {**export_sealed(spec, step, digest, made, say, node, check), "uri": to, "checkpoint": digest}
        if folder is None:
            upload_folder(made, store)
            store.put(EXPORT_FACTS, json.dumps(facts, indent=1).encode())
            say(f"model {to}: {facts['bytes'] / 1e6:.1f} MB")
    return facts


def _exported(store: Store, digest: str) -> dict[str, Any] | None:
    """What is known of a checkpoint's model that is there, whole; None if it is not."""
    try:
        facts = read_object(store, EXPORT_FACTS)
        there = store.sizes("")
        whole = sum(there[name] for name in facts["files"]) == facts["bytes"]
        return facts if whole and facts["checkpoint"] == digest else None
    except (MissingObjectError, ValueError, KeyError, TypeError):
        return None  # not there or torn since, or an earlier try did not get to its end


def bring_start(
    spec: RunSpec,
    say: Callable[[str], None],
    check: Callable[[], None] = lambda: None,
    *,
    first: bool = True,
    patience: float = PATIENCE,
    folder: Path | None = None,
    node: NodeCache | None = None,
) -> RunSpec:
    """Have the checkpoint that a run goes on from (`base.start`) as a model where its recipe names one.

    It is made once, beside the checkpoint's run, where retention does not look: later attempts need no checkpoint.

    :param check: called now and then while waiting; it may raise to stop.
    :param first: whether this is the first node; the others wait for what it makes.
    :param folder: an empty place for it instead, for who must not write; the run that is returned begins there.
    :param node: the node's cache, for the base model of the checkpoint's run.
    :return: the run; its start knows the model's files.
    :raises RecipeError: if the checkpoint is gone, broken or another one by now.
    """
    start = spec.start
    if start is None or start.kind != "checkpoint" or start.files:
        return spec
    store, digest = open_store(start.model), start.digest
    if not first:
        comes(lambda: _exported(store, digest) is not None, time.monotonic() + patience, check)
    root = start.model.rpartition("/exports/")[0]
    try:
        source = RunSpec.read(open_store(root), "run.json")
        facts = export_to(source, start.step or 0, digest, start.model, say, folder, node, check)
    except (DataError, MissingObjectError) as error:
        raise RecipeError(
            "recipe key `base.start`", f"{start.asked} cannot be used ({error.cause})", "Start from a newer checkpoint"
        ) from error
    start, recipe = replace(start, files=dict(facts["files"])), spec.recipe
    if folder is not None and folder.exists():
        start = replace(start, model=str(folder))
        recipe = {**recipe, "base": {**recipe["base"], "model": str(folder)}}
    return replace(spec, recipe=recipe, start=start)


def _probe(built: Built) -> Batch:
    rows = built.model.get_input_embeddings().weight.shape[0]
    ids = (torch.arange(_PROBE) * 7 % rows)[None]
    none = torch.zeros(0, dtype=torch.int64)
    return Batch(ids, torch.arange(_PROBE)[None], none, none, none, _PROBE)


def _check_tokenizer(tokenizer: Any, folder: Path) -> None:
    """:raises DataError: if the tokenizer that was written reads or renders other text than the run's."""
    again = load_tokenizer(folder, ends=tokenizer.eos_token_id is not None)
    text = "Grüße, 世界 <|im_end|>\n\tx = 1"
    if again.chat_template != tokenizer.chat_template or again(text)["input_ids"] != tokenizer(text)["input_ids"]:
        raise DataError(f"tokenizer in {folder}", "read back, it is another one", "Report this with the run's log")
