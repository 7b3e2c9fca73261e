"""E-mail addresses and the addresses of public hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

from curation.pii.hits import Hit, behind_escape, possessive

# Letters of Latin, Greek and Cyrillic: addresses are written in them too (RFC 6531).
_LETTER: Final = "A-Za-z\u00c0-\u024f\u0370-\u052f"
_ATOM: Final = rf"[{_LETTER}0-9_%+~'-]"
_LABEL: Final = rf"[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,61}}+(?<!-))?"
# What stands before the first letter is quotes and dashes of the text. A hyphen may follow: `bob@example.com- thanks`.
_ADDRESS: Final = (
    rf"['%~-]*+[{_LETTER}0-9_+]{_ATOM}{{0,63}}+(?:\.{_ATOM}{{1,64}}+){{0,15}}"
    rf"@((?:{_LABEL}\.){{1,8}})([{_LETTER}]{{2,24}})(?![{_LETTER}0-9])"
)
# Begins only where no atom is behind it, and each part has a length: linear on any text.
_EMAIL: Final = re.compile(rf"(?<!{_ATOM}){_ADDRESS}")
_NEXT: Final = re.compile(_ADDRESS)
# Percent escapes (RFC 3986, 2.1) of what no atom holds, such as a space or a colon, also escaped again as `%2520`; then
# all that no address begins with. Escaped letters inside, as in `j%C3%BCrgen@...`, are its own.
_BEFORE: Final = re.compile(
    "(?:.*%(?:25)*(?i:[01][0-9a-f]|2[0289cf]|3[a-f]|5[b-d]|7[bd]))?"
    + possessive(rf"%[0-9A-Fa-f]{{2}}|[^{_LETTER}0-9_+]", "*")
)
#: What comes behind the dot in names of files and is no top-level domain (IANA, Root Zone Database).
_FILES: Final = frozenset([
    "png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "ts", "html", "htm", "json", "xml", "txt", "pdf",
    "gz", "mp3", "mp4",
])  # fmt: skip
_SCALE: Final = re.compile(r"[0-9.]+x\.")  # as in `icon@2x.zip`: the ending is also a top-level domain
_NOBODY: Final = frozenset({"git", "svn", "hg"})  # of `git@host.org:group/project`

_IPV4: Final = re.compile(
    r"(?:(?<![0-9A-Za-z_.-])|(?<=\\[nrtbf]))(?:[0-9]{1,3}\.){3}[0-9]{1,3}(?![0-9A-Za-z_-]|\.[0-9])"
)
_IPV6: Final = re.compile(
    r"(?:(?<![0-9A-Za-z_:.])|(?<=\\[nrtbf]))[23][0-9A-Fa-f]{3}(?::[0-9A-Fa-f]{0,4}){2,7}(?![0-9A-Za-z_:])"
)
_VERSION: Final = re.compile(
    r"(?:\bv|ver\.?|version|release|build|firmware|driver|section|chapter|clause|article|§|[a-z]/)[\s:=#(]{0,3}$",
    re.IGNORECASE,
)
_HOST: Final = re.compile(r"(?:\bip|ipv4|address|host|server|from|client|peer|://|@)[\s:=(\[]{0,3}$", re.IGNORECASE)


def _networks(*written: str) -> tuple[tuple[int, int], ...]:
    found = [ipaddress.ip_network(name) for name in written]
    return tuple((int(net.network_address), int(net.broadcast_address)) for net in found)


# Not `is_global`: its table changes with Python's releases, and what is masked is part of the digest.
# IANA IPv4 and IPv6 Special-Purpose Address Registries, RFC 6890; multicast and class E.
_NOT_PUBLIC_4: Final = _networks(
    "0.0.0.0/8", "10.0.0.0/8", "100.64.0.0/10", "127.0.0.0/8", "169.254.0.0/16", "172.16.0.0/12", "192.0.0.0/24",
    "192.0.2.0/24", "192.88.99.0/24", "192.168.0.0/16", "198.18.0.0/15", "198.51.100.0/24", "203.0.113.0/24",
    "224.0.0.0/3",
)  # fmt: skip
_NOT_PUBLIC_6: Final = _networks("2001::/23", "2001:db8::/32", "2002::/16", "3fff::/20")


def emails(text: str) -> Iterator[Hit]:
    """Addresses as people write them: RFC 5322's dot-atoms at a name with dots (RFC 5321, 4.1.2), without quotes."""
    match = _EMAIL.search(text)
    while match is not None:
        host, ending = match.groups()
        start, at = behind_escape(text, match.start()), match.start(1) - 1
        before = _BEFORE.match(text, start, at)
        start = before.end() if before else start
        value = text[start : match.end()].lower()
        file = ending.lower() in _FILES or _SCALE.fullmatch(host)
        if start < at and not file and text[start:at].lower() not in _NOBODY:
            yield Hit(start, match.end(), "email", value)
        # Another may follow at once: `bob@example.com-anna@example.com`.
        match = _NEXT.match(text, match.end()) or _EMAIL.search(text, match.end())


def hosts(text: str) -> Iterator[Hit]:
    """Public IPv4 and IPv6 addresses (RFC 791, RFC 4291).

    Private, documentation and reserved ones are none. Four small numbers are more often a version: with a word for that
    before them they are none, and if all have one digit they need a word for a host.
    """
    for match in _IPV4.finditer(text):
        parts = match.group().split(".")
        if any((len(part) > 1 and part[0] == "0") or int(part) > 255 for part in parts):
            continue
        before = text[max(0, match.start() - 16) : match.start()]
        small = all(len(part) == 1 for part in parts)
        number = int.from_bytes(bytes(map(int, parts)), "big")
        if _VERSION.search(before) or (small and not _HOST.search(before)) or not _public(number, _NOT_PUBLIC_4):
            continue
        yield Hit(match.start(), match.end(), "ip", match.group())
    for match in _IPV6.finditer(text):
        try:
            address = ipaddress.IPv6Address(match.group())
        except ValueError:
            continue
        if _public(int(address), _NOT_PUBLIC_6):
            yield Hit(match.start(), match.end(), "ip", address.compressed)


def _public(number: int, excluded: tuple[tuple[int, int], ...]) -> bool:
    return not any(first <= number <= last for first, last in excluded)
