"""One rank's way through a run, from the prepared data to the report."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.profiling import Span
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.config import Settings
from trainer.data.balance import LINEAR, PER_WIDTH
from trainer.data.batch import make_batch
from trainer.data.plan import Plan
from trainer.data.proof import prove
from trainer.data.tokenizer import CHAT_TEMPLATE, PLAIN_TEMPLATE, SPECIAL
from trainer.gang import Gang
from trainer.loop.loop import Loop
from trainer.model.attention import Attention, agree_packing, choose
from trainer.model.build import (
    Built,
    add_adapters,
    check_context,
    check_router,
    check_vocabulary,
    load_model,
    make_scratch,
)
from trainer.model.export import ExportError, export_model
from trainer.model.loss import LossModel, check_first_loss, choose_way, loss_model, shortened
from trainer.model.shard import probe_loss
from trainer.node.heart import Heart
from trainer.prepare import Prepared, await_prepared
from trainer.report.artifacts import keep_files
from trainer.report.board import Board
from trainer.report.card import NAME as CARD
from trainer.report.card import model_card
from trainer.report.console import Console, warn
from trainer.report.curves import NAME as CURVES
from trainer.report.curves import draw_curves
from trainer.report.final import (
    REPORT,
    begin_attempt,
    checkpoint_rows,
    checkpoint_tag,
    first_began,
    make_report,
    wall_rows,
)
from trainer.report.models import BEST, LAST, Models, make_models, shown
from trainer.report.profile import Profiler, Requests
from trainer.report.tracking import Tracker, make_tracker
from trainer.report.wall import Wall
from trainer.state.checkpoint import Checkpoints, Seal
from trainer.state.compare import facts as comparable
from trainer.state.fast import Fast, open_fast
from trainer.state.retention import best_steps
from trainer.state.shared import check_shared
from trainer.state.stop import StopSignal

_PROFILE: Final = 60.0  # seconds that the end of a training waits for traces that are being written
_DRAW: Final = 30.0  # seconds that the end of a training waits for its pictures
_DRAW_FAILED: Final = 6.0  # the same where it failed: peers are ended ten seconds later
_LOOKS: Final = 4096  # values of each weight that ranks compare


def train(
    spec: RunSpec,
    settings: Settings,
    gang: Gang,
    scratch: Path,
    stop: StopSignal,
    console: Console,
    heart: Heart,
    wall: Wall | None = None,
) -> None:
    """Train, evaluate, export and report.

    :raises PreemptedError, CollectiveError, DropforgeError: see `trainer.rank` for how each ends.
    """
    wall = wall or Wall()
    prepared = await_prepared(settings, spec, scratch, stop.check)
    console.phase("building the model")
    built = build(settings, prepared, gang)
    attention = examine(built, settings)
    plan = make_plan(settings, prepared, attention.packs, width(built))
    stop.check()

    gang.connect()
    agreed = agree_packing(gang, attention)
    if agreed.packs is not attention.packs:
        plan = make_plan(settings, prepared, agreed.packs, width(built))
    attention = agreed
    console.steps = plan.steps
    pad = pad_id(prepared.tokenizer)
    probe = shortened(make_batch(prepared.train, plan.step(0)[:2], pad)).to(gang.device)
    loss = loss_model(built.model, attention.packs, settings.train.precision == "bf16", attention.masked)
    choose_way(loss, probe)
    describe(console, built, plan, attention, loss, prepared)
    digest = plan.digest(prepared.plan_content)
    agree(gang, {"plan": digest, "loss": loss.way, "weights": weights_digest(built)})
    proof = prove(plan, gang, settings.train.micro_batch)
    store = open_store(spec.root)
    check_shared(store, gang)
    checkpoints, fast = places(spec, settings, gang, digest, console)
    expected = probe_loss(loss, probe)
    if settings.base.scratch is not None:  # a checkpoint's weights come later
        check_first_loss(expected, len(probe.targets), loss.place()[1])
    tracker = make_tracker(spec.tracking if gang.leader else None, console.say)
    models = make_models(spec.tracking if gang.leader else None, tracker, console.say)
    requests = Requests(store, console.say) if gang.leader else None
    profiler = Profiler(
        gang,
        store,
        console.say if gang.leader else warn,
        planned=Span.parse(settings.train.profile) if settings.train.profile else None,
        requests=requests,
        told=lambda address: tracker.tags({"dropforge.profile": address}) if gang.leader else None,
    )
    board = None
    if settings.train.tensorboard and gang.leader:
        board = Board(open_store(spec.root, hurried=True), console.say)
    loop = Loop(
        gang=gang,
        settings=settings,
        built=built,
        loss=loss,
        plan=plan,
        train=prepared.train,
        eval=prepared.eval,
        pad=pad,
        checkpoints=checkpoints,
        stop=stop,
        console=console,
        tracker=tracker,
        offer=lambda seals: offer(tracker, models, checkpoints.store, seals, loop.progress.evaluations),
        heart=heart,
        row_keys=prepared.row_keys,
        wall=wall,
        observers=[profiler],
        asked=requests.take if requests else lambda: 0,
        board=board,
        fast=fast,
    )
    loop.wrapped.prove(probe, expected)
    proven = loop.wrapped.prove_isolation(reach(built, settings))
    if gang.world > 1:
        console.say("distribution: " + ", ".join(f"{key} {value}" for key, value in loop.wrapped.ran().items()))
    attempt, first = 0, None
    try:
        resumed_from = loop.resume()
        if board is not None:
            board.begin(resumed_from)
        if gang.leader:
            attempt = begin_attempt(store, gang, resumed_from, wall.began)
            first = first_began(store)
            came = {} if resumed_from is None else {"dropforge.resumed_from": str(resumed_from)}
            if resumed_from is not None:
                tracker.resume(resumed_from)
            tracker.tags({"dropforge.attempt": str(attempt), "dropforge.steps": str(plan.steps), **came})
        if resumed_from is not None:
            if gang.leader:  # the attempt before may have ended before it could tell
                loop.offer(checkpoints.seals())
            console.say(f"attempt {attempt}: resuming from checkpoint step-{resumed_from}")
        elif attempt > 1:
            wall.resume({}, first)  # of what was done before, nothing was kept
        loop.start()
        stop.together()
        loop.run()
        profiler.close(loop.progress.step, _PROFILE)
        whole = loop.wrapped.whole()
        if whole is not None:
            console.phase("writing the model", plan.steps)
            base = settings.base.model or ""
            try:
                exported = export_model(whole, portable(prepared.tokenizer), store, "model/", probe, base)
            except OSError as error:
                raise ExportError(
                    f"model {store.uri}/model/",
                    f"it could not be written ({error})",
                    "Make room and try again: training goes on from its last checkpoint",
                ) from error
            keep_files(lambda: curves(loop, spec), store, spec.tracking, console.say, "curves").join(_DRAW)
            report = make_report(
                store,
                spec,
                gang,
                resumed_from=resumed_from,
                figures=loop.report(),
                wall=wall_rows(wall, first),
                packing=packing_facts(plan, attention, proven, loss, prepared)
                | {"plan": digest, "proof": proof.plain()},
                checkpoints=checkpoint_rows(checkpoints.store, checkpoints.seals()),
                model=exported,
            )
            card = keep_files(
                lambda: {CARD: model_card(spec, report).encode()}, store, spec.tracking, console.say, "the model card"
            )
            card.join(_DRAW)
            store.put(REPORT, json.dumps(report, indent=1, ensure_ascii=False).encode())  # now the run has succeeded
            console.say(f"model {exported.uri}: {exported.bytes / 1e6:.1f} MB, {report['steps']} steps, done")
        gang.follow("report")  # nobody leaves before it is there, and writing a large model takes its time
        if fast is not None and gang.local_rank == 0:
            fast.clear()
    except BaseException as error:
        if gang.leader and loop.log.points.rows:
            seconds = min(_DRAW_FAILED, loop.grace_left() - 1)
            text = f"ended: {error}"
            keep_files(lambda: curves(loop, spec, text), store, spec.tracking, console.say, "curves").join(
                max(0.0, seconds)
            )
        raise
    finally:
        if board is not None:
            board.close()
        finish(tracker, spec, attempt, console)
    gang.leave()


def places(
    spec: RunSpec, settings: Settings, gang: Gang, digest: str, console: Console
) -> tuple[Checkpoints, Fast | None]:
    """The durable place of checkpoints and this node's fast tier; a collective.

    :raises RecipeError: on every rank, if nodes do not share the durable place or lack the fast folder.
    """
    store = open_store(spec.checkpoints_root)
    if spec.checkpoints_root != spec.root:
        check_shared(store, gang)
        console.say(f"checkpoints go to {store.uri}/checkpoints")
    checkpoints = Checkpoints(store, spec.run, digest, resume_facts(spec), console.say)
    asked = settings.train.fast_checkpoints
    return checkpoints, None if asked is None else open_fast(checkpoints, gang, asked.folder, asked.keep)


def build(settings: Settings, prepared: Prepared, gang: Gang) -> Built:
    """The model on its device, the same on every rank."""
    if settings.base.scratch is not None:
        vocabulary = prepared.tokenizer.get_vocab()
        built = make_scratch(
            settings.base.scratch, {token: vocabulary[token] for token in SPECIAL}, settings.train.seed
        )
    else:
        model = load_model(prepared.base, settings.base.revision)
        check_context(model, settings.train.sequence_length)
        check_router(model)
        built = (
            add_adapters(model, settings.train.lora, settings.train.seed)
            if settings.train.method == "lora"
            else Built(model)
        )
    largest = max(int(part.ids.max()) if len(part.ids) else 0 for part in (prepared.train, prepared.eval))
    check_vocabulary(built.model, largest)
    built.model.to(gang.device)
    built.model.config.use_cache = False
    return built


def examine(built: Built, settings: Settings) -> Attention:
    """How this run attends and whether it packs: the recipe must allow it and the model must prove it."""
    train = settings.train
    return choose(
        built.model,
        asked=train.attention,
        precision=train.precision,
        length=reach(built, settings),
        pack=train.packing != "off",
        deterministic=train.deterministic,
    )


def reach(built: Built, settings: Settings) -> int:
    """Longest row in tokens that the model takes."""
    limit = getattr(built.model.config, "max_position_embeddings", None) or settings.train.sequence_length
    return int(min(settings.train.sequence_length, limit))


def width(built: Built) -> int | None:
    """The model's hidden size, where its config tells."""
    size = getattr(built.model.config.get_text_config(), "hidden_size", None)
    return size if isinstance(size, int) else None


def make_plan(settings: Settings, prepared: Prepared, packs: bool, width: int | None = None) -> Plan:
    """The plan; padded, a step has as many documents as hold its tokens on average, unless the recipe counts rows.

    :param width: the model's hidden size, for the cost of a pack.
    """
    train = settings.train
    plan = Plan(
        lengths=prepared.train.lengths,
        targets=prepared.train.targets,
        seed=train.seed,
        size=train.sequence_length,
        rows=train.rows,
        packed=packs,
        epochs=train.passes,
        max_steps=train.max_steps,
        mix=prepared.mix,
        packs_of=prepared.packs if packs else None,
        linear=LINEAR if width is None else PER_WIDTH * width,
    )
    if not packs and train.rows_per_step is None:
        plan.rows = max(1, round(train.rows / plan.filled()))
    return plan


def pad_id(tokenizer: Any) -> int:
    """An id to fill rows with: the end token's where there is no padding token. It is never a target there."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def portable(tokenizer: Any) -> Any:
    """The tokenizer as it is saved: it carries the chat template that the training used."""
    if not tokenizer.chat_template:
        tokenizer.chat_template = PLAIN_TEMPLATE
    return tokenizer


def resume_facts(spec: RunSpec) -> dict[str, str]:
    """What a checkpoint and a resume from it are compared by; `trainer.state.compare` knows what may change."""
    template = hashlib.sha256(CHAT_TEMPLATE.encode()).hexdigest()
    return comparable(spec.recipe, dataset=spec.dataset_digest, chat_template=template)


def weights_digest(built: Built) -> str:
    """A look at every weight, frozen ones too: ranks must begin alike, or shards of two models make one."""
    state = hashlib.sha256()
    for name, weight in built.model.named_parameters():
        values = weight.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _LOOKS)].double()
        state.update(f"{name} {tuple(weight.shape)} {float(values.sum()):.6f} {float(values.abs().sum()):.6f}".encode())
    return state.hexdigest()[:16]


def agree(gang: Gang, facts: dict[str, str]) -> None:
    """:raises DropforgeError: on every rank, if ranks see different facts."""
    everyone = gang.gather(facts)
    for key in facts:
        values = [other[key] for other in everyone]
        if len(set(values)) > 1:
            raise DropforgeError(
                "the ranks", f"they disagree on the {key}: {', '.join(values)}", "Run the same image on all nodes"
            )


def describe(
    console: Console, built: Built, plan: Plan, attention: Attention, loss: LossModel, prepared: Prepared
) -> None:
    """Say what will be done, before it is done."""
    count = sum(weight.numel() for _, weight in built.trainable())
    facts = prepared.train.facts
    console.say(
        f"{count:,} trainable weights; {facts['rows']} rows, {facts['documents']} documents, {facts['tokens']} tokens, "
        f"{facts['targets']} of them targets; {plan.steps} steps of {plan.rows} rows of {plan.size} tokens"
    )
    console.say(f"attention: {attention}")
    isolation = attention.isolation
    if attention.packs:
        console.say(
            f"packing: {plan.filled():.1%} of the places hold tokens; documents do not see each other "
            f"(largest difference {isolation.difference:.1e}); loss: {loss.way}"
        )
    else:
        console.say(f"packing is off: {isolation.reason}; rows are padded and grouped by length; loss: {loss.way}")
    for key, text in (
        ("without_targets", "rows teach nothing and are left out"),
        ("refused_by_template", "of them are refused by the chat template"),
        ("cut_conversations", "conversations are longer than a row and are cut"),
        ("cut_targets", "targets are cut off with them"),
        (
            "unrolled_conversations",
            "conversations are one document per answer: the chat template rewrites earlier turns",
        ),
        ("merged_at_border", "answers begin in a token that also ends their prompt"),
        ("split_texts", "texts are longer than a row and are split"),
    ):
        if facts.get(key):
            console.say(f"{facts[key]} {text}")


def packing_facts(
    plan: Plan, attention: Attention, proven: float | None, loss: LossModel, prepared: Prepared
) -> dict[str, Any]:
    return {
        **attention.plain(),
        "difference_in_training": proven,
        "filled": round(plan.filled(), 4),
        "packs_per_epoch": plan.packs_per_epoch,
        "sources": plan.mixture(),
        "loss": loss.way,
        "train": dict(prepared.train.facts),
        "eval": dict(prepared.eval.facts),
    }


def curves(loop: Loop, spec: RunSpec, how: str = "") -> dict[str, bytes]:
    """The picture of a training, however it ended."""
    progress = loop.progress
    note = f"step {progress.step} of {loop.steps}{': ' if how else ''}{' '.join(how.split())[:120]}"
    return {CURVES: draw_curves(loop.log.points, progress.evaluations, progress.resumed, spec.run, note)}


def offer(
    tracker: Tracker, models: Models | None, store: Any, seals: list[Seal], evaluations: Sequence[Mapping[str, Any]]
) -> None:
    """Make the kept checkpoints visible in the MLflow run; returns at once."""
    best = {f"{BEST}_checkpoint": f"step-{step}" for step in best_steps(seals, 1)}
    last = {f"{LAST}_checkpoint": f"step-{seals[-1].step}"} if seals else {}
    tracker.tags({"dropforge.checkpoints": checkpoint_tag(checkpoint_rows(store, seals)), **best, **last})
    if models is not None:
        models.show(shown(store.uri, seals, evaluations))
    tracker.wake()


def finish(tracker: Tracker, spec: RunSpec, attempt: int, console: Console) -> None:
    """Send the last metrics; what MLflow could not take is kept in the run's folder."""
    unsent = tracker.close()
    if unsent:
        key = f"unsent-metrics/{attempt}-{int(time.time())}.json"
        console.say(f"MLflow did not take {len(unsent)} metrics; they are in {spec.root}/{key}")
        try:
            open_store(spec.root).put(key, json.dumps(unsent).encode())
        except (OSError, DropforgeError) as error:
            console.say(f"they could not be stored either ({error})")
