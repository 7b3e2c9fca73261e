"""What a training loop costs by itself: CPU microseconds of a step around a model that does next to nothing.

    python -m bench.overhead [--rounds 5] [--steps 400] [--rows 2] [--length 32] [--threads 1]

The model is one weight; its loss is the weight times the number of targets. What is left is making batches, forward and
backward of that one weight, clipping, fused AdamW, the schedule, checks and a log line each ten steps, written to
nowhere. Steps of one and of four micro-batches, the same rows for both, after fifty steps that do not count. Each way
runs in a fresh process, ways interleaved:

    ours      the loop, with its observers
    trainer   transformers' Trainer

CPU time and not wall time, because other load of the machine must not decide. Ends with 1 if the median of ours is not
below Trainer's.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from contextlib import redirect_stdout
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any

WAYS = ("ours", "trainer")
MICRO_BATCHES = (1, 4)
VOCABULARY, WARM, LOG = 512, 50, 10


def ours(options: argparse.Namespace, folder: str) -> float:
    """Microseconds of a step of our loop."""
    import numpy as np
    import torch
    from torch import nn

    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore
    from trainer.config import read_settings
    from trainer.data.chat import Document
    from trainer.data.plan import Plan
    from trainer.data.tokens import collect
    from trainer.gang import Gang
    from trainer.loop.loop import Loop
    from trainer.loop.progress import Progress
    from trainer.loop.step import StepResult
    from trainer.measure import Measured
    from trainer.model.build import Built
    from trainer.report.console import Console
    from trainer.report.tracking import Tracker
    from trainer.state.checkpoint import Checkpoints
    from trainer.state.stop import StopSignal

    class Empty(nn.Module):
        packed, bf16, way = True, False, "own"

        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))
            self.config = SimpleNamespace(use_cache=False)

        def forward(self, ids: Any, positions: Any, places: Any, targets: Any) -> Any:
            return self.weight.sum() * len(targets)

    class Times:
        def __init__(self) -> None:
            self.marks: dict[int, float] = {}

        def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
            if progress.step in (WARM, options.steps + WARM):
                self.marks[progress.step] = time.process_time()

    rows = options.rows * options.one[1]
    train = {
        "sequence_length": options.length,
        "rows_per_step": rows,
        "tokens_per_step": None,
        "micro_batch": options.rows,
        "max_steps": options.steps + WARM,
        "log_every": LOG,
        "checkpoint_every": 1_000_000,
    }
    scratch = {"hidden_size": 16, "layers": 1, "heads": 1, "vocab_size": VOCABULARY, "context": options.length}
    settings = read_settings(load_recipe("sample", {"base": {"scratch": scratch}, "train": train}).plain())
    generator = np.random.default_rng(7)
    documents = [
        Document(
            index, generator.integers(5, VOCABULARY, options.length).astype(np.int32), np.arange(options.length) > 0
        )
        for index in range(1024)
    ]
    tokens = collect(documents, {"rows": len(documents)})
    plan = Plan(
        tokens.lengths, tokens.targets, settings.train.seed, options.length, rows, True, 1.0, settings.train.max_steps
    )
    times, model = Times(), Empty()
    loop = Loop(
        gang=Gang(),
        settings=settings,
        built=Built(model),
        loss=model,  # type: ignore[arg-type]
        plan=plan,
        train=tokens,
        eval=tokens,
        pad=0,
        checkpoints=Checkpoints(FolderStore(Path(folder)), "bench", "p", {}),
        stop=StopSignal(),
        console=Console(steps=plan.steps),
        tracker=Tracker(None, print),
        observers=[times],
    )
    assert loop.batching.accumulation == options.one[1]
    loop.evaluate = lambda when: Measured(1, 1, 1.0, 1.0, None)  # type: ignore[method-assign]
    loop._finished = lambda: loop.progress.step >= plan.steps  # type: ignore[method-assign]
    loop.start()
    loop.run()
    return float((times.marks[options.steps + WARM] - times.marks[WARM]) / options.steps * 1e6)


def trainer(options: argparse.Namespace, folder: str) -> float:
    """Microseconds of a step of transformers' Trainer."""
    import torch
    from torch import nn
    from transformers import Trainer, TrainerCallback, TrainingArguments

    class Empty(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, input_ids: Any = None, attention_mask: Any = None, labels: Any = None) -> Any:
            return {"loss": self.weight.sum() * labels.numel()}

    class Times(TrainerCallback):
        marks: dict[int, float] = {}  # noqa: RUF012

        def on_step_end(self, args: Any, state: Any, control: Any, **options_: Any) -> None:
            if state.global_step in (WARM, options.steps + WARM):
                self.marks[state.global_step] = time.process_time()

    generator = torch.Generator().manual_seed(7)
    rows = torch.randint(5, VOCABULARY, (1024, options.length), generator=generator).tolist()
    data = [{"input_ids": row, "labels": row} for row in rows]
    arguments = TrainingArguments(
        folder,
        per_device_train_batch_size=options.rows,
        gradient_accumulation_steps=options.one[1],
        max_steps=options.steps + WARM,
        logging_steps=LOG,
        save_strategy="no",
        report_to=[],
        disable_tqdm=True,
        optim="adamw_torch_fused",
        lr_scheduler_type="cosine",
        max_grad_norm=1.0,
        use_cpu=True,
    )
    times = Times()
    Trainer(Empty(), arguments, train_dataset=data, callbacks=[times]).train()
    return float((times.marks[options.steps + WARM] - times.marks[WARM]) / options.steps * 1e6)


def measure(options: argparse.Namespace) -> float:
    import torch

    torch.set_num_threads(options.threads)
    with TemporaryDirectory() as folder, Path(os.devnull).open("w") as nowhere, redirect_stdout(nowhere):
        return {"ours": ours, "trainer": trainer}[options.one[0]](options, folder)


def fresh(way: str, micro_batches: int, options: argparse.Namespace) -> float:
    command = [sys.executable, "-m", "bench.overhead", "--one", way, str(micro_batches)]
    for key in ("steps", "rows", "length", "threads"):
        command += [f"--{key}", str(getattr(options, key))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
    return float(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--rows", type=int, default=2, help="rows of a micro-batch")
    parser.add_argument("--length", type=int, default=32, help="tokens of a row")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        options.one = (options.one[0], int(options.one[1]))
        print(json.dumps(measure(options)))
        return 0
    results: dict[tuple[str, int], list[float]] = {(way, count): [] for count in MICRO_BATCHES for way in WAYS}
    for turn in range(options.rounds):
        for key in list(results) if turn % 2 == 0 else list(results)[::-1]:
            results[key].append(fresh(*key, options))
    print(f"CPU microseconds of a step around an empty model, {options.rounds} rounds: median (range)")
    medians = {}
    for (way, count), found in results.items():
        medians[way, count] = statistics.median(found)
        print(f"  {count} micro-batch(es)  {way:8} {medians[way, count]:8.0f} ({min(found):.0f} to {max(found):.0f})")
    missed = [count for count in MICRO_BATCHES if medians["ours", count] >= medians["trainer", count]]
    for count in missed:
        print(f"missed: with {count} micro-batch(es) a step of ours takes longer than Trainer's")
    return int(bool(missed))


if __name__ == "__main__":
    sys.exit(main())
