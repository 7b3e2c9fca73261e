"""Memory is measured before the first step: what does not fit is refused with what would, and nothing is killed."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from dropforge.errors import RecipeError
from dropforge.run import ExitCode
from dropforge.store import open_store
from trainer.gang import Gang
from trainer.model import fit
from trainer.model.fit import Load, doubled, foresee, memory_room, rehearsal, shortage

from .ranks import Ranks, RanksError
from .ranks_loop import Stage, make_loop, make_stage
from .test_model import tokens
from .toy import REPOSITORY, Toy, write_dataset

CPU = torch.device("cpu")
GB = 10**9


@pytest.mark.parametrize("size", [1, 16, 128, 129, 512, 4096, 5000])
def test_lengths_grow_by_two_at_most_up_to_the_longest(size: int) -> None:
    found = doubled(128, size)
    assert found[-1] == size
    assert found[0] <= 128
    assert all(before < after <= 2 * before for before, after in itertools.pairwise(found))
    assert sum(found) <= 2 * size + 128


@pytest.mark.parametrize(("linear", "quadratic"), [(3.0, 0.0), (3.0, 0.5), (0.0, 2.0)])
def test_a_longer_row_is_foreseen_whether_attention_is_quadratic_or_not(linear: float, quadratic: float) -> None:
    def takes(length: int) -> float:
        return linear * length + quadratic * length**2

    assert foresee(takes(64), takes(128)) == pytest.approx(takes(256))
    assert foresee(10.0, 10.0) == 20.0  # what grows less than linearly is not believed
    assert foresee(0.0, 10.0) == 40.0


def test_ranks_of_a_node_share_its_room_and_gpus_have_their_own() -> None:
    loads = [Load(1.0, 1.0, 10.0)] * 3 + [Load(1.0, 2.0, 10.0)]
    assert shortage(loads, 3, 2) == (4 + 7, 8.0)  # a fifth of the room is spared
    assert shortage(loads, 2, 2) is None
    assert shortage(loads, 3, 1) is None
    assert shortage(loads, 9, 1) == (19.0, 8.0)


def test_a_rehearsed_row_has_the_targets_of_a_real_one_and_a_border_if_rows_are_packed() -> None:
    batch = rehearsal(tokens([30]), 64, 0.5, True)
    assert batch.ids.shape == (1, 64)
    assert abs(len(batch.places) - 32) <= 1
    assert (batch.positions == 0).sum() == 2
    assert (rehearsal(tokens([30]), 64, 0.5, False).positions == 0).sum() == 1
    assert torch.equal(batch.ids.view(-1)[batch.places + 1], batch.targets)
    assert len(rehearsal(tokens([30]), 2, 1.0, True).places) == 1
    three = rehearsal(tokens([30]), 64, 0.5, True, 3)
    assert three.ids.shape == three.positions.shape == (3, 64)
    assert len(three.places) == len(three.targets) == 3 * len(batch.places)
    assert torch.equal(three.ids.view(-1)[three.places + 1], three.targets)


@pytest.fixture
def machine(tmp_path: Path) -> Any:
    """A machine's files with 8 GB to be had, and whatever else."""

    def make(**files: str) -> Path:
        files = {"proc/meminfo": "MemTotal: 16000000 kB\nMemAvailable: 8000000 kB\nSwapFree: 0 kB\n", **files}
        for name, text in files.items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return tmp_path

    return make


def test_the_room_is_what_the_smallest_limit_leaves(machine: Any) -> None:
    assert memory_room(CPU, machine()) == 8_192_000_000
    group = "sys/fs/cgroup/pods/one"
    limited = {"proc/self/cgroup": "0::/pods/one\n", f"{group}/memory.max": "3000000000\n",
               f"{group}/memory.current": "2000000000\n",
               f"{group}/memory.stat": "anon 1\ninactive_file 300000000\nactive_file 200000000\n"}  # fmt: skip
    assert memory_room(CPU, machine(**limited)) == 1_500_000_000
    above = {"sys/fs/cgroup/pods/memory.max": "2500000000", "sys/fs/cgroup/pods/memory.current": "2400000000"}
    assert memory_room(CPU, machine(**limited, **above)) == 100_000_000
    limited[f"{group}/memory.max"] = above["sys/fs/cgroup/pods/memory.max"] = "max"
    assert memory_room(CPU, machine(**limited, **above)) == 8_192_000_000


def test_the_first_version_of_control_groups_is_read_too(machine: Any) -> None:
    group = "sys/fs/cgroup/memory/pod"
    files = {"proc/self/cgroup": "4:memory:/pod\n3:cpuset:/\n0::/\n", f"{group}/memory.limit_in_bytes": "3000000000",
             f"{group}/memory.usage_in_bytes": "2000000000", f"{group}/memory.stat": "total_inactive_file 500000000",
             "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
             "sys/fs/cgroup/memory/memory.usage_in_bytes": "1"}  # fmt: skip
    assert memory_room(CPU, machine(**files)) == 1_500_000_000


def test_what_nobody_tells_is_not_guessed(tmp_path: Path) -> None:
    assert memory_room(CPU, tmp_path) is None


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Stage:
    """Wide enough for megabytes: a row of 512 tokens."""
    folder = tmp_path_factory.mktemp("fit")
    toy = Toy(str(folder / "bucket"), write_dataset(open_store(str(folder / "bucket")), long_texts()))
    scratch = {"hidden_size": 64, "layers": 2, "heads": 2, "vocab_size": 320, "context": 512}
    train = {"sequence_length": 512, "tokens_per_step": 4096, "micro_batch": 4}
    return make_stage(toy, "fit", folder / "scratch", base={"scratch": scratch}, train=train)


def long_texts() -> dict[str, list[dict[str, Any]]]:
    words = np.random.default_rng(0).choice(["red", "green", "cat", "tree", "river", "and"], 60_000)
    return {
        split: [{"text": " ".join(words[i : i + 3000])} for i in range(0, 60_000, 3000)] for split in ("train", "eval")
    }


def found_with(gang: Gang, stage: Stage, rooms: list[int | None]) -> dict[str, int] | None:
    fit.memory_room = lambda device, root=None: rooms[gang.rank]  # type: ignore[assignment]
    loop = make_loop(gang, stage, True)
    loop.start()
    assert all(weight.grad is None or not weight.grad.any() for _, weight in loop.built.trainable())
    return None if loop.fit is None else loop.fit.plain()


@pytest.mark.dist
def test_a_micro_batch_that_does_not_fit_is_refused_with_the_one_that_does(ranks: Ranks, stage: Stage) -> None:
    [wide] = ranks(found_with, 1, stage, [GB])
    assert wide is not None
    assert (wide["rows"], wide["tokens"]) == (4, 512)
    assert 10e6 < wide["need"] < 300e6
    with pytest.raises(RanksError, match=r"train\.micro_batch.*4 rows of 512 tokens.*`train.micro_batch` to [123],"):
        ranks(found_with, 1, stage, [int(wide["need"] * 0.8)])
    with pytest.raises(RanksError, match=r"Set `train\.sequence_length` to (128|256) or less"):
        ranks(found_with, 1, stage, [int(wide["need"] * 0.15)])
    assert ranks(found_with, 1, stage, [None]) == [None]


@pytest.mark.dist
@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_ranks_are_refused_together_though_one_of_them_would_fit(ranks: Ranks, stage: Stage, mode: str) -> None:
    shared = stage.change(parallel=mode)
    wide = ranks(found_with, 2, shared, [GB, GB])
    assert wide[0] is not None
    with pytest.raises(RanksError, match=r"`train\.micro_batch` to \d,") as caught:
        ranks(found_with, 2, shared, [int(wide[0]["need"] * 1.5), GB])
    assert [type(error) for error in caught.value.errors.values()] == [RecipeError] * 2


GROUPS = Path("/sys/fs/cgroup/memory")  # the first version's, where a process with no others in it may be limited


@pytest.fixture
def group() -> Iterator[Path]:
    """A control group of 1.5 GB."""
    folder = GROUPS / f"dropforge-test-{os.getpid()}"
    try:
        folder.mkdir()
        (folder / "memory.limit_in_bytes").write_text("1500000000")
    except OSError:
        with contextlib.suppress(OSError):
            folder.rmdir()
        pytest.skip("no control group can be made here")
    yield folder
    folder.rmdir()


@pytest.mark.exact
@pytest.mark.dist
def test_under_a_real_limit_the_launched_run_is_refused_and_its_advice_works(tmp_path: Path, group: Path) -> None:
    root = str(tmp_path / "bucket")
    toy = Toy(root, write_dataset(open_store(root), long_texts()))
    scratch = {"hidden_size": 128, "layers": 4, "heads": 4, "vocab_size": 1024, "context": 1024}

    def launched(name: str, micro_batch: int) -> tuple[int, str]:
        train = {"sequence_length": 1024, "tokens_per_step": 32 * 1024, "micro_batch": micro_batch, "max_steps": 2}
        uri = toy.run(name, base={"scratch": scratch}, train=train)
        enter = f"import os, sys; open('{group}/cgroup.procs', 'w').write(str(os.getpid())); "
        enter += "os.execv(sys.executable, [sys.executable, '-m', 'trainer.launch', sys.argv[1]])"
        done = subprocess.run(
            [sys.executable, "-c", enter, uri],
            env={**os.environ, "OMP_NUM_THREADS": "2", "TERMINATION_LOG": str(tmp_path / f"{name}.json")},
            cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False,
        )  # fmt: skip
        return done.returncode, done.stdout + done.stderr + (tmp_path / f"{name}.json").read_text()

    code, text = launched("large", 32)
    assert code == ExitCode.BAD_RECIPE, text
    advice = re.search(r"Set `train\.micro_batch` to (\d+),", text)
    assert advice, text
    assert "step 1/" not in text
    code, text = launched("advised", int(advice.group(1)))
    assert code == 0, text
    memory = json.loads(toy.files("advised").get("report.json"))["memory"]
    assert memory["need"] <= memory["room"] < 1_500_000_000
