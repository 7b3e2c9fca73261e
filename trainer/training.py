"""One rank's way through a run, from the prepared data to the report."""

from __future__ import annotations

import hashlib
import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
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
from trainer.model.build import Built, add_adapters, check_context, check_vocabulary, load_model, make_scratch
from trainer.model.export import ExportError, export_model
from trainer.model.isolation import Isolation, check_isolation
from trainer.model.loss import LossModel, choose_way, loss_model, shortened
from trainer.model.shard import probe_loss
from trainer.node.heart import Heart
from trainer.prepare import Prepared, await_prepared
from trainer.report.console import Console
from trainer.report.final import begin_attempt, checkpoint_rows, checkpoint_tag, write_report
from trainer.report.tracking import Tracker, make_tracker
from trainer.state.checkpoint import Checkpoints, Seal
from trainer.state.compare import facts as comparable
from trainer.state.resume import choose_checkpoint
from trainer.state.shared import check_shared
from trainer.state.stop import StopSignal

_LOOKS: Final = 4096  # values of each weight that ranks compare


def train(
    spec: RunSpec, settings: Settings, gang: Gang, scratch: Path, stop: StopSignal, console: Console, heart: Heart
) -> None:
    """Train, evaluate, export and report.

    :raises PreemptedError, CollectiveError, DropforgeError: see `trainer.rank` for how each ends.
    """
    prepared = await_prepared(settings, spec, scratch, stop.check)
    console.phase("building the model")
    built = build(settings, prepared, gang)
    isolation = examine(built, settings)
    plan = make_plan(settings, prepared, isolation.packs, width(built))
    console.steps = plan.steps
    pad = pad_id(prepared.tokenizer)
    probe = shortened(make_batch(prepared.train, plan.step(0)[:2], pad)).to(gang.device)
    loss = loss_model(built.model, isolation.packs, settings.train.precision == "bf16")
    choose_way(loss, probe)
    describe(console, built, plan, isolation, loss, prepared)
    stop.check()

    gang.connect()
    digest = plan.digest(prepared.plan_content)
    agree(gang, {"plan": digest, "loss": loss.way, "weights": weights_digest(built)})
    proof = prove(plan, gang, settings.train.micro_batch)
    store = open_store(spec.root)
    check_shared(store, gang)
    checkpoints = Checkpoints(store, spec.run, digest, resume_facts(spec), console.say)
    snapshot = choose_checkpoint(checkpoints, gang)
    resumed_from = snapshot.step if snapshot else None
    expected = probe_loss(loss, probe)
    tracker = make_tracker(spec.tracking if gang.leader else None, console.say)
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
        offer=lambda seals: offer(tracker, store, seals),
        heart=heart,
        row_keys=prepared.row_keys,
    )
    loop.wrapped.prove(probe, expected)
    if gang.world > 1:
        console.say("distribution: " + ", ".join(f"{key} {value}" for key, value in loop.wrapped.ran().items()))
    attempt = 0
    try:
        if gang.leader:
            attempt = begin_attempt(store, gang, resumed_from)
            came = {} if resumed_from is None else {"dropforge.resumed_from": str(resumed_from)}
            tracker.tags({"dropforge.attempt": str(attempt), "dropforge.steps": str(plan.steps), **came})
        if snapshot is not None:
            loop.restore(snapshot)
            console.say(f"attempt {attempt}: resuming from checkpoint step-{resumed_from}")
            del snapshot
        loop.start()
        stop.together()
        loop.run()
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
            report = write_report(
                store,
                spec,
                gang,
                resumed_from=resumed_from,
                figures=loop.report(),
                packing=packing_facts(plan, isolation, loss, prepared) | {"plan": digest, "proof": proof.plain()},
                seals=checkpoints.seals(),
                model=exported,
            )
            console.say(f"model {exported.uri}: {exported.bytes / 1e6:.1f} MB, {report['steps']} steps, done")
        gang.barrier()  # nobody leaves before the report is there
    finally:
        finish(tracker, spec, attempt, console)
    gang.leave()


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


def examine(built: Built, settings: Settings) -> Isolation:
    """Whether this run packs: the recipe must allow it and the model must prove it."""
    if settings.train.packing == "off":
        return Isolation(False, 0.0, "the recipe says so")
    limit = getattr(built.model.config, "max_position_embeddings", None) or settings.train.sequence_length
    return check_isolation(built.model, min(settings.train.sequence_length, limit))


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
    console: Console, built: Built, plan: Plan, isolation: Isolation, loss: LossModel, prepared: Prepared
) -> None:
    """Say what will be done, before it is done."""
    count = sum(weight.numel() for _, weight in built.trainable())
    facts = prepared.train.facts
    console.say(
        f"{count:,} trainable weights; {facts['rows']} rows, {facts['documents']} documents, {facts['tokens']} tokens, "
        f"{facts['targets']} of them targets; {plan.steps} steps of {plan.rows} rows of {plan.size} tokens"
    )
    if isolation.packs:
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


def packing_facts(plan: Plan, isolation: Isolation, loss: LossModel, prepared: Prepared) -> dict[str, Any]:
    return {
        **{key: value for key, value in asdict(isolation).items() if value != float("inf")},
        "filled": round(plan.filled(), 4),
        "packs_per_epoch": plan.packs_per_epoch,
        "sources": plan.mixture(),
        "loss": loss.way,
        "train": dict(prepared.train.facts),
        "eval": dict(prepared.eval.facts),
    }


def offer(tracker: Tracker, store: Any, seals: list[Seal]) -> None:
    """Make the kept checkpoints visible in the MLflow run."""
    tracker.tags({"dropforge.checkpoints": checkpoint_tag(checkpoint_rows(store, seals))})


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
