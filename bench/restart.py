"""Time from the start of a process to its first step after a resume, at an early and at a very late step.

    python -m bench.restart [--rounds 5] [--steps 10 1000 100000] [--documents 20000]

It should not grow with the step: what was trained on before must not be gone through again. Documents are packed, an
epoch has more than a thousand steps, and the last of the steps lies many epochs on. The checkpoints are real ones whose
counters were set forward. Each measurement is a fresh process, interleaved; the clock starts before the interpreter.
Reading and tokenising the rows is left out on both sides: it knows nothing of steps. The peer is transformers' Trainer
on rows of the same length, which sets its samplers forward through all epochs and then skips batches. Needs the `bench`
extra (accelerate).

Ends with 1 if ours takes longer at the last step than at the first, by a fifth of the whole or half of the part after
the imports.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

WAYS = ("ours", "trainer")
WHOLE, PART = 1.2, 1.5  # of the time at the first step; beyond that it is not flat
LENGTH, ROWS, VOCABULARY = 128, 8, 512
LAST = 1_000_000  # steps of the run, far beyond those measured
_STARTED = "BENCH_STARTED"


def documents(count: int) -> Any:
    """Rows of 20 to 128 tokens, as prepared data has them."""
    import numpy as np

    from trainer.data.chat import Document
    from trainer.data.tokens import collect

    generator = np.random.default_rng(7)
    found = []
    for index in range(count):
        length = int(generator.integers(20, LENGTH + 1))
        ids = generator.integers(5, VOCABULARY, length).astype(np.int32)
        found.append(Document(index, ids, np.arange(length) > 0))
    return collect(found, {"rows": count})


def scratch() -> dict[str, Any]:
    return {"hidden_size": 64, "layers": 2, "heads": 2, "vocab_size": VOCABULARY, "context": LENGTH}


def ours(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """Make a checkpoint of a step, or go on from it."""
    import torch

    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore
    from trainer.config import read_settings
    from trainer.data.batch import make_batch
    from trainer.data.plan import Plan
    from trainer.data.tokenizer import SPECIAL
    from trainer.gang import Gang
    from trainer.loop.loop import Loop
    from trainer.model.loss import choose_way, loss_model
    from trainer.model.scratch import make_scratch
    from trainer.report.console import Console
    from trainer.report.tracking import Tracker
    from trainer.state.checkpoint import Checkpoints
    from trainer.state.stop import StopSignal

    torch.set_num_threads(1)
    import_module("transformers.models.llama.modeling_llama")  # else the clock of the part runs meanwhile
    train = {
        "sequence_length": LENGTH,
        "tokens_per_step": LENGTH * ROWS,
        "micro_batch": ROWS,
        "max_steps": LAST,
        "checkpoint_every": LAST,
        "schedule": "constant",
        "warmup": 0.0,
    }
    settings = read_settings(load_recipe("sample", {"base": {"scratch": scratch()}, "train": train}).plain())
    assert settings.base.scratch is not None
    tokens = documents(options.documents)
    began = time.time()
    built = make_scratch(settings.base.scratch, {token: index for index, token in enumerate(SPECIAL)}, 17)
    built.model.config.use_cache = False
    plan = Plan(tokens.lengths, tokens.targets, settings.train.seed, LENGTH, ROWS, True, 1.0, LAST)
    loss = loss_model(built.model, True, False)
    choose_way(loss, make_batch(tokens, plan.step(0)[:2], 0))
    loop = Loop(
        gang=Gang(),
        settings=settings,
        built=built,
        loss=loss,
        plan=plan,
        train=tokens,
        eval=tokens,
        pad=0,
        checkpoints=Checkpoints(FolderStore(folder), "bench", plan.digest("bench"), {}),
        stop=StopSignal(),
        console=Console(quiet=True),
        tracker=Tracker(None, print),
    )
    step = loop.resume()
    assert step == (None if options.make else options.step)
    loop.start()
    loop.loss.train()
    loop._step()
    if options.make:
        loop.progress.step = options.step
        loop.saving.begin()
        ended = loop.saving.saver.wait()
        assert ended is not None
        assert ended.error is None, ended.error
    return {"whole": time.time() - float(os.environ[_STARTED]), "part": time.time() - began}


def trainer(options: argparse.Namespace, folder: Path) -> dict[str, float]:
    """The same with transformers' Trainer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

    torch.set_num_threads(1)
    tokens = documents(options.documents)
    ids = torch.as_tensor(tokens.ids[: len(tokens.ids) // LENGTH * LENGTH].astype("int64")).view(-1, LENGTH)
    rows = [{"input_ids": row, "labels": row} for row in ids]
    began = time.time()
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=176,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    ended: list[float] = []

    class AfterOne(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
            ended.append(time.time())
            control.should_training_stop = True
            control.should_save = options.make
            return control

    arguments = TrainingArguments(
        output_dir=str(folder),
        max_steps=LAST,
        per_device_train_batch_size=ROWS,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
        lr_scheduler_type="constant",
        logging_strategy="no",
        seed=17,
    )
    peer = Trainer(model=LlamaForCausalLM(config), args=arguments, train_dataset=rows, callbacks=[AfterOne()])
    made = folder / f"checkpoint-{options.step}"
    peer.train(resume_from_checkpoint=None if options.make else str(made))
    if options.make:
        (folder / "checkpoint-1").rename(made)
        state = json.loads((made / "trainer_state.json").read_text())
        state["global_step"] = options.step
        (made / "trainer_state.json").write_text(json.dumps(state))
    else:
        assert peer.state.global_step == options.step + 1
    return {"whole": ended[0] - float(os.environ[_STARTED]), "part": ended[0] - began}


def fresh(way: str, step: int, folder: Path, count: int, make: bool = False) -> dict[str, float]:
    command = [sys.executable, "-m", "bench.restart", "--one", way, "--step", str(step), "--folder", str(folder)]
    command += ["--documents", str(count), *(["--make"] if make else [])]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "TRANSFORMERS_VERBOSITY": "error",
        _STARTED: repr(time.time()),
    }
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{way} at step {step} failed:\n{done.stderr[-3000:]}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, nargs="+", default=[10, 1000, 100_000])
    parser.add_argument("--documents", type=int, default=20_000)
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--one", choices=WAYS, help=argparse.SUPPRESS)
    parser.add_argument("--step", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--make", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps({"ours": ours, "trainer": trainer}[options.one](options, options.folder)))
        return 0
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    with TemporaryDirectory() as place:
        cells = [(way, step, Path(place) / f"{way}-{step}") for way in options.ways for step in options.steps]
        for way, step, folder in cells:
            fresh(way, step, folder, options.documents, make=True)
        for turn in range(options.rounds):
            for way, step, folder in cells if turn % 2 == 0 else cells[::-1]:
                found.setdefault((way, step), []).append(fresh(way, step, folder, options.documents))
    print("seconds from the start of the process to the end of the first step, and of these after the imports and data")
    middle = {}
    for way, step, _ in cells:
        whole, part = ([item[key] for item in found[way, step]] for key in ("whole", "part"))
        middle[way, step] = (statistics.median(whole), statistics.median(part))
        print(
            f"  {way:8} step {step:7,}  {middle[way, step][0]:6.2f} ({min(whole):.2f} to {max(whole):.2f})  "
            f"{middle[way, step][1]:6.2f} ({min(part):.2f} to {max(part):.2f})"
        )
    if "ours" not in options.ways:
        return 0
    first, last = middle["ours", min(options.steps)], middle["ours", max(options.steps)]
    flat = last[0] <= WHOLE * first[0] and last[1] <= PART * first[1]
    print("flat" if flat else f"NOT FLAT: {last[0] / first[0]:.2f} of the whole, {last[1] / first[1]:.2f} of the part")
    return int(not flat)


if __name__ == "__main__":
    sys.exit(main())
