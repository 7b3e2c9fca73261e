"""What a file that is read as text looks like instead, by its first bytes: told, never refused, for it may be meant.

`curation.formats` asks it of each such file, `curation.notes` tells it.
"""

from __future__ import annotations

import csv
import re
from typing import Final

_SAMPLE: Final = 4096
#: Lines of a file of which each has as many tabs as the others, and more than this many of them.
_ROWS: Final = 2
_JSON: Final = "call it `.json`, or `.jsonl` if each line is a row"
_PYTHON: Final = "write them with `json.dumps`"
_BLOCKS: Final = "write the rows alone, one a line, as `.jsonl`"
_TABLE: Final = "write the names of its columns as its first line, and call it `.{}`"
_TEXT: Final = "write the text alone"
_LINES: Final = "write JSON lines"
_EXPORT: Final = "export it as CSV or JSON lines"
_TALKS: Final = "write each as `messages` in JSON lines"
_ALONE: Final = "write the JSON alone, one row a line, as `.jsonl`"
#: How a text begins, behind white space, what that looks like, and what to do if it is not meant as text.
_BEGINS: Final = (
    (re.compile(r'[\[{]\s*(?:[\[{]\s*)?"[^"\n]{1,80}"\s*:'), "JSON", _JSON),
    (re.compile(r"[\[{]\s*(?:[\[{]\s*)?'[^'\n]{1,80}'\s*:"), "rows as Python shows them", _PYTHON),
    (re.compile(r"```\w*\s*\n\s*[\[{]"), "rows in blocks of Markdown", _BLOCKS),
    (re.compile(r"__label__\S+\s"), "fastText's rows", f"{_LINES} with `text` and `label`"),
    (re.compile(r"(?:---\s*\n)?-\s+[\w\"'-]{1,80}:\s.*\n\s+[\w\"'-]{1,80}:\s"), "YAML", _LINES),
    (re.compile(r"---[ \t]*\r?\n(?:[\w-]{1,40}:.*\n|[ \t]+.*\n){1,40}---[ \t]*\r?\n"), "Markdown with front matter",
     _TEXT),
    (re.compile(r"(?:WEBVTT|\d+\r?\n\d\d:\d\d:\d\d[,.]\d{3} --> )"), "subtitles", _TEXT),
    (re.compile(r"(?:From|To|Received|Return-Path|Delivered-To|Subject|Date|Message-ID|MIME-Version):\s.*\n"
                r"(?:[ \t].*\n|[A-Za-z-]{2,40}:\s.*\n){2}"
                r"|From \S+ +(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun) [A-Z][a-z]{2} .*\d{4}\r?\n[A-Za-z-]{2,40}:\s"),
     "an e-mail with its header", _TEXT),
    (re.compile(r"#(?:separator|html|columns|notetype|deck|tags|guid)(?: column)?:", re.IGNORECASE), "Anki's notes",
     "write the names of their columns as its first line in place of those that begin with `#`, and call it `.tsv`"),
    (re.compile(r"(?:%[^\n]*\n|\s)*@relation\s", re.IGNORECASE), "Weka's ARFF", _EXPORT),
    (re.compile(r"WARC/\d\.\d\r?\n"), "a web archive (WARC)", _TEXT),
    (re.compile(r"[^\n|]{0,200}\|[^\n]{0,1000}\n-{2,200}\+[-+]{0,400}\r?\n"
                r"|\+-{2,}[-+]{0,400}\r?\n\||\*{9,} *\d+\. row \*{9}|-\[ RECORD \d+ \]"),
     "a table as SQL's terminals show it", _EXPORT),
    (re.compile(r"-- (?:MySQL|MariaDB) dump|--\r?\n-- PostgreSQL database dump|PRAGMA foreign_keys=OFF;"
                r"|INSERT INTO \S{1,100}\s*(?:\([^()]{1,400}\)\s*)?VALUES\b", re.IGNORECASE), "a dump of SQL", _EXPORT),
    (re.compile(r"(?:# ?[\w. ]{1,40}=[^\n]*\n){1,9}1\t|-DOCSTART-"), "words with their tags", _LINES),
    (re.compile(r'(?:#[^\n]*\n|\s)*msgid "'), "messages of gettext", _EXPORT),
    (re.compile(r"BEGIN:V(?:CALENDAR|CARD)\r?\n|(?:#[^\n]*\n|version: 1\r?\n|\s)*dn: \w+="),
     "cards, dates or a directory", _EXPORT),
    (re.compile(r"(?:%[^\n]*\n|\s)*@[a-z]{2,20}\{[^,\s]{1,80},\s*\n?\s*\w+\s*=", re.IGNORECASE), "BibTeX", _EXPORT),
    (re.compile(r"(?:[#;][^\n]*\n|\s)*\[[\w. -]{1,60}\][ \t]*\r?\n(?:[#;][^\n]*\n|\s)*[\w.-]{1,60}[ \t]*="),
     "settings (INI)", _LINES),
    (re.compile(r"(?:<s>|<\|begin_of_text\|>)?\s*(?:\[INST\]|<\|im_start\|>|<start_of_turn>|<\|start_header_id\|>)"),
     "conversations in a model's template", _TALKS),
    (re.compile(r"(?:#{2,3} ?)?(?:Human|User|Instruction|Question|Q)(?:: ?|:?\n)[^\n]*\n(?:[^\n]*\n){0,40}?"
                r"(?:#{2,3} ?)?(?:Assistant|Bot|AI|Response|Answer|A):", re.IGNORECASE), "questions and answers",
     _TALKS),
    (re.compile(r"\[?\d{1,4}[./-]\d{1,2}[./-]\d{1,4},? \d{1,2}:\d\d(?::\d\d)?(?:\s?[AP]M)?(?:\]| -) [^:\n]{1,60}: ",
                re.IGNORECASE), "a chat", _TALKS),
    (re.compile(r"(?://[^\n]*\n|/\*(?:[^*]|\*(?!/)){0,400}\*/|\s)+[\[{]\s*(?:[\[{]\s*)?\"[^\"\n]{1,80}\"\s*:"),
     "JSON with comments", f"take these out, and {_JSON}"),
    (re.compile(r"## (?:intent|synonym|regex|lookup):"), "Rasa's examples", f"{_LINES} with `text` and `label`"),
    (re.compile(r"TY  - \w+\r?\n(?:[A-Z]\w  - )"), "references (RIS)", _EXPORT),
    (re.compile(r"(?:[-+]?\d+(?:\.\d+)?(?: \d+:\S+){2,}\s*\n){2}"), "libsvm's rows, which are no text", _EXPORT),
    # A template's `<s>` and a model's thoughts are no markup.
    (re.compile(r"<(?!s>|think>)[A-Za-z!][^<>]{0,400}>(?=[\s\S]*</|\s*<)"), "XML or HTML", _TEXT),
)  # fmt: skip
#: What a file called so begins with, where it has no list of rows.
_NAMED: Final = re.compile(r".*\.ya?ml(?:\.gz|\.zst)?", re.IGNORECASE)
_KEY: Final = re.compile(r"(?:#.*\n|---[ \t]*\n|\s)*[\w.\"'-]{1,80}:\s")
#: Lines that each end like a sentence, where prose that was wrapped has some that do not.
_SENTENCES: Final = 5
_SENTENCE: Final = re.compile(r"[.!?…。！？][\"'”’)\]]*$")
#: A word and its tag, as CoNLL has them; and JSON at the end of a line.
_TAGGED: Final = re.compile(r"\S+(?: \S+)* (?:O|[BILUES]-[\w-]+)")
_WITHIN: Final = re.compile(r'\{\s?"[^"\n]{1,80}"\s*:.*\}$')
#: What language models read for the end of a document, and programs write between two.
_ENDED: Final = re.compile(
    rb"<\|(?:endoftext|end_of_text)\|>|^[ \t]*(?:</s>|<(?:eos|eod|eot)>|\[(?:EOS|EOD|EOT|SEP)\])[ \t]*\r?$",
    re.MULTILINE | re.IGNORECASE,
)
#: Names of files that Hadoop, Spark and Hive write, of which each line is a row.
_PART: Final = re.compile(r"(?:.*/)?(?:part-(?:[a-z]-)?\d{3,}[^/]*|\d{6}_\d+(?:_copy_\d+)?)", re.IGNORECASE)


def text_kind(head: bytes, name: str) -> str | None:
    """Return what a text that begins so looks like, and what to do then; None for any other.

    :param head: without a byte order mark. :param name: of the file.
    """
    found = _look(head[:_SAMPLE].decode("utf-8", "replace").lstrip(), name)
    if found is None and (token := _ENDED.search(head)) is not None:
        found = f"has `{token[0].decode().strip()}` between its documents", _LINES
    if found is not None:
        like, mend = found
        return f"learned as text, a paragraph a row, though it {like}; if that is not meant, {mend}"
    return None


def _look(text: str, name: str) -> tuple[str, str] | None:
    for begins, what, mend in _BEGINS:
        if begins.match(text):
            return f"looks like {what}", mend
    if _NAMED.fullmatch(name) and _KEY.match(text):
        return "looks like YAML", _LINES
    rows = [line.strip(" \r") for line in text.split("\n")[:-1] if line.strip()]  # the last one may be cut
    if len(rows) <= _ROWS:
        return None
    lines = [row.strip(" \t\r") for row in rows]  # without outer cells that are empty
    for mark in "\t\x01":
        if len({row.count(mark) for row in rows}) == 1 and any(mark in line for line in lines):
            return "looks like a table whose first line names no columns", _TABLE.format("tsv")
    for mark in ";|":
        counts = {line.count(mark) for line in lines}
        # A table of Markdown begins its lines with the mark.
        even = len(lines) >= _SENTENCES and len(counts) == 1 and min(counts) and lines[0][0] != mark
        if even and not all(map(_SENTENCE.search, lines)):
            return "looks like a table whose first line names no columns", _TABLE.format("csv")
    if all(map(_WITHIN.search, lines)):
        return "has JSON in each line", _ALONE
    if all(map(_TAGGED.fullmatch, lines)):
        return "looks like words with their tags", _LINES
    if _is_csv(lines):
        return "looks like a CSV table", "call it `.csv`"
    if _is_packed(lines):
        return "looks like a CSV table", "call it `.csv`, with the names of its columns in its first line"
    if len(lines) >= _SENTENCES and "\n\n" not in text.replace("\r", "") and all(map(_SENTENCE.search, lines)):
        return "has lines that each end like a sentence", _LINES
    if _PART.fullmatch(name) and not re.search(r"\n\s*\n", text):
        return "is named as a part of which each line is a row", _LINES
    return None


def _is_csv(lines: list[str]) -> bool:
    """Whether lines are a table whose first one names columns, and most of which have a text in quotes."""
    rows = _cells(lines)
    named = bool(rows) and all(re.fullmatch(r"[\w .-]{1,40}", cell) for cell in rows[0])
    return named and 2 * sum('"' in line for line in lines) > len(lines)


def _is_packed(lines: list[str]) -> bool:
    """Whether lines are a table of which no cell begins with a space, as what follows a comma of prose does."""
    rows = _cells(lines) if len(lines) >= _SENTENCES and not all(map(_SENTENCE.search, lines)) else []
    return bool(rows) and not any(cell[:1] == " " for row in rows for cell in row[1:])


def _cells(lines: list[str]) -> list[list[str]]:
    """The cells of lines that have as many each, more than one, between commas; none of others."""
    try:
        rows = list(csv.reader(lines, strict=True))
    except csv.Error:
        return []
    return rows if len(rows[0]) > 1 and len({len(row) for row in rows}) == 1 else []
