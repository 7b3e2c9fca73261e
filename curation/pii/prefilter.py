"""Which passages can hold something at all: RE2 over whole columns, in linear time.

Each pattern is weaker than its detectors: it may hit for nothing, which costs time, and must never miss.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc

from curation.columns import integers

_DIGIT_RUN: Final = r"(?:[0-9][\x{a0}\x{202f}\x{2009}\x{2010}-\x{2013} ./()-]{0,2}){7}"
#: RE2's `\s` is ASCII, and not all of that; these are what Python's is.
_SPACE: Final = r"[\s\x{0b}\x{1c}-\x{1f}\x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}]"
#: Names before a value. Without case, Python takes two Turkish letters for an `i` and RE2 does not.
_NAMES: Final = (
    "api[_-]?key|secret|token|passw|passphrase|pwd|access[_-]?key|private[_-]?key|client[_-]?id|credential|auth"
)
_CASELESS: Final = _NAMES.replace("i", r"[i\x{130}\x{131}]")
#: By group of detectors.
PATTERNS: Final = {
    "email": r"[^\s@]@[^\s@]",
    "ip": r"[0-9]\.[0-9]{1,3}\.[0-9]{1,3}\.[0-9]|[23][0-9A-Fa-f]{3}:[0-9A-Fa-f:]",
    "digits": _DIGIT_RUN,
    "iban": r"[A-Z]{2}[0-9]{2}(?:[ \x{a0}]?[A-Z0-9]){2}",
    "written": (
        r"[A-Z]{6}[0-9L-NP-V]{2}[A-EHLMPR-T]|[A-Z]{2} ?[0-9]{2} ?[0-9]{2} ?[0-9]{2}|[0-9] ?2[AB] ?[0-9]"
        r"|[0-9]{3}-?[A-Z]|(?:[0-9] ?){12}"
    ),
    "issued": (
        r"AKIA|ASIA|gh[pousr]_|github_pat_|gl[a-z]{2,5}-|xox[a-s]-|xapp-|[sr]k_(?:live|test)|whsec_|AIza|hf_|npm_|pypi-"
        r"|SG\."
    ),
    "prefixed": r"sk-[0-9A-Za-z_-]{20}",
    "jwt": r"eyJ[0-9A-Za-z_-]{8}",
    "pem": "PRIVATE KEY",
    "url": r":\\?/\\?/[^\s/@]{0,128}:[^\s/@]",
    "named": rf"""(?i:{_CASELESS})[0-9A-Za-z_-]{{0,48}}\\{{0,3}}["'`]?{_SPACE}{{0,3}}[=:]""",
}
#: The groups of a kind: each pattern of a secret costs time of its own, so each has its own.
GROUPS: Final = {
    "secret": ("issued", "prefixed", "jwt", "pem", "url", "named"),
    "iban": ("iban",),
    "card": ("digits",),
    "national_id": ("digits", "written"),
    "email": ("email",),
    "ip": ("ip",),
    "phone": ("digits",),
}


class Prefilter:
    """Made once per worker for the kinds that are asked for."""

    def __init__(self, kinds: Collection[str]) -> None:
        self.groups = sorted({group for kind in kinds for group in GROUPS[kind]})
        self.pattern = "|".join(PATTERNS[group] for group in self.groups)

    def suspects(self, texts: pa.Array) -> list[tuple[int, frozenset[str]]]:
        """Places of the texts that may hold something, with the groups that may."""
        places = pc.indices_nonzero(pc.match_substring_regex(texts, self.pattern)).to_pylist()
        if not places:
            return []
        part = texts.take(integers(places))
        found: Sequence[list[bool]] = [
            pc.match_substring_regex(part, PATTERNS[group]).to_pylist() for group in self.groups
        ]
        return [
            (place, frozenset(group for group, hit in zip(self.groups, hits, strict=True) if hit))
            for place, *hits in zip(places, *found, strict=True)
        ]
