"""The preflight: real ranks over gloo, of which one does not come, one is too slow, one dies; and what figures mean."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from torch.distributed import TCPStore  # type: ignore[attr-defined]

from dropforge.network_bench import culprit
from dropforge.placement.fabrics import PREFLIGHT, Preflight
from dropforge.run import ExitCode
from tests.trainer.test_doctor import driver
from tests.trainer.test_launch import finish, read, termination
from trainer.node.nvml import Health
from trainer.preflight.node import check_node, chosen, faults
from trainer.preflight.transport import network, wrong
from trainer.preflight.verdict import too_slow

from .toy import Toy

ONE = {"OMP_NUM_THREADS": "1"}
HELD = Preflight("gloo", 0, 0, 60)
EFA = """
node-0:172:172 [0] NCCL INFO NET/Plugin: Loaded net plugin Libfabric (v11)
node-0:172:172 [0] NCCL INFO Using network Libfabric
node-0:172:172 [0] NCCL INFO NET/OFI Selected provider is efa, fabric is efa (found 3 nics)
"""
OLD_EFA = """
worker-1:21:21 [0] NCCL INFO NET/OFI Selected Provider is efa (found 1 nics)
worker-1:21:21 [0] NCCL INFO Using network AWS Libfabric
"""
SOCKETS = """
w:1:1 [0] NCCL INFO NET/Plugin: Could not find: libnccl-net.so
w:1:1 [0] NCCL INFO NET/IB : No device found.
w:1:1 [0] NCCL INFO Using network Socket
"""
OFI_SOCKETS = "w:1:1 [0] NCCL INFO NET/OFI No eligible providers were found\nw:1:1 [0] NCCL INFO Using network Socket\n"
INFINIBAND = "w:1:1 [0] NCCL INFO NET/IB : Using [0]mlx5_0:1/IB\nw:1:1 [0] NCCL INFO Using network IB\n"


@pytest.mark.parametrize(
    ("fabric", "log", "devices", "kind", "words"),
    [
        ("efa", EFA, True, None, ""),
        ("efa", OLD_EFA, True, None, ""),
        ("efa", OLD_EFA.replace("is efa", "is tcp;ofi_rxm"), True, "node", "took AWS Libfabric (tcp;ofi_rxm)"),
        ("efa", SOCKETS, False, "recipe", "vpc.amazonaws.com/efa"),
        ("efa", SOCKETS, True, "recipe", "no aws-ofi-nccl"),
        ("efa", OFI_SOCKETS, True, "node", "though the pod has its devices"),
        ("efa", "", True, "node", "does not say"),
        ("infiniband", INFINIBAND, True, None, ""),
        ("infiniband", SOCKETS, False, "recipe", "Give pods the devices"),
        ("tcp", SOCKETS, False, None, ""),
        ("tcp", INFINIBAND, True, "recipe", "took IB"),
        ("unknown", SOCKETS, False, None, ""),
        ("nvlink", "", False, None, ""),
    ],
)
def test_another_network_than_the_recipes_is_found_in_nccls_lines(
    fabric: str, log: str, devices: bool, kind: str | None, words: str
) -> None:
    found = wrong(fabric, log, devices)
    assert (found and found[0]) == kind
    assert words in (found[1] if found else "")
    assert network(EFA) == "Libfabric (efa)"


def test_a_node_is_to_blame_if_all_its_links_are_slow_and_no_others() -> None:
    sound = {(0, 1): 10.0, (1, 2): 11.0, (2, 3): 9.0, (3, 0): 10.0}
    assert culprit(sound) is None
    assert culprit(sound | {(0, 1): 1.0, (1, 2): 1.2}) == 1
    assert culprit(sound | {(0, 1): 1.0}) is None  # either of two
    assert culprit({(0, 1): 1.0}) is None
    assert culprit({(0, 1): 10.0, (1, 2): 1.0, (2, 0): 1.0}) == 2
    assert culprit(dict.fromkeys(sound, 0.01)) is None


def test_no_floor_takes_any_figure() -> None:
    assert too_slow(HELD, 1e-9, 1e9) is None
    held = replace(HELD, gb_per_second=1, milliseconds=5)
    assert too_slow(held, 1, 5) is None
    assert "0.9 GB/s, and 1 is the floor" in str(too_slow(held, 0.9, 1))
    assert "6 ms, and 5 is the most" in str(too_slow(held, 2, 6))


GPU = Health("NVIDIA A100", 8 * 10**10, 0, False, False, 12, (None, True))


@pytest.mark.parametrize(
    ("gpus", "words"),
    [
        ([GPU, GPU], []),
        ([replace(GPU, ecc=None, pending=None, failed=None, nvlinks=0)] * 2, []),
        ([GPU], ["2 GPUs are asked for, and the driver finds 1"]),
        ([GPU, replace(GPU, ecc=3)], ["GPU 1 (NVIDIA A100) has had 3 uncorrectable memory errors"]),
        ([GPU, replace(GPU, pending=True)], ["GPU 1 (NVIDIA A100) waits for a reset"]),
        ([replace(GPU, failed=True, pending=True), GPU], ["GPU 0 (NVIDIA A100) could not replace"]),
        ([replace(GPU, nvlinks=10), GPU], ["GPU 0 (NVIDIA A100) has 10 NVLinks up, and others have 12"]),
    ],
)
def test_gpus_that_are_missing_or_broken_are_named(gpus: list[Health], words: list[str]) -> None:
    found = faults(gpus, 2)
    assert len(found) == len(words)
    assert all(word in line for word, line in zip(words, found, strict=True))


def test_only_the_gpus_of_the_pod_count() -> None:
    gpus = [replace(GPU, name=str(number)) for number in range(4)]
    assert [gpu.name for gpu in chosen(gpus, "1, 3")] == ["1", "3"]
    assert len(chosen(gpus, None)) == len(chosen(gpus, "GPU-5ad3")) == 4
    assert "no GPUs are asked for" in check_node(0, None)
    assert "driver does not answer" in check_node(8, None)


class Ranks:
    """Processes that hold a preflight together, as ranks do, with a store as the launcher has it."""

    def __init__(self, folder: Path, world: int, held: Preflight) -> None:
        self.store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        self.folder, self.world, self.held = folder, world, held
        self.processes: dict[int, subprocess.Popen[str]] = {}

    def start(self, rank: int, port: int | None = None) -> None:
        code = (
            "import json, os, pathlib, sys\n"
            "from dropforge.placement.fabrics import Preflight\n"
            "from trainer.preflight.ranks import hold\n"
            "from trainer.preflight.verdict import PreflightError\n"
            "try:\n"
            "    held, folder = Preflight.from_json(sys.argv[1]), pathlib.Path(sys.argv[2])\n"
            "    shown = hold(held, 0, folder, os.environ, lambda: None)\n"
            "    print(json.dumps(vars(shown)))\n"
            "except PreflightError as error:\n"
            "    print(error); sys.exit(int(error.code))\n"
        )
        env = {
            **os.environ, **ONE, "RANK": str(rank), "WORLD_SIZE": str(self.world), "LOCAL_RANK": "0",
            "LOCAL_WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port or self.store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True", "GLOO_SOCKET_IFNAME": "lo",
        }  # fmt: skip
        self.processes[rank] = subprocess.Popen(
            [sys.executable, "-c", code, self.held.to_json(), str(self.folder)],
            env=env,
            stdout=subprocess.PIPE,
            text=True,
        )

    def ends(self) -> dict[int, tuple[int, str]]:
        """Exit code and words of each rank."""
        return {rank: (process.wait(200), process.communicate()[0]) for rank, process in self.processes.items()}

    def measuring(self, rank: int, stage: str) -> int:
        """The process id of a rank's measuring process, once it is there."""
        path = self.folder / f"preflight-{rank}.json"
        end = time.monotonic() + 120
        while time.monotonic() < end:
            with suppress(OSError, ValueError):
                if stage in json.loads(path.read_text())["stage"]:
                    pid = self.processes[rank].pid
                    return int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0])
            time.sleep(0.01)
        raise AssertionError(f"rank {rank} never was {stage}")


def test_a_floor_that_three_nodes_do_not_reach_ends_all_and_names_the_slowest_links(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 3, replace(HELD, gb_per_second=1e6))
    for rank in range(3):
        ranks.start(rank)
    for rank, (code, text) in ranks.ends().items():
        # On a busy machine one of them may be slow to both others, and is blamed for it.
        blamed = f"Node {rank} is slow to all others" in text
        assert code == (ExitCode.NODE if blamed else ExitCode.HARDWARE), text
        assert "1e+06 is the floor" in text
        assert "(node " in text
        assert "lower the floor in `compute.preflight`" in text


def test_a_rank_that_does_not_come_is_named_and_itself_blames_its_node(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections and never answers
        ranks = Ranks(tmp_path, 2, replace(HELD, seconds=10))
        ranks.start(0)
        ranks.start(1, port=deaf.getsockname()[1])
        ends = ranks.ends()
    assert ends[0][0] == ExitCode.HARDWARE
    assert "these ranks did not come within 10 s: 1 (node 1)" in ends[0][1]
    assert ends[1][0] == ExitCode.NODE
    assert "rank 1 was still connecting to the first node, and the others wait. Look at node 1" in ends[1][1]


def test_a_rank_whose_process_dies_blames_its_node_and_the_others_lose_it(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path, 2, replace(HELD, seconds=10))
    ranks.start(0)
    os.kill(ranks.measuring(0, "waiting"), signal.SIGKILL)
    ranks.start(1)
    ends = ranks.ends()
    assert ends[0][0] == ExitCode.NODE
    assert "the process of rank 0 was ended by SIGKILL while waiting for the other ranks" in ends[0][1]
    assert ends[1][0] == ExitCode.HARDWARE


def test_a_run_whose_preflight_fails_tells_the_pod_why_and_fetches_nothing(
    toy: Toy, start: Any, tmp_path: Path
) -> None:
    held = replace(HELD, gb_per_second=1e6)
    process = start(toy.run("slow"), 2, **ONE, **{PREFLIGHT: held.to_json()})
    text = finish(process, ExitCode.NODE)
    told = termination(tmp_path)
    assert told["exit_code"] == ExitCode.NODE
    assert "1e+06 is the floor. Look at the links" in told["message"]
    assert "no GPUs are asked for, so none are looked at" in text
    assert not list(toy.files("slow").list("plan/"))


def test_a_preflight_hears_a_stop(toy: Toy, start: Any, tmp_path: Path) -> None:
    process = start(toy.run("stopped"), 2, **ONE, **{PREFLIGHT: HELD.to_json()})
    read(process, "preflight, gloo")
    process.send_signal(signal.SIGTERM)
    finish(process, ExitCode.PREEMPTED)
    assert "before training began" in termination(tmp_path)["message"]


def test_a_node_with_a_broken_gpu_ends_before_its_ranks_start(toy: Toy, start: Any, tmp_path: Path) -> None:
    driver(tmp_path)
    compute = {"gpus": 2, "processes_per_node": 2}
    held = {PREFLIGHT: HELD.to_json(), "LD_LIBRARY_PATH": str(tmp_path)}
    text = finish(start(toy.run("ecc", compute=compute), 2, **held), ExitCode.NODE)
    told = termination(tmp_path)
    assert (told["exit_code"], told["rank"]) == (ExitCode.NODE, None)
    assert "GPU 0 (A100) waits for a reset" in told["message"]
    assert "GPU 1 (A100) has had 5 uncorrectable memory errors" in told["message"]
    assert "[rank" not in text
