"""The estimate of a rank's memory against the peak of a whole training: start, steps, checkpoint, evaluation, export.

    python -m bench.estimate [--cells "full, fp32" ...]

Each cell is `python -m trainer run` of a recipe on the CPU, in fresh processes, over the text that `make demo` trains
on; padded rows are cut from long texts, so that they are full. What is seen is the largest resident memory that the
kernel tells of any rank. Beside the whole stands what is left of both without the runtime: the part that a model makes.

Ends with 1 if an estimate of the whole is further than 10 % from what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import yaml

BAR = 0.1
LENGTH, STEPS = 512, 3
_SIZES = {"hidden_size": 512, "layers": 6, "heads": 8, "vocab_size": 4096, "context": LENGTH}


@dataclass(frozen=True)
class Cell:
    """A training to look at.

    :param sizes: of `base.scratch`. :param base: whether it starts from a model's folder. :param long: whether its rows
        are cut from long texts.
    """

    ranks: int = 1
    train: Mapping[str, Any] = field(default_factory=dict)
    parallel: str = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    base: bool = False
    long: bool = False


CELLS: dict[str, Cell] = {
    "full, fp32": Cell(),
    "full, fp32, padded": Cell(train={"packing": "off"}, long=True),
    "full, fp32, gpt2": Cell(sizes={"architecture": "gpt2"}),
    "full, fp32, vocabulary of 32,000": Cell(sizes={"vocab_size": 32_000, "layers": 2}),
    "full, bf16": Cell(train={"precision": "bf16"}),
    "full, fp32, from a folder": Cell(base=True),
    "lora, fp32": Cell(base=True, train={"method": "lora"}),
    "lora, bf16": Cell(base=True, train={"method": "lora", "precision": "bf16"}),
    "full, fp32, ddp": Cell(2, parallel="ddp"),
    "full, fp32, fsdp": Cell(2, parallel="fsdp"),
    "full, fp32, fsdp-no-reshard": Cell(2, parallel="fsdp-no-reshard"),
    "full, bf16, fsdp": Cell(2, {"precision": "bf16"}, "fsdp"),
    "lora, fp32, fsdp": Cell(2, {"method": "lora"}, "fsdp", base=True),
    "qlora, fp32": Cell(base=True, train={"method": "qlora"}),
    "qlora, bf16": Cell(base=True, train={"method": "qlora", "precision": "bf16"}),
    "qlora, fp32, fsdp": Cell(2, {"method": "qlora"}, "fsdp", base=True),
    "full, fp32, adamw-8bit": Cell(train={"optimizer": "adamw-8bit"}),
    "full, fp32, hybrid": Cell(4, parallel="hybrid"),
}


def recipe_of(cell: Cell, base: Path) -> dict[str, Any]:
    """The recipe of a cell. :param base: folder of a model of the usual sizes."""
    found: dict[str, Any] = {
        "base": {"model": str(base)} if cell.base else {"scratch": {**_SIZES, **cell.sizes}},
        "train": {
            "sequence_length": LENGTH,
            "rows_per_step": 4 * cell.ranks,
            "micro_batch": 4,
            "max_steps": STEPS,
            "checkpoint_every": 2,
            **cell.train,
        },
        "evaluate": {"max_rows": 60},
        "compute": {"processes_per_node": cell.ranks, "parallel": cell.parallel, "memory_gb": 6 * cell.ranks},
    }
    if cell.parallel == "hybrid":
        found["compute"]["shard_group"] = cell.ranks // 2
    return found


def peak(recipe: Mapping[str, Any], ranks: int, dataset: str, folder: Path) -> int:
    """Largest resident memory of any rank, in bytes."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    command = [sys.executable, "-m", "trainer", "run", "--recipe", str(folder / "recipe.yaml"), "--dataset", dataset]
    command += ["--to", str(folder / "run"), "--ranks", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DROPFORGE_HANG_SECONDS": "3000"}
    most = 0
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        while process.poll() is None:  # the peak may be begun anew, so it is looked at often
            most = max(most, max((_resident(child) for child in _below(process.pid)), default=0))
            time.sleep(0.02)
    if process.returncode:
        said = (folder / "log").read_text()[-3000:]
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return most


def datasets(folder: Path) -> dict[bool, str]:
    """Dataset versions of chats, and of long texts (True); the folders of their manifests."""
    from dropforge.samples import write_sample

    chats, texts = folder / "chats", folder / "texts"
    chats.mkdir()
    texts.mkdir()
    write_sample(chats)
    generator = random.Random(7)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 9))) for _ in range(3000)]
    rows = [{"text": " ".join(generator.choices(words, k=1800))} for _ in range(120)]
    (texts / "texts.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    found = {}
    for long, drop in ((False, chats), (True, texts)):
        out = folder / f"bucket-{drop.name}"
        command = [sys.executable, "-m", "curation", str(drop), "--out", str(out), "--recipe", "tiny"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        found[long] = str(next(out.glob("datasets/*/*/manifest.json")).parent)
    return found


def _below(pid: int) -> list[int]:
    """Ranks among the processes below one."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            found += [int(child), *_below(int(child))]
    return [child for child in found if "trainer.rank" in _read(Path(f"/proc/{child}/cmdline"))]


def _resident(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def main() -> int:
    """Run the cells; 1 if an estimate is too far off."""
    from dropforge.estimate import RUNTIME_BYTES, estimate
    from dropforge.recipes.load import build_recipe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", choices=list(CELLS), default=list(CELLS))
    options = parser.parse_args()
    missed = []
    print(f"{'training':34} {'seen':>9} {'estimate':>9} {'off':>7}   without the runtime")
    with TemporaryDirectory(prefix="dropforge-estimate-") as name:
        folder = Path(name)
        rows = datasets(folder)
        base = folder / "base" / "run" / "model"
        if any(CELLS[cell].base for cell in options.cells):
            peak(recipe_of(Cell(), base), 1, rows[False], folder / "base")
        for cell in options.cells:
            chosen = CELLS[cell]
            recipe = recipe_of(chosen, base)
            seen = peak(recipe, chosen.ranks, rows[chosen.long], folder / cell.replace(", ", "-").replace(" ", "-"))
            said = estimate(build_recipe(recipe)).rank_bytes
            assert said is not None
            off = said / seen - 1
            part = (said - RUNTIME_BYTES) / max(1, seen - RUNTIME_BYTES) - 1
            print(f"{cell:34} {seen / 1e6:6.0f} MB {said / 1e6:6.0f} MB {off:+7.1%}   {part:+7.1%}", flush=True)
            if abs(off) > BAR:
                missed.append(cell)
    if missed:
        print(f"further off than {BAR:.0%}: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
