"""Time that a checkpoint steals from the training, against one copy of the state measured in the same process.

    python -m bench.checkpoint [--rounds 5] [--pairs 5] [--steps 10] [--hidden 512] [--folder DIR] [--threads 1]

The real loop trains a decoder of about 200 MB of state (weights and two moments in fp32). Blocks of steps without a
save alternate with blocks that begin with one and last at least until it has ended, so that drift meets both alike.
What a save steals is the time beyond that of as many steps without one. One copy is the median of seven copies of the
same tensors into memory that was written before, as the save has it. Each way to save runs in a fresh process, ways
interleaved:

    ours      the loop's save
    dcp       torch.distributed.checkpoint.async_save to a folder, with one stager that is kept
    trainer   what transformers' Trainer writes in the step: safetensors of the model, torch.save of the optimizer

Ends with 1 if the median of ours is over the bar. Run it on a machine that is quiet otherwise.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import training

WAYS = ("ours", "dcp", "trainer")
BAR = 1.5  # copies
LENGTH, ROWS, WARM = 32, 2, 3  # short steps: a difference of blocks must not drown in their length


def make_loop(folder: Path, hidden: int, threads: int) -> Any:
    """The loop over random rows, on the GPU if there is one."""
    import numpy as np
    import torch

    from dropforge.recipes import load_recipe
    from trainer.config import read_settings
    from trainer.data.batch import make_batch
    from trainer.data.chat import Document
    from trainer.data.plan import Plan
    from trainer.data.tokenizer import SPECIAL
    from trainer.data.tokens import collect
    from trainer.gang import gang_from_env
    from trainer.model.loss import choose_way, loss_model
    from trainer.model.scratch import make_scratch

    torch.set_num_threads(threads)
    gang = gang_from_env(0, {})
    scratch = {"hidden_size": hidden, "layers": 5, "heads": 8, "vocab_size": 2048, "context": LENGTH}
    train = {
        "sequence_length": LENGTH,
        "tokens_per_step": LENGTH * ROWS,
        "micro_batch": ROWS,
        "max_steps": 100_000,
        "checkpoint_every": 100_000,
    }
    settings = read_settings(load_recipe("sample", {"base": {"scratch": scratch}, "train": train}).plain())
    generator = np.random.default_rng(7)
    documents = [
        Document(index, generator.integers(5, 2048, LENGTH).astype(np.int32), np.arange(LENGTH) > 0)
        for index in range(64)
    ]
    tokens = collect(documents, {"rows": len(documents)})
    assert settings.base.scratch is not None
    built = make_scratch(settings.base.scratch, {token: index for index, token in enumerate(SPECIAL)}, 17)
    built.model.config.use_cache = False
    built.model.to(gang.device)
    chosen = settings.train
    plan = Plan(tokens.lengths, tokens.targets, chosen.seed, LENGTH, ROWS, True, 1.0, chosen.max_steps)
    loss = loss_model(built.model, True, False)
    choose_way(loss, make_batch(tokens, plan.step(0)[:2], 0).to(gang.device))
    return training.make_loop(training.Prepared(None, settings, built, tokens, plan), gang, loss, folder)


def saving(way: str, loop: Any, folder: Path) -> tuple[Callable[[], None], Callable[[], None], Callable[[], bool]]:
    """How this way begins a save, how it waits for the last one, and whether that is still going on."""
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

    from trainer.loop.optim import optimizer_tensors

    if way == "ours":

        def busy() -> bool:
            loop.saving.collect(loop.saving.saver.poll())  # as the loop does after each step
            return loop.saving.saver.step is not None

        return (
            lambda: loop.saving.save(loop.progress.step, True),
            lambda: loop.saving.collect(loop.saving.saver.wait()),
            busy,
        )
    flying: list[Any] = []
    cuda = loop.gang.device.type == "cuda"
    options = StagingOptions(
        use_pinned_memory=cuda, use_shared_memory=False, use_async_staging=False, use_non_blocking_copy=cuda
    )
    stager = DefaultStager(options)

    def land() -> None:
        if flying:
            flying.pop().result()

    def dcp_save() -> None:
        land()
        named = dict(loop.built.trainable())
        state = {f"weights/{name}": weight.detach() for name, weight in named.items()}
        state |= {f"moments/{name}": value for name, value in optimizer_tensors(loop.optimizer, named.items()).items()}
        path = folder / f"step-{loop.progress.step}"
        writer = dcp.filesystem.FileSystemWriter(path, sync_files=True)
        answer = dcp.state_dict_saver.async_save(state, storage_writer=writer, no_dist=True, async_stager=stager)
        flying.append(getattr(answer, "upload_completion", answer))

    def trainer_save() -> None:
        weights = {name: weight.detach().cpu().contiguous() for name, weight in loop.built.trainable()}
        path = folder / f"step-{loop.progress.step}"
        path.mkdir()
        save_file(weights, path / "model.safetensors", {"format": "pt"})
        torch.save(loop.optimizer.state_dict(), path / "optimizer.pt")

    if way == "dcp":
        return dcp_save, land, lambda: bool(flying) and not flying[0].done()
    return trainer_save, lambda: None, lambda: False


def one_copy(loop: Any) -> tuple[float, int]:
    """Median seconds of a copy of the state into host memory, and the state's bytes."""
    import torch

    from trainer.loop.optim import optimizer_tensors

    named = dict(loop.built.trainable())
    state = [weight.detach() for weight in named.values()]
    state += optimizer_tensors(loop.optimizer, named.items()).values()
    pinned = loop.gang.device.type == "cuda"
    places = [torch.zeros(value.shape, dtype=value.dtype, pin_memory=pinned) for value in state]
    seconds = []
    for _ in range(7):
        began = time.perf_counter()
        for place, value in zip(places, state, strict=True):
            place.copy_(value, non_blocking=True)
        if pinned:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return statistics.median(seconds), sum(value.nbytes for value in state)


def measure(way: str, options: argparse.Namespace) -> dict[str, float]:
    """What a save of one way steals, in this process."""
    with TemporaryDirectory(dir=options.folder) as place:
        folder = Path(place)
        loop = make_loop(folder, options.hidden, options.threads)
        loop.start()
        loop.loss.train()
        save, land, busy = saving(way, loop, folder)

        calls = []

        def block(with_save: bool) -> tuple[float, int]:
            began = time.perf_counter()
            if with_save:
                save()
                calls.append(time.perf_counter() - began)
            done = 0
            while done < options.steps or (with_save and busy()):
                loop._step()
                done += 1
            return time.perf_counter() - began, done

        for _ in range(WARM):
            loop._step()
        save()  # buffers and pages are made once in a run
        land()
        stolen, plain = [], []
        for pair in range(options.pairs):
            found = {with_save: block(with_save) for with_save in ((False, True), (True, False))[pair % 2]}
            land()
            plain.append(found[False][0] / found[False][1])
            stolen.append(found[True][0] - found[True][1] * plain[-1])
        copy, size = one_copy(loop)
    return {
        "stolen": statistics.median(stolen),
        "call": statistics.median(calls),
        "copy": copy,
        "megabytes": size / 1e6,
        "step": statistics.median(plain),
    }


def fresh(way: str, options: argparse.Namespace) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.checkpoint", "--one", way]
    for key in ("pairs", "steps", "hidden", "threads", "folder"):
        if getattr(options, key) is not None:
            command += [f"--{key}", str(getattr(options, key))]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads), "TRANSFORMERS_VERBOSITY": "error"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--folder")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options)))
        return 0
    results: dict[str, list[dict[str, float]]] = {way: [] for way in options.ways}
    for turn in range(options.rounds):
        for way in options.ways if turn % 2 == 0 else options.ways[::-1]:
            results[way].append(fresh(way, options))
    size = results[options.ways[0]][0]["megabytes"]
    print(f"{size:.0f} MB of state; what a save steals, in milliseconds and in copies of the state: median (range)")
    medians = {}
    for way, found in results.items():
        copies = [item["stolen"] / item["copy"] for item in found]
        medians[way] = statistics.median(copies)
        stolen = [1000 * item["stolen"] for item in found]
        middle = {key: 1000 * statistics.median(item[key] for item in found) for key in ("call", "copy", "step")}
        print(
            f"  {way:8} {statistics.median(stolen):6.0f} ({min(stolen):.0f} to {max(stolen):.0f})  "
            f"{medians[way]:6.2f} ({min(copies):.2f} to {max(copies):.2f})   "
            f"in the call {middle['call']:.0f}, copy {middle['copy']:.0f}, step {middle['step']:.0f}"
        )
    return int("ours" in medians and medians["ours"] > BAR)


if __name__ == "__main__":
    sys.exit(main())
