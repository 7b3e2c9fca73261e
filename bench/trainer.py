"""Ours against Hugging Face Trainer with its flattening collator: tokens per CPU-second and peak memory.

    python -m bench.trainer [--repeats 3] [--steps 12] [--vocab 2048 32768]

Same model from the same config, same chat rows as the same token lists, and the same number of tokens and of targets
in every optimizer step: ours packs documents into rows of 512, the peer gets exactly the documents of our step,
flattened into one row per micro-batch (its padding-free way). One thread, CPU time of the process, each variant in a
fresh process, variants interleaved; the clock starts after two warm-up steps. Needs the `bench` extra (accelerate).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import time
from typing import Any

VARIANTS = ("ours", "trainer")
LENGTH, ROWS, MICRO, WARM = 512, 8, 4, 2


def rows(vocab: int) -> Any:
    """Short chats: 40 to 300 tokens, the second half of each is the answer."""
    import numpy as np

    from trainer.data.chat import Document
    from trainer.data.tokens import collect

    generator = np.random.default_rng(7)
    documents = []
    for index in range(1500):
        length = int(np.clip(generator.lognormal(4.6, 0.5), 40, 300))
        trained = np.arange(length) >= length // 2
        documents.append(Document(index, generator.integers(5, vocab, length).astype(np.int32), trained))
    return collect(documents, {"rows": len(documents)})


def settings(vocab: int, steps: int) -> Any:
    from dropforge.recipes import load_recipe
    from trainer.config import read_settings

    scratch = {"hidden_size": 128, "layers": 4, "heads": 4, "vocab_size": vocab, "context": LENGTH}
    train = {
        "sequence_length": LENGTH,
        "tokens_per_step": LENGTH * ROWS,
        "micro_batch": MICRO,
        "max_steps": steps + WARM,
        "checkpoint_every": 10_000,
        "eval_every": 0,
        "weight_decay": 0.0,
        "schedule": "constant",
        "warmup": 0.0,
    }
    return read_settings(load_recipe("sample", {"base": {"scratch": scratch}, "train": train}).plain())


def prepare(vocab: int, steps: int) -> tuple[Any, Any, Any, Any]:
    """Settings, model, tokens and plan, the same for both variants."""
    import torch

    from trainer.data.plan import Plan
    from trainer.data.tokenizer import SPECIAL
    from trainer.model.scratch import make_scratch

    torch.set_num_threads(1)
    chosen = settings(vocab, steps)
    tokens = rows(vocab)
    built = make_scratch(chosen.base.scratch, {token: index for index, token in enumerate(SPECIAL)}, 17)
    built.model.config.use_cache = False
    train = chosen.train
    plan = Plan(tokens.lengths, tokens.targets, train.seed, LENGTH, ROWS, True, 1.0, train.max_steps)
    return chosen, built, tokens, plan


def ours(vocab: int, steps: int) -> dict[str, float]:
    """Our loop with everything it does in a step, console and tracking included."""
    from pathlib import Path
    from tempfile import TemporaryDirectory

    from dropforge.store import FolderStore
    from trainer.data.batch import make_batch
    from trainer.gang import Gang
    from trainer.loop.loop import Loop
    from trainer.model.loss import choose_way, loss_model
    from trainer.report.console import Console
    from trainer.report.tracking import Tracker
    from trainer.state.checkpoint import Checkpoints
    from trainer.state.stop import StopSignal

    chosen, built, tokens, plan = prepare(vocab, steps)
    loss = loss_model(built.model, True, False)
    way = choose_way(loss, make_batch(tokens, plan.step(0)[:2], 0))
    with TemporaryDirectory() as folder:
        loop = Loop(
            gang=Gang(),
            settings=chosen,
            built=built,
            loss=loss,
            plan=plan,
            train=tokens,
            eval=tokens,
            pad=0,
            checkpoints=Checkpoints(FolderStore(Path(folder)), "bench", "p", {}),
            stop=StopSignal(),
            console=Console(quiet=True),
            tracker=Tracker(None, print),
        )
        loop.start()
        loop.loss.train()
        for _ in range(WARM):
            loop._step()
        seen, began = loop.progress.tokens, time.process_time()
        while loop.progress.step < loop.steps:
            loop._step()
        seconds = time.process_time() - began
    assert loop.progress.loss_last is not None
    return {"tokens": loop.progress.tokens - seen, "seconds": seconds, "loss": loop.progress.loss_last, "way": way}  # type: ignore[dict-item]


def trainer(vocab: int, steps: int) -> dict[str, float]:
    """Hugging Face Trainer, DataCollatorWithFlattening, the documents of our steps in our order."""
    from tempfile import TemporaryDirectory

    import numpy as np
    import torch
    from transformers import DataCollatorWithFlattening, Trainer, TrainerCallback, TrainingArguments

    from trainer.data.balance import share

    chosen, built, tokens, plan = prepare(vocab, steps)

    class Groups(torch.utils.data.Dataset):  # type: ignore[type-arg]
        """One item per micro-batch: the documents of ours."""

        def __init__(self) -> None:
            self.items = []
            for step in range(plan.steps):
                for packs in share(plan.step(step), tokens.lengths, 0, 1, MICRO):
                    self.items.append([int(index) for pack in packs for index in pack])

        def __len__(self) -> int:
            return len(self.items)

        def __getitem__(self, index: int) -> list[dict[str, list[int]]]:
            found = []
            for document in self.items[index]:
                ids, trained = tokens.document(document)
                found.append({"input_ids": ids.tolist(), "labels": np.where(trained, ids, -100).tolist()})
            return found

    groups = Groups()
    flatten = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]

    class Clock(TrainerCallback):
        began = 0.0
        losses: list[float]

        def __init__(self) -> None:
            self.losses = []

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == WARM:
                self.began = time.process_time()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            if logs and "loss" in logs:
                self.losses.append(float(logs["loss"]))

    class Ordered(Trainer):
        def _get_train_sampler(self, *rest: Any) -> Any:
            return torch.utils.data.SequentialSampler(groups)

    clock = Clock()
    with TemporaryDirectory() as folder:
        peer = Ordered(
            model=built.model,
            args=TrainingArguments(
                output_dir=folder,
                per_device_train_batch_size=1,
                gradient_accumulation_steps=ROWS // MICRO,
                max_steps=plan.steps,
                learning_rate=chosen.train.learning_rate,
                lr_scheduler_type="constant",
                weight_decay=0.0,
                adam_beta2=0.95,
                max_grad_norm=chosen.train.clip,
                logging_steps=1,
                save_strategy="no",
                report_to=[],
                use_cpu=True,
                disable_tqdm=True,
                remove_unused_columns=False,
                dataloader_pin_memory=False,
            ),
            train_dataset=groups,
            data_collator=lambda items: flatten(items[0]),
            callbacks=[clock],
        )
        with open(os.devnull, "w") as null:  # noqa: PTH123 - it prints each log
            before, sys.stdout = sys.stdout, null
            peer.train()
            sys.stdout = before
        seconds = time.process_time() - clock.began
    seen = sum(int(tokens.lengths[pack].sum()) for step in range(WARM, plan.steps) for pack in plan.step(step))
    return {"tokens": seen, "seconds": seconds, "loss": clock.losses[-1]}


def measure(variant: str, vocab: int, steps: int) -> dict[str, Any]:
    """Run one variant in this process."""
    found = {"ours": ours, "trainer": trainer}[variant](vocab, steps)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {**found, "rate": found["tokens"] / found["seconds"], "peak_mb": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--vocab", type=int, nargs="+", default=[2048, 32768])
    parser.add_argument("--one", choices=VARIANTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(options.one, options.vocab[0], options.steps)))
        return
    for vocab in options.vocab:
        results: dict[str, list[dict[str, Any]]] = {variant: [] for variant in VARIANTS}
        for repeat in range(options.repeats):
            for variant in VARIANTS if repeat % 2 == 0 else VARIANTS[::-1]:
                results[variant].append(fresh(variant, vocab, options.steps))
        report(vocab, results)


def fresh(variant: str, vocab: int, steps: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "bench.trainer", "--one", variant, "--vocab", str(vocab), "--steps", str(steps)]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"{variant} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def report(vocab: int, results: dict[str, list[dict[str, Any]]]) -> None:
    print(f"\nvocabulary {vocab}: non-padding tokens per CPU-second (min / median / max), peak memory, last loss")
    medians = {}
    for variant, found in results.items():
        rates = sorted(item["rate"] for item in found)
        medians[variant] = statistics.median(rates)
        memory = statistics.median(item["peak_mb"] for item in found)
        print(
            f"  {variant:8} {rates[0]:8.0f} /{medians[variant]:8.0f} /{rates[-1]:8.0f}   {memory:6.0f} MB   "
            f"loss {found[-1]['loss']:.4f}   {found[-1]['tokens']:.0f} tokens   {found[-1].get('way', '')}"
        )
    print(f"  ratio of medians: {medians['ours'] / medians['trainer']:.2f}")


if __name__ == "__main__":
    main()
