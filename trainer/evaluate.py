"""`python -m trainer.evaluate ADDRESS_OF_EVALUATE_JSON`: candidate and champion on the same rows.

The rows are the evaluation rows of the candidate's dataset, the first `evaluate.max_rows` in the order of their
content keys. Each model reads them with its own tokenizer, so `eval/loss` (nats per token) compares two models only
if they share the tokenizer (`same_tokenizer`); `eval/bits_per_byte` compares any two.

evaluate.json: `{"run": address of run.json, "candidate": model folder, "champion": null or {"version", "model",
"days"}}`; the result is `evaluation.json` in the run's folder. Both models are measured in the recipe's
`evaluate.precision`, which the result names. A model without a finite loss has `problem` in the place of its figures.
With `evaluate.generation` each model answers the same rows (`gen/...`), which compare whatever the tokenizers are; what
it answered is `answers/candidate.json` and `answers/champion.json` in the run's folder and among its artifacts.
What each row adds to the figures of both is `evaluation-rows.json` (`trainer.row_sums`), written before the result,
which has its SHA-256; `slices` are the figures of parts of them, as `promote.slices` asks; with `promote.confidence`
the gain's interval that follows from it is `gain` of the result.

With `evaluate.holdout` both are measured on that dataset version's rows as well (`holdout/...`): on the first
`evaluate.max_rows` in the order of their content keys, without those that the candidate was trained on. `holdout` of
the result says how many.

Of what a model's chat template refuses nothing is read, and a shorter context cuts rows: where candidate and champion
read other rows, both are measured on those that both read alike, and the champion's figures are these alone.

Classifiers are measured on the rows whose label the candidate knows, each with its own tokenizer; a row is a row, so
their figures compare whatever the tokens. A champion that does not know one of these labels, or has another task, has
`problem` in the place of its figures.
"""

from __future__ import annotations

import hashlib
import heapq
import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Final, TypeVar

import numpy as np
from numpy.typing import NDArray

from dropforge.dataset import SPLITS, Manifest
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.holdout import PREFIX, find_holdout, holdout_of, named_as
from dropforge.json_objects import read_object
from dropforge.promotion import LOST_LABELS, UNSEEN_LABELS, Gain, Policy, policy_of
from dropforge.run import ExitCode, RunSpec
from dropforge.slices import OWN, Cut, cuts_of
from dropforge.store import Store, open_store, split_uri, wait_for_s3
from trainer import bootstrap
from trainer.compat import check_versions, quiet_libraries
from trainer.config import Settings, read_settings
from trainer.data.chat import tell_left_out
from trainer.data.rows import Row, check_keys, load_manifest, read_rows
from trainer.data.template import UNWRITTEN
from trainer.data.user_code import UserCode, user_code
from trainer.launch import Verdict, write_termination_message
from trainer.local_ranks import begin_rank, ranks_of_node, run_ranks
from trainer.node.machine import allocator
from trainer.rank import ending, leave_process, leave_word
from trainer.report.artifacts import keep_files
from trainer.report.console import Console, warn
from trainer.report.samples import name_of, table_json
from trainer.row_slices import sliced
from trainer.row_sums import NAME, Columns, answered_columns, figure, measured_columns, placed, plain, read_bytes
from trainer.state.stop import PreemptedError, StopSignal
from trainer.unmeasurable import NoTargetError, OtherTaskError

if TYPE_CHECKING:
    from trainer.data.tokens import Tokens
    from trainer.gang import Gang
    from trainer.generate import Answers
    from trainer.measure import Measured

T = TypeVar("T")

RESULT = "evaluation.json"
_KEPT: Final = ("eval/", "gen/", PREFIX, "model/")  # figures that are told of the champion, too
_OF_ROWS: Final = ("eval/", PREFIX)  # those that count tokens of rows; answers are of prompts that all models are asked
_KEEP: Final = 30.0  # seconds that the end waits for the answers to be stored


def evaluate(uri: str, stop: StopSignal, console: Console, gang: Gang | None = None) -> dict[str, Any]:
    """Measure both models and write the result.

    :param gang: the ranks that measure together; without it those of `gang_here`.
    :return: the result; of ranks other than the first one nothing.
    :raises RecipeError: if a model cannot be loaded. :raises DataError: if the dataset is broken.
    """
    check_versions()
    order = read_order(uri)
    root, key = split_uri(order["run"])
    spec = RunSpec.read(open_store(root), key)
    settings = read_settings(spec.recipe)
    gang = gang or gang_here(settings)
    gang.connect(console.phase)
    with user_code(settings.code) as code:
        found = _compare(spec, settings, order, code, stop, console, gang)
    gang.barrier()  # the first rank has stored the result
    return found


def gang_here(settings: Settings) -> Gang:
    """This process among those that its launcher has started, or by itself.

    :raises RecipeError, NodeError: if it finds no GPU and the recipe asks for some.
    """
    from trainer.gang import gang_from_env

    return gang_from_env(settings.gpus, None if "LOCAL_RANK" in os.environ else {})


def _compare(
    spec: RunSpec,
    settings: Settings,
    order: Mapping[str, Any],
    code: UserCode,
    stop: StopSignal,
    console: Console,
    gang: Gang,
) -> dict[str, Any]:
    read: tuple[list[Row], Holdout | None] | None = None
    if gang.leader:
        held = holdout_rows(spec, settings, code)
        read = evaluation_rows(spec, settings, code, held), held
    gang.follow("the evaluation rows")  # which one rank reads for all, however long that takes
    rows, held = gang.gather(read)[0]
    stop.check()
    if held is not None:
        console.say(str(held))
    own = None if held is None else held.rows

    def measure(
        name: str, uri: str, some: list[Row], held_out: list[Row] | None, *, answering: bool = True
    ) -> MeasuredModel:
        how = settings if answering else replace(settings, generation=None)
        return measure_model(name, uri, some, how, stop, console, code, held_out, gang)

    measured = measure("candidate", order["candidate"], rows, own)
    candidate, tables = measured.figures, {"candidate": measured.answers}
    columns: dict[str, dict[str, NDArray[np.float64]]] = {"candidate": dict(measured.columns)}
    compared: Mapping[str, Columns] = columns  # on the same rows
    in_slices: Mapping[str, Columns] = columns
    champion: dict[str, Any] | None = None
    shared: dict[str, Any] | None = None
    same = True
    if order["champion"] is not None:
        known = measured.labels
        places, ours = _places(rows, known), _known(own, known)
        try:
            some = [rows[place] for place in places]
            other = measure("champion", order["champion"]["model"], some, ours)
            champion, same = other.figures, measured.tokenizer == other.tokenizer
            tables["champion"] = other.answers
            columns["champion"] = placed(other.columns, places, len(rows))
            if lost := _lost(own or (), known, other.labels):
                candidate[LOST_LABELS] = lost
            left_out = champion.get("unseen_labels") or champion.get(UNSEEN_LABELS)
            if "problem" not in {**champion, **candidate}:
                mine, held_mine = measured.read, measured.held_read
                if left_out:
                    console.say("the champion does not know all labels: both are compared without rows of the others")
                    mine, held_mine = _of(other.labels, rows, mine), _of(other.labels, own or (), held_mine)
                both = _Alike.of("evaluation rows", mine, other.read, places)
                in_held = _Alike.of("rows of the holdout", held_mine, other.held_read, _places(own or (), known))
                for told in filter(None, (both.told, in_held.told)):
                    console.say(told)
                narrower = "; ".join(filter(None, (both.narrower, in_held.narrower)))
                if left_out or narrower:
                    some = [rows[place] for place in both.places]
                    ours = None if own is None else [own[place] for place in in_held.places]
                    again = measure("candidate", order["candidate"], some, ours, answering=False)
                    shared = _kept(again.figures, _OF_ROWS)
                    again_placed = placed(again.columns, both.places, len(rows))
                    compared = in_slices = {**columns, "candidate": {**columns["candidate"], **again_placed}}
                if narrower:
                    console.say(narrower)
                    other = measure("champion", order["champion"]["model"], some, ours, answering=False)
                    champion = {key: value for key, value in champion.items() if not key.startswith(_OF_ROWS)}
                    champion |= _kept(other.figures, _OF_ROWS)
                    columns["champion"] |= placed(other.columns, both.places, len(rows))
        except (OtherTaskError, NoTargetError) as error:
            champion = {"problem": str(error)}
        if "problem" in champion:
            console.say(f"the champion has no figures: {champion['problem']}")
            columns.pop("champion", None)
    if not gang.leader:
        return {}
    policy = policy_of(spec.recipe["promote"], same_tokenizer=same, task=settings.task)
    gain = gain_of(policy, compared)
    if gain is not None:
        console.say(str(gain))
    note = "tokenizers differ: compare eval/bits_per_byte, not eval/loss"
    result = {
        "precision": settings.eval_precision,
        "rows": candidate.pop("rows"),
        "target_tokens": candidate.pop("target_tokens"),
        "candidate": candidate,
        "champion": None if champion is None else _kept(champion),
        "shared": shared,
        "champion_version": None if order["champion"] is None else str(order["champion"]["version"]),
        "champion_days": None if order["champion"] is None else order["champion"].get("days"),
        "same_tokenizer": same,
        "metric_note": "" if same or settings.task == "classification" else note,
        "gain": None if gain is None else vars(gain),
        "holdout": None if held is None else held.told(),
        "slices": _sliced(cuts_of(spec.recipe.get("promote") or {}), rows, columns, in_slices),
    }
    found = {name_of(name): table_json(answers.table()) for name, answers in tables.items() if answers is not None}
    if found:
        keep_files(lambda: found, open_store(spec.root), spec.tracking, console.say, "the answers").join(_KEEP)
    store = open_store(spec.root)
    each_row = json.dumps(plain(rows, columns), allow_nan=False).encode()
    store.put(NAME, each_row)
    result["rows_sha256"] = hashlib.sha256(each_row).hexdigest()
    store.put(RESULT, json.dumps(result, indent=1, allow_nan=False).encode())
    return result


def _kept(figures: Mapping[str, Any], groups: tuple[str, ...] = _KEPT) -> dict[str, Any]:
    """What is told of a model that the candidate is compared with. :param groups: how names of figures begin."""
    return {key: value for key, value in figures.items() if key.startswith(groups) or key == "problem"}


def _sliced(
    cuts: Sequence[Cut], rows: Sequence[Row], columns: Mapping[str, Columns], same_rows: Mapping[str, Columns]
) -> list[dict[str, Any]]:
    """Figures of slices, the candidate's on the champion's rows where that has figures in a slice.

    :param columns: with all that the candidate reads. :param same_rows: with what both read.
    """
    found = sliced(cuts, rows, columns)
    if same_rows is columns:
        return found
    both = sliced(cuts, rows, same_rows)
    return [narrow if narrow.get("champion") else whole for whole, narrow in zip(found, both, strict=True)]


@dataclass(frozen=True)
class _Alike:
    """Rows that candidate and champion both read alike; of which most are cut for one, or written without thoughts, all
    that both read.

    :param what: they are. :param places: of them. :param candidate, champion: how many each reads.
    :param otherwise: how many of `places` one reads with more text than the other.
    """

    what: str
    places: list[int]
    candidate: int
    champion: int
    otherwise: int = 0

    @classmethod
    def of(cls, what: str, mine: Mapping[int, int], theirs: Mapping[int, int], given: Sequence[int]) -> _Alike:
        """:param mine, theirs: as of `MeasuredModel`. :param given: (K,) places of what the champion was given."""
        theirs = {given[place]: size for place, size in theirs.items()}
        both = sorted(mine.keys() & theirs.keys())
        alike = [place for place in both if mine[place] == theirs[place]]
        places, otherwise = (alike, 0) if 2 * len(alike) >= len(both) else (both, len(both) - len(alike))
        return cls(what, places, len(mine), len(theirs), otherwise)

    @property
    def narrower(self) -> str:
        """What is said where these are not all; empty if they are. :raises NoTargetError: if there are none."""
        if self.candidate == len(self.places) == self.champion:
            return ""
        said = f"the candidate reads {self.candidate:,} {self.what}, the champion {self.champion:,}"
        if not self.places:
            raise NoTargetError("champion", f"{said}, and none of them is the same", "Compare them by hand")
        return f"{said}: they are compared on the {len(self.places):,} that both read alike"

    @property
    def told(self) -> str:
        """What is said of those that are read otherwise; empty if there are none."""
        if not self.otherwise:
            return ""
        return (
            f"candidate and champion read {self.otherwise:,} of {len(self.places):,} {self.what} with more or less "
            "text, cut or without thoughts: their figures are of what each reads"
        )


def _places(rows: Sequence[Row], labels: Sequence[str] | None) -> list[int]:
    """Where rows stand whose label a model knows; all of them, if it is no classifier."""
    return [place for place, row in enumerate(rows) if labels is None or row.label in labels]


def _of(labels: Sequence[str] | None, rows: Sequence[Row], read: Mapping[int, int]) -> dict[int, int]:
    """What was read of the rows whose label is one of these. :param read: as of `MeasuredModel`."""
    return {place: size for place, size in read.items() if rows[place].label in (labels or ())}


def _known(rows: list[Row] | None, labels: Sequence[str] | None) -> list[Row] | None:
    """The rows whose label a model knows."""
    return None if rows is None else [rows[place] for place in _places(rows, labels)]


def _lost(rows: Sequence[Row], candidate: Sequence[str] | None, champion: Sequence[str] | None) -> int:
    """How many rows have a label that the champion knows and the candidate does not."""
    if candidate is None or champion is None:
        return 0
    return sum(row.label in champion and row.label not in candidate for row in rows)


def gain_of(policy: Policy, columns: Mapping[str, Columns]) -> Gain | None:
    """The gain in the deciding metric with its interval; None where nobody asks for it or one model has no figure.

    :param columns: those of `candidate`, and of `champion` if it has figures.
    """
    if policy.confidence is None or "champion" not in columns:
        return None
    candidate, champion = (figure(columns[side], policy.metric) for side in ("candidate", "champion"))
    if candidate is None or champion is None:
        return None
    lower = policy.direction == "lower"
    found = bootstrap.gain(candidate, champion, lower=lower, confidence=policy.confidence)
    if not math.isfinite(found.value):
        return None
    return Gain(policy.metric, policy.confidence, found.rows, found.value, found.low, found.high)


@dataclass(frozen=True)
class MeasuredModel:
    """What came of one model. :param figures: as JSON values; of a classifier also `unseen_labels`, the rows left out
    for a label that it does not know. :param tokenizer: a digest of its tokenizer. :param labels: those it knows.
    :param columns: what each row adds to its figures; none without a finite loss.
    :param read, held_read: of the rows, and of those of the holdout, that it was measured on, the UTF-8 bytes that it
    was measured by; 0 of a classifier's. :param notes: what of the rows it does not read."""

    figures: dict[str, Any]
    tokenizer: str
    answers: Answers | None = None
    labels: tuple[str, ...] | None = None
    columns: Columns = field(default_factory=dict)
    read: Mapping[int, int] = field(default_factory=dict)
    held_read: Mapping[int, int] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def read_order(uri: str) -> dict[str, Any]:
    """The content of evaluate.json. :raises RecipeError: if it is none."""
    root, key = split_uri(uri)
    try:
        values = read_object(open_store(root), key)
        champion = values["champion"]
        if not isinstance(values["run"], str) or not isinstance(values["candidate"], str):
            raise TypeError("run and candidate are addresses")
        if champion is not None and not {"version", "model"} <= set(champion):
            raise KeyError("champion needs version and model")
        return dict(values)
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(uri, f"it is no evaluate.json ({error!r})", "Write it with this version") from error


@dataclass
class Holdout:
    """The family's own evaluation rows. :param rows: to measure on. :param trained_on: how many the candidate knows."""

    named: str
    rows: list[Row]
    trained_on: int = 0

    def without(self, keys: Set[bytes]) -> None:
        """Leave out what the candidate was trained on. :raises DataError: if nothing is left."""
        left = [row for row in self.rows if row.key not in keys]
        self.trained_on = len(self.rows) - len(left)
        self.rows = left
        if not left:
            raise DataError(
                f"recipe key `evaluate.holdout`, dataset version {self.named}",
                f"all its {self.trained_on} rows are among the training rows",
                "Name rows that no drop holds, or name the set in `curation.decontaminate.sets` too",
            )

    def told(self) -> dict[str, Any]:
        return {"named": self.named, "rows": len(self.rows), "trained_on": self.trained_on}

    def __str__(self) -> str:
        known = f", without {self.trained_on} that the candidate was trained on" if self.trained_on else ""
        return f"holdout {self.named[:54]}: {len(self.rows)} rows{known}"


def holdout_rows(spec: RunSpec, settings: Settings, code: UserCode | None = None) -> Holdout | None:
    """The rows of `evaluate.holdout`, checked against their manifest; None without. See `evaluation_rows`."""
    named = holdout_of(spec.recipe)
    if named is None:
        return None
    store = open_store(spec.data_root)
    rows, _ = _first_rows(store, find_holdout(store, named), settings.eval_rows, SPLITS)
    return Holdout(named, _changed(rows, code))


def evaluation_rows(
    spec: RunSpec, settings: Settings, code: UserCode | None = None, held: Holdout | None = None
) -> list[Row]:
    """The rows to measure on, checked against the dataset's manifest.

    :param code: the user's, which changes them. :param held: loses what is among the training rows.
    """
    kept = any(cut.by not in OWN for cut in cuts_of(spec.recipe.get("promote") or {}))
    asked = frozenset(row.key for row in held.rows) if held is not None else frozenset()
    manifest, store = load_manifest(spec), open_store(spec.data_root)
    rows, known = _first_rows(store, manifest, settings.eval_rows, ("eval",), extras=kept, asked=asked)
    if held is not None:
        held.without(known)
    return _changed(rows, code)


def _first_rows(
    store: Store,
    manifest: Manifest,
    most: int,
    splits: Sequence[str],
    *,
    extras: bool = False,
    asked: Set[bytes] = frozenset(),
) -> tuple[list[Row], set[bytes]]:
    """The first rows of these splits in the order of their content keys; and which keys the other splits have.

    :param extras: whether rows bring what is only kept. :param asked: keys that are looked for in the other splits.
    :raises DataError: if the rows of the whole version are not those of its manifest.
    """
    keys = {split: bytearray() for split in SPLITS}  # 16 bytes of each row are all that stays of it

    def read(those: Sequence[str], extras: bool) -> Iterator[Row]:
        for split in those:
            for row in read_rows(store, manifest, split, None, extras):
                keys[split] += row.key
                yield row

    rows = heapq.nsmallest(most, read(splits, extras), key=lambda row: row.key)
    others = [split for split in SPLITS if split not in splits]
    known = {row.key for row in read(others, False) if row.key in asked}
    check_keys(manifest, {split: np.frombuffer(found, dtype="V16") for split, found in keys.items()})
    return rows, known


def _changed(rows: list[Row], code: UserCode | None) -> list[Row]:
    """The rows as the user's own code makes them."""
    return rows if code is None or code.rows is None else [code.rows(row) for row in rows]


def measure_model(
    name: str,
    uri: str,
    rows: list[Row],
    settings: Settings,
    stop: StopSignal,
    console: Console,
    code: UserCode | None = None,
    held: list[Row] | None = None,
    gang: Gang | None = None,
) -> MeasuredModel:
    """Measure one model. Without a finite loss, `problem` is in the place of figures.

    :param name: what it is called in messages. :param uri: its folder.
    :param code: the user's own, for its metrics; `rows` were changed by it.
    :param held: rows of the family's own, to be measured besides.
    :param gang: the ranks that measure together, all with the same rows; without it those of `gang_here`.
    :raises OtherTaskError: if it is not for the task of `settings`.
    """
    from trainer.assembly import examine, pad_id
    from trainer.data.batch import make_batch
    from trainer.data.tokenizer import reading_digest
    from trainer.evaluation_model import evaluation_model
    from trainer.gang import set_threads
    from trainer.generate import generate
    from trainer.measure import measure
    from trainer.model.attention import agree_packing
    from trainer.model.build import check_vocabulary, context_of
    from trainer.model.loss import check_tf32, choose_way, loss_model
    from trainer.tokenise import encode_eval, prompts_of

    code = code or UserCode()
    code.check_metrics(settings.generation)
    console.phase(f"measuring the {name}, {uri}")
    quiet_libraries()
    gang = gang or gang_here(settings)
    check_tf32(gang.device, settings.eval_precision, "evaluate.precision")
    set_threads(gang.local_world)
    with evaluation_model(name, uri, settings, gang, stop.check, console.say) as model:
        built, labels, tokenizer, stored = model.built, model.labels, model.tokenizer, model.stored
        # A champion may have a shorter context than the candidate: it reads longer rows in parts, or cut.
        longest = context_of(built.model) or settings.train.sequence_length
        if labels is not None:  # cuts texts there wherever it is used
            longest = min(longest, tokenizer.model_max_length)
        length = min(settings.train.sequence_length, longest)
        settings = replace(settings, train=replace(settings.train, sequence_length=length))
        tokens = encode_eval(tokenizer, rows, settings, labels)
        if not len(tokens):
            raise NoTargetError(f"{name} {uri}", "no evaluation row has a target for it", "Check `train.loss_on`")
        notes = _read_otherwise(tokens.facts)
        for note in notes:
            console.say(f"{name}: {note}")
        check_vocabulary(built.model, int(tokens.ids.max()))
        # Models are measured alike, whatever attention one of them was trained with, and perhaps without its GPU.
        alike = replace(settings.train, attention="auto", precision=settings.eval_precision)
        attention = agree_packing(gang, examine(model.look, replace(settings, train=alike)))
        chosen = loss_model(model.look.model, attention.packs, False, attention.masked)
        chosen.exact = attention.exact
        pad = pad_id(tokenizer)
        probe = make_batch(tokens, [np.zeros(1, np.int64)], pad).to(gang.device)
        choose_way(chosen, probe)
        loss = model.shared(chosen, probe, length, settings.eval_precision)

    def tell(done: int, count: int) -> None:
        if done == count or done % max(1, count // 10) == 0:
            console.say(f"measuring the {name}: {done} of {count}")
            console.progress(done, steps=count, text=f"measuring the {name}")

    def measured(tokens: Tokens, *, alone: bool) -> Measured:
        """:param alone: what each row adds, and the user's own metrics, too."""
        found = measure(
            loss,
            tokens,
            gang,
            size=length,
            micro=settings.train.micro_batch,
            pad=pad,
            precision=settings.eval_precision,
            stop=lambda: stop.asked,
            tell=tell,
            own=code.figures if alone else None,
            each_document=alone,
        )
        return _whole(found, stop)

    began = time.monotonic()
    found = measured(tokens, alone=True)
    figures = {**found.plain(), **_size(stored, built.model), "model/rows_per_second": _speed(found.rows, began)}
    digest = reading_digest(tokenizer)
    if labels is not None:
        figures["unseen_labels"] = tokens.facts["unseen_labels"]
    if math.isfinite(found.loss):
        console.say(f"{name}: " + "  ".join(f"{key} {value:.4f}" for key, value in found.metrics().items()))
    else:  # JSON has no such number, and none of the others means anything
        problem = f"its loss on these rows is {found.loss}"
        figures = {**{key: value for key, value in figures.items() if not key.startswith(_KEPT)}, "problem": problem}
        console.say(f"{name} {uri}: {problem}")
        return MeasuredModel(figures, digest, labels=labels, notes=notes)
    assert found.each is not None
    columns = measured_columns(tokens, found.each, len(rows))
    read, held_read = read_bytes(tokens), dict[int, int]()
    if held is not None:
        others = encode_eval(tokenizer, held, settings, labels)
        if not len(others):
            raise NoTargetError(f"{name} {uri}", "no row of `evaluate.holdout` has a target for it", "Name other rows")
        check_vocabulary(built.model, int(others.ids.max()))
        told = _held_out(measured(others, alone=False), int(others.facts.get("unseen_labels") or 0))
        console.say(f"{name}, holdout: " + "  ".join(f"{key} {value:.4f}" for key, value in told.items()))
        figures |= told
        held_read = read_bytes(others)
    if settings.generation is None:
        return MeasuredModel(figures, digest, None, labels, columns, read, held_read, notes)
    console.phase(f"the {name} answers")
    answers = generate(
        loss,
        prompts_of(settings, tokenizer, rows, settings.generation.rows),
        gang,
        tokenizer,
        settings.generation,
        pad=pad,
        precision=settings.eval_precision,
        stop=lambda: stop.asked,
        say=console.say,
        scorers=code.scorers,
    )
    answers = _whole(answers, stop)
    console.say(f"{name}: {answers}")
    columns |= answered_columns(answers, rows)
    return MeasuredModel({**figures, **answers.plain()}, digest, answers, labels, columns, read, held_read, notes)


def _whole(found: T | None, stop: StopSignal) -> T:
    """What was measured. :raises PreemptedError: if a rank was asked to stop meanwhile."""
    if found is None:
        stop.check()
        raise PreemptedError(None, message="another rank was asked to stop")
    return found


def _read_otherwise(facts: Mapping[str, Any]) -> tuple[str, ...]:
    """What of the evaluation rows a model does not read, in a line each."""
    kinds = {
        **UNWRITTEN,
        "cut_conversations": "conversations are longer than its context and are cut",
        "cut_rows": "rows are longer than its context and are cut",
    }
    notes = [f"{facts[kind]:,} {text}" for kind, text in kinds.items() if facts.get(kind)]
    return tuple(filter(None, (tell_left_out("evaluation rows", facts), *notes)))


def _held_out(found: Measured, unseen: int) -> dict[str, float]:
    """Figures on the family's own rows; none without a finite loss. :param unseen: rows left out for their label."""
    if not math.isfinite(found.loss):
        return {}
    return {named_as(name): value for name, value in found.metrics().items()} | (
        {UNSEEN_LABELS: unseen} if found.macro_f1 is not None else {}
    )


def _size(stored: int, model: Any) -> dict[str, int]:
    """:param stored: bytes of its files of weights; a prefix is small, and its parameters are its base's as well."""
    return {"model/bytes": stored, "model/parameters": sum(weight.numel() for weight in model.parameters())}


def _speed(rows: int, began: float) -> float:
    """Rows that were read in a second, as the recipe's evaluation does it: a time, which is another one next time."""
    return rows / max(time.monotonic() - began, 1e-9)


def main(argv: list[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Entry point; returns the exit code. With several processes a node it starts them and waits."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        warn("usage: python -m trainer.evaluate ADDRESS_OF_EVALUATE_JSON")
        return 2
    if "LOCAL_RANK" in env:
        return _rank(arguments[0], int(env["RANK"]))
    ranks = ranks_of_node(env)
    if ranks > 1:
        verdict = run_ranks("trainer.evaluate", arguments[0], ranks)
        if verdict.code:
            warn(verdict.message)
    else:
        # As for ranks, and before torch is imported: threads that spin while they wait take the others' cores.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
        os.environ.update(allocator(os.environ))
        verdict = _evaluated(arguments[0], Console())
    write_termination_message(verdict, env)
    return int(verdict.code)


def _rank(uri: str, rank: int) -> int:
    """One of several ranks; the launcher writes the termination message."""
    begin_rank()
    verdict = _evaluated(uri, Console(quiet=rank != 0), rank)
    leave_word(rank, int(verdict.code), verdict.message)
    return int(verdict.code)


def _evaluated(uri: str, console: Console, rank: int = 0) -> Verdict:
    stop = StopSignal()
    stop.install()
    try:
        evaluate(uri, stop, console)
    except (Exception, KeyboardInterrupt) as error:
        code, message = ending(error)
        if not isinstance(error, DropforgeError) and code == 1:
            import traceback

            traceback.print_exc()
        warn(message)
        return Verdict(code, message, rank)
    return Verdict(ExitCode.DONE, "done")


if __name__ == "__main__":
    wait_for_s3()
    ended = main()
    if "LOCAL_RANK" in os.environ:
        leave_process(ended)
    raise SystemExit(ended)
