"""Figures of a machine: from files like those of `/proc`, from a library like the driver's, and from this machine."""

from __future__ import annotations

import shutil
import subprocess
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import Tracking
from tests.trainer.test_tracking import Server, server
from trainer.node.nvml import Nvml
from trainer.node.system import Machine, find_gpus
from trainer.report.system import SystemMetrics, start_system_metrics

__all__ = ["server"]

NET = """Inter-|   Receive                                                |  Transmit
 face |bytes    packets errs drop fifo frame compressed multicast|bytes    packets errs drop fifo colls
    lo: {received}0 1 0 0 0 0 0 0 {sent}0 1 0 0 0 0 0 0
  eth0: {received} 1 0 0 0 0 0 0 {sent} 1 0 0 0 0 0 0
"""

# Two GPUs; the second tells nothing but its memory, as a slice of a GPU does.
NVML = """
#include <string.h>
typedef struct { unsigned long long total, free, used; } memory_t;
typedef struct { unsigned int gpu, memory; } use_t;
static int devices[2] = {0, 1};
int nvmlInit_v2(void) { return INIT; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = &devices[index]; return 0; }
int nvmlDeviceGetMemoryInfo(void *device, memory_t *m) { m->total = 8e10; m->used = 2e10; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, use_t *use) { use->gpu = 87; return *(int *)device ? 3 : 0; }
int nvmlDeviceGetPowerUsage(void *device, unsigned int *power) { *power = 350000; return *(int *)device ? 3 : 0; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *limit) { *limit = 700000; return 0; }
int nvmlDeviceGetClockInfo(void *device, int kind, unsigned int *mhz) {
  *mhz = 1200; return *(int *)device ? 3 : kind - 1; }
int nvmlDeviceGetTemperature(void *device, int sensor, unsigned int *heat) {
  *heat = 88; return *(int *)device ? 3 : sensor; }
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
  *reasons = REASONS; return *(int *)device ? 3 : 0; }
"""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    (tmp_path / "proc/net").mkdir(parents=True)
    text = "MemTotal: 1000000 kB\nMemFree: 1 kB\nMemAvailable: 750000 kB\nHugePages: 0\n"
    (tmp_path / "proc/meminfo").write_text(text)
    write(tmp_path, busy=100, idle=900, received=5_000_000, sent=1_000_000)
    return tmp_path


def write(root: Path, *, busy: int, idle: int, received: int, sent: int) -> None:
    (root / "proc/stat").write_text(f"cpu  {busy} 0 0 {idle // 2} {idle - idle // 2} 0 0 0 77 77\ncpu0 1 2 3\n")
    (root / "proc/net/dev").write_text(NET.format(received=received, sent=sent))


def library(folder: Path, init: int = 0, reasons: str = "0x4") -> str:
    """A library that answers like NVML."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    (folder / "nvml.c").write_text(NVML)
    target, told = folder / f"libnvml-{init}-{reasons}.so", [f"-DINIT={init}", f"-DREASONS={reasons}"]
    subprocess.run([compiler, "-shared", "-fPIC", *told, "-o", target, folder / "nvml.c"], check=True)
    return str(target)


def test_figures_are_those_of_the_kernels_counters(root: Path) -> None:
    machine = Machine(root, root)
    write(root, busy=175, idle=925, received=15_000_000, sent=3_500_000)
    found = machine.sample()
    assert found["cpu_utilization_percentage"] == 75
    assert found["system_memory_usage_megabytes"] == 256
    assert found["system_memory_usage_percentage"] == 25
    assert found["network_receive_megabytes"] == 10
    assert found["network_transmit_megabytes"] == 2.5
    assert 0 < found["disk_usage_percentage"] <= 100
    write(root, busy=175, idle=1025, received=16_000_000, sent=3_500_000)
    found = machine.sample()
    assert found["cpu_utilization_percentage"] == 0
    assert found["network_receive_megabytes"] == 11


def test_infiniband_is_counted_too(root: Path) -> None:
    port = root / "sys/class/infiniband/mlx5_0/ports/1/counters"
    port.mkdir(parents=True)
    (port / "port_rcv_data").write_text("1000000\n")
    (port / "port_xmit_data").write_text("0\n")
    machine = Machine(root, root)
    (port / "port_rcv_data").write_text("3000000\n")
    found = machine.sample()
    assert found["infiniband_receive_megabytes"] == 8  # a count is four bytes
    assert found["infiniband_transmit_megabytes"] == 0


def test_what_a_machine_does_not_tell_is_left_out(tmp_path: Path) -> None:
    assert Machine(tmp_path, tmp_path / "none").sample() == {}


def test_gpus_are_read_from_the_drivers_library(root: Path) -> None:
    found = Machine(root, root, Nvml(library(root))).sample()
    assert {key: value for key, value in found.items() if key.startswith("gpu")} == {
        "gpu_0_utilization_percentage": 87,
        "gpu_0_memory_usage_megabytes": 20_000,
        "gpu_0_memory_usage_percentage": 25,
        "gpu_0_power_usage_watts": 350,
        "gpu_0_power_usage_percentage": 50,
        "gpu_0_clock_megahertz": 1200,
        "gpu_0_temperature_celsius": 88,
        "gpu_0_throttled_percentage": 0,  # it is at its cap of power, as busy GPUs are
        "gpu_1_memory_usage_megabytes": 20_000,
        "gpu_1_memory_usage_percentage": 25,
    }


@pytest.mark.parametrize("reasons", ["0x8", "0x24", "0x40", "0x80"])
def test_a_gpu_that_heat_or_power_slows_says_so(root: Path, reasons: str) -> None:
    found = Machine(root, root, Nvml(library(root, reasons=reasons))).sample()
    assert found["gpu_0_throttled_percentage"] == 100
    assert "gpu_1_throttled_percentage" not in found


def test_a_driver_that_does_not_work_is_no_gpu(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (library(root, init=9), "libnothing-of-that-name.so.1", "libc.so.6"):
        monkeypatch.setattr("trainer.node.system.Nvml", lambda name=name: Nvml(name))
        assert find_gpus() is None


def test_a_sample_of_this_machine_costs_less_than_a_thousandth_of_a_core() -> None:
    machine = Machine(gpus=find_gpus())
    machine.sample()
    began = time.thread_time()
    for _ in range(20):
        found = machine.sample()
    assert (time.thread_time() - began) / 20 < 0.010  # every ten seconds
    assert found["system_memory_usage_megabytes"] > 100


@pytest.fixture
def quick(server: Server, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    server.started = int(time.time() * 1000) - 50_000
    return {"MLFLOW_SYSTEM_METRICS_SAMPLING_INTERVAL": "0.1"}


def started(tracking: Tracking, env: dict[str, str], node: int = 0, nodes: int = 1) -> SystemMetrics:
    found = start_system_metrics(tracking, env, node, nodes)
    assert found is not None
    return found


def rows(server: Server) -> list[dict[str, Any]]:
    return [row for batch in server.batches for row in batch["metrics"]]


def test_samples_reach_the_run_under_mlflows_names(server: Server, quick: dict[str, str]) -> None:
    system = started(server.tracking, quick)
    end = time.monotonic() + 20
    while len({row["timestamp"] for row in rows(server)}) < 3:
        assert time.monotonic() < end
        time.sleep(0.02)
    system.close()
    assert "system/cpu_utilization_percentage" in {row["key"] for row in rows(server)}
    assert all(48 <= row["step"] <= 80 for row in rows(server))  # seconds since the run began


def test_nodes_are_told_apart(server: Server, quick: dict[str, str]) -> None:
    system = started(server.tracking, quick, 1, 2)
    end = time.monotonic() + 20
    while not rows(server):
        assert time.monotonic() < end
        time.sleep(0.02)
    system.close()
    assert all(row["key"].startswith("system/node_1/") for row in rows(server))


def test_samples_from_before_mlflow_answered_are_sent_with_their_times(server: Server, quick: dict[str, str]) -> None:
    address, server.started = server.started, 0
    system = started(server.tracking, quick)
    end = time.monotonic() + 20
    while len(system._samples) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert rows(server) == []
    server.started = address
    while len({row["timestamp"] for row in rows(server)}) < 4:
        assert time.monotonic() < end
        time.sleep(0.02)
    system.close()
    times = sorted(row["timestamp"] for row in rows(server) if row["key"] == "system/system_memory_usage_megabytes")
    assert all(later - before > 30 for before, later in pairwise(times))  # each its own, a tenth of a second apart


def test_nothing_is_sampled_where_nobody_wants_it(server: Server) -> None:
    assert start_system_metrics(None, {}, 0, 1) is None
    assert start_system_metrics(Tracking("sqlite:///x.db", "r", "0"), {}, 0, 1) is None
    off = {"MLFLOW_ENABLE_SYSTEM_METRICS_LOGGING": "false"}
    assert start_system_metrics(server.tracking, off, 0, 1) is None


def test_a_server_that_is_away_costs_the_end_no_time(quick: dict[str, str]) -> None:
    system = started(Tracking("http://127.0.0.1:1", "r", "0"), quick)
    began = time.monotonic()
    system.close()
    assert time.monotonic() - began < 5
