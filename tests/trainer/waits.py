"""What makes a processor wait for a device: reading a tensor's values, counted where the trainer does it."""

from __future__ import annotations

import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from trainer.gang import Gang

from .ranks_loop import Stage, make_loop

_READING = ("item", "tolist", "cpu", "numpy", "__float__", "__bool__", "__int__", "nonzero")


def reads_of_steps(
    stage: Stage, packs: bool, monkeypatch: pytest.MonkeyPatch, steps: int = 1
) -> dict[int, list[Counter[str]]]:
    """For steps of one micro-batch of 8 rows, and of four of 2, what each of the steps behind the first one reads."""
    seen: Counter[str] = Counter()
    for name in _READING:
        own = getattr(torch.Tensor, name)

        def counted(self: Any, *args: Any, own: Any = own, name: str = name) -> Any:
            # transformers looks at each micro-batch's positions, to see whether several documents are in a row.
            if "transformers" not in Path(sys._getframe(1).f_code.co_filename).parts:
                seen[name] += 1
            return own(self, *args)

        monkeypatch.setattr(torch.Tensor, name, counted)
    found: dict[int, list[Counter[str]]] = {}
    for micro in (8, 2):
        loop = make_loop(Gang(), stage.change(micro_batch=micro), packs)
        loop.start()
        loop._step()
        assert loop.batching.accumulation == 8 // micro
        found[micro] = []
        for _ in range(steps):
            seen.clear()
            loop._step()
            found[micro].append(Counter(seen))
    return found
