"""Our loop, with all that it does in a step: log lines, checks and tracking included."""

from __future__ import annotations

import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench.speed.work import Work
from bench.training import make_loop


def train(work: Work) -> dict[str, Any]:
    """Seconds of CPU in the steps that count, their tokens, and the last loss."""
    from trainer.data.batch import make_batch
    from trainer.gang import Gang
    from trainer.model.loss import choose_way, loss_model

    loss = loss_model(work.built.model, not work.cell.labelled, False)
    way = choose_way(loss, make_batch(work.tokens, work.plan.step(0)[:2], 0))
    with TemporaryDirectory() as folder:
        loop = make_loop(work, Gang(), loss, Path(folder))
        loop.start()
        loop.loss.train()
        for _ in range(work.cell.warm):
            loop._step()
        seen, began = loop.progress.tokens, time.process_time()
        while loop.progress.step < loop.steps:
            loop._step()
        seconds = time.process_time() - began
    return {"tokens": loop.progress.tokens - seen, "seconds": seconds, "loss": loop.progress.loss_last, "way": way}
