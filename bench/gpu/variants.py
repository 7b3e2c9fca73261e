"""Who trains: our loop, a bare loop by hand, and transformers' Trainer, all in bf16 over the same packed rows."""

from __future__ import annotations

import os
import statistics
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.gpu.work import RATE, Work, settle
from bench.speed.hugging_face import flattened, silence
from bench.speed.work import BETAS, CLIP
from bench.training import make_loop


def ours(work: Work) -> dict[str, Any]:
    """Our loop, with all that it does in a step: log lines, checks and tracking included."""
    with TemporaryDirectory() as folder:
        loop, facts = _loop(work, folder)
        for _ in range(work.cell.warm):
            loop._step()
        settle(work.gang.device)
        began = time.perf_counter()
        while loop.progress.step < loop.steps:
            loop._step()
        settle(work.gang.device)
        return {"seconds": time.perf_counter() - began, "loss": loop.progress.loss_last, **facts}


def saves(work: Work) -> dict[str, Any]:
    """What a checkpoint takes from the training, saved beside it, against the same state saved in the step."""
    import torch

    with TemporaryDirectory() as folder:
        loop, facts = _loop(work, folder)
        for _ in range(work.cell.warm):
            loop._step()
        alone: list[float] = []
        beside: list[float] = []
        turn = 4
        while loop.progress.step + turn <= loop.steps:
            save = (loop.progress.step - work.cell.warm) // turn % 2 == 1
            settle(work.gang.device)
            began = time.perf_counter()
            if save:
                loop.saving.save(loop.progress.step, True)
            for _ in range(turn):
                loop._step()
            settle(work.gang.device)
            (beside if save else alone).append(time.perf_counter() - began)
            loop.saving.collect(loop.saving.saver.wait())
        state = {name: weight.detach() for name, weight in loop.wrapped.trainable()}
        moments = loop.optimizer.state_dict()
        settle(work.gang.device)
        began = time.perf_counter()
        torch.save({"model": state, "optimizer": moments}, Path(folder) / "whole.pt")
        whole = time.perf_counter() - began
        size = (Path(folder) / "whole.pt").stat().st_size
    stolen = statistics.median(beside) - statistics.median(alone)
    return {"saves": len(beside), "stolen_seconds": stolen, "in_the_step_seconds": whole, "bytes": size, **facts}


def _loop(work: Work, folder: str) -> tuple[Any, dict[str, Any]]:
    from trainer.assembly import examine
    from trainer.data.batch import make_batch
    from trainer.model.loss import choose_way, loss_model

    attention = examine(work.built, work.settings)
    loss = loss_model(work.built.model, attention.packs, masked=attention.masked)
    loss.precision, loss.exact = "bf16", attention.exact
    way = choose_way(loss, make_batch(work.tokens, work.plan.step(0)[:2], 0).to(work.gang.device))
    loop = make_loop(work, work.gang, loss, Path(folder))
    loop.start()
    loop.loss.train()
    return loop, {"attention": attention.name, "packing": attention.packing, "way": way}


def loop(work: Work) -> dict[str, Any]:
    """A bare loop, written by hand for one model: no log, no check, no checkpoint. A ceiling, not a trainer."""
    import torch
    from torch.nn import functional

    from trainer.data.batch import make_batch

    model, device = work.built.whole or work.built.model, work.gang.device
    if work.cell.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        if work.cell.method == "lora":
            model.enable_input_require_grads()
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    model.train()
    began = 0.0
    loss = torch.zeros((), device=device)
    for step in range(work.plan.steps):
        if step == work.cell.warm:
            settle(device)
            began = time.perf_counter()
        batches = [make_batch(work.tokens, packs, 0).to(device) for packs in work.micro_batches(step)]
        targets = sum(len(batch.targets) for batch in batches)
        loss = torch.zeros((), device=device)
        for batch in batches:
            with torch.autocast(device.type, torch.bfloat16):
                inner = work.built.model
                hidden = inner.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)[0]
                logits = inner.lm_head(hidden.reshape(-1, hidden.shape[-1])[batch.places])
            nats = functional.cross_entropy(logits.float(), batch.targets, reduction="sum") / targets
            nats.backward()  # type: ignore[no-untyped-call]
            loss += nats.detach()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    settle(device)
    return {"seconds": time.perf_counter() - began, "loss": float(loss)}


def trainer(work: Work) -> dict[str, Any]:
    """transformers' Trainer with its collator for rows without padding."""
    device = work.gang.device

    def clock() -> float:
        settle(device)
        return time.perf_counter()

    if work.cell.recompute and work.cell.method == "lora":
        work.built.whole.enable_input_require_grads()
    cpu = device.type == "cpu"
    more = {"learning_rate": RATE, "use_cpu": cpu, "bf16": True, "dataloader_pin_memory": not cpu}
    with TemporaryDirectory() as folder, silence():
        return flattened(work, folder, clock, **more)


VARIANTS = {"ours": ours, "loop": loop, "trainer": trainer, "saves": saves}


def measure(work: Work) -> dict[str, Any]:
    """A cell's figures, as JSON values: speed, share of the GPU's peak, memory measured and estimated."""
    import torch

    from dropforge.estimate import memory_of, shape_of
    from dropforge.recipes.load import build_recipe
    from trainer.report.flops import model_flops, peak_flops

    cuda = work.gang.device.type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats(work.gang.device)
    flops = model_flops(work.built.model, work.tokens.lengths)
    peak = peak_flops(work.gang.device_name, "bf16", os.environ)
    try:
        found = VARIANTS[work.cell.who](work)
    except torch.OutOfMemoryError as error:
        return {"problem": str(error).splitlines()[0]}
    if "seconds" in found:
        tokens, targets = work.timed_with_targets
        found |= {"tokens": tokens, "tokens_per_second": tokens / found["seconds"]}
        found["tflops"] = flops.of(tokens, targets) / found["seconds"] / 1e12
        found["mfu"] = None if peak is None else found["tflops"] * 1e12 / peak
    if cuda:
        found["peak_gb"] = torch.cuda.max_memory_allocated(work.gang.device) / 1e9
    shape = shape_of(work.recipe)
    if work.cell.who == "ours" and shape is not None:
        plain = work.recipe.plain()
        asked = {**plain, "base": {"model": "x"}, "train": {**plain["train"], "method": work.cell.method}}
        learned = float(work.tokens.targets.sum() / work.tokens.lengths.sum())
        found["estimated_gb"] = memory_of(build_recipe(asked), shape, work.cell.micro, learned).total / 1e9
    sys.stdout.flush()
    return found
