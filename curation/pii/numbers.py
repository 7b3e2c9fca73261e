"""Phone numbers, payment cards, IBANs and national ids.

Digits are read once, as runs of groups with one or two separators between them. Whether neighbouring groups are a
number that names somebody is decided by their lengths, then by its rules; so a text of digits takes linear time.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from functools import cache
from itertools import pairwise
from typing import Final, NamedTuple

from curation.pii import checks
from curation.pii.hits import END, START, Hit, possessive

_SPACES: Final = " \u00a0\u202f\u2009"
_DASHES: Final = "\\-\u2010\u2011\u2012\u2013"
_RUN: Final = re.compile("[0-9]++" + possessive(rf"[{_SPACES}{_DASHES}./()]{{1,2}}+[0-9]++", "*"))
_GROUP: Final = re.compile(r"[0-9]+")
_GROUPS: Final = 8
_DIGITS: Final = 19
_Shape = tuple[int, ...]

_IBAN: Final = re.compile(rf"{START}([A-Z]{{2}}[0-9]{{2}}(?:[ \u00a0]?[A-Z0-9]){{11,29}})")
_WRITTEN: Final = (
    (re.compile(rf"{START}(?:[0-9]{{8}}|[0-9]{{2}}\.[0-9]{{3}}\.[0-9]{{3}}|[XYZ]-?[0-9]{{7}})-?[A-Z]{END}"),
     checks.dni),
    (re.compile(rf"{START}[A-Z]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[0-9]{{2}} ?[A-D]{END}"), checks.nino),
    (
        re.compile(rf"{START}[A-Z]{{6}}[0-9L-NP-V]{{2}}[A-EHLMPR-T][0-9L-NP-V]{{2}}[A-Z][0-9L-NP-V]{{3}}[A-Z]{END}"),
        checks.codice_fiscale,
    ),
    (
        re.compile(rf"{START}[12](?: ?[0-9]{{2}}){{2}} ?(?:[0-9]{{2}}|2[AB])(?: ?[0-9]{{3}}){{2}} ?[0-9]{{2}}{END}"),
        checks.nir,
    ),
)  # fmt: skip

#: Lengths of a phone number behind the country's code (ITU-T E.164 and the national numbering plans it lists).
_NATIONAL: Final = {
    "1": (10, 10), "7": (10, 10), "20": (8, 10), "27": (9, 9), "30": (10, 10), "31": (9, 9), "32": (8, 9), "33": (9, 9),
    "34": (9, 9), "36": (8, 9), "39": (6, 11), "40": (9, 9), "41": (9, 9), "43": (6, 13), "44": (9, 10), "45": (8, 8),
    "46": (7, 10), "47": (8, 8), "48": (9, 9), "49": (6, 12), "52": (10, 10), "55": (10, 11), "60": (8, 10),
    "61": (9, 9), "64": (8, 10), "65": (8, 8), "81": (9, 10), "82": (8, 10), "84": (9, 10), "86": (10, 11),
    "90": (10, 10), "91": (10, 10), "92": (9, 10), "351": (9, 9), "352": (6, 11), "353": (7, 9), "358": (6, 11),
    "380": (9, 9), "420": (9, 9), "421": (9, 9), "852": (8, 8), "886": (8, 9), "966": (8, 9), "971": (8, 9),
    "972": (8, 9),
}  # fmt: skip
#: Codes of two digits; all others but 1 and 7 have three.
_TWO: Final = frozenset([
    "20", "27", "30", "31", "32", "33", "34", "36", "39", "40", "41", "43", "44", "45", "46", "47", "48", "49",
    "51", "52", "53", "54", "55", "56", "57", "58", "60", "61", "62", "63", "64", "65", "66", "81", "82", "84",
    "86", "90", "91", "92", "93", "94", "95", "98",
])  # fmt: skip
_PHONE_WORD: Final = re.compile(
    r"(?:phone|\btel|telephone|mobile|\bcell|\bcall|\bfax|whatsapp|\bsms|handy|telefon|téléphone|teléfono|móvil|telefono"
    r"|cellulare|telefoon)(?:(?: number| no| nr| me at| us at| me on| us on| is| at|[.:#=\s]){0,3})[\s(]{0,2}$",
    re.IGNORECASE,
)
_SSN_WORD: Final = re.compile(r"(?:\bssn|social security)(?: number| no| is|[.:#=\s]){0,4}$", re.IGNORECASE)
_BSN_WORD: Final = re.compile(r"(?:\bbsn|burgerservicenummer|sofi-?nummer)(?: is|[.:#=\s]){0,4}$", re.IGNORECASE)


class _Window(NamedTuple):
    """Neighbouring groups of a run. `left` and `right` stand between them and the run's others, "" at its ends."""

    text: str
    start: int
    end: int
    groups: tuple[str, ...]
    seps: tuple[str, ...]
    left: str
    right: str

    @property
    def digits(self) -> str:
        return "".join(self.groups)

    def behind(self, word: re.Pattern[str]) -> bool:
        return word.search(self.text[max(0, self.start - 32) : self.start]) is not None

    def alone(self) -> bool:
        """Nothing goes on on either side with a separator that the groups themselves use."""
        inner = set("".join(self.seps)) or {"-", ".", "/"}
        return inner.isdisjoint(self.left) and inner.isdisjoint(self.right)

    def same(self, allowed: str) -> bool:
        return len(set(self.seps)) <= 1 and all(len(sep) == 1 and sep in allowed for sep in self.seps)


def phones(text: str) -> Iterator[Hit]:
    """International numbers (ITU-T E.164, E.123), and national ones as they are written in North America, France, the
    United Kingdom, Germany, Spain and Brazil; digits in other groups only behind a word such as "phone"."""
    for window in _windows(text, _PHONE_SHAPES, free=True):
        if (found := _phone(window)) is not None:
            start = window.start
            while start > 0 and text[start - 1] in "+(" and window.start - start < 2:
                start -= 1
            yield Hit(start, window.end, "phone", found)


def numbers(text: str, cards: bool, ids: bool) -> Iterator[Hit]:
    """Payment cards and the national ids that are digits alone."""
    for window in _windows(text, _SHAPES):
        shape = tuple(map(len, window.groups))
        digits = window.digits
        if cards and shape in _CARD_SHAPES and window.same(f"{_SPACES}-") and checks.card(digits):
            yield Hit(window.start, window.end, "card", digits)
        if ids and any(rule(window) for rule in _ID_SHAPES.get(shape, ())):
            yield Hit(window.start, window.end, "national_id", digits)


def written(text: str) -> Iterator[Hit]:
    """The national ids with letters: ES DNI and NIE, UK NINO, IT codice fiscale, and FR NIR."""
    for pattern, check in _WRITTEN:
        for match in pattern.finditer(text):
            value = re.sub(r"[^0-9A-Z]", "", match.group())
            if check(value):
                yield Hit(match.start(), match.end(), "national_id", value)


def ibans(text: str) -> Iterator[Hit]:
    """International bank account numbers, in one piece or in groups (ISO 13616)."""
    for match in _IBAN.finditer(text):
        written = match.group(1)
        length, seen = checks.IBAN_LENGTHS.get(written[:2], 0), 0
        for place, char in enumerate(written):
            seen += char.isalnum()
            if seen == length:
                value = re.sub(r"[^0-9A-Z]", "", written[: place + 1])
                end = match.start() + place + 1
                if checks.iban(value) and not text[end : end + 1].isalnum():
                    yield Hit(match.start(), end, "iban", value)
                break


def _windows(text: str, shapes: frozenset[_Shape], free: bool = False) -> Iterator[_Window]:
    """Neighbouring groups whose lengths are among the shapes. :param free: at the beginning of a run any will do."""
    begun = _begun(shapes)
    for run in _RUN.finditer(text):
        if run.end() - run.start() < 7:
            continue
        places = [match.span() for match in _GROUP.finditer(text, run.start(), run.end())]
        glued = _glued(text, run.start(), run.end())
        for first, (start, _) in enumerate(places):
            if first == 0 and glued[0]:
                continue
            any_shape = free and first == 0
            lengths: _Shape = ()
            for last in range(first, min(len(places), first + _GROUPS)):
                lengths = (*lengths, places[last][1] - places[last][0])
                if sum(lengths) > _DIGITS or not (any_shape or lengths in begun):
                    break
                if not (any_shape or lengths in shapes) or (last == len(places) - 1 and glued[1]):
                    continue
                part = places[first : last + 1]
                yield _Window(
                    text,
                    start,
                    part[-1][1],
                    tuple(text[begin:end] for begin, end in part),
                    tuple(text[one[1] : other[0]] for one, other in pairwise(part)),
                    text[places[first - 1][1] : start] if first else "",
                    text[part[-1][1] : places[last + 1][0]] if last + 1 < len(places) else "",
                )


@cache
def _begun(shapes: frozenset[_Shape]) -> frozenset[_Shape]:
    """All that a shape can begin with: where none does, no more groups are looked at."""
    return frozenset(shape[:length] for shape in shapes for length in range(1, len(shape) + 1))


def _glued(text: str, start: int, end: int) -> tuple[bool, bool]:
    """Is the run a part of a word, on the left and on the right? The letter of `\\n` in JSON text is no word."""
    before, after = text[start - 1 : start], text[end : end + 1]
    escape = start > 1 and before in "nrtbf" and text[start - 2] == "\\"
    return (before.isalnum() or before == "_") and not escape, after.isalnum() or after == "_"


def _phone(window: _Window) -> str | None:
    """The number's digits, if it is one."""
    groups, digits, before = window.groups, window.digits, window.text[max(0, window.start - 2) : window.start]
    if not window.left and before.endswith(("+", "+(")):
        return f"+{found}" if (found := _international(window)) else None
    if digits[:2] == "00" and len(groups) > 1 and len(digits) >= 11 and not window.left:
        return f"+{found}" if (found := _international(window, skip=2)) else None
    if before.endswith(("$", "€", "£", "#", "%", "§")) or window.text[window.end : window.end + 1] in {
        "%",
        "€",
        "$",
        "£",
    }:
        return None
    shape = tuple(map(len, groups))
    by_word = not window.left and not window.right and 7 <= len(digits) <= 15 and window.behind(_PHONE_WORD)
    if not by_word and not (window.alone() and _national(window, shape)):
        return None
    # As `+1 ...` is written, so that one number has one pseudonym.
    return f"+1{digits[-10:]}" if shape in _NANP_SHAPES and _nanp(digits) else digits


def _international(window: _Window, skip: int = 0) -> str:
    digits = window.digits[skip:]
    code = digits[:1] if digits[:1] in {"1", "7"} else digits[:2] if digits[:2] in _TWO else digits[:3]
    # `+44 (0)20 ...`: the zero is dialled inside the country only.
    kept = [group for place, group in enumerate(window.groups) if group != "0" or not _in_parentheses(window, place)]
    number = "".join(kept)[skip + len(code) :]
    least, most = _NATIONAL.get(code, (7, 12))
    if code[:1] == "0" or not least <= len(number) <= most or len(set(number)) == 1:
        return ""
    return code + number


def _in_parentheses(window: _Window, place: int) -> bool:
    return 0 < place < len(window.seps) and "(" in window.seps[place - 1] and ")" in window.seps[place]


def _national(window: _Window, shape: tuple[int, ...]) -> bool:
    groups, seps = window.groups, window.seps
    opened = ")" in "".join(seps) and window.text[window.start - 1 : window.start] == "("
    one = window.same(f"{_SPACES}.-")
    if shape in {(3, 3, 4), (1, 3, 3, 4)}:
        return _nanp(window.digits) and (one or opened or len(shape) == 4)
    if shape == (2, 2, 2, 2, 2):  # France
        return one and groups[0][0] == "0" and groups[0][1] > "0"
    if shape in {(3, 2, 2, 2), (2, 3, 2, 2)}:  # Spain
        return one and groups[0][0] in "6789"
    if shape in {(2, 5, 4), (2, 4, 4)}:  # Brazil, with the area in parentheses
        return opened and groups[0][0] != "0"
    if shape in {(3, 4, 4), (4, 3, 4), (5, 3, 3)}:  # United Kingdom
        return (one or opened) and groups[0][0] == "0" and groups[0][1] in "12378"
    # Area and number: Germany, the United Kingdom, Italy.
    written = seps[0] if seps else ""
    return (
        shape in _AREAS
        and groups[0][0] == "0"
        and groups[0][1] > "0"
        and (opened or (len(written) == 1 and written in f"{_SPACES}/-"))
    )


def _nanp(digits: str) -> bool:
    """North America: neither area nor exchange begins with 0 or 1, nor is it 211 to 911 (NANPA, "Area Codes")."""
    area, exchange = digits[-10:-7], digits[-7:-4]
    plan = area[0] > "1" and exchange[0] > "1" and area[1:] != "11" and exchange[1:] != "11"
    return plan and digits[:-10] in {"", "1"}


def _is_ssn(window: _Window) -> bool:
    dashed = set(window.seps) == {"-"} and window.alone()
    return (dashed or window.behind(_SSN_WORD)) and checks.ssn(window.digits)


def _is_bsn(window: _Window) -> bool:
    dotted = window.seps == (".", ".") and len(window.groups[0]) == 4 and window.alone()
    return (dotted or window.behind(_BSN_WORD)) and checks.bsn(window.digits)


def _is_cpf(window: _Window) -> bool:
    return window.seps in {(), (".", ".", "-")} and window.alone() and checks.cpf(window.digits)


def _is_pesel(window: _Window) -> bool:
    return window.alone() and checks.pesel(window.digits)


def _is_steuer_id(window: _Window) -> bool:
    return window.same(_SPACES) and window.alone() and checks.steuer_id(window.digits)


#: An area code and the number behind it.
_AREAS: Final = frozenset((area, number) for area in (3, 4, 5) for number in (5, 6, 7, 8))
_NANP_SHAPES: Final = frozenset([(10,), (11,), (3, 7), (3, 3, 4), (1, 3, 3, 4), (1, 10)])
_CARD_SHAPES: Final = frozenset(
    [*((length,) for length in range(14, 20)), (4, 4, 4, 4), (4, 6, 5), (4, 6, 4), (4, 4, 4, 4, 3)]
)
_PHONE_SHAPES: Final = _AREAS | {
    *((3, 3, 4), (1, 3, 3, 4), (2, 2, 2, 2, 2), (3, 2, 2, 2), (2, 3, 2, 2)),
    *((2, 5, 4), (2, 4, 4), (3, 4, 4), (4, 3, 4), (5, 3, 3)),
}
_ID_SHAPES: Final[dict[_Shape, tuple[Callable[[_Window], bool], ...]]] = {
    (3, 2, 4): (_is_ssn,),
    (9,): (_is_ssn, _is_bsn),
    (4, 2, 3): (_is_bsn,),
    (3, 3, 3): (_is_bsn,),
    (11,): (_is_cpf, _is_pesel, _is_steuer_id),
    (3, 3, 3, 2): (_is_cpf,),
    (2, 3, 3, 3): (_is_steuer_id,),
}
_SHAPES: Final = _CARD_SHAPES | frozenset(_ID_SHAPES)
