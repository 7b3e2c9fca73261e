"""What benches train: a model, rows and a plan that are the same for all who train them, and our loop over them."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Prepared:
    """
    :param cell: of the bench, if it has some. :param settings: as the trainer reads them from the recipe.
    :param built: the model, adapters injected.
    :param tokens: the documents, and :param plan: which of them stand together in which step.
    """

    cell: Any
    settings: Any
    built: Any
    tokens: Any
    plan: Any

    def micro_batches(self, step: int) -> list[list[Any]]:
        """The packs of each forward pass of a step, in the order in which ours takes them."""
        from trainer.data.balance import share

        return share(self.plan.step(step), self.tokens.lengths, 0, 1, self.settings.train.micro_batch)

    def documents(self, packs: list[Any]) -> list[dict[str, Any]]:
        """The same documents one by one, as peers take them."""
        found = []
        for index in (int(index) for pack in packs for index in pack):
            ids, trained = self.tokens.document(index)
            labels = (
                np.where(trained, ids, -100).tolist() if self.tokens.labels is None else int(self.tokens.labels[index])
            )
            found.append({"input_ids": ids.tolist(), "labels": labels})
        return found


def make_loop(work: Prepared, gang: Any, loss: Any, folder: Path) -> Any:
    """Our loop over it, with its logs, checks and tracking. :param folder: for checkpoints."""
    from dropforge.store import FolderStore
    from trainer.loop.loop import Loop
    from trainer.report.console import Console
    from trainer.report.tracking import Tracker
    from trainer.state.checkpoint import Checkpoints
    from trainer.state.stop import StopSignal

    return Loop(
        gang=gang,
        settings=work.settings,
        built=work.built,
        loss=loss,
        plan=work.plan,
        train=work.tokens,
        eval=work.tokens,
        pad=0,
        checkpoints=Checkpoints(FolderStore(folder), "bench", "p", {}),
        stop=StopSignal(),
        console=Console(quiet=True),
        tracker=Tracker(None, print),
    )
