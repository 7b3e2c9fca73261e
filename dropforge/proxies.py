"""A shell's proxies are not for this machine: requests to it are not to be seen elsewhere, nor to fail there."""

from __future__ import annotations

from collections.abc import Mapping, MutableMapping
from typing import Final

_LOOPBACK: Final = "127.0.0.1,localhost"
_PROXIES: Final = ("http_proxy", "https_proxy", "all_proxy")
_SPARED: Final = ("NO_PROXY", "no_proxy")


def proxies(env: Mapping[str, str]) -> list[str]:
    """Names of the variables that name a proxy."""
    return [name for name in (*_PROXIES, *map(str.upper, _PROXIES)) if env.get(name)]


def spared(env: Mapping[str, str]) -> dict[str, str]:
    """Variables with which no proxy is asked for this machine, nor for what the environment leaves out already.

    Both spellings are read by one program or another, which takes the first that it knows.
    """
    known = [env[name] for name in _SPARED if env.get(name)]
    hosts = dict.fromkeys(host.strip() for text in (_LOOPBACK, *known) for host in text.split(",") if host.strip())
    return dict.fromkeys(_SPARED, ",".join(hosts))


def spare_this_machine(env: MutableMapping[str, str]) -> None:
    """Have this process and those that it starts ask no proxy for this machine."""
    if proxies(env):
        env.update(spared(env))
