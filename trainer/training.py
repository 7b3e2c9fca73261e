"""One rank's way through a run, from the prepared data to the report."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import SafetensorError

from dropforge.run import RunSpec
from dropforge.store import Store, open_store
from trainer.assembly import Assembly, assemble, reach
from trainer.config import Base, Settings
from trainer.data.template_date import told_date
from trainer.data.tokenizer import CHAT_TEMPLATE, plain_template
from trainer.gang import Gang
from trainer.loop.loop import Loop
from trainer.model.export import Exported, ExportError, export_model
from trainer.model.packaged import packaging
from trainer.node.heart import Heart
from trainer.preflight.verdict import Figures
from trainer.prepare import await_prepared
from trainer.report.console import Console
from trainer.report.teller import Teller
from trainer.report.wall import Wall
from trainer.state.checkpoint import Checkpoints
from trainer.state.compare import facts as comparable
from trainer.state.fast import Fast, open_fast
from trainer.state.shared import check_shared
from trainer.state.stop import StopSignal

FROZEN: Final = "base.frozen_weights"  # a fact of a checkpoint, see `resume_facts`


def train(
    spec: RunSpec,
    settings: Settings,
    gang: Gang,
    scratch: Path,
    stop: StopSignal,
    console: Console,
    heart: Heart,
    wall: Wall | None = None,
    shown: Figures | None = None,
) -> None:
    """Train, evaluate, export and report.

    :param shown: what the preflight measured, if there was one.

    :raises PreemptedError, CollectiveError, DropforgeError: see `trainer.rank` for how each ends.
    """
    wall = wall or Wall()
    prepared = await_prepared(settings, spec, scratch, stop.check)
    console.phase("building the model")
    made = assemble(settings, prepared, gang, stop.check, console)
    console.steps = made.plan.steps
    store = open_store(spec.root)
    check_shared(store, gang)
    checkpoints, fast = places(spec, settings, gang, made, console)
    size = sum(weight.numel() * weight.element_size() for weight in made.built.model.parameters())
    heart.bounds = heart.bounds.of(size, settings.train.compile)
    teller = Teller(spec, settings, gang, store, console, wall)
    loop = Loop(
        gang=gang,
        settings=settings,
        built=made.built,
        loss=made.loss,
        plan=made.plan,
        train=prepared.train,
        eval=prepared.eval,
        pad=made.pad,
        checkpoints=checkpoints,
        stop=stop,
        console=console,
        tracker=teller.tracker,
        offer=lambda seals: teller.checkpoints(checkpoints.store, seals, loop.progress.evaluations),
        heart=heart,
        row_keys=prepared.row_keys,
        wall=wall,
        observers=[teller.profiler],
        asked=teller.asked,
        board=teller.board,
        job_status=teller.job_status,
        fast=fast,
        prompts=prepared.prompts,
        tokenizer=prepared.tokenizer,
        answered=teller.answered,
        code=prepared.code,
    )
    loop.wrapped.prove(made.probe, made.expected)
    proven = loop.wrapped.prove_isolation(reach(made.built, settings))
    if gang.world > 1:
        console.say("distribution: " + ", ".join(f"{key} {value}" for key, value in loop.wrapped.ran().items()))
    try:
        resumed_from = loop.resume()
        teller.begin(resumed_from, loop.steps)
        if shown is not None:
            teller.tracker.metrics(shown.metrics(), resumed_from or 0)
        if prepared.code.wheel is not None:
            teller.tracker.tags({"dropforge.user_code": str(prepared.code.wheel)[:5000]})
        if told := told_date(prepared.tokenizer.chat_template, spec.date):
            teller.tracker.tags({"dropforge.date": told})
        if resumed_from is not None and gang.leader:  # the attempt before may have ended before it could tell
            loop.offer(checkpoints.seals())
        loop.start()
        stop.together()
        loop.run()
        teller.trained(loop.progress.step)
        loop.release()
        exported = write_model(loop, made, store, spec, settings.base)
        if exported is not None:
            teller.succeeded(loop, exported, made.facts(proven))
        gang.follow("report")  # nobody leaves before it is there, and writing a large model takes its time
        if fast is not None and gang.local_rank == 0:
            fast.clear()
    except BaseException as error:
        teller.failed(loop, error)
        raise
    finally:
        teller.close(loop.saving.grace_left())
    gang.leave()


def places(
    spec: RunSpec, settings: Settings, gang: Gang, made: Assembly, console: Console
) -> tuple[Checkpoints, Fast | None]:
    """The durable place of checkpoints and this node's fast tier; a collective.

    :raises RecipeError: on every rank, if nodes do not share the durable place or lack the fast folder.
    """
    store = open_store(spec.checkpoints_root)
    if spec.checkpoints_root != spec.root:
        check_shared(store, gang)
        console.say(f"checkpoints go to {store.uri}/checkpoints")
    checkpoints = Checkpoints(store, spec.run, made.digest, resume_facts(spec, made.frozen), console.say)
    asked = settings.train.fast_checkpoints
    return checkpoints, None if asked is None else open_fast(checkpoints, gang, asked.folder, asked.keep)


def write_model(loop: Loop, made: Assembly, store: Store, spec: RunSpec, base: Base) -> Exported | None:
    """Write the model's folder, on the leader; all ranks take part.

    :raises ExportError: if it cannot be written now.
    """
    try:
        whole = loop.wrapped.whole()
        if whole is None:
            return None
        loop.console.phase("writing the model", loop.steps)
        tokenizer = portable(made.prepared.tokenizer)
        local = made.prepared.base
        about = packaging(spec, made.prepared.code, local, loop.console.say)
        name, commit = base.model or "", base.revision
        return export_model(whole, tokenizer, store, "model/", made.probe, name, commit, about, local)
    except torch.OutOfMemoryError as error:  # the recipe has proved itself: all steps are done
        raise ExportError(
            f"model {store.uri}/model/",
            f"there was no memory to write it and read it back, after the training ({str(error).splitlines()[0]})",
            "Look for what else takes the GPU's memory and try again: training resumes from its last checkpoint",
        ) from error
    except (OSError, SafetensorError) as error:
        raise ExportError(
            f"model {store.uri}/model/",
            f"it could not be written ({error})",
            "Make room and try again: training resumes from its last checkpoint",
        ) from error


def portable(tokenizer: Any) -> Any:
    """The tokenizer as it is saved: it carries the chat template that the training used."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = plain_template(tokenizer)
    return tokenizer


def resume_facts(spec: RunSpec, frozen: str | None) -> dict[str, str]:
    """What a checkpoint and a resume from it are compared by; `trainer.state.compare` knows what may change.

    :param frozen: see `Assembly`. Trained weights are the checkpoint's, whatever the base has become.
    """
    template = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    base = {} if frozen is None else {FROZEN: frozen}
    return comparable(spec.recipe, dataset=spec.dataset_digest, chat_template=template, **base)
