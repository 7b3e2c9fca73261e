"""`python -m trainer inspect`: what a run or a dataset version really feeds to the model."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from dropforge.text import escape
from dropforge.wheel import ROWS
from trainer.commands.addresses import is_dataset, open_dataset, open_run, spec_of
from trainer.commands.arguments import natural, positive, subparser
from trainer.commands.terminal import Paint, tell
from trainer.config import Settings, Task, read_settings

_WHOLE = 1 << 40  # tokens: nothing is cut
_SHOWN = 600  # characters of a stretch

_EPILOG = """\
Of a dataset version only the shards are read that hold the rows shown, each checked by its SHA-256. With --step the
run's whole training split is read and packed, because only that says which documents meet in a step.

On a terminal the text runs on in colour: context is dim, targets are green, the token that ends a turn is magenta.
Elsewhere, with --plain, or where NO_COLOR is set, each stretch has a line of its own with its kind before it.
Control characters in the data are spelled out.

examples:
  python -m trainer inspect s3://dropforge/runs/python-help-9ab3f12c77d0
  python -m trainer inspect s3://dropforge/runs/python-help-9ab3f12c77d0 --step 1 --rows 2
  python -m trainer inspect s3://dropforge/datasets/python-help/DIGEST --model ./model --packed --rows 20
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands, "inspect", "show samples and their loss mask", "Show samples as the model gets them.", _EPILOG
    )
    parser.add_argument("target", metavar="ADDRESS", help="a run, or a dataset version")
    parser.add_argument("--split", choices=("train", "eval"), default="train", help="which rows (default: train)")
    parser.add_argument("--start", type=natural, default=0, metavar="N", help="first row to show (default: 0)")
    parser.add_argument("--rows", type=positive, default=3, metavar="N", help="how many rows to show (default: 3)")
    parser.add_argument("--packed", action="store_true", help="pack the rows that are shown, and show the borders")
    parser.add_argument("--step", type=positive, metavar="N", help="show packed rows of optimizer step N of a run")
    parser.add_argument("--model", help="whose tokenizer to use (default: the run's; see evaluate --help)")
    parser.add_argument("--length", type=positive, help="tokens of a row (default: the run's, or no limit)")
    parser.add_argument("--loss-on", choices=("answers", "all"), help="targets in conversations (default: the run's)")
    parser.add_argument("--full", action="store_true", help="show long stretches whole")
    parser.add_argument("--plain", action="store_true", help="no colour, one line for each stretch")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(main=main)


@dataclass(frozen=True)
class Subject:
    """What is looked at. :param settings: None for a dataset without a run. :param length: tokens of a row."""

    spec: RunSpec
    settings: Settings | None
    length: int | None
    loss_on: str
    task: Task = "causal-lm"


def main(arguments: argparse.Namespace) -> int:
    """Show samples; returns the exit code."""
    from trainer.compat import quiet_libraries

    quiet_libraries()
    subject = _subject(arguments)
    facts = _of_rows(subject, arguments) if arguments.step is None else _of_step(subject, arguments)
    if arguments.json:
        print(json.dumps({key: _plain(value) for key, value in facts.items()}))
    else:
        _print(facts, Paint.of(sys.stdout, arguments.plain), _WHOLE if arguments.full else _SHOWN)
    return 0


def _subject(arguments: argparse.Namespace) -> Subject:
    if is_dataset(arguments.target):
        if arguments.step is not None:
            raise RecipeError("option --step", "a dataset version has no steps", "Give a run, or use --packed")
        spec, settings = spec_of(open_dataset(arguments.target)), None
    else:
        spec = open_run(arguments.target)
        settings = read_settings(spec.recipe)
    length = arguments.length or (settings.train.sequence_length if settings else None)
    loss_on = arguments.loss_on or (settings.train.loss_on if settings else "answers")
    task = settings.task if settings else "causal-lm"
    if task == "classification" and (arguments.loss_on or arguments.packed):
        name = "--loss-on" if arguments.loss_on else "--packed"
        raise RecipeError(f"option {name}", "a classifier reads one document a row, for its label", "Leave it out")
    if task == "sequence-to-sequence" and (arguments.loss_on == "all" or arguments.packed):
        name = "--packed" if arguments.packed else "--loss-on"
        raise RecipeError(f"option {name}", "an encoder-decoder learns one target a row", "Leave it out")
    return Subject(spec, settings, length, loss_on, task)


def _of_rows(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Rows as they lie in the dataset, or packed among themselves."""
    from trainer.commands.segments import sample_of_row, sample_of_tokens
    from trainer.data.chat import documents, make_encoder
    from trainer.data.labels import labelled_documents, made_for
    from trainer.data.rows import load_manifest
    from trainer.data.seq2seq import pairs
    from trainer.data.template import UNWRITTEN
    from trainer.data.tokens import collect
    from trainer.data.user_code import user_code

    manifest = load_manifest(subject.spec)
    there = manifest.rows(arguments.split)
    with user_code(subject.settings.code if subject.settings else None) as code:
        change = code.rows
        lying = _rows(subject.spec, manifest, arguments.split, arguments.start, arguments.rows)
        rows = list(lying if change is None else map(change, lying))
    facts: dict[str, Any] = {
        "family": manifest.family,
        "dataset": manifest.digest,
        "split": arguments.split,
        "rows_there": there,
        "start": arguments.start,
        "notes": [],
    }
    if change is not None:
        facts["notes"].append(f"each row was changed by {', '.join(code.of(ROWS))} of the run's own code")
    if not rows:
        facts["notes"].append(f"there is no row {arguments.start}: the split has {there}")
    with _tokenizer(subject, arguments.model) as tokenizer:
        if tokenizer is None:
            if arguments.packed:
                raise RecipeError("option --packed", "without a tokenizer no row has a length", "Give --model as well")
            facts["notes"].append("no tokenizer is known, so the mask is shown by turns: give --model")
            labelled = subject.task == "classification"
            samples = [
                sample_of_row(arguments.start + i, row, subject.loss_on, labelled=labelled)
                for i, row in enumerate(rows)
            ]
            return facts | {"samples": samples}
        counts: dict[str, Any] = {}
        length = subject.length or _WHOLE
        if subject.task == "classification":
            labels = sorted({row.label for row in rows if row.label is not None})
            most = made_for(tokenizer) if subject.length else tokenizer.model_max_length
            found = labelled_documents(tokenizer, labels, rows, min(length, most), counts)
            tokens = collect(found, counts, labelled=True)
        elif subject.task == "sequence-to-sequence":
            tokens = collect(pairs(tokenizer, rows, length, counts), counts)
        else:
            tokens = collect(documents(make_encoder(tokenizer, subject.loss_on), rows, length, counts), counts)
        for key, text in (
            *UNWRITTEN.items(),
            ("cut_conversations", "of the conversations are longer than a row, so they are cut"),
            ("unrolled_conversations", "of the conversations are unrolled, a document for each answer"),
            ("split_texts", "of the texts are longer than a row, so they are split"),
            ("cut_rows", "of the rows are longer than a row of the model, so they are cut"),
        ):
            if counts.get(key):
                facts["notes"].append(f"{counts[key]} {text}")
        facts["notes"] += [f"row with key {item['row']} is left out: {item['reason']}" for item in counts["left_out"]]
        samples = []
        for index in range(len(tokens)):
            row = int(tokens.rows[index])
            samples.append(
                sample_of_tokens(
                    arguments.start + row,
                    rows[row].key.hex(),
                    *tokens.document(index),
                    tokenizer,
                    None if tokens.labels is None else rows[row].label,
                )
            )
    if not arguments.packed:
        return facts | {"samples": samples}
    from trainer.data.packing import pack_window

    size = max([subject.length or 512, *tokens.lengths.tolist()])
    packs = pack_window(tokens.lengths, (-tokens.lengths).argsort(kind="stable"), size)
    facts["notes"].append("these rows are packed among themselves; --step shows what a run packs together")
    return facts | {"packed": [_pack(size, [samples[index] for index in pack]) for pack in packs]}


def _of_step(subject: Subject, arguments: argparse.Namespace) -> dict[str, Any]:
    """Packed rows of one step of a run, as the plan has them."""
    from trainer.commands.dry import rehearse
    from trainer.commands.segments import sample_of_tokens

    for name in ("model", "length", "loss_on", "packed"):
        if getattr(arguments, name):
            raise RecipeError(f"option --{name.replace('_', '-')}", "a step is what the run makes it", "Leave it out")
    if arguments.split != "train" or subject.settings is None:
        raise RecipeError("option --split", "a step has rows of the train split only", "Leave it out")
    with tempfile.TemporaryDirectory(prefix="dropforge-inspect-") as name:
        made = rehearse(subject.spec, subject.settings, Path(name), tell)
        plan, tokens, tokenizer = made.plan, made.prepared.train, made.prepared.tokenizer
        labels = made.prepared.labels
        if arguments.step > plan.steps:
            raise RecipeError("option --step", f"the run has {plan.steps} steps", f"Give 1 to {plan.steps}")
        packs = plan.step(arguments.step - 1)
        shown = islice(packs, arguments.start, arguments.start + arguments.rows)
        packed = [
            _pack(
                plan.size,
                [
                    sample_of_tokens(
                        int(tokens.rows[i]),
                        None,
                        *tokens.document(int(i)),
                        tokenizer,
                        None if labels is None or tokens.labels is None else labels[int(tokens.labels[i])],
                    )
                    for i in pack
                ],
            )
            for pack in shown
        ]
    return {
        "family": subject.spec.family,
        "dataset": subject.spec.dataset_digest,
        "split": "train",
        "step": arguments.step,
        "steps": plan.steps,
        "rows_there": len(packs),
        "start": arguments.start,
        "notes": [] if plan.packed else [f"rows hold one document each: {made.attention.isolation.reason}"],
        "packed": packed,
    }


def _pack(size: int, samples: list[Any]) -> dict[str, Any]:
    return {"places": size, "tokens": sum(sample.tokens for sample in samples), "documents": samples}


def _rows(spec: RunSpec, manifest: Any, split: str, start: int, count: int) -> Iterator[Any]:
    """Some rows of a split; shards before them and behind them are not opened."""
    from trainer.data.rows import read_rows

    wanted, place = [], 0
    skip = start
    for shard in (shard for shard in manifest.shards if shard.split == split):
        if place + shard.rows <= start:
            skip -= shard.rows
        elif place < start + count:
            wanted.append(shard)
        place += shard.rows
    found = read_rows(open_store(spec.data_root), replace(manifest, shards=tuple(wanted)), split)
    return islice(found, skip, skip + count)


@contextmanager
def _tokenizer(subject: Subject, model: str | None) -> Iterator[Any]:
    """The tokenizer that is asked for, or the run's; None if there is none yet."""
    from trainer.data.labels import for_labels
    from trainer.data.seq2seq import for_seq2seq
    from trainer.data.template_date import with_date
    from trainer.data.tokenizer import add_tokens, load_tokenizer
    from trainer.prepare import TOKENIZER, open_tokenizer

    with tempfile.TemporaryDirectory(prefix="dropforge-inspect-") as name:
        settings = subject.settings
        if model is None and settings is not None and settings.base.scratch is not None:
            run = open_store(subject.spec.root)
            yield open_tokenizer(settings, "", run, "") if run.stat(TOKENIZER) is not None else None
            return
        address = model or (settings.base.model if settings else None)
        if address is None:
            yield None
            return
        from trainer.commands.models import fetch_tokenizer

        folder = fetch_tokenizer(address, settings.base.revision if settings and not model else None, Path(name))
        try:
            tokenizer = load_tokenizer(folder, ends=subject.task != "classification")
            if settings and not model:
                add_tokens(tokenizer, settings.base.new_tokens or ())
                tokenizer.chat_template = with_date(tokenizer.chat_template, subject.spec.date)
            if subject.task == "classification":
                tokenizer = for_labels(tokenizer)
            if subject.task == "sequence-to-sequence":
                tokenizer = for_seq2seq(tokenizer)
        except (OSError, ValueError) as error:
            cause = " ".join(str(error).split())[:300]
            raise RecipeError(f"tokenizer of {address}", cause, "Name a model with a tokenizer beside it") from error
        yield tokenizer


def _plain(value: Any) -> Any:
    from trainer.commands.segments import Sample

    if isinstance(value, Sample):
        return value.plain()
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    return [_plain(item) for item in value] if isinstance(value, list) else value


def _print(facts: Mapping[str, Any], paint: Paint, most: int) -> None:
    from trainer.commands.segments import head, legend, show

    what = (
        f"step {facts['step']} of {facts['steps']}, packed rows" if "step" in facts else f"{facts['split']} split, rows"
    )
    named = escape(f"{facts['family']}/{facts['dataset'][:12]}")
    print(f"{named}, {what} {facts['start']} and on of {facts['rows_there']:,}")
    for note in facts["notes"]:
        print(f"note: {escape(note)}")
    print(legend(paint))
    for sample in facts.get("samples", ()):
        print(f"\n{paint(head(sample), 'bold')}\n{show(sample, paint, most)}")
    for number, pack in enumerate(facts.get("packed", ())):
        share = pack["tokens"] / pack["places"]
        places = f"{pack['tokens']:,} of {pack['places']:,} places filled ({share:.1%})"
        title = paint(f"packed row {facts['start'] + number}", "bold")
        print(f"\n{title}: {places}")
        for index, sample in enumerate(pack["documents"], 1):
            print(f"--- document {index} of {len(pack['documents'])}: {head(sample)}\n{show(sample, paint, most)}")
