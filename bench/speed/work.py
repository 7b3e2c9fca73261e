"""The model, the rows and the plan of a cell: the same for all who train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.speed.cells import LENGTH, ROWS, Cell
from bench.training import Prepared

RATE, CLIP, BETAS, SEED = 1e-3, 1.0, (0.9, 0.95), 17
LABELS: Final = ("no", "yes", "perhaps")


@dataclass(frozen=True)
class Work(Prepared):
    """A cell's."""

    cell: Cell

    @property
    def timed(self) -> int:
        """Tokens of the steps that count."""
        steps = range(self.cell.warm, self.plan.steps)
        return sum(int(self.tokens.lengths[pack].sum()) for step in steps for pack in self.plan.step(step))


def lengths(cell: Cell, count: int, generator: np.random.Generator) -> Any:
    """(count,) tokens of each document.

    `short` are questions with an answer of a line, `middle` chats of some turns, `long` mostly short ones with a tail
    that fills a row.
    """
    if cell.mix == "short":
        return np.clip(generator.lognormal(3.9, 0.4, count), 20, 150).astype(np.int64)
    if cell.mix == "middle":
        return np.clip(generator.lognormal(4.6, 0.5, count), 40, 300).astype(np.int64)
    return np.clip(generator.lognormal(4.6, 1.0, count), 20, LENGTH).astype(np.int64)


def prepare(cell: Cell) -> Work:
    """Make it all; the second half of each document is its answer."""
    import torch

    from dropforge.recipes import load_recipe
    from trainer.config import Lora, read_settings
    from trainer.data.chat import Document
    from trainer.data.plan import Plan
    from trainer.data.tokenizer import SPECIAL
    from trainer.data.tokens import collect
    from trainer.model.adapters import add_adapters
    from trainer.model.scratch import make_scratch

    torch.set_num_threads(1)
    sizes: dict[str, Any] = {
        "hidden_size": 128,
        "layers": 4,
        "heads": 4,
        "vocab_size": cell.vocabulary,
        "context": LENGTH,
    }
    if cell.labelled:
        sizes["architecture"] = "distilbert"
    asked: dict[str, Any] = {
        "base": {"scratch": sizes},
        "train": {
            "sequence_length": LENGTH,
            "tokens_per_step": LENGTH * ROWS,
            "micro_batch": cell.micro,
            "max_steps": cell.steps + cell.warm,
            "checkpoint_every": 10_000,
            "eval_every": 0,
            "weight_decay": 0.0,
            "schedule": "constant",
            "warmup": 0.0,
            "learning_rate": RATE,
            "activation_checkpointing": "full" if cell.recompute else "none",
        },
    }
    if cell.labelled:
        asked |= {"task": "classification"}
    settings = read_settings(load_recipe("sample", asked).plain())
    generator = np.random.default_rng(7)
    documents = []
    for index, length in enumerate(lengths(cell, 1500, generator).tolist()):
        ids = generator.integers(5, cell.vocabulary, length).astype(np.int32)
        label = index % len(LABELS) if cell.labelled else None
        documents.append(Document(index, ids, np.arange(length) >= length // 2, label=label))
    tokens = collect(documents, {"rows": len(documents)}, labelled=cell.labelled)
    special = {token: index for index, token in enumerate(SPECIAL)}
    assert settings.base.scratch is not None
    built = make_scratch(settings.base.scratch, special, SEED, LABELS if cell.labelled else None)
    if cell.method == "lora":
        built = add_adapters(built.model, Lora(r=8, alpha=16, dropout=0.0, targets="all-linear"), SEED)
    if not cell.labelled:
        built.model.config.use_cache = False
    packed = not cell.labelled
    plan = Plan(tokens.lengths, tokens.targets, SEED, LENGTH, ROWS, packed, 1.0, cell.steps + cell.warm)
    if not packed:
        plan.rows = round(ROWS / plan.filled())
    return Work(cell, settings, built, tokens, plan)
