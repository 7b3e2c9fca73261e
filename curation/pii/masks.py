"""What stands in a value's place: `<EMAIL>`, or with a key a pseudonym such as `<EMAIL:kfmbaeojdcpl>`.

A pseudonym is HMAC-SHA-256 (RFC 2104) over kind and value: the same value has the same one in any row, drop and order,
and nobody without the key can try values. It is made of letters, so that no detector finds it again, and holds nothing
that JSON would escape or a chat template could read as a control token.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from typing import Final

from curation.pii.hits import KINDS, Hit
from dropforge.errors import DropforgeError

#: Characters of a key, at least: its fingerprint is public, so it must not be guessed.
LEAST_KEY: Final = 32
_LETTERS: Final = str.maketrans("0123456789abcdef", "abcdefghijklmnop")
_LENGTH: Final = 12  # 48 bits: among a million values the chance that any two share one is 0.2 %
#: A pattern of RE2 that any mask has.
MASK: Final = f"<(?:{'|'.join(map(str.upper, KINDS))})(?::[a-p]{{{_LENGTH}}})?>"


def read_key(name: str, env: Mapping[str, str]) -> bytes:
    """The key in the environment. :raises DropforgeError: if it is not there or short; it is never shown."""
    key = env.get(name, "").strip()
    if len(key) < LEAST_KEY:
        cause = f"it has {len(key)} characters, and {LEAST_KEY} are needed" if key else "it is not set"
        mend = f"Set it where curation runs, for example `export {name}=$(openssl rand -hex 32)`, and keep it"
        raise DropforgeError(f"environment variable {name} (`curation.pii.key_env`)", cause, mend)
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
