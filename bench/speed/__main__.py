"""Tokens for a second of CPU and peak memory, ours beside its peers and a bare loop.

    python -m bench.speed [--cells '2k-*' lora ...] [--rounds 5] [--json FILE]

The same model from the same config, the same documents as the same token lists, and the same documents in every
optimizer step (TRL packs by itself: it gets the same list, and its tokens are counted). Ours packs them into rows of
512 tokens, 4096 a step. One thread on one pinned core, CPU time of the process, each variant in a fresh process,
variants interleaved; the clock starts after the warm-up steps. Peers need the `bench` extra.

    ours        our loop, with its logs, checks and tracking
    loop        a bare loop by hand with the fused loss: a ceiling, no trainer
    flat        transformers' Trainer with DataCollatorWithFlattening
    padded      transformers' Trainer, rows padded to the longest; a classifier's as they come
    bucketed    the same with the rows of our forward passes, which are of like length
    trl-padded  TRL's SFTTrainer, padded; trl-packed: the same with packing

Ends with 1 if ours is not above its bar over the best peer, below 0.93 of the bare loop, or needs more memory than
any peer. With --json, what was measured is kept, and a later call with the same file adds to it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
from collections.abc import Mapping
from fnmatch import fnmatch
from pathlib import Path
from typing import Any, Final

from bench.speed.cells import CELLS, LOOP, OURS

FLOOR: Final = 0.93  # of the bare loop
Found = dict[str, dict[str, list[dict[str, Any]]]]  # cell, variant, rounds


def measure(name: str, variant: str) -> dict[str, Any]:
    """Run one variant in this process."""
    from bench.speed import by_hand, hugging_face, ours
    from bench.speed.work import prepare

    work = prepare(CELLS[name])
    if variant == OURS:
        found = ours.train(work)
    else:
        found = by_hand.train(work) if variant == LOOP else hugging_face.train(work, variant)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "rate": found["tokens"] / found["seconds"], "peak_mb": peak}


def fresh(name: str, variant: str) -> dict[str, Any]:
    core = max(os.sched_getaffinity(0))
    done = subprocess.run(
        [sys.executable, "-m", "bench.speed", "--one", name, variant],
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{name}, {variant} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], help=f"of {', '.join(CELLS)}; patterns with * too")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path, help="keep what was measured here, and add to what is there")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return 0
    names = [name for name in CELLS if any(fnmatch(name, pattern) for pattern in options.cells)]
    if not names:
        parser.error(f"--cells names none of {', '.join(CELLS)}")
    found: Found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    for name in names:
        rounds = found.setdefault(name, {variant: [] for variant in CELLS[name].variants})
        for turn in range(options.rounds):
            for variant in CELLS[name].variants if turn % 2 == 0 else CELLS[name].variants[::-1]:
                rounds[variant].append(fresh(name, variant))
        if options.json:
            options.json.write_text(json.dumps(found))
    print(table(found))
    missed = [line for name, rounds in found.items() for line in misses(name, rounds)]
    for line in missed:
        print(f"missed: {line}")
    return int(bool(missed))


def median(rounds: list[dict[str, Any]], key: str) -> float:
    return float(statistics.median(item[key] for item in rounds))


def best_peer(name: str, rounds: Mapping[str, list[dict[str, Any]]]) -> str:
    """The peer with the most tokens for a second of CPU."""
    return max(CELLS[name].peers, key=lambda peer: median(rounds[peer], "rate"))


def misses(name: str, rounds: Mapping[str, list[dict[str, Any]]]) -> list[str]:
    """What falls short of its bar."""
    cell, found = CELLS[name], []
    rate, peer = median(rounds[OURS], "rate"), best_peer(name, rounds)
    if (ratio := rate / median(rounds[peer], "rate")) < cell.bar:
        found.append(f"{name}: {ratio:.2f} times {peer}, not {cell.bar}")
    if (ratio := rate / median(rounds[LOOP], "rate")) < FLOOR:
        found.append(f"{name}: {ratio:.2f} of the bare loop, not {FLOOR}")
    lowest = min(cell.peers, key=lambda peer: median(rounds[peer], "peak_mb"))
    if median(rounds[OURS], "peak_mb") > median(rounds[lowest], "peak_mb"):
        found.append(
            f"{name}: {median(rounds[OURS], 'peak_mb'):.0f} MB at the peak, {lowest} has "
            f"{median(rounds[lowest], 'peak_mb'):.0f}"
        )
    return found


def table(found: Found) -> str:
    """Markdown: medians with their range, and the ratio of the medians."""
    lines = [
        "| cell | who | tokens for a second of CPU | ours to it | peak memory | last loss |",
        "|---|---|---|---|---|---|",
    ]
    for name, rounds in found.items():
        for variant, items in rounds.items():
            rates = [item["rate"] for item in items]
            ratio = median(rounds[OURS], "rate") / median(items, "rate")
            lines.append(
                f"| {name} | {variant} | {median(items, 'rate'):,.0f} ({min(rates):,.0f} to {max(rates):,.0f}) "
                f"| {'' if variant == OURS else f'{ratio:.2f}'} | {median(items, 'peak_mb'):,.0f} MB "
                f"| {items[-1]['loss']:.4f} |"
            )
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
