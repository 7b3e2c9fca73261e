"""What a machine gives a process, as the kernel and the user say it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from trainer.node.machine import allocator, available_cores

MINE = len(os.sched_getaffinity(0))


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({}, MINE),
        ({"cpu.max": "max 100000"}, MINE),
        ({"cpu.max": "100000 100000"}, 1),
        ({"cpu.max": "50000 100000"}, 1),  # less than one is one
        ({"cpu.max": f"{1000 * MINE}00 100000"}, MINE),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, MINE),  # version 1
        ({"cpu/cpu.cfs_quota_us": "150000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 1),
        ({"cpu/cpu.cfs_quota_us": "150000\n"}, MINE),
        ({"cpu/cpu.cfs_quota_us": "1\n", "cpu/cpu.cfs_period_us": "0\n"}, MINE),
    ],
)
def test_cores_are_those_of_the_quota_of_either_version(tmp_path: Path, files: dict[str, str], cores: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert available_cores(tmp_path) == cores


def test_memory_of_a_gpu_comes_in_pieces_that_grow_unless_the_user_says_otherwise() -> None:
    assert allocator({}) == {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    for name in ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"):
        assert allocator({name: "max_split_size_mb:512"}) == {}
