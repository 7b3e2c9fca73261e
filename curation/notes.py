"""What is told of a drop's files in words: what is worth a look, and why nothing could be used."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

import pyarrow.parquet as pq

from curation.dialect import SEEN
from curation.folders import labels, said
from curation.identity import LONG
from curation.page import first_of, place_text, visible
from curation.places import line_numbers
from curation.reasons import Filtered, Reason, filtered, mend, quarantined
from curation.task import Report, Rules, Task
from dropforge.dataset import Manifest
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError
from dropforge.text import counted


def warnings(
    work: Sequence[Task],
    reports: Sequence[tuple[Task, Report]],
    rules: Rules,
    files: Sequence[DropFile],
    passed: Mapping[str, str],
    read: Sequence[int],
) -> list[str]:
    """What people should know of their files, beyond the quarantine and `not_as_meant`."""
    recoded = f"lines are not UTF-8, and were read as {rules.encoding}"
    python = "rows hold a list, object, tuple or bytes as Python shows it; if that is not meant, write the text alone"
    chats = (
        "rows hold a conversation, a message or its parts as JSON text, learned as it is: name a column of "
        "conversations in `data.columns` as `messages`, and write of a message its text alone"
    )
    found: dict[str, Counter[str]] = {}  # names of files, with rows where these are counted, by what is told of them
    for task in work:
        for warning in task.split.format.warnings:
            found.setdefault(warning, Counter())[task.name] += 0
    rounded = (
        "rows have a group, label or source that a program has rounded, as Excel does (1.23457E+17), and pandas where "
        "some are missing (1.2345678901234568e+17): several that differed may be one; have it write the column as "
        "text, from the original"
    )
    tallied: dict[str, Counter[str]] = {
        what: Counter() for what in (recoded, *SEEN.values(), python, chats, rounded, _SEVERAL, _APART, _CELL)
    } | _shares(reports)
    for task, report in reports:
        tallied[recoded][task.name] += report.recoded
        tallied[python][task.name] += report.shown
        tallied[chats][task.name] += report.chats
        tallied[rounded][task.name] += report.rounded
        tallied[_SEVERAL][task.name] += report.several
        tallied[_APART][task.name] += report.apart
        tallied[_CELL][task.name] += report.cell
        for seen, number in report.dialect.items():
            tallied[SEEN[seen]][task.name] += number
    found |= {what: +rows for what, rows in tallied.items() if +rows}
    for task in work:
        if task.split.format.looks is not None:
            found.setdefault(task.split.format.looks, Counter())[task.name] += 0
    wide = "too many columns to count them all; are some of their names data?"
    found[wide] = Counter(dict.fromkeys((task.name for task, report in reports if report.unlisted), 0))
    found[_TOTAL] = Counter({task.name: 0 for task, report in reports if report.total})
    found["the file is empty"] = Counter({file.key: 0 for file in files if file.size == 0})
    found["no rows"] = Counter({file.key: 0 for rows, file in zip(read, files, strict=True) if file.size and not rows})
    told = {line: None for what, names in found.items() if names for line in _lines(names, what)}
    columns = {name for _, report in reports for name in report.columns}
    others = {task.name for task in work if task.split.format.kind != "text"}
    others |= {file.key for file in files if file.size == 0}
    told |= dict.fromkeys(said([file.key for file in files], columns, others, beside=rules.scope == "family"))
    told |= {f"{name}: skipped, because {why}": None for name, why in passed.items()}  # each by its name, so last
    return first_of(list(told), _WARNINGS, "warnings about files")


def not_as_meant(reports: Sequence[tuple[Task, Report]], rules: Rules, keys: Mapping[str, int]) -> list[str]:
    """What is learned, or left out, otherwise than somebody may think: it stands before all else that is told.

    :param keys: see `unknown_keys`.
    """
    lines = nowhere(reports, rules)
    if keys:
        named = [f"`{name}` ({counted(rows, 'row')})" for name, rows in keys.items()]
        shown = first_of(named, _KEYS, "keys (card.json has them)")
        lines.insert(0, f"Keys that mean nothing here and are not learned: {', '.join(shown)}")
    unset: Counter[str] = Counter()
    for _, report in reports:
        unset.update(report.unset)
    if unset:
        named = [f"`{text}` ({counted(rows, 'row')})" for text, rows in sorted(unset.items())]
        spelled = ", ".join(first_of(named, _SPELLINGS, "spellings"))
        lines.insert(
            0, f"Learned, though programs write so what is missing: {spelled}; leave out rows or fields where it is"
        )
    return lines


def of_answers(several: int, examples: tuple[int, int], crossing: int, rules: Rules) -> list[str]:
    """What is told of answers of conversations that are learned in several rows, and on both sides of the split.

    :param several: and :param examples: and :param crossing: as of `curation.statistics`.
    """
    if rules.task != "causal-lm":  # the others learn one answer of a row, or none
        return []
    lines = []
    if several:
        lines.append(
            f"{counted(several, 'answer')} of conversations {'stands' if several == 1 else 'stand'} in several rows, "
            "as in a log whose `messages` grow, and each row learns it; such rows are on one side of the split. Keep "
            "the longest row of each conversation, or mark what another row learns with `train: false`"
        )
    answers, rows = examples
    if answers:
        lines.append(
            f"{counted(answers, 'answer')} with the same beginning {'is' if answers == 1 else 'are'} learned by up to "
            f"{rows:,} rows each, as examples before each question are. They leave these rows on their sides; mark "
            "what no row should learn `train: false`"
        )
    if crossing:
        where = "of the family" if rules.scope == "family" else "of this drop"
        lines.append(
            f"{counted(crossing, 'answer')} of {LONG} words or more {'is' if crossing == 1 else 'are'} learned and "
            f"{'stands' if crossing == 1 else 'stand'} in evaluation rows {where} too, behind other words: a log "
            "adds texts or the date to its newest question, or conversations share what they say. Give the rows of one "
            "conversation the same `group`"
        )
    return lines


def _shares(reports: Sequence[tuple[Task, Report]]) -> dict[str, Counter[str]]:
    """Rows of files by what is told of them where so many have it that it is how the file was written: one may be what
    somebody said."""
    files: dict[str, Counter[str]] = {}
    for task, report in reports:
        held = files.setdefault(task.name, Counter())
        held.update({name: getattr(report, name) for name in ("rows", *_SHARES)})
        held["told"] += report.letters if report.dialect.get("escaped") else 0
    found: dict[str, Counter[str]] = {
        what: Counter() for what in (_QUOTED, _FLOATS, *_MOSTLY.values(), _LETTERS, *_OFTEN.values(), *_EVER.values())
    }
    for name, held in files.items():
        rows = held["rows"]
        quoted = held["quoted"] if 2 * held["quoted"] > rows else held["escaped"]
        found[_QUOTED][name] = quoted * (quoted * _FEW >= rows)
        floats = held["floats"] * (not held["decimals"])
        found[_FLOATS][name] = floats * (floats >= _NUMBERS and 2 * floats > rows)
        for seen, what in _MOSTLY.items():
            found[what][name] = held[seen] * (2 * held[seen] > rows)
        # Where others have line ends, `\n` is what programs and formulas are written with.
        letters = held["letters"] - held["told"]
        found[_LETTERS][name] = letters * (letters * _SOME >= rows and letters > _SOME * held["lined"])
        for seen, what in _OFTEN.items():
            found[what][name] = held[seen] * (held[seen] * _SOME >= rows)
        for seen, what in _EVER.items():
            found[what][name] = held[seen] * (held[seen] * _FEW >= rows)
    return {what: +files_of for what, files_of in found.items()}


_FLOATS: Final = (
    "answers are whole numbers with `.0`, as pandas writes a column of numbers of which one is missing: write it as "
    "`Int64`, if they are none with parts"
)
_CELL: Final = (
    "rows hold a text as long as a cell of Excel (32,767), Google Sheets (50,000) or MySQL's `TEXT` (65,535) may be, "
    "where these cut longer ones off: export the whole texts"
)
_TOTAL: Final = "the last row is a total, as sheets have below a table; leave it out if it is none of the data"
_SEVERAL: Final = (
    "rows have several answers, of which an encoder-decoder learns the last one alone; write a row for each that it is "
    "to learn"
)
_APART: Final = (
    "rows have an answer directly behind another one, with thoughts of its own, another weight or name, or text behind "
    "calls: each is learned as an answer that ends there; write them as one message if they are one"
)
_SHARES: Final = (
    "quoted",
    "escaped",
    "addresses",
    "encoded",
    "letters",
    "lined",
    "replaced",
    "lost",
    "terminal",
    "misread",
    "entities",
    "pictured",
    "cut",
    "guarded",
    "styled",
    "formula",
    "codes",
    "leaked",
    "floats",
    "decimals",
    "rounded_answers",
)
#: What is told where one row of a file in `_FEW` has it.
_EVER: Final = {
    "replaced": "rows hold U+FFFD, which programs write for bytes that they could not read: write them again from the "
    "original",
    "lost": "rows hold `?` for letters, as programs write what their encoding lacks: export them again as UTF-8",
    "rounded_answers": "answers are numbers as Excel has rounded them (`1.23457E+17`): write them in full",
    "terminal": "rows hold what a terminal reads as colours or as a backspace (`\\x1b[31m`, `\\b`): write the text "
    "alone",
    "misread": "rows were read in another encoding than they were written in, as `Ã¤` for `ä`; `curation.unicode: "
    "repair` fixes UTF-8 that was read as Windows-1252 or Latin-1, others have to be exported again as UTF-8",
    "styled": "rows hold RTF (`{\\rtf1`): write the text alone",
}
#: What is told where most rows of a file have it.
_MOSTLY: Final = {
    "leaked": "rows begin or end with their own label, which a classifier is given with them then; leave it out there",
    "addresses": "rows hold where a file is and not what is in it; if that is not meant, write its text",
    "encoded": "rows hold a text in base64, in hexadecimal or with `%20` for spaces; if that is not meant, decode it",
}
#: What is told where one row of a file in `_SOME` has it.
_OFTEN: Final = {
    "entities": "rows have characters as HTML writes them (`&#39;`, `&uuml;`) and no tags, or Excel's `_x000D_` before "
    "line ends; if that is not meant, write the characters",
    "codes": "rows have characters as JSON, logs or e-mails write them in ASCII (`\\u00e4`, `\\xe4`, `=C3=A4`); if "
    "that is not meant, write JSON once, not twice, or without escapes, and decode the mails",
    "pictured": "rows hold a picture, sound or video by its bytes (`data:image/png;base64,...`) or its place "
    "(`<image>`), and only text is learned: take it out",
    "guarded": "rows hold a text that begins with an apostrophe before `=`, `+`, `-` or `@`, as exports keep sheets "
    "from taking it for a formula: write it without",
    "formula": "rows hold a formula (`=VLOOKUP(`): export values",
    "cut": "rows hold a text of 255 characters, where databases cut longer ones off: if that is so, export the whole "
    "texts",
}
_LETTERS: Final = (
    "rows have `\\n` in letters, and few have a line end; if that is not meant, write JSON once, not twice"
)
#: So many numbers of one kind are no chance.
_NUMBERS: Final = 10
#: One row in so many is more than a few.
_SOME: Final = 20
_QUOTED: Final = (
    "rows hold a text as JSON writes it, in quotes and with `\\n` for the end of a line; if that is not meant, write "
    "the text alone (in SQL `->>` and not `->`)"
)
#: One row in so many is more than a literal of a program here and there.
_FEW: Final = 100


def _lines(names: Counter[str], what: str) -> list[str]:
    """What is told of files: in one line, or one each where they are few and have rows.

    :param names: of them, with their rows where these are counted.
    """
    rows = f"{total:,} " if (total := names.total()) else ""
    if rows and len(names) <= _FILES:
        return [f"{name}: {names[name]:,} {what}" for name in sorted(names)]
    return [f"{', '.join(first_of(sorted(names), _FILES, 'files'))}: {rows}{what}"]


def unknown_keys(reports: Sequence[tuple[Task, Report]], rules: Rules) -> dict[str, int]:
    """Keys of rows and of their messages that mean nothing here, or nothing beside others, and are not kept, with the
    number of rows that have them: first those of messages and those that mean something elsewhere, then columns, the
    most frequent ones before the others; and how often there are more than the card holds."""
    counts: Counter[str] = Counter()
    first = {name for _, report in reports for name in report.unknown}
    kept = {name.strip().lower() for name in rules.keep_columns or ()}
    read = rules.columns.wanted(rules.text_column) | kept
    for _, report in reports:
        counts.update({name: rows for name, rows in report.unknown.items() if name.strip().lower() not in kept})
        if rules.keep_columns == "all":
            continue
        for name, kinds in report.columns.items():
            if name.strip().lower() not in read:
                counts[name] += sum(rows for kind, rows in kinds.items() if kind != "null")
    found = sorted((+counts).items(), key=lambda item: (item[0] not in first, -item[1], item[0]))
    if more := found[_ON_CARD:]:
        found = [*found[:_ON_CARD], (f"and {len(more):,} more keys", sum(rows for _, rows in more))]
    return dict(found)


def nowhere(reports: Sequence[tuple[Task, Report]], rules: Rules) -> list[str]:
    """Return a line for the columns that the recipe names and no row has, where a row that lacks one is no fault."""
    if any(report.unlisted for _, report in reports):
        return []  # it may be one of those that are not counted
    there = {
        name.strip().lower()
        for _, report in reports
        for name, kinds in report.columns.items()
        if any(rows and kind != "null" for kind, rows in kinds.items())
    }
    named = [(f"data.columns.{name}", column) for name, column in rules.columns.names if name in _MAY_LACK]
    if isinstance(rules.keep_columns, tuple):
        named += [("data.keep_columns", column) for column in rules.keep_columns]
    lost = [f"`{column}` (`{key}`)" for key, column in named if column[:_COLUMN].strip().lower() not in there]
    if not there or not lost:
        return []
    return [f"Columns that the recipe names and no row has: {', '.join(first_of(lost, _KEYS, 'columns'))}"]


#: What `data.columns` may name without each row having it: others end it in quarantine.
_MAY_LACK: Final = frozenset({"label", "source", "group", "system"})
#: Characters of a column's name that are counted.
_COLUMN: Final = 100
#: Keys that a line names, keys that the card has, and spellings of missing values that a line names.
_KEYS: Final = 100
_ON_CARD: Final = 500
_SPELLINGS: Final = 20
#: Files of one kind that a line names.
_FILES: Final = 3
#: Lines about single files that are kept.
_WARNINGS: Final = 1_000


def faults(work: Sequence[Task]) -> dict[str, int]:
    """Rows that the readers and kernels took, by reason."""
    counts: Counter[str] = Counter()
    for task in work:
        for batch in pq.ParquetFile(task.faults).iter_batches(columns=["reason"]):
            counts.update(batch.column("reason").to_pylist())
    return dict(counts)


@dataclass(frozen=True)
class Cause:
    """Why rows could not be read.

    :param rows: how many ended so. :param file, position, line: the first one's; a table has no lines.
    """

    reason: str
    detail: str
    rows: int
    file: str
    position: int
    line: int | None = None

    def text(self) -> str:
        told = f"{self.reason}: {self.detail}" if self.detail else self.reason
        place = place_text(self.file, self.position, self.line)
        return visible(f"{told} ({counted(self.rows, 'row')}, the first at {place})")


def causes(work: Sequence[Task], most: int = 3) -> list[Cause]:
    """The most frequent causes for which readers and kernels took rows; details that differ in numbers count as one."""
    found: dict[tuple[str, str], tuple[Cause, Task]] = {}
    rows: Counter[tuple[str, str]] = Counter()
    for task in work:
        for batch in pq.ParquetFile(task.faults).iter_batches(columns=["position", "reason", "detail"]):
            for row in batch.to_pylist():
                if row["reason"] not in _REASONS:
                    continue  # a rule of the recipe's took it
                like = row["reason"], _NUMBER.sub("0", row["detail"])
                if like not in found and len(found) < _DIFFERENT:
                    found[like] = Cause(row["reason"], row["detail"], 0, task.name, row["position"]), task
                rows[like if like in found else _OTHERS] += 1
    worst = [(*found[like], count) for like, count in rows.most_common(most + 1) if like != _OTHERS]
    return [replace(cause, rows=count, line=_line(task, cause.position)) for cause, task, count in worst[:most]]


def _line(task: Task, position: int) -> int | None:
    return line_numbers(task.split.path, task.split.format, [position], task.limits).get(position)


#: Causes that are told apart: details come from outside.
_DIFFERENT: Final = 10_000
_OTHERS: Final = ("", "")
_REASONS: Final = frozenset(reason.value for reason in Reason)
_NUMBER: Final = re.compile(r"\d+")


class NoUsableRowError(DataError):
    """A drop of which no row can be used. :ivar manifest: its version, which nobody can train on, if there is one."""

    manifest: Manifest | None = None


def nothing(
    drop: Drop,
    names: Sequence[str],
    counts: Mapping[str, int],
    why: Sequence[Cause] = (),
    passed: Mapping[str, str] = MappingProxyType({}),
    lacking: Sequence[str] = (),
) -> NoUsableRowError:
    """No row could be used: say which files, how many rows each step left and why, and what to do.

    :param counts: rows by the reason for which they went: all of them. :param why: rows could not be read.
    :param passed: files that were not read, each with the reason. :param lacking: see `nowhere`.
    """
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    thing = f"drop {drop.family}/{drop.drop} ({shown or 'no files'})"
    if not counts:
        skipped = [f"{name} is skipped, because {reason}" for name, reason in sorted(passed.items())]
        cause = "; ".join(["its files hold no row", *first_of(skipped, _FILES, "files")])
        how = "; a file that holds some takes another name" if passed else ", for example JSON lines"
        return NoUsableRowError(thing, cause, f"Upload files with rows{how}")
    reasons = sorted((quarantined(counts) | filtered(counts)).items(), key=lambda item: (-item[1], item[0]))
    worst, rows = reasons[0]
    total = sum(counts.values())
    aside = "copies aside, " if _COPIES & counts.keys() else ""  # these went for the sake of another row
    cause = f"none of {total:,} rows can be used; {aside}most often the reason is {worst} ({counted(rows, 'row')})"
    details = "".join(f". {one}" for one in (*(one.text() for one in why), *lacking))
    if worst == Reason.NO_LABEL and (folders := labels(names, 1)):
        details += f". Are the names of the folders the labels ({', '.join(first_of(folders, _FILES, 'folders'))})?"
    return NoUsableRowError(thing, f"{cause}{details}. Step by step: {', '.join(funnel(counts))}", mend(worst))


_COPIES: Final = frozenset({"duplicate", "near_duplicate"})
#: What takes rows, in the order of `curation.stages` and then of `curation.exchange.settle`.
_STEPS: Final[Mapping[str, tuple[str, ...]]] = {
    "own kernels": (Filtered.OWN_KERNEL,),
    "personal data": (Filtered.PERSONAL_DATA,),
    "evaluation sets": (Filtered.CONTAMINATED,),
    "language": (Filtered.OTHER_LANGUAGE, Filtered.UNKNOWN_LANGUAGE),
    "quality": tuple(code for code in Filtered if code.startswith(("gopher_", "c4_"))),
    "forgotten": (Filtered.FORGOTTEN,),
    "exact copies": ("duplicate",),
    "label conflicts": (Filtered.LABEL_CONFLICT,),
    "near copies": ("near_duplicate",),
    "caps of sources": (Filtered.OVER_CAP,),
    "the split": (Filtered.CROSSES_SPLIT,),
}
#: Reasons that are told of a step.
_MOST: Final = 3


def funnel(counts: Mapping[str, int]) -> list[str]:
    """Rows that were read and that each step left, where it took any, with its largest reasons.

    :param counts: rows by the reason for which they went: all of them.
    """
    left = sum(counts.values())
    told = [f"{left:,} read"]
    gone = filtered(counts) | {code: counts[code] for code in _COPIES if counts.get(code)}
    steps = {"readable": quarantined(counts)}
    for name, codes in _STEPS.items():
        steps[f"left by {name}"] = {code: rows for code, rows in gone.items() if code in codes}
    for name, reasons in steps.items():
        if reasons:
            left -= sum(reasons.values())
            shown = [f"{reason} {rows:,}" for reason, rows in list(reasons.items())[:_MOST]]
            more = ["..."] if len(reasons) > _MOST else []
            told.append(f"{left:,} {name} ({', '.join([*shown, *more])})")
    return told
