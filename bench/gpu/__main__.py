"""What one GPU does in eight minutes: tokens a second, MFU and memory beside peers, and what checkpoints take.

    python -m bench.gpu [--minutes 8] [--json FILE] [--dry]

Shapes of 1B and 7B with random weights, bf16, packed rows of 4,096 tokens, each cell in a process of its own; the clock
starts after the first steps. It needs torch, transformers and peft, and no other machine. Each figure is printed when
it is there, and written to FILE, so that nothing is lost where time runs out: cells that do not fit into what is left
are left out. With pytest at hand the rest of the time goes to the tests of `make test-gpu` for one GPU.

    ours      our loop, with its logs, checks and tracking
    loop      a bare loop by hand: a ceiling, no trainer
    trainer   transformers' Trainer with DataCollatorWithFlattening
    saves     ours: what a checkpoint takes from the steps, against torch.save in the step

`--dry` runs all of it on a CPU with models of a second each, in one process, which shows that it would run.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from bench.gpu.cells import CELLS, Cell, dry

GOAL: Final = 0.5  # of the GPU's peak, for the 7B shape
ROOT: Final = Path(__file__).parents[2]
Found = list[dict[str, Any]]


def fresh(cell: Cell, seconds: float) -> dict[str, Any]:
    """Measure a cell in a process of its own; `problem` is in the place of figures if it fails."""
    command = [sys.executable, "-m", "bench.gpu", "--one", json.dumps(asdict(cell))]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False, cwd=ROOT)
    except subprocess.TimeoutExpired:
        return {"problem": f"it took more than {seconds:.0f} s"}
    if done.returncode:
        return {"problem": (done.stderr.strip().splitlines() or ["it says nothing"])[-1][:300]}
    return dict(json.loads(done.stdout.splitlines()[-1]))


def here(cell: Cell) -> dict[str, Any]:
    """Measure a cell in this process."""
    from bench.gpu.variants import measure
    from bench.gpu.work import prepare

    return measure(prepare(cell))


def device() -> tuple[str, float]:
    """Name and gigabytes of the GPU; `cpu` without one."""
    import torch

    if not torch.cuda.is_available():
        return "cpu", 0.0
    about = torch.cuda.get_device_properties(0)
    return about.name, about.total_memory / 1e9


def told(cell: Cell, facts: Mapping[str, Any]) -> str:
    """A cell's figures in a row of the table."""
    speed = f"{facts['tokens_per_second']:,.0f}" if "tokens_per_second" in facts else ""
    mfu = f"{facts['mfu']:.1%}" if facts.get("mfu") is not None else ""
    peak = f"{facts['peak_gb']:.1f}" if "peak_gb" in facts else ""
    guess = f"{facts['estimated_gb']:.1f}" if "estimated_gb" in facts else ""
    more = str(facts.get("problem") or facts.get("attention") or "")
    if "stolen_seconds" in facts:
        more = (
            f"a checkpoint of {facts['bytes'] / 1e9:.2f} GB takes {facts['stolen_seconds']:.2f} s of the steps, and "
            f"{facts['in_the_step_seconds']:.2f} s in one"
        )
    return f"| {cell.name} | {cell.who} | {speed} | {mfu} | {peak} | {guess} | {more} |"


HEAD: Final = "| cell | who | tokens/s | MFU | peak GB | estimated GB | |\n|---|---|---|---|---|---|---|"


def misses(found: Sequence[Mapping[str, Any]]) -> list[str]:
    """What falls short, and what was not measured."""
    lines = [f"{item['name']}, {item['who']}: {item['problem']}" for item in found if "problem" in item]
    speeds = {(item["name"], item["who"]): item["tokens_per_second"] for item in found if "tokens_per_second" in item}
    for (name, who), speed in speeds.items():
        mine = speeds.get((name, "ours"))
        if who == "trainer" and mine is not None and mine < speed:
            lines.append(f"{name}: {mine / speed:.2f} times transformers' Trainer")
    for item in found:
        if item["shape"] == "7b" and item["who"] == "ours" and (item.get("mfu") or 1.0) < GOAL:
            lines.append(f"{item['name']}: {item['mfu']:.1%} MFU, the goal is {GOAL:.0%}")
        if item.get("estimated_gb", 0) and item.get("peak_gb", 0) > 1.02 * item["estimated_gb"]:
            lines.append(f"{item['name']}: {item['peak_gb']:.1f} GB, {item['estimated_gb']:.1f} were estimated")
    return lines


def session(cells: Sequence[Cell], minutes: float, file: Path | None) -> Found:
    """Measure what fits into the time; each figure is printed, and kept, as soon as it is there."""
    end, found = time.monotonic() + 60 * minutes, []
    name, gigabytes = device()
    print(f"{name}, {gigabytes:.0f} GB\n\n{HEAD}", flush=True)
    for cell in cells:
        left = max(0.0, end - time.monotonic())
        facts: dict[str, Any]
        if cell.dry:
            facts = here(cell)
        elif gigabytes < cell.gigabytes:
            facts = {"problem": f"it needs a GPU of {cell.gigabytes:.0f} GB"}
        elif left < cell.seconds:
            facts = {"problem": f"left out: {left:.0f} s were left, and it takes up to {cell.seconds:.0f} s"}
        else:
            facts = fresh(cell, cell.seconds)
        found.append({"name": cell.name, "shape": cell.shape, "who": cell.who, **facts})
        print(told(cell, facts), flush=True)
        if file is not None:
            new = file.with_suffix(".part")
            new.write_text(json.dumps({"device": name, "cells": found}, indent=1))
            new.replace(file)
    return found


def tests(seconds: float) -> str:
    """What the tests of one GPU say, in a line."""
    command = [sys.executable, "-m", "pytest", "-q", "-n0", "-m", "gpu", "tests/trainer/test_gpu.py"]
    env = {"DROPFORGE_RANKS_ON": "cuda"}
    try:
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=seconds, check=False, env={**os.environ, **env}
        )
    except subprocess.TimeoutExpired:
        return f"they took more than {seconds:.0f} s"
    return (done.stdout.strip().splitlines() or done.stderr.strip().splitlines() or ["they say nothing"])[-1]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=8.0)
    parser.add_argument("--json", type=Path, help="keep what was measured here")
    parser.add_argument("--dry", action="store_true", help="all of it on a CPU, with models of a second each")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(here(Cell(**json.loads(options.one)))))
        return 0
    end = time.monotonic() + 60 * options.minutes
    cells = list(dict.fromkeys(map(dry, CELLS))) if options.dry else CELLS
    found = session(cells, options.minutes, options.json)
    left = end - time.monotonic()
    if not options.dry and left > 20:
        print(f"\ntests of one GPU: {tests(left)}")
    lines = misses(found)
    print("\n".join(f"missed: {line}" for line in lines))
    return int(bool(lines) and not options.dry)  # of models of a second nothing follows


if __name__ == "__main__":
    sys.exit(main())
