"""Keys, tokens and passwords: by the form that their issuer gives them, else by a name before them and by entropy."""

from __future__ import annotations

import base64
import binascii
import json
import re
from collections.abc import Collection, Iterator
from typing import Final

from curation.pii.checks import random_looking
from curation.pii.hits import START, Hit, possessive

_URL_SAFE: Final = "[0-9A-Za-z_-]"
#: Forms that say what they are, with the issuer's page. What is behind a number of characters at most stays linear.
_ISSUED: Final = re.compile(
    START + "(?:"
    # AWS, "IAM identifiers", unique prefixes AKIA and ASIA.
    r"(?:AKIA|ASIA)[A-Z2-7]{16}(?![0-9A-Za-z])"
    # GitHub, "Behind GitHub's new authentication token formats" (2021), and fine-grained tokens.
    r"|gh[pousr]_[0-9A-Za-z]{36,255}+|github_pat_[0-9A-Za-z_]{22,255}+"
    # GitLab, "Token overview", prefixes.
    rf"|gl(?:pat|dt|rt|ptt|ft|soat|cbt|imt|agent)-{_URL_SAFE}{{20,255}}+"
    # Slack, "Token types"; app-level tokens.
    r"|xox[abeoprs]-[0-9A-Za-z-]{10,250}+|xapp-[0-9]-[0-9A-Za-z-]{10,250}+"
    # Stripe, "API keys" and "Restricted API keys"; signing secrets of webhooks.
    r"|[sr]k_(?:live|test)_[0-9A-Za-z]{16,247}+|whsec_[0-9A-Za-z]{24,64}+"
    # Google Cloud, "Authenticate by using API keys".
    rf"|AIza{_URL_SAFE}{{35}}(?!{_URL_SAFE})"
    # Hugging Face, "User access tokens"; npm and PyPI, their pages on tokens; SendGrid, "API keys".
    rf"|hf_[A-Za-z]{{30,64}}+|npm_[0-9A-Za-z]{{36}}|pypi-{_URL_SAFE}{{50,255}}+|SG\.{_URL_SAFE}{{22}}\.{_URL_SAFE}{{43}}"
    ")"
)
#: OpenAI, Anthropic and those who follow them: a short prefix, so the rest must look random.
_PREFIXED: Final = re.compile(rf"{START}sk-(?:proj-|svcacct-|admin-|ant-|or-)?({_URL_SAFE}{{20,255}}+)")
#: JSON Web Tokens, RFC 7519: three parts in base64url, the first of which is a header with `alg` (RFC 7515).
_JWT: Final = re.compile(rf"{START}(eyJ{_URL_SAFE}{{8,1024}}+)\.eyJ{_URL_SAFE}{{4,16384}}+\.{_URL_SAFE}{{0,2048}}+")
#: PEM (RFC 7468) and OpenPGP (RFC 9580) private keys, whole; a lost end takes the lines of base64 that are there. A
#: line feed may be written as JSON does.
_BREAK: Final = r"\s|\\{1,4}[nr]"
_LINE: Final = possessive(_BREAK, "{0,4}") + possessive(r"[0-9A-Za-z+/=]|\\/", "{16,20000}")
_PEM: Final = re.compile(
    r"-----BEGIN (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    "(?:"
    + possessive(rf"[0-9A-Za-z+/=:,.() ]|-(?!-)|\\/|{_BREAK}", "{0,20000}")
    + "-----END (?:[A-Z0-9]{1,16} ){0,4}PRIVATE KEY(?: BLOCK)?-----"
    "|" + possessive(_LINE, "{0,500}") + ")"
)
#: RFC 3986, 3.2.1: user information with a password.
_URL: Final = re.compile(
    r"""(?<![0-9A-Za-z])[A-Za-z][0-9A-Za-z+.-]{1,20}:\\?/\\?/([^\s/?#:@"'<>\\]{0,128}:[^\s/?#@"'<>\\]{1,256}+)@(?=[0-9A-Za-z\[])"""
)
_NAMED: Final = re.compile(
    r"(?i:api[_-]?key|secret|token|passw(?:or)?d|passphrase|pwd|access[_-]?key|private[_-]?key|client[_-]?id|credential"
    r"|auth(?:orization)?)[0-9A-Za-z_-]{0,32}+"
    r"""\\{0,3}["'`]?\s{0,3}(?:=>|:=|=|:)\s{0,3}(?:(?i:bearer|basic)\s{1,3})?(\\{0,3}["'`])?"""
    r"""((?(1)[^\s"'`<>\\]|[0-9A-Za-z+/=_-]){8,256}+)(?![(.\[{$])"""
)
_PLACEHOLDER: Final = re.compile(r"your|placeholder|change.?me|xxxx|\*\*\*|\$\{|\{\{|\.\.\.|^https?:", re.IGNORECASE)
_QUOTED: Final = 10  # characters of a password that is quoted; without quotes more are needed
_BARE: Final = 16


def secrets(text: str, groups: Collection[str]) -> Iterator[Hit]:
    """All that opens something. Public examples in a vendor's manual have the form of a key, and go too.

    :param groups: which forms are looked for, by their names in the prefilter.
    """
    for name, pattern in (("issued", _ISSUED), ("pem", _PEM)):
        if name in groups:
            for match in pattern.finditer(text):
                yield _hit(match.start(), match.end(), match.group())
    if "prefixed" in groups:
        for match in _PREFIXED.finditer(text):
            if random_looking(match.group(1)):
                yield _hit(match.start(), match.end(), match.group())
    if "jwt" in groups:
        for match in _JWT.finditer(text):
            if _is_header(match.group(1)):
                yield _hit(match.start(), match.end(), match.group())
    if "url" in groups:
        for match in _URL.finditer(text):
            if not _PLACEHOLDER.search(match.group(1)):
                yield _hit(match.start(1), match.end(1), match.group(1))
    if "named" in groups:
        yield from _named(text)


def _named(text: str) -> Iterator[Hit]:
    for match in _NAMED.finditer(text):
        value = match.group(2)
        least = _QUOTED if match.group(1) else _BARE
        if len(value) >= least and random_looking(value) and not _PLACEHOLDER.search(value):
            yield _hit(match.start(2), match.end(2), value)


def _hit(start: int, end: int, value: str) -> Hit:
    return Hit(start, end, "secret", value)


def _is_header(part: str) -> bool:
    try:
        header = json.loads(base64.urlsafe_b64decode(part + "=" * (-len(part) % 4)))
    except (ValueError, binascii.Error, RecursionError):
        return False
    return isinstance(header, dict) and "alg" in header
