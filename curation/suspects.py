"""Rows that may not be what they seem: they are kept and counted, and the card says how many of a file's are so.

Called by the kernel for each row that is kept, so most rows cost a look at length, ends and a few characters.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from decimal import Decimal
from typing import Any, Final, NamedTuple

from curation.canonical import Row
from curation.misread import is_misread
from curation.shapes import has_entities, has_picture, is_address, is_chat, is_encoded, is_json_text, is_repr
from curation.spellings import LONGEST_UNSET, is_no_input, is_rounded, is_unset, stands_at_end
from curation.task import Report

#: What may stand for a line end, and for no formula's `\\nu`.
_LETTERS: Final = re.compile(r"\\n(?![a-z])")
#: What stands behind the backslash of formulas' commands.
_COMMAND: Final = re.compile(r"\\n(?:u|e|eq|abla|ot|i|eg|ewline|onumber|sim|mid)\b")
#: A character as JSON, Python, JavaScript and logs write it in ASCII.
_CODE: Final = re.compile(r"\\(?:u[0-9a-fA-F]{4}|x[89a-fA-F][0-9a-fA-F])")
#: A word of an e-mail's header in ASCII, and UTF-8 within its body.
_MAIL: Final = re.compile(r"=\?[\w-]{1,40}\?[QqBb]\?|=[C-F][0-9A-F](?:=[89AB][0-9A-F]){1,3}")
#: A letter that an encoding had none for, between others.
_LOST: Final = re.compile(r"(?<=[^\W\d_])\?(?=[^\W\d_])")
_MOST_LOST: Final = 3
#: How a document of RTF begins.
_STYLED: Final = ("{\\rtf1", "{\\rtf ")
#: A carriage return in the XML of Excel's files, before the line end.
_RETURN: Final = "_x000D_"
#: Characters of a text that may be an address.
_LONGEST_ADDRESS: Final = 500
#: How a text begins and ends that may be more than one, and how much of the end may be what is missing.
_BEGINS: Final = frozenset('[{("abR \n\t\r')
_ENDS: Final = frozenset("]})\"' \n\t\r")
_END: Final = -LONGEST_UNSET - 2
_UNNAMED: Final = (None, None, None)
#: Without what is looked for beyond `_looks`: line ends, escapes, entities, and characters that were misread.
_PLAIN: Final = re.compile(r"[ -%'-<>@-\[\]-~]*")
_SHORT: Final = re.compile(rf'"(?:name|reasoning_content)":"([^"]{{1,{LONGEST_UNSET}}})"')
#: Characters of a `VARCHAR(255)`, where longer texts end; few texts are so long by chance.
_CUT: Final = 255
#: Characters of a cell of Excel and of Google Sheets, and of MySQL's `TEXT`: no text is so long by chance.
_CELLS: Final = frozenset({32_767, 50_000, 65_535})
#: What exports write before cells that a sheet would take for a formula, and the beginning of one.
_SHEET: Final = frozenset("'=")
_GUARDED: Final = frozenset({"'=", "'+", "'-", "'@"})
_FORMULA: Final = re.compile(r"=[A-Z][A-Z.]+\(")
_SHORTEST_CELL: Final = 32_767 // 2  # of characters that Excel counts as two
#: Characters of a text whose look is kept.
_LONGEST_KEPT: Final = 100
_MOST_KEPT: Final = 1 << 12
#: Short texts in which nothing was found: many rows share one, as system prompts.
_plain: set[str] = set()


def count_suspects(row: Row, report: Report, *, labels: bool) -> None:
    """Count a row that says what programs write for a missing value, also at the end of a question or beside a content,
    and one that holds what Python shows of a value, or a text, messages or parts of one in JSON, or where a file is;
    and one whose name is a number that a program has rounded, whose line ends may be letters, whose characters HTML,
    Excel or JSON wrote otherwise, which was misread, or may have been cut off.

    :param labels: whether labels are what is learned: a row that says its own is counted too.
    """
    if labels and row.label and stands_at_end(row.label, row.contents[-1] if row.text is None else row.text):
        report.leaked += 1
    if row.neutralised or row.invisible:
        report.neutralised += row.neutralised > 0
        report.invisible += row.invisible
    named = row.group, row.label, row.source
    if named != _UNNAMED and any(name is not None and (row.rounded or is_rounded(name)) for name in named):
        report.rounded += 1
    texts = row.contents if row.text is None else (row.text,)
    odd: list[int] = []
    lined = letters = replaced = lost = terminal = misread = entities = pictured = cut = codes = guarded = formula = (
        styled
    ) = False
    # Most are nothing of all this, which length, first and last character, and end tell at once.
    for place, text in enumerate(texts):
        if len(text) <= _LONGEST_KEPT and text in _plain:
            continue
        seen = False
        cut = cut or len(text) == _CUT
        if text[:1] in _SHEET:
            guarded = guarded or text[:2] in _GUARDED
            formula = formula or _FORMULA.match(text) is not None
        if text.isascii():
            seen = " " not in text  # in other scripts most have none
        else:
            replaced = replaced or "\ufffd" in text
            misread = misread or is_misread(text)
        if "\x1b" in text or "\b" in text:
            terminal = True
        if "?" in text and not lost and text.count("?") >= _MOST_LOST:
            lost = _is_lost(text)
        if "=" in text and not codes:
            codes = _MAIL.search(text) is not None
        if lines := "\n" in text:
            lined = True
            seen = seen or "\n\n" in text[_END:]
            entities = entities or _RETURN in text
        if "\\" in text:
            letters = letters or (not lines and _has_letters(text))
            codes = codes or len(_CODE.findall(text)) > 1
            styled = styled or text.startswith(_STYLED)
        if ";" in text or text[:1] == "<" or text[-1:] == ">":
            pictured = pictured or has_picture(text)
        if "&" in text and not entities and (not row.roles or row.roles[place] != "tool"):
            entities = has_entities(text)
        if seen or len(text) <= LONGEST_UNSET or (text[-1] in _ENDS and text[0] in _BEGINS):
            odd.append(place)
    if texts[-1][-1:].isdecimal() and len(texts[-1]) <= _LONGEST_NUMBER:
        _count_number(texts[-1], report)
    if lined:
        report.lined += 1
    elif letters:
        report.letters += 1
    if replaced or lost or terminal or misread or styled or entities or pictured or cut or codes or guarded or formula:
        report.replaced += replaced
        report.lost += lost
        report.styled += styled
        report.terminal += terminal
        report.misread += misread
        report.entities += entities
        report.pictured += pictured
        report.cut += cut
        report.codes += codes
        report.guarded += guarded
        report.formula += formula
    if not odd and not row.beside:
        return
    said: list[_Looks] = []
    for place in odd:
        if row.roles and row.roles[place] == "tool":
            continue  # what a tool gives is whatever it gives
        if (found := _looks(text := texts[place])) is not None:
            said.append(found)
        elif len(text) <= _LONGEST_KEPT and len(_plain) < _MOST_KEPT and _PLAIN.fullmatch(text):
            _plain.add(text)
    if not said and not row.beside:
        return
    unset = {seen.unset for seen in said if seen.unset} | {text.strip() for text in _beside(row) if is_unset(text)}
    for spelling in unset:
        report.unset[spelling] = report.unset.get(spelling, 0) + 1
    report.addresses += any(seen.address for seen in said)
    report.encoded += any(seen.encoded for seen in said)
    report.shown += any(seen.shown for seen in said)
    report.chats += any(seen.chat for seen in said)
    report.quoted += any(seen.quoted for seen in said)
    report.escaped += any(seen.escaped for seen in said)


def holds_a_full_cell(row: Row, fields: Mapping[str, Any]) -> bool:
    """Whether one of a row's texts, or of the fields that they were put together from, is as long as a cell may be."""
    texts = row.contents if row.text is None else (row.text,)
    if max(map(len, texts)) < _SHORTEST_CELL:
        return False
    return any(isinstance(text, str) and _fills_a_cell(text) for text in (*texts, *fields.values()))


def _fills_a_cell(text: str) -> bool:
    """Whether a text is as long as a cell may be, as Excel counts, in UTF-16, or MySQL, in bytes, too: of a character
    that does not fit whole nothing is kept."""
    if len(text) in _CELLS or text.isascii():
        return len(text) in _CELLS
    pairs = len(text.encode("utf-16-le", "surrogatepass")) // 2
    return pairs == 32_767 or (pairs == 32_766 > len(text)) or 65_533 <= len(text.encode("utf-8", "replace")) <= 65_535


def _count_number(answer: str, report: Report) -> None:
    """Count an answer that is a number, by how a program wrote it."""
    if _NUMBER.fullmatch(answer):
        report.floats += answer.endswith(".0")
        report.decimals += not answer.endswith(".0")
    report.rounded_answers += is_rounded(answer)


#: With a point, and characters of one.
_NUMBER: Final = re.compile(r"-?\d+\.\d+")
_LONGEST_NUMBER: Final = 24


def _is_lost(text: str) -> bool:
    """Whether a program wrote `?` for letters that it could not write: most of a text is, or several words have one."""
    if 2 * text.count("?") > len(text) - text.count(" "):
        return True
    return "=" not in text and "://" not in text and len(_LOST.findall(text)) >= _MOST_LOST


def _has_letters(text: str) -> bool:
    """Whether a text without line ends has `\\n` for some: before no small letter, or where no other backslash is."""
    if _LETTERS.search(text):
        return True
    ends = text.count("\\n")
    return ends > 1 and ends == text.count("\\") and _COMMAND.search(text) is None


class _Looks(NamedTuple):
    """What a text may be beside a text. :param unset: as it stands for a missing value, also at its end."""

    unset: str
    address: bool
    encoded: bool
    shown: bool
    chat: bool
    quoted: bool
    escaped: bool


def _looks(text: str) -> _Looks | None:
    """Look closer at a text; None for one that is nothing else."""
    _, behind, end = text.rpartition("\n\n")  # where an `input` stands, or all of it
    quoted = is_json_text(text)
    found = _Looks(
        end.strip()[:LONGEST_UNSET] if (is_no_input if behind else is_unset)(end) else "",
        len(text) <= _LONGEST_ADDRESS and is_address(text),
        is_encoded(text),
        is_repr(text),
        is_chat(text),
        quoted,
        quoted and "\\" in text,
    )
    return found if any(found) else None


def _beside(row: Row) -> Iterator[str]:
    """Names and thoughts of a row's messages, where one may be what is missing."""
    for text in row.beside:
        if any(map(is_unset, _SHORT.findall(text))):
            said = json.loads(text)
            yield from (value for key in ("name", "reasoning_content") if (value := said.get(key)) is not None)


def is_total(fields: Mapping[Any, Any]) -> bool:
    """Whether a row is what sheets and reports have below a table: a word for a total, and numbers alone beside it."""
    values = [value for value in fields.values() if value not in (None, "")]
    if len(values) < 2 or not isinstance(values[0], str) or values[0].strip(" :").casefold() not in _TOTALS:
        return False
    return all(
        isinstance(value, int | float | Decimal)
        or (isinstance(value, str) and len(value) <= _LONGEST_SUM and _SUM.fullmatch(value))
        for value in values[1:]
    )


#: Words of Excel's pivot tables, of reports and of people.
_TOTALS: Final = frozenset(
    {
        *("total", "totals", "grand total", "subtotal", "sum", "gesamt", "gesamtergebnis", "summe", "gesamtsumme"),
        *("total general", "total général", "totale", "totale complessivo", "total geral", "totaal", "eindtotaal"),
        *("suma", "suma końcowa", "итого", "всего", "общий итог"),
        *("合計", "総計", "合计", "总计", "總計", "총합계", "합계"),
    }
)
_LONGEST_SUM: Final = 40
_SUM: Final = re.compile(r"\s*[-+(]?[$€£¥]?\s*\d[\d.,'\s]*[%)€$£¥]?\s*")
