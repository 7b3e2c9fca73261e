"""GPUs that do nothing end a run, after a checkpoint: the decision, and a real run beside a driver of ours."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from dropforge import layout
from dropforge.run import ExitCode
from trainer.node.idle import EVERY, Idleness, IdleWatch, Policy, busiest
from trainer.state.checkpoint import Checkpoints

from .test_launch import ONE, finish, read, termination
from .toy import Toy

# A driver's library with one GPU, whose use is the number in a file.
NVML = """
#include <stdio.h>
#include <stdlib.h>
typedef struct { unsigned int gpu, memory; } use_t;
int nvmlInit_v2(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void **device) { *device = (void *) 1; return 0; }
int nvmlDeviceGetUtilizationRates(void *device, use_t *use) {
  FILE *file = fopen(getenv("GPU_USE"), "r");
  if (!file) return 3;
  int found = fscanf(file, "%u", &use->gpu);
  fclose(file);
  return found == 1 ? 0 : 3;
}
int nvmlDeviceGetMemoryInfo(void *device, void *m) { return 3; }
int nvmlDeviceGetPowerUsage(void *device, unsigned int *power) { return 3; }
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned int *limit) { return 3; }
"""

Look = tuple[float | None, bool, float]
IDLE: Look = (0.0, True, EVERY)


def looked(looks: Sequence[Look], minutes: float = 1) -> list[int]:
    """Which of the looks find that it is enough."""
    idleness = Idleness(Policy(5, minutes))
    return [number for number, look in enumerate(looks, 1) if idleness.look(*look)]


def test_a_whole_window_without_a_break_is_enough() -> None:
    assert looked([IDLE] * 30) == [30]
    assert looked([IDLE] * 29) == []


@pytest.mark.parametrize(
    "between",
    [(5.0, True, EVERY), (100.0, True, EVERY), (50.0, False, EVERY)],
)
def test_one_busy_look_begins_the_window_anew(between: Look) -> None:
    assert looked([*[IDLE] * 29, between, *[IDLE] * 29]) == []
    assert looked([*[IDLE] * 29, between, *[IDLE] * 30]) == [60]


def test_what_may_take_any_time_neither_counts_nor_begins_anew() -> None:
    assert looked([(0.0, False, EVERY)] * 1000) == []
    assert looked([*[IDLE] * 29, *[(0.0, False, EVERY)] * 100, IDLE]) == [130]


def test_a_gpu_that_tells_nothing_proves_nothing() -> None:
    assert looked([(None, True, EVERY)] * 1000) == []


def test_a_node_that_stood_still_as_a_whole_proves_nothing() -> None:
    assert looked([(0.0, True, 86_400.0)] * 5) == []


def test_the_busiest_of_the_gpus_that_are_this_pods_counts() -> None:
    sample = {
        "cpu_utilization_percentage": 99.0,
        "gpu_0_utilization_percentage": 3.0,
        "gpu_1_utilization_percentage": 90.0,
        "gpu_2_utilization_percentage": 1.0,
        "gpu_2_memory_usage_percentage": 80.0,
    }
    assert busiest(sample, None) == busiest(sample, "") == busiest(sample, "GPU-8f2a") == 90
    assert busiest(sample, "0, 2") == 3
    assert busiest(sample, "7") is None
    assert busiest({}, None) is None


def test_a_run_of_an_earlier_version_has_no_policy() -> None:
    assert Policy.of({"compute": {"gpus": 1}}) is None
    assert Policy.of({"compute": {"idle": {"below_percent": 5, "minutes": 30}}}) == Policy(5, 30)


@pytest.fixture
def driver(tmp_path: Path) -> dict[str, str]:
    """Environment in which the driver's library is ours, with an idle GPU."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        pytest.skip("needs a C compiler")
    folder = tmp_path / "driver"
    folder.mkdir()
    (folder / "nvml.c").write_text(NVML)
    subprocess.run([compiler, "-shared", "-fPIC", "-o", folder / "libnvidia-ml.so.1", folder / "nvml.c"], check=True)
    (folder / "use").write_text("0")
    paths = [str(folder), os.environ.get("LD_LIBRARY_PATH", "")]
    return {"LD_LIBRARY_PATH": ":".join(filter(None, paths)), "GPU_USE": str(folder / "use")}


def with_policy(toy: Toy, name: str, minutes: float, **overrides: Any) -> str:
    """A run with a policy that a recipe without GPUs, as this machine needs it, could not have."""
    uri = toy.run(name, **overrides)
    key = layout.run_key(name)
    spec = json.loads(toy.store.get(key))
    spec["recipe"]["compute"]["idle"] = {"below_percent": 5, "minutes": minutes}
    toy.store.put(key, json.dumps(spec).encode())
    return uri


@pytest.mark.dist
def test_a_run_with_idle_gpus_saves_says_so_and_ends_with_its_own_code(
    toy: Toy, start: Any, tmp_path: Path, driver: dict[str, str]
) -> None:
    use = Path(driver["GPU_USE"])
    use.write_text("60")  # until it trains: on a busy machine its first pass alone may take longer than the policy
    uri = with_policy(toy, "idle", 0.04, train={"max_steps": 100_000, "checkpoint_every": 50_000})
    process = start(uri, 2, **ONE, **driver)
    text = "".join(read(process, r'^@progress {"step": 10, '))
    use.write_text("0")
    text += finish(process, ExitCode.IDLE)
    assert "run failed with exit code 13: the GPUs of this pod were idle: below 5 % for 0.04 minutes" in text
    told = termination(tmp_path)
    assert told["exit_code"] == 13
    assert told["message"].startswith("the GPUs of this pod were idle")
    assert told["step"] > 0
    # What was trained is kept, and a person who clears the task goes on from it.
    (seal,) = Checkpoints(toy.files("idle"), "idle", "", {}).seals()
    assert seal.step >= told["step"]  # the last line of progress came before


@pytest.mark.dist
def test_busy_gpus_end_nothing(toy: Toy, start: Any, driver: dict[str, str]) -> None:
    Path(driver["GPU_USE"]).write_text("60")
    finish(start(with_policy(toy, "busy", 0.001), 1, **ONE, **driver))


def test_where_no_driver_answers_a_line_says_that_nobody_watches(tmp_path: Path) -> None:
    said: list[tuple[int, str]] = []
    watch = IdleWatch(
        Policy(5, 0),
        tmp_path,
        range(4, 8),
        stop=lambda why: pytest.fail(why),
        tell=lambda rank, line: said.append((rank, line)),
        gpus=lambda: None,
    )
    watch.close()
    assert said == [(4, "compute.idle: the GPUs' driver does not answer, so they are not watched")]
