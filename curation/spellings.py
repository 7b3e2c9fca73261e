"""One name for one value of a label, source or group, whichever program wrote it: 1, 1.0 and their texts are `1`.

`curation.canonical` names the values of each row here, the gate asks whether truth values have several spellings.
Only texts that a program writes for a number become another text, so two values never become one; what may be one value
is told.
"""

from __future__ import annotations

import json
import math
import re
import unicodedata
from collections import Counter
from collections.abc import Collection, Mapping
from decimal import Decimal
from html import unescape
from typing import Any, Final
from urllib.parse import unquote

from curation.misread import reread
from curation.reasons import Reason, RejectError
from curation.shapes import texts
from curation.tokens import blank
from curation.words import folded

#: What pandas writes for a missing value.
_MISSING: Final = frozenset({"nan", "NaN", "<NA>"})
_LONGEST: Final = 24  # characters of a float


def value_name(value: Any) -> str | None:
    """Return the name of a value; None if it is missing, as NaN is.

    :raises RejectError: if it holds bytes that are no text, or an object whose keys are none.
    """
    if isinstance(value, str):
        # Most are words, which these tell at once.
        if value[-2:] == ".0" or "e+" in value[-5:] or value in _MISSING:
            return _of_text(value)
        return None if value and blank(value) else value
    if isinstance(value, bytes):
        return value_name(_shown(texts(value)))
    if value is None:
        return None
    if isinstance(value, float):
        return _of_float(value)
    if isinstance(value, Decimal):
        written = format(value, "f")
        short = written.rstrip("0").rstrip(".") if "." in written else written
        return "0" if short == "-0" else short
    if isinstance(value, bool | int | dict | list):
        try:
            return json.dumps(texts(value), sort_keys=True, ensure_ascii=False, default=_shown)
        except TypeError:
            raise RejectError(Reason.BAD_FIELD, "holds an object whose keys are no text") from None
    return str(value)


def _shown(value: Any) -> str:
    """What JSON has no type for, as text. :raises RejectError: for bytes, which nobody means as Python shows them."""
    if isinstance(value, bytes):
        raise RejectError(Reason.BAD_FIELD, "holds bytes that are not UTF-8")
    return str(value)


def _of_text(text: str) -> str | None:
    if text in _MISSING:
        return None
    try:
        number = float(text) if len(text) <= _LONGEST else math.inf
    except ValueError:
        return text
    return _of_float(number) if repr(number) == text else text


def _of_float(number: float) -> str | None:
    if math.isnan(number):
        return None
    return str(int(number)) if number.is_integer() else repr(number)


def names_so_far(group: str) -> list[str]:
    """Return the name that a group has, and the one that it may have in older versions, where 1 and 1.0 were two."""
    now = value_name(group) or group
    return [now, f"{now}.0"] if now.removeprefix("-").isdecimal() else [now]


def truths_among(words: Mapping[str, int], others: int) -> dict[str, int]:
    """Return labels that may be truth values, of those that are called like one of `TRUTHS`, 0 or 1.

    :param others: how many labels there are besides: beside these, words such as yes or t may well be what they say.
    """
    return {label: rows for label, rows in words.items() if not others or label.lower() in _PLAIN}


def mixed_truths(rows: Mapping[str, int]) -> dict[str, int]:
    """Return the truth values among labels, with their rows, where they are spelled in several ways; else nothing.

    :param rows: of each label; numbers are truth values only beside words.
    """
    small = {label.lower() for label in rows}
    ways = {label: _way(label, small) for label in rows}
    found = {label: rows[label] for label, way in ways.items() if way}
    return found if len({ways[label] for label in found}) > 1 else {}


def alike(rows: Mapping[str, int]) -> list[dict[str, int]]:
    """Return labels that differ in case, spaces, hyphens and underscores, characters that nobody sees, the way a number
    or an address is written, or what people and programs write around them alone (`Label: **spam**.`), or such as say
    more than another (`1 - low` beside `1`), with their rows: one value or several, nobody can tell.

    :param rows: of each label.
    """
    found: dict[str, dict[str, int]] = {}
    for label, count in rows.items():
        found.setdefault(folded_name(label), {})[label] = count
    same = [group for group in found.values() if len(group) > 1 and not mixed_truths(group)]
    more = [(label, other) for label in rows for other in _within(label) if other in rows]
    more += [(label, other) for label in rows for other in _lost_of(label, rows)]
    return same + [{other: rows[other], label: rows[label]} for label, other in more]


def _within(label: str) -> tuple[str, ...]:
    """What may be the label alone: the number or the name of one that has both, or its first line."""
    if (both := _BOTH.fullmatch(label)) is not None:
        return both[1], both[2]
    if (member := _MEMBER.fullmatch(label)) is not None:
        return (member[1],)
    first, more, _ = label.partition("\n")
    return (first.strip(),) if more else ()


def _lost_of(label: str, labels: Collection[str]) -> list[str]:
    """Those of other labels that have letters beyond ASCII where one has `?`, as programs write what they cannot."""
    if "?" not in label.strip("?"):
        return []
    pattern = re.compile(re.escape(label).replace(r"\?", r"[^\x00-\x7f]"))
    return [other for other in labels if pattern.fullmatch(other)]


#: A member of an enumeration as Python shows it.
_MEMBER: Final = re.compile(r"[A-Za-z_]\w*\.([A-Za-z_]\w*)")
#: A number and a name, as of a choice; 1.5 is one number.
_BOTH: Final = re.compile(r"([A-Za-z]?\d{1,4})(?:\s+[-\u2013]\s+|\s?[:=]\s?|[.)]\s)([^\W\d_].*)")


def made_of_others(rows: Mapping[str, int]) -> dict[str, int]:
    """Return labels that are several of the others with a separator between, or, where most with one are, several parts
    that others have too, with their rows. :param rows: of each label."""
    found: dict[str, int] = {}
    for mark in "|;, ":
        parts = {label: _parts(label, mark) for label in rows if mark in label}
        often = Counter(part for within in parts.values() for part in within) if len(parts) > 1 else Counter()
        shared = [label for label, within in parts.items() if within and all(often[part] > 1 for part in within)]
        made = {label for label, within in parts.items() if within and within <= rows.keys()}
        made |= set(shared) if len(shared) > len(parts) // 2 else set()
        found |= {label: rows[label] for label in made}
    return {label: count for label, count in rows.items() if label in found}


def _parts(label: str, mark: str) -> set[str]:
    """What a separator parts of a label; of what spaces part numbers alone, where words may well be a name."""
    parts = {part.strip() for part in label.split(mark)}
    return parts if mark != " " or all(part.isdecimal() for part in parts) else set()


def numbers_and_names(rows: Mapping[str, int]) -> dict[str, int]:
    """Return labels that are 0 to n, and as many others, where there are no more: they may be the names of the first.

    :param rows: of each label.
    """
    half, odd = divmod(len(rows), 2)
    numbers = set(map(str, range(half)))
    both = half > 1 and not odd and numbers <= rows.keys()
    return dict(rows) if both and not any(_is_number(label) for label in rows.keys() - numbers) else {}


def _is_number(label: str) -> bool:
    return folded_name(label)[-1:].isdecimal()


def called_alike(names: Collection[str], there: Collection[str]) -> dict[str, str]:
    """Return names that nothing there has, each with what may be meant, "" if nothing is like it: one that differs as
    those of `alike` do, or a file of that name. Those that are like one come first."""
    lost = set(names) - set(there)
    found: dict[str, str] = {}
    for name in sorted(there, reverse=True) if lost else ():
        file = name.rpartition("/")[2]
        found |= {folded_name(file.partition(".")[0]): name, folded_name(file): name, folded_name(name): name}
    meant = {name: found.get(folded_name(name), "") for name in sorted(lost)}
    return dict(sorted(meant.items(), key=lambda item: not item[1]))


def stands_at_end(label: str, text: str) -> bool:
    """Return whether a text begins or ends with a label, as one does of which the label is the answer."""
    label = label.strip().casefold()
    around = len(label) + _AROUND
    head, tail = text[:around].lstrip(_BORDER).casefold(), text[-around:].rstrip(_BORDER).casefold()
    begins = head.startswith(label) and not head[len(label) : len(label) + 1].isalnum()
    return bool(label) and (begins or (tail.endswith(label) and not tail[: -len(label)][-1:].isalnum()))


#: What may stand around a label, and how many of it.
_BORDER: Final = " \t\r\n.,:;!*#`_\"'()[]<>/"
_AROUND: Final = 10


def unset(rows: Mapping[str, int]) -> dict[str, int]:
    """Return labels that programs write for a missing value, with their rows: also -1 beside 0 to n, but `-` not beside
    `+`, and -1 not beside 0 and 1 alone, of which it is the opposite. :param rows: of each label."""
    others = rows.keys() - {"-1"}
    numbered = len(rows) > len(others) > _TERNARY and others == set(map(str, range(len(others))))
    return {
        label: count
        for label, count in rows.items()
        if (is_unset(label) and not (label.strip() == "-" and "+" in rows)) or (numbered and label == "-1")
    }


def is_unset(text: str) -> bool:
    """Return whether programs write the text for a missing value, or Excel what no cell had room for."""
    return (len(text) <= LONGEST_UNSET and text.strip().lower() in _UNSET) or _NO_ROOM.fullmatch(text) is not None


def is_no_input(text: str) -> bool:
    """Return whether a text behind an instruction says that there is nothing behind it."""
    return is_unset(text) or text.strip().rstrip(".").lower() in _NO_INPUT


#: Excel writes a long text in a narrow cell so, and a number or a date in a narrow column.
_NO_ROOM: Final = re.compile(r"\s*#{4,}\s*")
#: Classes beside which -1 may be one more.
_TERNARY: Final = 2


def is_inexact(value: Any) -> bool:
    """Return whether a value is a float, or its text, that stands for several whole numbers: pandas makes floats of a
    column of numbers of which one is missing."""
    if isinstance(value, str) and "e+" in value[-5:] and len(value) <= _LONGEST:
        try:
            value = float(value)
        except ValueError:
            return False
    return isinstance(value, float) and _EXACT < abs(value) < math.inf


#: Above it a float is one of several whole numbers.
_EXACT: Final = 2.0**53


def dated(rows: Mapping[str, int]) -> dict[str, int]:
    """Return labels that are a day and a month, or a month and a year, as Excel writes what it takes for a date
    (`5-Jan` of 1-5, `1-Mar` of a gene), with their rows, beside ranges or very many others. :param rows: of each label.
    """
    found = {label: count for label, count in rows.items() if _EXCEL_DATE.fullmatch(label.strip().lower())}
    ranges = any(_RANGE.fullmatch(label.strip()) for label in rows)
    return found if ranges or len(rows) >= _FEW * len(found) else {}


_FEW: Final = 10  # times as many other labels
_RANGE: Final = re.compile(r"\d+\s?(?:[-\u2013]\s?\d+|\+)")
_MONTH: Final = r"(?:jan|feb|m[aä]r|mrz|apr|ma[iy]|jun|jul|aug|sep|o[kc]t|nov|de[cz])"
_EXCEL_DATE: Final = re.compile(rf"\d{{1,2}}(?:-|\. ?| ){_MONTH}|{_MONTH}[-. ]\d\d")


def is_rounded(name: str) -> bool:
    """Return whether Excel has rounded a number so: names of several values may be one."""
    return name[-4:-2] == "E+" and _ROUNDED.fullmatch(name) is not None


_ROUNDED: Final = re.compile(r"-?\d(?:[.,]\d+)?E\+\d\d")
#: Of SNLI, pandas, SQL, Hive, R, Python, JavaScript, C, Ruby, Alpaca, and of Excel and LibreOffice in a few languages,
#: in small letters.
_UNSET: Final = frozenset(
    {
        *("-", "\\n", "null", "none", "na", "n/a", "<na>", "nan", "-nan", "nat", "undefined", "nil", "<noinput>"),
        *("(null)", "[null]", "<null>", "(none)", "<none>", "[object object]"),
        *("#n/a", "#n/a n/a", "#na", "#ref!", "#name?", "#value!", "#div/0!", "#num!", "#null!", "#spill!", "#calc!"),
        *("#getting_data", "#field!", "#blocked!", "#unknown!", "#connect!", "#busy!"),
        *("#nv", "#bezug!", "#wert!", "#zahl!", "#überlauf!", "#kalk!", "#n/d", "#valeur!", "#nom?", "#nombre!"),
        *("#nul!", "#¡ref!", "#¿nombre?", "#¡valor!", "#¡div/0!", "#¡num!", "#¡nulo!"),
        # Of forums, chat programs and editors, where a text is gone or none was written.
        *("[deleted]", "[removed]", "<media omitted>", "this message was deleted", "this message was deleted."),
        *("<p></p>", "<p><br></p>", "<p>&nbsp;</p>", "<br>", "<br/>"),
        *("{}", '""', "(empty)", "…", "...", "—", "–", "tbd"),
        *(f"err:{number}" for number in (501, 502, 503, 504, 508, 509, 510, 511, 512, 519, 520, 522, 523, 524)),
    }
)
#: Of people and language models who write rows of Alpaca that need no `input`; a label may well be called so.
_NO_INPUT: Final = frozenset(
    {"no input", "<no input>", "noinput", "no input needed", "no input required", "no input provided", "not applicable"}
)
#: Characters of the longest one, and a space on each side.
LONGEST_UNSET: Final = max(map(len, _UNSET | _NO_INPUT)) + 2


def folded_name(label: str) -> str:
    """Return what all spellings have that may be one value, see `alike`."""
    text = label
    if not text.isascii():
        text = unicodedata.normalize("NFKC", reread(text)).translate(_PLAINER)
        text = "".join(character for character in text if not _is_unseen(character))
    text = unescape(text) if "&" in text else text
    text = (unquote(text) if "%" in text else text).strip().casefold().removeprefix("__label__")
    if not text.isascii():
        # Greek capitals have no accents.
        text = _in_latin(text.translate(_UMLAUTS))
        text = unicodedata.normalize("NFC", _TONOS.sub(r"\1", unicodedata.normalize("NFD", folded(text))))
    text = text[1:] if text[:2] == '="' else text  # as Excel is told that a number is text
    for _ in range(_LAYERS):
        text, before = _bare(text) or text, text
        if text == before:
            break
    text = _STARS.sub("", _NUMBERED.sub("", text))
    text = str(len(text.rstrip("☆"))) if _DRAWN.fullmatch(text) else _ORDINAL.sub("", _OF.sub("/", text))
    text = _day(text) or text
    if (time := _TIME.fullmatch(text)) is not None:
        return f"{time[1]} {time[2]}{(time[3] or '').rstrip('.0')}"
    if _THOUSANDS.fullmatch(text):
        text = text.replace(",", "")
    written = text.replace(",", ".")
    try:
        number = float(written) if len(text) <= _LONGEST and "_" not in text else math.nan
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        if _UUID.fullmatch(text):
            return text.replace("-", "")
        if _MEASURE.fullmatch(text):
            text = _AMOUNT.sub(_plain, _AROUND_SIGNS.sub(r"\1", text))
        return _PADDED.sub("", _BETWEEN.sub("", _BESIDE.sub(_beside, text)))
    return repr(number + 0) if abs(number) < _EXACT else str(int(Decimal(written)))


def _beside(found: re.Match[str]) -> str:
    """What stands between the parts of a path of classes, however it is written."""
    return "/" if found[1] in ">|" else found[1]


def _in_latin(text: str) -> str:
    """A text in small letters whose letters of Cyrillic look like Latin ones all, in Latin ones."""
    latin = text.translate(_LOOK_ALIKE)
    return latin if latin.isascii() else text


def _day(text: str) -> str | None:
    """A day as ISO 8601 writes it, if it is one that can be read in one way alone."""
    if not text[-1:].isdecimal() or len(text) > _LONGEST:
        return None
    if (found := _YEAR_FIRST.fullmatch(text)) is not None:
        year, month, day = found[1], found[3], found[4]
    elif (found := _YEAR_LAST.fullmatch(text)) is not None:
        year, (day, month) = found[4], (found[1], found[3])
        if found[2] == "/" and int(day) <= _MONTHS_OF_YEAR:
            return None  # or the month
    elif (found := _NAMED_MONTH.fullmatch(text)) is not None:
        year, month, day = found[5], _NUMBER_OF_MONTH[(found[2] or found[3])[:3]], found[1] or found[4]
    else:
        return None
    return f"{year}-{int(month):02}-{int(day):02}"


def _plain(found: re.Match[str]) -> str:
    """A number within a label in one spelling: 1,000 as 1000, 10.00 as 10, 5,50 as 5.5."""
    number = found[0]
    number = number.replace(",", "" if _GROUPED.fullmatch(number) else ".")
    return f"{Decimal(number).normalize():f}" if number.count(".") < 2 else number


def _bare(text: str) -> str:
    """A label in small letters without what people and language models write around one."""
    if _CLOSING.get(text[:1]) == text[1:][-1:]:  # a list or set of one, as JSON, Python, NumPy and PostgreSQL write it
        text = text[1:-1].rstrip(", ").lstrip()
    for around in (_MADE, _QUOTED, _MARKED, _TAGGED):
        if (held := around.fullmatch(text)) is not None:
            text = held[2].strip()
    text = _SAID.sub("", text)
    if text[:1] == "'" and text.count("'") == 1:  # as spreadsheets are told that a number or a formula is text
        text = text[1:]
    shorter = text.rstrip(_STOPS)
    if shorter[-1:] == ")" and "(" not in shorter:  # of a list, `a)`
        shorter = shorter[:-1]
    return shorter if shorter[-1:].isalnum() or shorter[-1:] in _ENDS else text


def _is_unseen(character: str) -> bool:
    """Whether it is not seen, or only says how the one before it is drawn (a variation selector)."""
    return unicodedata.category(character) == "Cf" or "\ufe00" <= character <= "\ufe0f"


#: A time of ISO 8601, with a space or a T, of UTC or without a zone: day, time and parts of a second.
_TIME: Final = re.compile(r"(\d{4}-\d\d-\d\d)[t ](\d\d:\d\d:\d\d)(\.\d+)?\s?(?:z|utc|\+00(?::?00)?)?")
_THOUSANDS: Final = re.compile(r"[1-9]\d{0,2}(?:,\d{3})+")
#: What transformers calls the classes 0 to n, where they have no names.
_NUMBERED: Final = re.compile(r"(?:label|class)[\s_-]*(?=\d+\Z)")
#: And as people rate.
_STARS: Final = re.compile(r"(?<=\d)[\s_-]*stars?\Z")
#: As signs; what is not given may be drawn too.
_DRAWN: Final = re.compile(r"[★⭐]+☆*")
_ORDINAL: Final = re.compile(r"(?<=\d)(?:st|nd|rd|th)\Z")
_OF: Final = re.compile(r"(?<=\d)\s+(?:out\s+)?of\s+(?=\d)")
_YEAR_FIRST: Final = re.compile(r"(\d{4})([-/.])(\d\d?)\2(\d\d?)")
_YEAR_LAST: Final = re.compile(r"(\d\d?)([/.])(\d\d?)\2(\d{4})")
_NUMBER_OF_MONTH: Final = {
    name: number + 1
    for number, name in enumerate("jan feb mar apr may jun jul aug sep oct nov dec".split())  # noqa: SIM905
}
_MONTHS: Final = (
    r"(jan(?:uary)?|feb(?:ruary)?|mar(?:ch)?|apr(?:il)?|may|june?|july?|aug(?:ust)?|sept?(?:ember)?|oct(?:ober)?"
    r"|nov(?:ember)?|dec(?:ember)?)"
)
#: 5 January 2024, Jan. 5th, 2024.
_NAMED_MONTH: Final = re.compile(
    rf"(?:(\d\d?)(?:st|nd|rd|th)?[\s-]{_MONTHS}|{_MONTHS}\.?\s(\d\d?)(?:st|nd|rd|th)?,?)[\s-](\d{{4}})"
)
_MONTHS_OF_YEAR: Final = 12
#: What stands between words of a name, or between words and numbers; 1-2 is not 12.
_MARK: Final = r"(?:\s+-\s+|\s+|[_\-\u2010-\u2015]+)"
_BETWEEN: Final = re.compile(rf"(?<=[^\W\d_]){_MARK}(?=[^\W_])|(?<=\d){_MARK}(?=[^\W\d_])|(?<=\d)\s+(?=%)")
_TONOS: Final = re.compile("([\u03b1-\u03c9])\u0301")
_CLOSING: Final = {"[": "]", "{": "}", "(": ")"}
_QUOTED: Final = re.compile(r"""b?(["'])(.*)\1""", re.DOTALL)
#: A value as NumPy, PyTorch and Python's Decimal show it.
_MADE: Final = re.compile(r"(np\.\w{1,20}|numpy\.\w{1,20}|tensor|decimal)\((.*)\)", re.DOTALL)
_UUID: Final = re.compile(r"[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}|[0-9a-f]{32}")
#: Markdown, an element of XML, and what stands before a label, or before the place of one in the address of a page.
_MARKED: Final = re.compile(r"(\*{1,3}|_{2,3}|`{1,3})(?=\S)(.*\S)\1", re.DOTALL)
_TAGGED: Final = re.compile(r"<(\w{1,40})>(.*)</\1>", re.DOTALL)
_SAID: Final = re.compile(
    r"\A(?:(?:label|answer|class|category|option|choice|sentiment|prediction|output|result)(?:\s{0,3}[:=]\s{0,3}"
    r"|\s(?=\w\Z))(?=\S)|#(?=\w)|(?:https?://)(?:www\.)?|mailto:)"
)
_STOPS: Final = " .,;:/"
_ENDS: Final = frozenset(")]}>\"'*`")
_BESIDE: Final = re.compile(r"\s{0,3}([/,:;>|&])\s{0,3}")
#: An amount or a range of two, with a sign, unit or word: 10.00%, $1,000, >= 50K, 18 - 24 years.
_DIGITS: Final = r"\d{1,20}(?:[.,]\d{1,20}){0,6}"
_SIDE: Final = rf"[$€£¥]?\s?{_DIGITS}\s?[km]?[%€$£¥+°]?"
_WORDS: Final = r"(?:(?:under|over|below|above|less than|more than|up to|at least|at most)\s)?"
_MEASURE: Final = re.compile(rf"{_WORDS}[<>=~]{{0,2}}\s?{_SIDE}(?:\s?-\s?{_SIDE})?(?:\s?[^\W\d_]+)?")
_AROUND_SIGNS: Final = re.compile(r"\s*([<>=~$€£¥%°+-])\s*")
_AMOUNT: Final = re.compile(_DIGITS)
_GROUPED: Final = re.compile(r"\d{1,3}(?:,\d{3})+(?:\.\d+)?")
_PADDED: Final = re.compile(r"(?<=[^\W\d_])0+(?=[1-9])")
_LAYERS: Final = 3
#: As people write them on other keyboards.
_UMLAUTS: Final = str.maketrans({"ä": "ae", "ö": "oe", "ü": "ue"})
#: Letters of Cyrillic, and the `i` without a dot, as capitals and small ones are drawn.
_LOOK_ALIKE: Final = str.maketrans("авекмнорстухіѕјһԁӏı", "abekmhopctyxisjhdli")
_DASHES: Final = dict.fromkeys("\u2010\u2011\u2012\u2013\u2014\u2015\u2212", "-")
_PLAINER: Final = str.maketrans(
    {**_DASHES, "≥": ">=", "≤": "<=", "\u2018": "'", "\u2019": "'", "\u201c": '"', "\u201d": '"'}
)


def _way(label: str, small: Collection[str]) -> str:
    """How a truth value is spelled; empty for what is none.

    :param small: all labels in small letters: other words than true and false are one only beside their opposite.
    """
    if label in {"0", "1"}:
        return "number"
    word = label.lower()
    if word in _PLAIN:
        return "small" if label.islower() else "capital" if label.isupper() else "mixed"
    for yes, no in _OPPOSITES:
        if word in {*yes, *no} and not yes.isdisjoint(small) and not no.isdisjoint(small):
            return min(no)
    return ""


_PLAIN: Final = frozenset({"true", "false", "0", "1"})
#: Truth values of PostgreSQL, R, YAML and of Excel in other languages, in small letters.
_OPPOSITES: Final = tuple(
    (frozenset(yes.split()), frozenset(no.split()))
    for yes, no in (
        *(("t", "f"), ("y", "n"), ("yes", "no"), ("on", "off"), ("wahr", "falsch"), ("vrai", "faux")),
        *(("vero verdadero verdadeiro", "falso"), ("waar", "onwaar")),
    )
)
#: Words that programs write for truth values, in small letters.
TRUTHS: Final = frozenset({"true", "false"}.union(*(words for pair in _OPPOSITES for words in pair)))
