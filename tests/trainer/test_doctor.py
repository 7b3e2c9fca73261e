"""The doctor: on this machine for real, and on trees of files like those of machines that are not to be had here."""

from __future__ import annotations

import json
import re
import resource
import shutil
import subprocess
from dataclasses import replace
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

from trainer.__main__ import main
from trainer.commands import doctor
from trainer.commands.doctor import Findings, Libraries, problems, rows
from trainer.node.fabric import Device, Interface, Room, devices, interfaces, library, transport, verbs, version
from trainer.node.nvml import LIBRARY, Health, Nvml

GPU = Health("NVIDIA A100", 80 << 30, 0, False, False, 12, (None, True))
EFA = Device("rdmap0s6", "efa", True, "Unspecified", "100 Gb/sec (4X EDR)")
SOUND = Findings(
    Libraries(
        torch="2.11.0",
        cuda="12.8",
        nccl="2.27.5",
        driver="570.1",
        driver_cuda=12080,
        libfabric="1.26.0",
        ofi_nccl="libnccl-net.so",
    ),
    [GPU, replace(GPU, peers=(True, None))],
    [Interface("eth0", True, 100_000)],
    [EFA],
    ["uverbs0"],
    "efa",
    Room("/dev/shm", 8 << 30, 8 << 30),
    Room("/tmp", 100 << 30, 50 << 30),
)
NVML = """
typedef struct { unsigned long long total, free, used; } memory_t;
#include <string.h>
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetName(void *device, char *name, unsigned int length) { strncpy(name, "A100", length); return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *m) { m->total = 8e10; return 0; }
int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors) {
  *errors = *(int *)device ? 5 : 0; return kind == 1 && counter == 0 ? 0 : 2; }
int nvmlDeviceGetRemappedRows(void *device, unsigned *fixed, unsigned *not, unsigned *pending, unsigned *failed) {
  *fixed = 7; *not = 7; *pending = 1; *failed = 0; return *(int *)device ? 3 : 0; }
int nvmlDeviceGetNvLinkState(void *device, unsigned link, int *active) { *active = link != 1; return link < 4 ? 0 : 2; }
int nvmlDeviceGetP2PStatus(void *one, void *other, int index, int *status) { *status = one > other; return 0; }
int nvmlSystemGetDriverVersion(char *text, unsigned int length) { strncpy(text, "570.86.15", length); return 0; }
int nvmlSystemGetCudaDriverVersion_v2(int *version) { *version = 12080; return 0; }
"""


def test_this_machine_is_told_for_people_and_for_programs(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    code = main(["doctor", "--json"])
    told = json.loads(capsys.readouterr().out)
    assert code == bool(told["problems"])
    assert told["libraries"]["torch"] == torch.__version__
    assert told["locked"] == (None if (most := resource.getrlimit(resource.RLIMIT_MEMLOCK)[0]) < 0 else most)
    assert told["shm"]["size"] == shutil.disk_usage("/dev/shm").total
    assert {one["name"] for one in told["interfaces"]} <= {path.name for path in Path("/sys/class/net").iterdir()}
    if not told["gpus"]:
        assert told["transport"] == "gloo over tcp"
    assert main(["doctor"]) == code
    text = capsys.readouterr().out
    assert ["torch", torch.__version__] in [line.split() for line in text.splitlines()]
    assert ("nothing is wrong" in text) == (code == 0)


@pytest.mark.parametrize(
    ("found", "words"),
    [
        (SOUND, None),
        (replace(SOUND, gpus=[], verbs=[], libraries=Libraries(torch="2.11.0")), None),  # a CPU pod on such a node
        (replace(SOUND, shm=Room("/dev/shm", 64 << 20, 0)), "/dev/shm: it has 64 MiB, and 2 ranks may take 128 MiB"),
        (replace(SOUND, shm=None), "/dev/shm: it is missing"),
        (replace(SOUND, temp=Room("/tmp", 9 << 30, 1 << 20)), "temporary disk: it has 1 MiB left"),
        (
            replace(SOUND, libraries=replace(SOUND.libraries, cuda="13.0"), broken="driver too old"),
            "driver: 570.1 runs CUDA up to 12.8, and torch is built for 13.0",
        ),
        (replace(SOUND, libraries=replace(SOUND.libraries, cuda=None)), "torch: it has no CUDA, and there are 2 GPUs"),
        (
            replace(SOUND, libraries=Libraries(driver_cuda=12080, libfabric="1", ofi_nccl="1")),
            "torch: it is not installed",
        ),
        (replace(SOUND, broken="no device"), "CUDA: no device"),
        (replace(SOUND, libraries=replace(SOUND.libraries, nccl=None)), "NCCL: torch has none"),
        (replace(SOUND, lacking="package peft: it is not installed"), "packages: package peft: it is not installed"),
        (replace(SOUND, bucket="AccessDenied"), "S3: AccessDenied"),
        (replace(SOUND, libraries=replace(SOUND.libraries, ofi_nccl=None)), "aws-ofi-nccl: there are EFA devices"),
        (replace(SOUND, verbs=[]), "RDMA devices: the node has them, and the pod has no /dev/infiniband"),
        (replace(SOUND, devices=[replace(EFA, active=False)]), "RDMA devices: rdmap0s6 of 1 have no active port"),
        (replace(SOUND, locked=8 << 20), "locked memory: a process may lock 8 MiB"),
        (replace(SOUND, interfaces=[]), "network: no interface is up"),
        (replace(SOUND, gpus=[replace(GPU, ecc=2)]), "GPUs: GPU 0 (NVIDIA A100) has had 2 uncorrectable"),
    ],
)
def test_what_is_wrong_has_a_mend(found: Findings, words: str | None) -> None:
    told = problems(found)
    assert [f"{one.thing}: {one.cause}".startswith(words or "") for one in told] == [True] * (words is not None)
    assert all(one.mend for one in told)
    assert dict(rows(found))["ranks would use"] == found.transport


@pytest.mark.parametrize(("there", "cause"), [(2, None), (1, "1 of 3 is there"), (0, "none of 3 is there, and no dr")])
def test_gpus_that_were_asked_for_have_to_be_there(there: int, cause: str | None) -> None:
    found = replace(SOUND, gpus=[GPU] * there)
    if not there:
        found = replace(found, libraries=replace(SOUND.libraries, driver=None, driver_cuda=None), verbs=[])
    told = problems(found, 3 if cause else there)
    assert [f"{one.thing}: {one.cause}".startswith(f"GPUs: {cause}") for one in told] == [True] * bool(cause)


def test_a_machine_without_the_gpus_that_are_asked_for_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--gpus", "1000"]) == 1
    assert "of 1000" in capsys.readouterr().out


@pytest.fixture
def node(tmp_path: Path) -> Path:
    """A node with an EFA and a Mellanox device, whose plugin lies where AWS' installer puts it."""
    for name, vendor, state in (("rdmap0s6", "0x1d0f", "4: ACTIVE"), ("mlx5_0", "0x15b3", "1: DOWN")):
        folder = tmp_path / "sys/class/infiniband" / name
        (folder / "device").mkdir(parents=True)
        (folder / "ports/1").mkdir(parents=True)
        (folder / "device/vendor").write_text(f"{vendor}\n")
        (folder / "ports/1/state").write_text(f"{state}\n")
        (folder / "ports/1/rate").write_text("100 Gb/sec (4X EDR)\n")
    for name, state, speed in (("eth0", "up", "100000"), ("eth1", "down", "-1"), ("lo", "unknown", "")):
        folder = tmp_path / "sys/class/net" / name
        folder.mkdir(parents=True)
        (folder / "operstate").write_text(f"{state}\n")
        (folder / "speed").write_text(f"{speed}\n")
    (tmp_path / "sys/class/net/bonding_masters").write_text("")
    return tmp_path


def test_networks_are_read_from_the_kernels_files(node: Path) -> None:
    assert interfaces(node) == [Interface("eth0", True, 100_000), Interface("eth1", False, None)]
    assert devices(node) == [
        Device("mlx5_0", "infiniband", False, "", "100 Gb/sec (4X EDR)"),
        Device("rdmap0s6", "efa", True, "", "100 Gb/sec (4X EDR)"),
    ]
    assert transport(node, ["efa", "infiniband"], "libnccl-net.so") == "tcp"  # the pod has not asked for devices
    (node / "dev/infiniband").mkdir(parents=True)
    (node / "dev/infiniband/uverbs0").touch()
    assert verbs(node) == ["uverbs0"]
    assert transport(node, ["efa"], "libnccl-net.so") == "efa"
    assert transport(node, ["efa"], None) == "tcp"
    assert transport(node, ["infiniband"], None) == "infiniband"
    assert not [*interfaces(node / "none"), *devices(node / "none"), *verbs(node / "none")]


def test_libraries_are_found_where_the_loader_looks(node: Path) -> None:
    assert library(node, "libfabric.so.1*", {}) is None
    folder = node / "opt/amazon/efa/lib"
    folder.mkdir(parents=True)
    (folder / "libfabric.so.1.26.0").touch()
    (folder / "libfabric.so.1").symlink_to("libfabric.so.1.26.0")
    assert version(library(node, "libfabric.so.1*", {})) == "1.26.0"
    own = node / "mine"
    own.mkdir()
    (own / "libnccl-net.so").touch()
    found = library(node, "libnccl-net*.so*", {"LD_LIBRARY_PATH": "relative:/mine"})
    assert found == str(own / "libnccl-net.so")
    assert version(found) is None


def test_what_our_image_brings_is_found_without_a_variable(tmp_path: Path) -> None:
    dockerfile = (Path(__file__).parents[2] / "images/trainer/Dockerfile").read_text()
    said = re.search(r"(/\S+(?: /\S+)*) >/etc/ld\.so\.conf\.d/", dockerfile)
    assert said is not None
    folders = said[1].split()
    assert "/opt/network/lib" in folders
    for number, folder in enumerate(folders):
        (there := tmp_path / folder.lstrip("/")).mkdir(parents=True)
        (there / f"lib{number}.so").touch()
        assert library(tmp_path, f"lib{number}.so*", {}) == str(there / f"lib{number}.so")


def driver(folder: Path) -> Path:
    """A library that answers like the driver's, of two GPUs that are not whole."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "nvml.c").write_text(NVML)
    target = folder / LIBRARY
    subprocess.run([compiler, "-shared", "-fPIC", "-o", target, folder / "nvml.c"], check=True)
    return target


def test_the_drivers_library_tells_errors_links_and_peers(tmp_path: Path) -> None:
    gpus = Nvml(str(driver(tmp_path)))
    assert gpus.driver() == ("570.86.15", 12080)
    assert gpus.health() == [
        Health("A100", 80_000_000_000, 0, True, False, 3, (None, True)),
        Health("A100", 80_000_000_000, 5, None, None, 3, (False, None)),
    ]


def test_an_image_without_a_package_cannot_train(monkeypatch: pytest.MonkeyPatch) -> None:
    known = doctor.installed

    def without(name: str) -> str:
        if name == "pyarrow":
            raise PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(doctor, "installed", without)
    assert doctor._lacking() == "package pyarrow: it is not installed"
    monkeypatch.undo()
    assert doctor._lacking() == ""


def test_a_bucket_that_is_not_there_is_told(aws: str) -> None:
    assert "NoSuchBucket" in doctor._unreached("no-such-bucket")
