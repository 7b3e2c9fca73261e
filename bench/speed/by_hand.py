"""A bare loop, written by hand for one model: no log, no check, no checkpoint. A ceiling, not a trainer."""

from __future__ import annotations

import time
from typing import Any

from bench.speed.work import BETAS, CLIP, RATE, Work


def train(work: Work) -> dict[str, Any]:
    """Seconds of CPU in the steps that count, their tokens, and the last loss."""
    import torch
    from torch.nn import functional

    from trainer.data.batch import make_batch

    model = work.built.model
    if work.cell.recompute:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, lr=RATE, betas=BETAS, weight_decay=0.0, fused=True)
    model.train()
    began = loss = 0.0
    for step in range(work.plan.steps):
        if step == work.cell.warm:
            began = time.process_time()
        batches = [make_batch(work.tokens, packs, 0) for packs in work.micro_batches(step)]
        targets = sum(len(batch.targets) for batch in batches)
        loss = 0.0
        for batch in batches:
            if work.cell.labelled:
                mask = torch.arange(batch.ids.shape[1]) <= batch.places[:, None] % batch.ids.shape[1]
                logits = model(input_ids=batch.ids, attention_mask=mask.long()).logits
                nats = functional.cross_entropy(logits, batch.targets, reduction="sum") / targets
            else:
                hidden = model.model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)[0]
                hidden = hidden.reshape(-1, hidden.shape[-1])[batch.places]
                head = model.lm_head.weight
                nats = functional.linear_cross_entropy(hidden, head, batch.targets, reduction="sum") / targets
            nats.backward()  # type: ignore[no-untyped-call]
            loss += nats.item()
        torch.nn.utils.clip_grad_norm_(weights, CLIP)
        optimizer.step()
        optimizer.zero_grad()
    return {"tokens": work.timed, "seconds": time.process_time() - began, "loss": loss}
