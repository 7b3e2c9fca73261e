"""The loss of a mixture of experts as it is trained: that of the text, and that of the router."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

import torch

from dropforge.errors import RecipeError
from trainer.data.batch import Batch
from trainer.model.loss import LossModel, Way
from trainer.model.mixture import balance_of, balance_rows, chosen_of, coefficient, core_of
from trainer.node.device_errors import device_error

_CLOSE: Final = 1e-4  # as a part of the router's loss


class RouterLoss(LossModel):
    """The text's loss and, times its coefficient, the router's of each row, weighted by the row's targets.

    Logits, and so evaluations, know nothing of the router's.

    :param model: one whose config asks for it, see `trainer.model.mixture.settle_router`.
    """

    def __init__(self, model: Any, packed: bool, bf16: bool = False, way: Way = "own", *, masked: bool = False) -> None:
        super().__init__(model, packed, bf16, way, masked=masked)
        self.coefficient = coefficient(model.config)
        self._balance, self._chosen = balance_of(model), chosen_of(model)
        self._heard: tuple[torch.Tensor, ...] | None = None
        self._listens = False
        self._text: torch.Tensor | None = None

    def like(self, model: Any) -> LossModel:
        return RouterLoss(model, self.packed, False, self.way, masked=self.masked)

    def told(self, loss: torch.Tensor) -> torch.Tensor:
        return loss.detach() if self._text is None else self._text

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Sum over the targets of both losses, fp32; `router` and `told` have each of them by itself."""
        self._heard, self._listens = None, True
        try:
            with _coefficient(self.model, 0.0):  # else the model's own loss has the router's of the whole pass in it
                text = super().forward(ids, positions, places, targets)
        finally:
            self._listens = False
        heard, self._heard, self._text = self._heard, None, text.detach()
        if heard is None:  # the model's own way, without a target
            self.router = torch.zeros_like(self._text)
            return text
        assert self._balance is not None
        rows, width = ids.shape
        learned = torch.zeros(rows * width, dtype=torch.int64, device=ids.device)
        learned[places + 1] = 1
        wide = heard[0].numel() // heard[0].shape[-1] // rows  # less than `width` where the model's context ends
        router = balance_rows(heard, learned.view(rows, width)[:, :wide], self._balance, self._chosen)
        self.router = router.detach()
        return text + self.coefficient * router

    @contextmanager
    def whole_rows(self, whole: bool) -> Iterator[None]:
        """Within it, rows are halves of rows unless they are `whole`: of those the router's loss is another."""
        kept = self.coefficient
        self.coefficient = kept if whole else 0.0
        try:
            yield
        finally:
            self.coefficient = kept

    @torch.no_grad()
    def check_row(self, batch: Batch) -> None:
        """Compare both losses of one row with what the model itself makes of it.

        :raises RecipeError: if they are not the same, or the model does not tell.
        """
        width = batch.ids.shape[1]
        row = int(batch.places[0]) // width
        mine = batch.places // width == row
        columns, targets = batch.places[mine] % width, batch.targets[mine]
        end = int(columns.max()) + 2  # the last target is the last token
        ids, positions = batch.ids[row : row + 1, :end].contiguous(), batch.positions[row : row + 1, :end].contiguous()
        labels = torch.full_like(ids, -100)
        labels[0, columns + 1] = targets
        try:
            total = float(self(ids, positions, columns, targets))
            inputs = {**self._inputs(ids, positions), "labels": labels, "output_router_logits": True}
            with _coefficient(self.model, self.coefficient):
                own = self.model(**inputs)
            theirs, router = float(own.loss) * len(targets), float(own.aux_loss) * len(targets)
        except (RuntimeError, ValueError, TypeError, AttributeError, IndexError) as error:
            if device_error(error):
                raise
            raise _refused(self.model, " ".join(str(error).split())[:200]) from error
        if not abs(total - theirs) <= _CLOSE * max(1.0, abs(theirs)):  # NaN is no agreement
            raise _refused(self.model, f"its own loss of a row is {theirs:.6g}, and the sum of both is {total:.6g}")
        assert self.router is not None
        if not abs(float(self.router) - router) <= _CLOSE * abs(router):
            raise _refused(self.model, f"its own of a row is {router:.6g}, and that is {float(self.router):.6g}")

    def _pass(self, part: Any, inputs: dict[str, Any]) -> Any:
        if not self._listens:
            return super()._pass(part, inputs)
        found = part(**{**inputs, "output_router_logits": True})
        self._heard = tuple(found.router_logits)
        return found


@contextmanager
def _coefficient(model: Any, value: float) -> Iterator[None]:
    """Within it, the model's own forward multiplies its router's loss by another number."""
    core = core_of(model)
    kept = core.router_aux_loss_coef
    core.router_aux_loss_coef = value
    try:
        yield
    finally:
        core.router_aux_loss_coef = kept


def _refused(model: Any, cause: str) -> RecipeError:
    return RecipeError(
        "recipe key `train.router_loss`",
        f"the router's loss of {type(core_of(model)).__name__} cannot be taken of single rows ({cause})",
        "Set it to 0",
    )
