"""`python -m trainer doctor`: what this machine or image has for a training, and what is wrong with it."""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError
from importlib.metadata import version as installed
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.shared_memory import RANK
from dropforge.text import as_line, counted, escape
from trainer.commands.arguments import subparser
from trainer.commands.terminal import Paint, table
from trainer.compat import check_versions
from trainer.node.fabric import (
    EFA,
    Device,
    Interface,
    Room,
    devices,
    interfaces,
    library,
    room,
    transport,
    verbs,
    version,
)
from trainer.node.nvml import Health, Nvml
from trainer.node.system import find_gpus
from trainer.preflight.node import faults

_EPILOG = """\
Exit code 1 if something is wrong; each line that reports it has its fix.

examples:
  python -m trainer doctor
  python -m trainer doctor --gpus 8
  kubectl exec POD -- python -m trainer doctor --json
"""
_NEEDED: Final = ("numpy", "pyarrow", "safetensors", "tokenizers")
_DISK: Final = 1 << 30
_LOCKED: Final = (
    1 << 30
)  # bytes of buffers that NCCL and libfabric register; the usual limit of 64 KiB or 8 MiB is none
_SHM: Final = "/dev/shm"  # noqa: S108 - the mount, not a temporary file


@dataclass(frozen=True)
class Libraries:
    """Versions; None for what is not there. :param driver_cuda: the newest CUDA that the driver runs, as 12040."""

    python: str = platform.python_version()
    torch: str | None = None
    cuda: str | None = None
    nccl: str | None = None
    driver: str | None = None
    driver_cuda: int | None = None
    libfabric: str | None = None
    ofi_nccl: str | None = None
    transformers: str | None = None
    peft: str | None = None


@dataclass(frozen=True)
class Findings:
    """What there is.

    :param locked: bytes that a process may lock in memory; None for no limit.
    :param lacking: which package is missing or of a release that was never tried. :param bucket: why it cannot be read.
    :param broken: why torch cannot be imported, or cannot use a GPU that the driver shows.
    """

    libraries: Libraries
    gpus: list[Health] = field(default_factory=list)
    interfaces: list[Interface] = field(default_factory=list)
    devices: list[Device] = field(default_factory=list)
    verbs: list[str] = field(default_factory=list)
    transport: str = "gloo"
    shm: Room | None = None
    temp: Room | None = None
    locked: int | None = None
    broken: str = ""
    lacking: str = ""
    bucket: str = ""


@dataclass(frozen=True)
class Problem:
    thing: str
    cause: str
    mend: str


def problems(found: Findings, wanted: int = 0) -> list[Problem]:
    """What is wrong, each with its mend; a pure function. :param wanted: how many GPUs there should be at least."""
    told = []
    versions, gpus = found.libraries, len(found.gpus)
    if gpus < wanted:
        cause = f"{gpus or 'none'} of {wanted} {'are' if gpus > 1 else 'is'} there"
        cause += "" if versions.driver else ", and no driver answers"
        mend = "Have the pod ask for them (nvidia.com/gpu), on a node with the driver and NVIDIA's container toolkit"
        told.append(Problem("GPUs", cause, mend))
    if versions.torch is None:
        told.append(Problem("torch", found.broken or "it is not installed", "Install requirements/trainer.txt"))
    elif gpus and versions.cuda is None:
        told.append(Problem("torch", f"it has no CUDA, and there are {gpus} GPUs", "Take the image with CUDA"))
    elif gpus and versions.nccl is None:
        told.append(Problem("NCCL", "torch has none, by which the GPUs exchange data", "Take the image with CUDA"))
    if found.lacking and versions.torch is not None:
        mend = "Install requirements/trainer.txt" if found.lacking.startswith("package") else "Unset it"
        told.append(Problem("packages", found.lacking, mend))
    if found.bucket:
        mend = "Look at the secret dropforge-trainer (AWS_*), the pods' role, network policies and the bucket's name"
        told.append(Problem("S3", found.bucket, mend))
    needs = _number(versions.cuda)
    if needs and versions.driver_cuda and versions.driver_cuda // 1000 < needs // 1000:
        runs = f"{versions.driver_cuda // 1000}.{versions.driver_cuda % 1000 // 10}"
        told.append(
            Problem(
                "driver",
                f"{versions.driver} runs CUDA up to {runs}, and torch is built for {versions.cuda}",
                "Upgrade the node's driver, or take an image for an older CUDA",
            )
        )
    elif versions.torch is not None and found.broken:
        told.append(Problem("CUDA", found.broken, "See that the pod asks for GPUs, and that nvidia-smi runs in it"))
    told += [Problem("GPUs", text, "Look at the node, or reset its GPUs") for text in faults(found.gpus, gpus)]
    least = max(1, gpus) * RANK
    if found.shm is None or found.shm.size < least:
        size = "is missing" if found.shm is None else f"has {_size(found.shm.size)}"
        mend = "Mount a memory-backed emptyDir there, or start docker with --shm-size"
        told.append(Problem(_SHM, f"it {size}, and {counted(max(1, gpus), 'rank')} may take {_size(least)}", mend))
    if found.temp is None or found.temp.free < _DISK:
        left = "is missing" if found.temp is None else f"has {_size(found.temp.free)} left"
        told.append(Problem("temporary disk", f"it {left}", "Make room, or set TMPDIR to a larger disk"))
    told += _of_network(found)
    return told


def _of_network(found: Findings) -> list[Problem]:
    told = []
    if not any(one.up for one in found.interfaces):
        told.append(Problem("network", "no interface is up", "Look at the pod's network"))
    idle = [device.name for device in found.devices if not device.active]
    if found.verbs and idle:
        cause = f"{', '.join(idle)} of {len(found.devices)} have no active port"
        told.append(Problem("RDMA devices", cause, "Look at the node's cables and driver"))
    fabrics = {device.fabric for device in found.devices}
    if found.gpus and fabrics & {EFA, "infiniband"} and not found.verbs:
        mend = "Have the pod ask for them (vpc.amazonaws.com/efa, or the plugin's name of the cluster)"
        told.append(Problem("RDMA devices", "the node has them, and the pod has no /dev/infiniband", mend))
    if found.gpus and found.verbs and found.locked is not None and found.locked < _LOCKED:
        cause = f"a process may lock {_size(found.locked)}, and RDMA devices work on locked buffers"
        mend = "Have the node's container runtime start with LimitMEMLOCK=infinity; no right of a pod changes it"
        told.append(Problem("locked memory", cause, mend))
    if found.gpus and found.verbs and EFA in fabrics:
        for name, there in (("libfabric", found.libraries.libfabric), ("aws-ofi-nccl", found.libraries.ofi_nccl)):
            if there is None:
                mend = "Take an image that has it, or set LD_LIBRARY_PATH to its folder"
                told.append(Problem(name, "there are EFA devices, and NCCL would go over TCP without it", mend))
    return told


def look(root: Path, env: Mapping[str, str], bucket: str = "") -> Findings:
    """All of it. :param root: where `dev`, `proc`, `sys` and libraries are. :param bucket: to be read, if any."""
    gpus = find_gpus()
    libraries, broken = _libraries(root, env, gpus)
    there = devices(root)
    health = gpus.health() if isinstance(gpus, Nvml) else []
    return Findings(
        libraries=libraries,
        gpus=health,
        interfaces=interfaces(root),
        devices=there,
        verbs=verbs(root),
        transport=transport(root, (one.fabric for one in there), libraries.ofi_nccl) if health else "gloo over tcp",
        shm=room(root / _SHM[1:]),
        temp=room(Path(tempfile.gettempdir())),
        locked=_locked(),
        broken=broken,
        lacking=_lacking(),
        bucket=_unreached(bucket) if bucket else "",
    )


def _lacking() -> str:
    """The first package that a training needs and that is not here, or is of another release; empty for none."""
    try:
        check_versions()
        for name in _NEEDED:
            installed(name)
    except DropforgeError as error:
        return f"{error.thing}: {error.cause}"
    except PackageNotFoundError as error:
        return f"package {error.name}: it is not installed"
    return ""


def _unreached(bucket: str) -> str:
    """Why the bucket cannot be read from here; empty if it can."""
    from dropforge.store import open_store

    try:
        next(iter(open_store(f"s3://{bucket}", hurried=True).list("runs/")), None)  # a HEAD finds no missing bucket
    except Exception as error:  # of many kinds: no key, no network, no such bucket
        return as_line(error, 300)
    return ""


def _locked() -> int | None:
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def _libraries(root: Path, env: Mapping[str, str], gpus: Any) -> tuple[Libraries, str]:
    found: dict[str, Any] = {}
    for name in ("transformers", "peft"):
        with suppress(PackageNotFoundError):
            found[name] = installed(name)
    if isinstance(gpus, Nvml):
        found["driver"], found["driver_cuda"] = gpus.driver()
    fabric = library(root, "libfabric.so.1*", env)
    plugin = library(root, "libnccl-net*.so*", env) or library(root, "libnccl-ofi*.so*", env)
    found["libfabric"] = None if fabric is None else version(fabric) or fabric
    found["ofi_nccl"] = None if plugin is None else version(plugin) or plugin
    broken = ""
    try:
        import torch

        found["torch"], found["cuda"] = str(torch.__version__), torch.version.cuda
        if torch.version.cuda:
            with suppress(Exception):
                found["nccl"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
        if torch.version.cuda and isinstance(gpus, Nvml):
            torch.cuda.init()  # type: ignore[no-untyped-call]
    except Exception as error:  # of many kinds: a library that does not load, a driver that is too old
        broken = " ".join(str(error).split())[:300]
    return Libraries(**found), broken


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands,
        "doctor",
        "look at this machine or image",
        "Versions, GPUs, networks and room of this machine.",
        _EPILOG,
    )
    parser.add_argument("--json", action="store_true", help="print JSON")
    parser.add_argument("--gpus", type=int, default=0, metavar="N", help="there have to be so many GPUs at least")
    parser.add_argument("--bucket", default="", help="try to read this S3 bucket, too")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace, root: Path = Path("/")) -> int:
    """Look and tell; 1 if something is wrong."""
    found = look(root, os.environ, arguments.bucket)
    wrong = problems(found, arguments.gpus)
    if arguments.json:
        print(json.dumps({**asdict(found), "problems": [asdict(one) for one in wrong]}, indent=1))
        return 1 if wrong else 0
    paint = Paint.of(sys.stdout)
    print(escape(table(rows(found))))
    for one in wrong:
        print(f"{paint('wrong:', 'red')} {escape(one.thing)}: {escape(one.cause)}. {escape(one.mend)}.")
    if not wrong:
        print(paint("nothing is wrong", "green"))
    return 1 if wrong else 0


def rows(found: Findings) -> list[tuple[str, str]]:
    """The table for people."""
    told = [(name, str(value)) for name, value in asdict(found.libraries).items() if value is not None]
    absent = [name for name, value in asdict(found.libraries).items() if value is None]
    told.append(("not there", ", ".join(absent) or "nothing"))
    gpus = [
        f"{index}: {gpu.name}, {_size(gpu.memory) if gpu.memory else '?'}, "
        f"{'no ECC' if gpu.ecc is None else f'{gpu.ecc} ECC errors'}, {gpu.nvlinks} NVLinks, direct to {_peers(gpu)}"
        for index, gpu in enumerate(found.gpus)
    ]
    told.append(("GPUs", "\n".join(gpus) or "none, or no driver"))
    nets = [
        f"{one.name}: {'up' if one.up else 'down'}, {f'{one.mbps / 1000:g} Gbit/s' if one.mbps else 'speed unknown'}"
        for one in found.interfaces
    ]
    told.append(("interfaces", "\n".join(nets) or "none"))
    rdma = [
        f"{one.name}: {one.fabric}, {'active' if one.active else 'not active'} {one.link} {one.rate}".rstrip()
        for one in found.devices
    ]
    told.append(("RDMA devices", "\n".join(rdma) or "none"))
    told.append(("in /dev/infiniband", ", ".join(found.verbs) or "none"))
    told.append(("ranks would use", found.transport))
    told.append(("may be locked", "all memory" if found.locked is None else _size(found.locked)))
    for name, place in ((_SHM, found.shm), ("temporary disk", found.temp)):
        told.append((name, "none" if place is None else f"{_size(place.size)}, {_size(place.free)} free"))
    return told


def _peers(gpu: Health) -> str:
    reached = [str(index) for index, peer in enumerate(gpu.peers) if peer]
    return ", ".join(reached) or "none"


def _size(count: int) -> str:
    return f"{count / 2**30:.1f} GiB" if count >= 2**30 else f"{count / 2**20:.0f} MiB"


def _number(text: str | None) -> int | None:
    """A CUDA version as the driver counts: 12040 for `12.4`."""
    try:
        major, minor = (int(part) for part in (text or "").split(".")[:2])
    except ValueError:
        return None
    return major * 1000 + minor * 10
