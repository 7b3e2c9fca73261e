"""E-mail addresses and the addresses of public hosts."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterator
from typing import Final

from curation.pii.hits import Hit

# Letters of Latin, Greek and Cyrillic: addresses are written in them too (RFC 6531).
_LETTER: Final = "A-Za-z\u00c0-\u024f\u0370-\u052f"
_ATOM: Final = rf"[{_LETTER}0-9_%+~'-]"
_LABEL: Final = rf"[{_LETTER}0-9](?:[{_LETTER}0-9-]{{0,61}}+(?<!-))?"
# Begins only where no atom is behind it, and each part has a length: linear on any text.
_EMAIL: Final = re.compile(
    rf"(?<!{_ATOM}){_ATOM}{{1,64}}+(?:\.{_ATOM}{{1,64}}+){{0,15}}+@(?:{_LABEL}\.){{1,8}}([{_LETTER}]{{2,24}})(?![{_LETTER}0-9-])"
)
#: What comes behind the dot in names of files, as in `icon@2x.png`.
_FILES: Final = frozenset([
    "png", "jpg", "jpeg", "gif", "svg", "webp", "ico", "css", "js", "ts", "py", "html", "htm", "json", "xml", "md",
    "txt", "pdf", "zip", "gz", "mp3", "mp4",
])  # fmt: skip
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
    for match in _EMAIL.finditer(text):
        value = match.group().lower()
        if match.group(1).lower() not in _FILES and value.partition("@")[0] not in _NOBODY:
            yield Hit(match.start(), match.end(), "email", value)


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
