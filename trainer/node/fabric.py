"""What this machine shows of networks, libraries and room, from its files alone; no torch needed."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

EFA: Final = "efa"
_VENDORS: Final[Mapping[str, str]] = {"0x1d0f": EFA, "0x15b3": "infiniband"}  # Amazon, Mellanox
#: Where installers put libraries, and our image, which names its own to the loader in a file of /etc/ld.so.conf.d.
_FOLDERS: Final = (
    "opt/network/lib",
    "opt/amazon/efa/lib64",
    "opt/amazon/efa/lib",
    "opt/amazon/ofi-nccl/lib/x86_64-linux-gnu",
    "opt/amazon/ofi-nccl/lib/aarch64-linux-gnu",
    "opt/amazon/ofi-nccl/lib",
    "opt/amazon/ofi-nccl/lib64",
    "opt/aws-ofi-nccl/lib",
    "opt/aws-ofi-nccl/install/lib",
    "usr/local/lib",
    "usr/lib/x86_64-linux-gnu",
    "usr/lib/aarch64-linux-gnu",
    "usr/lib64",
)


@dataclass(frozen=True)
class Interface:
    """:param mbps: speed as the driver tells it; None where it does not."""

    name: str
    up: bool
    mbps: int | None


@dataclass(frozen=True)
class Device:
    """An RDMA device. :param fabric: `efa`, `infiniband`, or the maker's number. :param link: as `InfiniBand`."""

    name: str
    fabric: str
    active: bool
    link: str
    rate: str


@dataclass(frozen=True)
class Room:
    """Bytes of a file system, and those that are free."""

    path: str
    size: int
    free: int


def interfaces(root: Path) -> list[Interface]:
    """The network interfaces but `lo`."""
    found = []
    for folder in sorted((root / "sys/class/net").glob("*")):
        if folder.name == "lo" or not (folder / "operstate").exists():
            continue
        speed = _read(folder / "speed")  # cannot even be read of one that is down
        found.append(
            Interface(
                folder.name,
                _read(folder / "operstate") in ("up", "unknown"),
                int(speed) if speed.isdecimal() and int(speed) else None,
            )
        )
    return found


def devices(root: Path) -> list[Device]:
    """The RDMA devices that the kernel knows."""
    found = []
    for folder in sorted((root / "sys/class/infiniband").glob("*")):
        vendor = _read(folder / "device/vendor")
        ports = sorted((folder / "ports").glob("*"))
        states = [_read(port / "state") for port in ports]
        found.append(
            Device(
                folder.name,
                _VENDORS.get(vendor, vendor or "unknown"),
                any("ACTIVE" in state for state in states),
                next((text for port in ports if (text := _read(port / "link_layer"))), ""),
                next((text for port in ports if (text := _read(port / "rate"))), ""),
            )
        )
    return found


def verbs(root: Path) -> list[str]:
    """The devices' files, which a pod only has if it has asked for them."""
    return sorted(path.name for path in (root / "dev/infiniband").glob("uverbs*"))


def library(root: Path, pattern: str, env: Mapping[str, str]) -> str | None:
    """The path of a shared library, where the loader of this environment would look."""
    own = [folder.lstrip("/") for folder in env.get("LD_LIBRARY_PATH", "").split(":") if folder.startswith("/")]
    for folder in (*own, *_FOLDERS):
        with suppress(OSError):
            for path in sorted((root / folder).glob(pattern)):
                return str(path.resolve())
    return None


def version(path: str | None) -> str | None:
    """The version in a library's name, as `1.26.0` of `libfabric.so.1.26.0`; None if it has none."""
    found = re.search(r"\.so\.([\d.]+)$", path or "")
    return found[1] if found else None


def room(path: Path) -> Room | None:
    """None if there is no such place."""
    try:
        stat = os.statvfs(path)
    except OSError:
        return None
    return Room(str(path), stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize)


def transport(root: Path, fabrics: Iterable[str], plugin: str | None) -> str:
    """Which network NCCL would take here between nodes; the preflight looks which it did."""
    there = set(fabrics)
    if not verbs(root):
        return "tcp"
    if EFA in there:
        return EFA if plugin else "tcp"
    return "infiniband" if "infiniband" in there else "tcp"


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError):
        return ""
