"""What stands in a value's place: `<EMAIL>`, or with a key a pseudonym such as `<EMAIL:kfmbaeojdcpl>`.

A pseudonym is HMAC-SHA-256 (RFC 2104) over kind and value: the same value has the same one in any row, drop and order,
and nobody without the key can try values. It is made of letters, so that no detector finds it again, and holds nothing
that JSON would escape or a chat template could read as a control token.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Mapping, Sequence
from typing import Final

from curation.pii.hits import KINDS, Hit, possessive
from dropforge.errors import RecipeError

#: Characters of a key, at least: its fingerprint is public, so it must not be guessed.
LEAST_KEY: Final = 32
_LETTERS: Final = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_LENGTH: Final = 12  # 48 bits: among a million values the chance that any two share one is 0.2 %
#: A pattern of RE2 that any mask has.
MASK: Final = f"<(?:{'|'.join(map(str.upper, KINDS))})(?::[a-p]{{{_LENGTH}}})?>"
#: Numbers as JSON writes them (RFC 8259, 6): what may stand in one before a hit and behind it, and a quote not escaped.
_HEAD: Final = re.compile(r"-?(?:[0-9]+\.)?")
_TAIL: Final = re.compile(r"((?:\.[0-9]++)?(?:[eE][+-]?[0-9]++)?)[ \t\r\n]*+[,}\]]")
_QUOTE: Final = re.compile(r"(?<!\\)" + possessive(r"\\\\", "*") + '"')


def read_key(name: str, env: Mapping[str, str]) -> bytes:
    """The key in the environment. :raises RecipeError: if it is not there or short; it is never shown."""
    key = env.get(name, "").strip()
    if len(key) < LEAST_KEY:
        cause = f"it has {len(key)} characters, and {LEAST_KEY} are needed" if key else "it is not set"
        mend = f"Set it where curation runs, for example `export {name}=$(openssl rand -hex 32)`, and keep it"
        raise RecipeError(f"environment variable {name} (`curation.pii.key_env`)", cause, mend)
    return key.encode()


def fingerprint(key: bytes) -> str:
    """Tells one key from another and leads back to none."""
    return hmac.digest(key, b"dropforge: which key", "sha256").hex()[:16]


def mask(hit: Hit, key: bytes | None) -> str:
    """What stands in the hit's place."""
    name = hit.kind.upper()
    if key is None:
        return f"<{name}>"
    state = hmac.digest(key, f"{hit.kind}\0{hit.value}".encode("utf-8", "surrogatepass"), hashlib.sha256)
    return f"<{name}:{state.hex()[:_LENGTH].translate(_LETTERS)}>"


def replaced(text: str, hits: Sequence[Hit], key: bytes | None) -> str:
    """The text with masks. What is a number of JSON becomes a string, so that JSON stays JSON.

    :param hits: in order, without overlaps.
    """
    parts: list[str] = []
    at, strings = 0, _Strings(text)
    for hit, following in zip(hits, [*(hit.start for hit in hits[1:]), len(text)], strict=True):
        before, digits = text[at : hit.start], text[hit.start : hit.end]
        lead = before.rstrip("0123456789.-")
        tail = _TAIL.match(text, hit.end) if digits.isdecimal() and _HEAD.fullmatch(before, len(lead)) else None
        quote = strings.quote(lead.rstrip(" \t\r\n"), hit.start) if tail and tail.end(1) <= following else ""
        end = tail.end(1) if tail and quote else hit.end
        parts += [lead, quote, before[len(lead) :], mask(hit, key), text[hit.end : end], quote]
        at = end
    return "".join([*parts, text[at:]])


class _Strings:
    """Where a text's strings of JSON are. Read once, from left to right."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._counted, self._open = 0, False
        self._first = min((at for at in (text.find("{"), text.find("[")) if at >= 0), default=len(text))
        self._last = max(text.rfind("}"), text.rfind("]"))

    def quote(self, lead: str, start: int) -> str:
        """The quote to write around a value at `start`, or "" where there is no place for one.

        :param lead: what stands before the value, without the spaces between.
        """
        if not self._first < start < self._last or not lead.endswith((":", "[", ",")):
            return ""
        # No string goes over the end of a line, so a stray quote does not reach beyond its own.
        line = self._text.rfind("\n", self._counted, start) + 1
        quotes = len(_QUOTE.findall(self._text, max(self._counted, line), start))
        self._counted, self._open = start, (self._open and not line) ^ (quotes % 2 == 1)
        if not self._open:
            return '"'
        # JSON inside a string: as its key is quoted, so is the value.
        named = lead.removesuffix(":").rstrip(" ")
        escapes = len(named) - 1 - len(named[:-1].rstrip("\\"))
        return "\\" * escapes + '"' if lead.endswith(":") and named.endswith('\\"') else ""
