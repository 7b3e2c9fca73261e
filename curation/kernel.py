"""The kernel: one split becomes one file of canonical rows, one of faults, those of fingerprints, and counters.

It needs nothing but the split and the rules, so any number of workers, in any order, give the same files.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any, Final, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq

from curation.batch import FAULTS, ROWS, Batch
from curation.canonical import PICTURES, Row, canonical, has_pictures
from curation.continued import ANSWERS
from curation.dialect import Quotes
from curation.encodings import Fallback
from curation.extras import Extras, scrubbed
from curation.fingerprint import fingerprints
from curation.forgotten import Forgotten
from curation.identity import UNLEARNED, Answer, kind, labelled, names, rank, salt_bytes, unit
from curation.pii import make_scrub
from curation.readers import read
from curation.reasons import REST, Filtered, Reason, RejectError
from curation.records import HEAD, Blank, Fault, Found, Split
from curation.sample import WORKING, chosen
from curation.schema import Seen, joined, unread
from curation.stage import Refusal, put_through
from curation.stages import make_stages
from curation.streams import TornError
from curation.suspects import count_suspects, holds_a_full_cell, is_total
from curation.task import PRINTED, Report, Task
from curation.turns import hidden

_FLUSH_BYTES: Final = 16 << 20
#: What the stages get at once, at most.
_STAGE_ROWS: Final = 4096
_STAGE_CHARS: Final = 4 << 20
#: A detail of this length may have been cut in the middle of a value, and those of these reasons are cut sooner.
_CUT: Final = 100
_QUOTING: Final = frozenset({Reason.DUPLICATE_FIELD, Reason.UNKNOWN_ROLE})
_NAME: Final = 60
_MOST_NAMES: Final = 100
_OTHERS: Final = "others"
_NO_MEMORY: Final = "there is not enough memory for what the row becomes"
Scrub = Callable[[str], str]


def run(task: Task) -> Report:
    """Work on a split, or take the result that an earlier try left; its report is written last."""
    if task.report.is_file():
        return Report(**json.loads(task.report.read_bytes()))
    report, begun = Report(task.file), time.perf_counter()
    with _Files(task) as files:
        batch = Batch()
        for item in _curated(task, report):
            if isinstance(item, Fault):
                fault = _forgotten(item) if item.position in task.forgotten else item
                batch.faults.append((task.file, fault.position, fault.reason, _printable(fault.detail), fault.head))
            else:
                batch.add(task, *item)
            if batch.weight > _FLUSH_BYTES or len(batch.faults) > 50_000:
                files.write(batch, report)
                batch = Batch()
        files.write(batch, report)
    if task.sample is not None:
        report.counts[WORKING] = round((time.perf_counter() - begun) * 1e6)
    temporary = _part(task.report)
    temporary.write_text(json.dumps(report.__dict__))
    temporary.replace(task.report)
    return report


def _forgotten(fault: Fault) -> Fault:
    """What is shown where a row stands that was forgotten, and whose name other rules cannot make: nothing of it."""
    return fault._replace(head=b"") if fault.reason in REST else Fault(fault.position, Filtered.FORGOTTEN, "", b"")


class _Files:
    """A split's results on their way to disk; they take their names when all are whole."""

    def __init__(self, task: Task) -> None:
        self.near = task.rules.near
        row_options = {"compression": "lz4", "use_dictionary": ["source"], "write_statistics": False}
        kinds: dict[Path, tuple[pa.Schema, dict[str, Any]]] = {
            task.rows: (ROWS, row_options),
            task.faults: (FAULTS, {"compression": "lz4"}),
            task.answers: (ANSWERS, {"compression": "none", "use_dictionary": ["unit"]}),
        }
        for name, schema in PRINTED.items() if self.near else ():
            # Hashes do not shrink; places come many times in a row.
            kinds[task.printed(name)] = (schema, {"compression": "none", "use_dictionary": ["file", "position"]})
        self.writers = {path: pq.ParquetWriter(_part(path), schema, **how) for path, (schema, how) in kinds.items()}

    def __enter__(self) -> _Files:
        return self

    def __exit__(self, failed: type[BaseException] | None, *_: object) -> None:
        for path, writer in self.writers.items():
            writer.close()
            if failed is None:
                _part(path).replace(path)

    def write(self, batch: Batch, report: Report) -> None:
        rows, faults, answers, *printed = self.writers.values()
        if batch.valid:
            rows.write_batch(batch.rows())
        if batch.faults:
            faults.write_batch(batch.faulty())
        if batch.answers:
            answers.write_batch(batch.answered())
        if batch.valid and self.near:
            prints = fingerprints(batch.compared(), self.near)
            report.short += prints.short
            for writer, part in zip(printed, (prints.prints, prints.bands, prints.shingles), strict=True):
                writer.write_batch(part)


def _part(path: Path) -> Path:
    # Keeps a worker that was given up, here or in another pod, from writing into its successor's file.
    return path.with_name(f"{path.name}.{socket.gethostname()}-{os.getpid()}.part")


class Canonical(NamedTuple):
    """A row on its way through the stages, and where it came from."""

    position: int
    row: Row


class Curated(NamedTuple):
    """A row with its names."""

    position: int
    row: Row
    key: bytes
    rank: bytes
    unit: bytes
    words: int
    priority: int
    kind: int
    question: bytes | None
    answers: list[Answer]
    answer: bytes | None
    layout: int


def _curated(task: Task, report: Report) -> Iterator[Curated | Fault]:
    """Each input row once, or the fault that it ends in."""
    salt = salt_bytes(task.rules.split_salt)
    scrub = make_scrub(task.rules.pii) if task.rules.pii else None
    forgotten = frozenset(map(bytes.fromhex, task.rules.forgotten))  # those of groups are gone already
    labels, one_answer = task.rules.task == "classification", task.rules.task == "sequence-to-sequence"
    for item in _staged(task, report):
        if isinstance(item, Fault):
            report.faults += 1
            yield item
            continue
        try:
            named = _named(item, task, salt, scrub, report)
        except MemoryError:
            report.faults += 1
            yield Fault(item.position, Reason.MEMORY, _NO_MEMORY, b"")
            continue
        if named.key in forgotten:
            report.faults += 1
            yield Fault(item.position, Filtered.FORGOTTEN, "", b"")
            continue
        report.rows += 1
        row = item.row
        for name in row.unknown:
            _count(report.unknown, name)
        count_suspects(row, report, labels=labels)
        report.several += one_answer and row.roles.count("assistant") > 1
        if row.beside:  # else they are joined
            report.apart += any(
                pair == ("assistant", "assistant") and UNLEARNED not in beside
                for pair, beside in zip(pairwise(row.roles), row.beside, strict=False)
            )
        yield named
    if scrub is not None:  # names of columns come from outside as well
        report.unknown = {scrub(name): rows for name, rows in report.unknown.items()}
        report.columns = joined({scrub(name): kinds} for name, kinds in report.columns.items())


def _named(item: Canonical, task: Task, salt: bytes, scrub: Scrub | None, report: Report) -> Curated:
    rules, row = task.rules, item.row
    labels = rules.task == "classification"
    group = row.group
    # A row that names no source comes from its file; the exact name does not cover this.
    priority = rules.priority(row.source if row.source is not None else task.name) if rules.prefer else 0
    if scrub is not None:
        label, source, shown = (None if value is None else scrub(value) for value in (row.label, row.source, group))
        extras = None if row.extras is None else scrubbed(row.extras, scrub)
        tools = None if row.tools is None else hidden(row.tools, scrub)
        masked = row._replace(label=label, source=source, group=shown, extras=extras, tools=tools)
        report.masked += masked != row
        row = masked
    key, exact, words, question, asked, answers, answer, layout = names(row)
    question = key if labels else question
    # Of what is asked: it never stands on both sides. Two groups may share a mask, and stay two.
    side = unit(group, key if labels or asked is None else asked, salt)
    number = 0
    if labels:
        answers = answers or ([(key, False, None, None)] if asked else [])
        key, number = labelled(key, row.label), kind(row.label)
    # Of copies one with a group stays: the others of its group are on its side.
    name = rank(exact, side, task.file, item.position, 2 * priority + (group is None))
    return Curated(item.position, row, key, name, side, words, priority, number, question, answers, answer, layout)


def _count(counts: dict[str, int], name: str) -> None:
    """Names come from outside: only the first ones are told apart; the others are counted together."""
    shown = _printable(name[:_NAME])
    shown = shown if shown in counts or len(counts) < _MOST_NAMES else _OTHERS
    counts[shown] = counts.get(shown, 0) + 1


def _staged(task: Task, report: Report) -> Iterator[Canonical | Fault]:
    """The rows as the stages leave them, a batch at a time."""
    stages = make_stages(task.rules, task.index, task.own)
    if not stages:
        yield from canonical_rows(task, report)
        return
    scrub = make_scrub(task.rules.pii) if task.rules.pii else None
    for batch in _batches(canonical_rows(task, report)):
        rows = [item for item in batch if isinstance(item, Canonical)]
        yield from (item if scrub is None else _hidden(item, scrub) for item in batch if isinstance(item, Fault))
        done, counts = put_through([item.row for item in rows], stages)
        for name, count in counts.items():
            report.counts[name] = report.counts.get(name, 0) + count
        for item, left in zip(rows, done, strict=True):
            if isinstance(left, Refusal):
                # A stage behind the masks may have ended it, and changed it before.
                text = left.text if scrub is None else scrub(left.text[: 8 * HEAD])
                head = text[:HEAD].encode()[:HEAD]
                yield Fault(item.position, left.reason, left.detail, head)
            else:
                yield Canonical(item.position, left)


def _hidden(fault: Fault, scrub: Scrub) -> Fault:
    """What could not be read is not shown where personal data are not to be seen: nobody knows how it is written, nor
    what its end would have been."""
    detail = "" if fault.reason in _QUOTING else _printable(fault.detail)
    if len(detail) >= _CUT:
        detail = detail.rpartition(", ")[0]  # what was cut off may have been a part of a value
    return fault._replace(detail=scrub(detail), head=b"")


def _batches(items: Iterator[Canonical | Fault]) -> Iterator[list[Canonical | Fault]]:
    held: list[Canonical | Fault] = []
    chars = 0
    for item in items:
        held.append(item)
        chars += item.row.held if isinstance(item, Canonical) else 0
        if len(held) >= _STAGE_ROWS or chars >= _STAGE_CHARS:
            yield held
            held, chars = [], 0
    if held:
        yield held


def canonical_rows(task: Task, report: Report) -> Iterator[Canonical | Fault]:
    """The rows of the split in their canonical form: each input row once, or why it cannot be used."""
    rules = task.rules
    labels, answers = rules.task == "classification", rules.task == "sequence-to-sequence"
    fallback = Fallback(rules.encoding) if rules.encoding not in {"utf-8", "auto"} else None
    quotes = Quotes(rules.quotes)
    extras = Extras(rules.keep_columns, rules.columns.wanted(rules.text_column), rules.pii is not None)
    forgotten = Forgotten(rules.forgotten, rules.pii, rules.columns)
    seen = Seen(unread(task.split, extras.wanted))
    pictures = any(name.strip().lower() in PICTURES for name in seen.unread)
    nulls = not task.split.format.is_table
    last: Mapping[str, Any] = {}
    records = read(
        task.split,
        max_row_bytes=rules.max_row_bytes,
        text_column=rules.columns.text(rules.text_column),
        wanted=extras.wanted,
        limits=task.limits,
        fallback=fallback,
        quotes=quotes,
    )
    if task.sample is not None:
        records = chosen(records, task.name, task.sample, report.counts)
    mapped, size, made = bool(rules.columns), _size(task.split), 0
    for record in records:
        if isinstance(record, Blank):
            report.blank += record.lines
            continue
        report.records += 1
        if isinstance(record, Fault):
            yield record
            continue
        seen.add(record.fields)
        last = record.fields
        try:
            fields = record.fields
            if mapped:
                fields = rules.columns.apply(fields, rules.max_row_bytes)
                made += rules.columns.made(fields)
                task.limits.check(made, size)
            pictured = pictures or (mapped and has_pictures(record.fields))
            row = canonical(fields, rules.text_column, labels, answers, pictured, nulls)
            report.cell += holds_a_full_cell(row, record.fields)
            if extras.asked is not None:
                row = row._replace(extras=extras.of(record.fields))
        except RejectError as error:
            if forgotten.fields(record.fields):
                yield Fault(record.position, Filtered.FORGOTTEN, "", b"")
            else:
                yield Fault(record.position, error.reason, error.detail, _head(record))
            continue
        except MemoryError:
            yield Fault(record.position, Reason.MEMORY, _NO_MEMORY, b"")
            continue
        except TornError as tear:  # a template of few bytes makes many of each row
            yield Fault(record.position, tear.reason, f"filling the template: {tear.detail}", b"")
            break
        except RecursionError:  # of a row whose depth nothing has bounded
            yield Fault(record.position, Reason.TOO_DEEP, "it is nested too deeply", b"")
            continue
        if forgotten.group(row.group):  # before the stages: what they refuse is shown in the quarantine
            yield Fault(record.position, Filtered.FORGOTTEN, "", b"")
        else:
            yield Canonical(record.position, row)
    report.total += is_total(last)
    report.recoded += fallback.lines if fallback is not None else 0
    report.dialect = dict(+quotes.seen)
    report.columns, report.unlisted = seen.columns(), seen.more


def _size(split: Split) -> int:
    """The bytes that a split is read from, or the file's, if it cannot be told."""
    if split.format.kind == "jsonl" and split.end is not None:
        return split.end - split.start
    return split.path.stat().st_size


def _head(record: Found) -> bytes:
    """First bytes of a rejected row; a row of Parquet is shown as Python shows it."""
    if record.head:
        return record.head
    shown = {name: value for name, value in record.fields.items() if value is not None}
    return repr(shown)[:HEAD].encode("utf-8", "backslashreplace")


def _printable(text: str) -> str:
    """Names of fields come from outside and may hold what is no Unicode."""
    return text[:240].encode("utf-8", "backslashreplace").decode().replace("\0", "\\0")
