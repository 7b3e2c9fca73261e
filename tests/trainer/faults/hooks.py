"""Where the ranks of `trainer.launch` meet `inside`: called with each module of the trainer once it is imported."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from . import inside

_FILE = re.compile(r"checkpoints/step-(\d+)/\.?rank-\d+\.safetensors$")
_MANIFEST = re.compile(r"checkpoints/step-(\d+)/manifest\.json$")


def prepare(module: Any) -> None:
    if "RANK" in os.environ:
        inside.here()  # the first of these modules that a rank imports
    write = module.write_tokens

    def held(*arguments: Any) -> Any:
        inside.reach("prepare")
        return write(*arguments)

    module.write_tokens = held


def training(module: Any) -> None:
    export = module.export_model

    def held(*arguments: Any) -> Any:
        inside.reach("export")
        return export(*arguments)

    module.export_model = held


def loop(module: Any) -> None:
    made, evaluate, measure = module.Loop.__post_init__, module.Loop.evaluate, module.measure

    def named(loop: Any) -> None:
        made(loop)
        loop.step.keys = [bytes(key).hex() for key in loop.row_keys]

    def noted(loop: Any, when: str) -> Any:
        def held(*arguments: Any, **more: Any) -> Any:
            inside.reach("evaluation", loop.progress.step)
            return measure(*arguments, **more)

        module.measure = held
        return evaluate(loop, when)

    module.Loop.__post_init__, module.Loop.evaluate = named, noted


def store(module: Any) -> None:
    temporary, put_if_absent = module._temporary, module.FolderStore.put_if_absent

    def half(path: Path, data: Any) -> Any:
        found = _FILE.search(str(path))
        if found and inside.act("save", int(found[1])):
            path.parent.mkdir(parents=True, exist_ok=True)
            rest = path.parent / f".half-{path.name}"
            rest.write_bytes(bytes(data[: len(data) // 2]))
            inside.reach("save", int(found[1]))
            rest.unlink(missing_ok=True)  # whoever lives on writes it whole
        return temporary(path, data)

    def sealed(self: Any, key: str, data: bytes) -> Any:
        found = _MANIFEST.search(key)
        if found:
            inside.reach("seal", int(found[1]))
        return put_if_absent(self, key, data)

    module._temporary, module.FolderStore.put_if_absent = half, sealed


def step(module: Any) -> None:
    """The trace is of what a backward pass got, not of what the plan says."""
    take = module.Step.take

    def traced(self: Any, index: int, *arguments: Any) -> Any:
        inside.reach("step", index)
        rows: list[str] = []
        backward, optimize = self.wrapped.backward, self.optimizer.step

        def noted(batch: Any, scale: float, last: bool) -> Any:
            for document in np.unique(batch.documents.numpy()):
                rows.append(self.keys[int(self.tokens.rows[document])])
            harm = inside.act("loss", index)
            loss = backward(batch, float("nan") if harm else scale, last)
            return loss * float("nan") if harm == "nan-loss" else loss

        self.wrapped.backward = noted
        if inside.act("update", index) == "skip":
            self.optimizer.step = lambda: None
        try:
            result = take(self, index, *arguments)
        finally:
            self.wrapped.backward, self.optimizer.step = backward, optimize
        inside.seen(result.step, rows, result.nats is not None)
        return result

    module.Step.take = traced


HOOKS = {
    "trainer.tokenise": prepare,
    "trainer.training": training,
    "trainer.loop.loop": loop,
    "trainer.loop.step": step,
    "dropforge.store": store,
}
