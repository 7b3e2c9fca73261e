"""The model, the rows and the plan of a cell on its device: the same for all who train it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from bench.gpu.cells import Cell
from bench.training import Prepared

SEED: Final = 17
RATE: Final = 1e-4


@dataclass(frozen=True)
class Work(Prepared):
    """A cell's. :param gang: this process, on its device."""

    cell: Cell
    gang: Any
    recipe: Any

    @property
    def timed_with_targets(self) -> tuple[int, int]:
        """Tokens of the steps that count, and those of them that are targets."""
        packs = [pack for step in range(self.cell.warm, self.plan.steps) for pack in self.plan.step(step)]
        return tuple(
            sum(int(part[pack].sum()) for pack in packs) for part in (self.tokens.lengths, self.tokens.targets)
        )  # type: ignore[return-value]


def prepare(cell: Cell) -> Work:
    """Make it all. Documents are of 200 to a whole row's tokens, and all but the first third of each is learned."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    from dropforge.recipes import load_recipe
    from trainer.config import Lora, read_settings
    from trainer.data.chat import Document
    from trainer.data.plan import Plan
    from trainer.data.tokens import collect
    from trainer.gang import gang_from_env
    from trainer.model.adapters import add_adapters
    from trainer.model.build import Built

    gang = gang_from_env(int(torch.cuda.is_available() and not cell.dry), {})
    recipe = load_recipe(
        "sample",
        {
            "base": {"scratch": {"config": cell.config}},
            "train": {
                "precision": "bf16",
                "attention": cell.attention,
                "compile": cell.compile,
                "activation_checkpointing": "full" if cell.recompute else "none",
                "sequence_length": cell.length,
                "tokens_per_step": cell.length * cell.rows,
                "micro_batch": cell.micro,
                "max_steps": cell.steps + cell.warm,
                "checkpoint_every": 1_000_000,
                "eval_every": 0,
                "learning_rate": RATE,
                "schedule": "constant",
                "warmup": 0.0,
                "weight_decay": 0.0,
            },
            "compute": {"processes_per_node": 1, "gpus": int(gang.device.type == "cuda")},
        },
    )
    settings = read_settings(recipe.plain())
    torch.manual_seed(SEED)
    with gang.device:
        model: Any = AutoModelForCausalLM.from_config(AutoConfig.for_model(**cell.config))  # type: ignore[no-untyped-call]
    model.config.use_cache = False
    built = add_adapters(model, Lora(16, 32, 0.0, "all-linear"), SEED) if cell.method == "lora" else Built(model)
    generator = np.random.default_rng(7)
    count = 3 * cell.rows * (cell.steps + cell.warm)
    sizes = np.clip(generator.lognormal(np.log(cell.length / 4), 0.8, count), cell.length / 20, cell.length)
    documents = [
        Document(
            index,
            generator.integers(5, cell.config["vocab_size"], size).astype(np.int32),
            np.arange(size) >= size // 3,
        )
        for index, size in enumerate(sizes.astype(int).tolist())
    ]
    tokens = collect(documents, {"rows": count})
    steps = cell.steps + cell.warm
    plan = Plan(tokens.lengths, tokens.targets, SEED, cell.length, cell.rows, True, 8.0, steps)
    return Work(cell, settings, built, tokens, plan, gang, recipe)


def settle(device: Any) -> None:
    """Wait until the device has done what it was asked."""
    import torch

    if device.type == "cuda":
        torch.cuda.synchronize(device)
