"""What one rank trains, put together from the prepared data: the model, how it attends, its plan and its loss."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dropforge.errors import DropforgeError
from trainer.config import Settings
from trainer.data.balance import LINEAR, PER_WIDTH
from trainer.data.batch import make_batch
from trainer.data.chat import tell_left_out
from trainer.data.mix import unlike_asked
from trainer.data.plan import Plan
from trainer.data.proof import Proof, prove
from trainer.data.template import UNWRITTEN
from trainer.data.tokenizer import SPECIAL, token_ids
from trainer.data.tokens import occurring
from trainer.gang import Gang
from trainer.model.attention import Attention, agree_packing, choose
from trainer.model.build import (
    Built,
    check_context,
    check_vocabulary,
    context_of,
    is_classifier,
    load_classifier,
    load_model,
    prefix_length,
)
from trainer.model.hollow import few_blocks, first_loss, make_hollow, sums_of_files, to_device, weights_of, why_whole
from trainer.model.loss import LossModel, check_first_loss, check_tf32, choose_way, loss_model, shortened
from trainer.model.method import apply_method
from trainer.model.mixture import settle_router
from trainer.model.scratch import make_scratch
from trainer.model.seq2seq import load_seq2seq
from trainer.model.shard import choose as choose_mode
from trainer.model.shard import find_blocks, probe_loss
from trainer.model.slices import UnsliceableError
from trainer.model.unreached import freeze_kinds, freeze_unreached
from trainer.model.vocabulary import add_rows
from trainer.prepare import Prepared
from trainer.report.console import Console

_LOOKS: Final = 4096  # values of each weight that ranks compare
_INTEGERS: Final = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of a value


@dataclass(frozen=True)
class Assembly:
    """The parts, the same on every rank.

    :param pad: id for padding. :param probe: a short batch, and :param expected: the loss of the model on it before it
        was shared out, in nats.
    :param digest: of the plan, see `Plan.digest`. :param proof: that the plan covers the data.
    :param frozen: digest of the weights that are not trained, which no checkpoint holds; None if all are.
    """

    prepared: Prepared
    built: Built
    attention: Attention
    plan: Plan
    pad: int
    probe: Any
    loss: LossModel
    expected: float
    digest: str
    proof: Proof
    frozen: str | None

    def facts(self, proven: float | None) -> dict[str, Any]:
        """The report's part on rows and packs. :param proven: what `Wrapped.prove_isolation` found."""
        plan, prepared = self.plan, self.prepared
        return {
            **self.attention.plain(),
            "difference_in_training": proven,
            "filled": round(plan.filled(), 4),
            "packs_per_epoch": plan.packs_per_epoch,
            "sources": plan.mixture(),
            "loss": self.loss.way,
            "train": dict(prepared.train.facts),
            "eval": dict(prepared.eval.facts),
            "plan": self.digest,
            "proof": self.proof.plain(),
        }


def assemble(
    settings: Settings, prepared: Prepared, gang: Gang, check: Callable[[], None], console: Console
) -> Assembly:
    """Build, choose, plan, and see that all ranks came to the same; the gang connects on the way.

    :param check: called before the first collective; it may raise to stop.
    :raises DropforgeError: on every rank, if they disagree or the recipe does not fit the model.
    """
    built, look = begin(settings, prepared, gang, console)
    own = examine(look, settings)
    plan = make_plan(settings, prepared, own.packs, width(built))
    check()

    gang.connect(console.phase)
    attention = agree_packing(gang, own)
    if attention.packs is not own.packs:
        plan = make_plan(settings, prepared, attention.packs, width(built))
    pad = pad_id(prepared.tokenizer)
    probe = shortened(make_batch(prepared.train, plan.step(0)[:2], pad)).to(gang.device)
    loss = loss_model(look.model, attention.packs, masked=attention.masked)
    loss.precision, loss.exact = settings.train.precision, attention.exact
    choose_way(loss, probe)
    frozen = freeze_unreached(look, loss, probe, gang.world)
    if look is not built:
        frozen = freeze_kinds(built, frozen)
        loss = same_loss(built, loss)
    if frozen:
        console.say(f"{len(frozen)} weights are frozen, because the text does not reach them: {', '.join(frozen[:3])}")
    describe(console, built, plan, attention, loss, prepared)
    if settings.train.loss_on == "all":
        console.say("all messages are learned, questions too: a weight of 0 counts on answers alone (train.loss_on)")
    if unseen := unseen_tokens(settings, prepared):
        console.say(f"no training row has these new tokens, whose rows stay as they begin: {', '.join(unseen)}")
    digest = plan.digest(prepared.plan_content)
    agree(gang, {"plan": digest, "loss": loss.way, "weights": weights_digest(built)})
    proof = prove(plan, gang, settings.train.micro_batch)
    expected, frozen_weights = look_at_all(built, loss, probe, gang)
    # A checkpoint's weights come later. Of a classifier two rows are too few to tell a guess.
    if settings.base.scratch is not None and prepared.labels is None:
        nats = float(loss.told(torch.tensor(expected, dtype=torch.float64)))
        check_first_loss(nats, len(probe.targets), loss.place()[1])
    return Assembly(prepared, built, attention, plan, pad, probe, loss, expected, digest, proof, frozen_weights)


def begin(settings: Settings, prepared: Prepared, gang: Gang, console: Console) -> tuple[Built, Built]:
    """The model to train, and the one on which is decided how: itself, or its first blocks where it is hollow."""
    check_tf32(gang.device, settings.train.precision, "train.precision")
    check_tf32(gang.device, settings.eval_precision, "evaluate.precision")
    mode, _ = choose_mode(settings.parallel, settings.shard_group, gang)
    reason = why_whole(settings, mode)
    if reason is None:
        try:
            built = make_hollow(prepared.base, settings)
            look = few_blocks(built, settings)
        except UnsliceableError as error:
            reason = str(error)
        else:
            check_context(built.model, settings.train.sequence_length)
            return ready(built, prepared, gang), ready(look, prepared, gang)
    if mode not in ("auto", "ddp") and settings.base.model is not None:
        console.say(f"each rank reads the whole base model before it keeps its shard: {reason}")
    built = build(settings, prepared, gang)
    return built, built


def build(settings: Settings, prepared: Prepared, gang: Gang) -> Built:
    """The model on its device, the same on every rank."""
    if settings.base.scratch is not None:
        vocabulary = prepared.tokenizer.get_vocab()
        built = make_scratch(
            settings.base.scratch,
            {token: vocabulary[token] for token in SPECIAL},
            settings.train.seed,
            prepared.labels,
            settings.task,
        )
        settle_router(built.model, settings.train.router_loss)
    else:
        base, revision, labels = prepared.base, settings.base.revision, prepared.labels
        if settings.task == "sequence-to-sequence":
            model = load_seq2seq(base, revision)
        elif labels is None:
            model = load_model(base, revision)
        else:
            pad = pad_id(prepared.tokenizer)
            model = load_classifier(base, revision, labels=labels, pad=pad, seed=settings.train.seed)
        settle_router(model, settings.train.router_loss)
        new = token_ids(prepared.tokenizer, settings.base.new_tokens or ())
        add_rows(model, new)
        built = apply_method(model, settings.train, new)
        check_context(built.model, settings.train.sequence_length)
    return ready(built, prepared, gang)


def ready(built: Built, prepared: Prepared, gang: Gang) -> Built:
    """See that a model knows all tokens, and put it onto its device."""
    largest = max(int(part.ids.max()) if len(part.ids) else 0 for part in (prepared.train, prepared.eval))
    check_vocabulary(built.model, largest)
    if built.slices is None:
        built.model.to(gang.device)
    else:
        to_device(built, gang.device)
    if not is_classifier(built.model):
        built.model.config.use_cache = False
    return built


def same_loss(built: Built, loss: LossModel) -> LossModel:
    """The loss that was chosen on another model of the same code, of this one."""
    model = built.model
    attention = loss.model.config.get_text_config()._attn_implementation
    if model.config.get_text_config()._attn_implementation != attention:
        model.set_attn_implementation(attention)
    found = loss_model(model, loss.packed, masked=loss.masked)
    found.way, found.precision, found.exact = loss.way, loss.precision, loss.exact
    return found


def look_at_all(built: Built, loss: LossModel, probe: Any, gang: Gang) -> tuple[float, str | None]:
    """The loss of the whole model on the first rows, and the digest of what is not trained; all ranks take part."""
    if built.slices is None:
        return probe_loss(loss, probe), frozen_digest(built)
    found = None
    if gang.leader:  # one of them reads all files, and the others wait for it however long it takes
        expected = first_loss(built, loss, probe, find_blocks(built.model))
        found = expected, frozen_digest(built), sums_of_files(built)
    gang.follow("the base model's first loss")
    told: tuple[float, str | None, dict[str, int]] = gang.gather(found)[0]
    built.slices.sums = told[2]
    return told[:2]


def examine(built: Built, settings: Settings) -> Attention:
    """How this run attends and whether it packs: the recipe must allow it and the model must prove it."""
    train = settings.train
    pack = train.packing != "off"
    found = choose(
        built.model,
        asked=train.attention,
        precision=train.precision,
        length=reach(built, settings),
        pack=pack and not prefix_length(built.model),
        deterministic=train.deterministic,
    )
    if not pack or not prefix_length(built.model):
        return found
    return replace(found, isolation=replace(found.isolation, reason="each document has its own prefix before it"))


def reach(built: Built, settings: Settings) -> int:
    """Longest row in tokens that the model takes."""
    limit = context_of(built.model)
    return settings.train.sequence_length if limit is None else min(settings.train.sequence_length, limit)


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


def unseen_tokens(settings: Settings, prepared: Prepared) -> list[str]:
    """Names of new tokens that no training document has."""
    names = list(settings.base.new_tokens or ())
    ids = token_ids(prepared.tokenizer, names)
    seen = occurring(prepared.train.ids, ids)
    return [name for name, index in zip(names, ids, strict=True) if index not in seen]


def pad_id(tokenizer: Any) -> int:
    """An id to fill rows with: the end token's where there is no padding token. It is never a target there."""
    return int(tokenizer.eos_token_id if tokenizer.pad_token_id is None else tokenizer.pad_token_id)


def weights_digest(built: Built) -> str:
    """A look at every weight, frozen ones too: ranks must begin alike, or shards of two models make one."""
    if built.slices is not None:
        return str(built.slices.digest())
    state = hashlib.sha256()
    for name, weight in built.model.named_parameters():
        values = weight.detach().reshape(-1)
        values = values[:: max(1, values.numel() // _LOOKS)].double()
        state.update(f"{name} {tuple(weight.shape)} {float(values.sum()):.6f} {float(values.abs().sum()):.6f}".encode())
    return state.hexdigest()[:16]


def frozen_digest(built: Built) -> str | None:
    """SHA-256 of the weights that are not trained, the same on any device; None if there are none.

    Of each go in the sum of all its values as integers, which no order of adding changes, and some of its values.
    """
    state = hashlib.sha256()
    frozen = False
    for name, weight in weights_of(built):
        frozen = True
        bits = weight.detach().contiguous().reshape(-1).view(_INTEGERS[weight.element_size()])
        some = bits[:: max(1, bits.numel() // _LOOKS)].cpu().numpy().tobytes()
        state.update(f"{name} {weight.dtype} {tuple(weight.shape)} {int(bits.sum(dtype=torch.int64))} ".encode() + some)
    return state.hexdigest() if frozen else None


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
        *UNWRITTEN.items(),
        ("cut_conversations", "conversations are longer than a row and are cut"),
        ("cut_targets", "targets are cut off with them"),
        (
            "unrolled_conversations",
            "conversations are one document per answer: the chat template rewrites earlier turns",
        ),
        ("merged_at_border", "answers begin in a token that also ends their prompt"),
        ("split_texts", "texts are longer than a row and are split"),
        ("cut_rows", "rows are longer than a row of the model and are cut"),
    ):
        if facts.get(key):
            console.say(f"{facts[key]} {text}")
    if told := tell_left_out("evaluation rows", prepared.eval.facts):
        console.say(told)
    for told in unlike_asked(plan.mixture()):
        console.say(told)
    if prepared.code.wheel is not None:
        console.say(f"own code: {prepared.code.wheel}")
    if prepared.labels is not None:
        console.say(
            f"{len(prepared.labels)} labels: " + ", ".join(f"{k} ({n})" for k, n in facts["labels"].items())[:500]
        )
        if prepared.eval.facts["unseen_labels"]:
            console.say(f"{prepared.eval.facts['unseen_labels']} evaluation rows have labels that no training row has")
