"""The sum of the loss over a micro-batch's targets, by the cheapest way that gives the model's own loss.

Three ways, cheapest first: hidden states of the target places with head and loss fused; the same with plain logits;
the model's own forward and loss. Softcaps and scaled heads make the first two wrong for some models,
so a check at the start compares them with the model's own loss and logits, and takes the first that agrees.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import product
from typing import Any, Final, Literal

import torch
from torch import nn
from torch.nn import functional

from dropforge.errors import DropforgeError, RecipeError
from trainer.data.batch import Batch
from trainer.model.build import context_of, is_classifier, is_seq2seq, takes_positions
from trainer.model.chunks import linear_cross_entropy
from trainer.model.mixture import balance_of, coefficient

Precision = Literal["fp32", "tf32", "bf16", "fp16"]
Way = Literal["fused", "places", "own"]
_NARROW: Final[dict[str, torch.dtype]] = {"bf16": torch.bfloat16, "fp16": torch.float16}
TOLERANCE: Final = 1e-4
_TF32_SINCE: Final = (8, 0)  # compute capability
_NEAR: Final = 0.25  # of the logarithm of the vocabulary's size
_PROBE: Final = 256  # tokens of a row that show which loss is the model's own


@contextmanager
def matrix_products(precision: Precision) -> Iterator[None]:
    """Within it, a GPU's tensor cores round what fp32 matrix products multiply to 10 bits if `precision` is `tf32`, and
    not if it is another; sums are fp32 either way.

    Products of the backward pass go by what holds while it runs.
    """
    before = torch.get_float32_matmul_precision()
    wanted = "high" if precision == "tf32" else "highest"
    if wanted != before:
        torch.set_float32_matmul_precision(wanted)
    try:
        yield
    finally:
        if wanted != before:
            torch.set_float32_matmul_precision(before)


def check_tf32(device: torch.device, precision: Precision, key: str) -> None:
    """:raises RecipeError: if the device cannot do what a key of the recipe asks for, and would compute in fp32."""
    if precision != "tf32" or (device.type == "cuda" and torch.cuda.get_device_capability(device) >= _TF32_SINCE):
        return
    what = f"a GPU of {torch.cuda.get_device_name(device)}" if device.type == "cuda" else "a CPU"
    raise RecipeError(f"recipe key `{key}`", f"{what} has no `tf32`", "Set `fp32`, or run on a GPU of 8.0 or later")


class LossModel(nn.Module):
    """A model and its loss as one module, so that DDP and FSDP see one forward.

    :param packed: whether rows hold several documents, kept apart by their positions.
    :param bf16: arithmetic of the forward pass; the loss itself is computed in fp32.
    :param masked: whether packed documents are kept apart by own masks as well, made from the positions.
    """

    router: torch.Tensor | None = None  # a mixture's, of the last forward pass, without its coefficient
    exact: str | None = None  # what attends in evaluation mode in fp32, where the model's own attention cannot

    def __init__(self, model: Any, packed: bool, bf16: bool = False, way: Way = "own", *, masked: bool = False) -> None:
        super().__init__()
        self.model = model
        self.packed = packed
        self.masked = packed and masked
        #: Arithmetic of the forward pass, by autocast; where shards are cast, their policy has another.
        self.precision: Precision = "bf16" if bf16 else "fp32"
        self.way: Way = way
        self.scale = 1.0  # of what stands below the head
        self.scales: tuple[float, ...] = (1.0,)  # that are tried

    @property
    def narrow(self) -> torch.dtype | None:
        """The 16-bit type of the forward pass; None in fp32 and tf32."""
        return _NARROW.get(self.precision)

    @contextmanager
    def without_dropout(self, precision: Precision) -> Iterator[None]:
        """Within it, passes are in evaluation mode and in this arithmetic."""
        training, before, attention = self.training, self.precision, self._attention()
        other = self.exact if precision not in _NARROW else None
        self.eval()
        self.precision = precision
        try:
            if other is not None:
                self.model.set_attn_implementation(other)
            with matrix_products(precision):
                yield
        finally:
            if other is not None:
                self.model.set_attn_implementation(attention)
            self.train(training)
            self.precision = before

    def like(self, model: Any) -> LossModel:
        """The same loss, in the weights' own arithmetic, of another copy of the model."""
        return LossModel(model, self.packed, False, self.way, masked=self.masked)

    def has_states(self) -> bool:
        """Whether there is a part below the head that can be asked by itself."""
        return _decoder(self.model) is not None

    def told(self, loss: torch.Tensor) -> torch.Tensor:
        """What is reported of a forward pass that gave `loss`: the text's part of it, apart from its graph."""
        return loss.detach()

    def place(self) -> tuple[torch.device, int]:
        """Where inputs go, and the rows of the embedding."""
        weight = self.model.get_input_embeddings().weight
        return weight.device, weight.shape[0]

    def _inputs(self, ids: torch.Tensor, positions: torch.Tensor) -> dict[str, Any]:
        # A cache makes models ignore that positions begin anew; a mask of ones hides the packing from them.
        inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
        if self.packed and takes_positions(self.model):
            inputs["position_ids"] = positions
        if self.masked:
            inputs["attention_mask"] = block_causal(positions, self._attention() != "sdpa")
        if coefficient(self.model.config):
            inputs["output_router_logits"] = False  # the router's loss is a training's, see `RouterLoss`
        return inputs

    def _pass(self, part: Any, inputs: dict[str, Any]) -> Any:
        """A forward pass of the model, or of what is below its head, in training."""
        return part(**inputs)

    def _attention(self) -> str:
        return str(self.model.config.get_text_config()._attn_implementation)

    def _rows(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows as the model takes them, without the padding that goes beyond its context."""
        context = context_of(self.model)
        width = ids.shape[1]
        if context is not None and width > context:  # rounded up; documents do not reach so far
            places = places // width * context + places % width
            ids, positions = ids[:, :context].contiguous(), positions[:, :context].contiguous()
        if self.packed and self._attention().startswith("flash"):
            # Its kernels for documents of many lengths take one row; each row begins a document, and so stays apart.
            ids, positions = ids.reshape(1, -1), positions.reshape(1, -1)
        return ids, positions, places

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, H) hidden states at `places`."""
        states = self._pass(_decoder(self.model), self._inputs(ids, positions))[0]
        return states.reshape(-1, states.shape[-1])[places]  # type: ignore[no-any-return]

    def logits(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, V) fp32 logits at `places`.

        For callers from outside: FSDP gathers weights around it as around `forward`, which must not do so twice.
        """
        return self._logits(*self._rows(ids, positions, places))

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with self._arithmetic(ids):
            if self.way != "own":
                found = self.model.get_output_embeddings()(self._hidden(ids, positions, places))
            elif not len(places) or "logits_to_keep" not in inspect.signature(self.model.forward).parameters:
                whole = self.model(**self._inputs(ids, positions)).logits
                found = whole.reshape(-1, whole.shape[-1])[places]
            else:  # whole logits take more memory than all the rest where the vocabulary is wide
                width = ids.shape[1]
                columns = torch.unique(places % width)
                some = self.model(**self._inputs(ids, positions), logits_to_keep=columns).logits
                if some.shape[1] != len(columns):
                    raise ValueError("it gives other logits than those asked for")
                index = places // width * len(columns) + torch.searchsorted(columns, places % width)
                found = some.reshape(-1, some.shape[-1])[index]
        return found.float()  # type: ignore[no-any-return]

    def next_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """(B, V) fp32 logits behind the last column, and the model's cache; for callers from outside, as `logits`.

        :param ids: (B, L) the columns that are new. :param positions: (B, L).
        :param mask: (B, columns so far) int64, 0 where a row's padding stands, which comes first.
        :param cache: what the call before returned, None at first; None is returned by models that keep none.
        """
        inputs: dict[str, Any] = {"input_ids": ids, "attention_mask": mask}
        known = inspect.signature(self.model.forward).parameters
        if "past_key_values" in known:
            inputs |= {"past_key_values": cache, "use_cache": True}
        if takes_positions(self.model):
            inputs["position_ids"] = positions
        if "logits_to_keep" in known:
            inputs["logits_to_keep"] = 1
        if coefficient(self.model.config):
            inputs["output_router_logits"] = False
        with self._arithmetic(ids):
            found = self.model(**inputs)
        return found.logits[:, -1].float(), getattr(found, "past_key_values", None)

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the loss over the targets, fp32; 0 without targets, and still a function of every weight."""
        ids, positions, places = self._rows(ids, positions, places)
        if self.way == "fused":
            head = self.model.get_output_embeddings()
            with self._arithmetic(ids):
                hidden = self._hidden(ids, positions, places)
            if len(targets):
                kind = self.narrow or torch.float32
                return linear_cross_entropy(hidden.to(kind), head.weight.to(kind), targets, head.bias)
            return head(hidden).sum()  # type: ignore[no-any-return]
        if self.way == "own" and len(targets):
            with self._arithmetic(ids):
                loss = self._own(ids, positions, places, targets)
            return loss.float() * len(targets)
        return functional.cross_entropy(self._logits(ids, positions, places), targets, reduction="sum")

    def _own(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """The mean of the loss over the targets, as the model itself has it."""
        labels = torch.full_like(ids, -100)
        labels.view(-1)[places + 1] = targets
        return self._pass(self.model, {**self._inputs(ids, positions), "labels": labels}).loss  # type: ignore[no-any-return]

    def check_row(self, batch: Batch) -> None:
        """Compare what is not a sum over targets with the model's own.

        :param batch: with targets. :raises RecipeError: if they differ.
        """

    def whole_rows(self, whole: bool) -> AbstractContextManager[None]:
        """Within it, what is a function of a row as a whole is left out, unless rows are `whole`."""
        del whole
        return nullcontext()

    def _arithmetic(self, ids: torch.Tensor) -> torch.autocast:
        return torch.autocast(ids.device.type, dtype=self.narrow or torch.bfloat16, enabled=self.narrow is not None)


class LabelLoss(LossModel):
    """A classifier and its loss: each row has one target, the number of its label; rows are padded at the right.

    Where a row ends is told by its place. What pools a row is the model's own forward, so that the model does in use
    what it does here.
    """

    def __init__(self, model: Any, bf16: bool = False) -> None:
        super().__init__(model, False, bf16)
        self._cached = "use_cache" in inspect.signature(model.forward).parameters

    def like(self, model: Any) -> LossModel:
        return LabelLoss(model)

    def states(self, ids: torch.Tensor) -> torch.Tensor:
        """(B * L, H) fp32 hidden states below the head, of rows without padding."""
        with self._arithmetic(ids):
            found = getattr(self.model, self.model.base_model_prefix)(input_ids=ids)[0]
        return found.reshape(-1, found.shape[-1]).float()  # type: ignore[no-any-return]

    def _mask(self, ids: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(B, L) 1 up to each row's place, 0 behind it; a row without a target is one of padding, and sees itself."""
        width = ids.shape[1]
        ends = torch.full((len(ids),), width - 1, device=ids.device)
        ends[places // width] = places % width
        return (torch.arange(width, device=ids.device) <= ends[:, None]).long()

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, labels) fp32 logits of the rows that have a place."""
        del positions
        inputs = {"input_ids": ids, "attention_mask": self._mask(ids, places)}
        if self._cached:
            inputs["use_cache"] = False  # type: ignore[assignment]
        with self._arithmetic(ids):
            found = self.model(**inputs).logits
        return found[places // ids.shape[1]].float()  # type: ignore[no-any-return]

    def forward(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        """Sum of the loss over rows with a label, fp32; 0 without one, and still a function of every weight."""
        logits = self._logits(*self._rows(ids, positions, places))
        return functional.cross_entropy(logits, targets, reduction="sum")

    @torch.no_grad()
    def check(self, batch: Batch) -> None:
        """Compare the loss with the model's own.

        :param batch: rows with a label each. :raises RecipeError: if the model learns by another one.
        """
        ids, positions, places = self._rows(batch.ids, batch.positions, batch.places)
        own = self.model(input_ids=ids, attention_mask=self._mask(ids, places), labels=batch.targets).loss
        mine, theirs = float(self(ids, positions, places, batch.targets)), float(own) * len(batch.targets)
        if not abs(mine - theirs) <= TOLERANCE * max(1.0, abs(theirs)):
            raise RecipeError(
                "recipe key `base.model`",
                f"its own loss is not the cross entropy of its labels ({theirs:.6g}, and that is {mine:.6g})",
                "Choose another model",
            )


@torch.no_grad()
def choose_way(loss: LossModel, batch: Batch) -> Way:
    """Set and return the cheapest way whose loss and logits agree with the model's own, in fp32.

    :param batch: any batch with targets; a part of it is used.
    :raises RecipeError: if the model learns by another loss than is measured.
    """
    from trainer.model.seq2seq import Seq2SeqLoss

    batch = shortened(batch)
    narrow = loss.narrow
    with loss.without_dropout("fp32"):
        if isinstance(loss, LabelLoss):
            loss.check(batch)
            return "own"
        inputs = (batch.ids, batch.positions, batch.places, batch.targets)
        loss.way = "own"
        own, logits = float(loss(*inputs)), loss.logits(*inputs[:3])
        if isinstance(loss, Seq2SeqLoss):
            loss.check(own, logits, batch.targets)
        head = loss.model.get_output_embeddings()
        ways: list[Way] = ["places"] if isinstance(head, nn.Module) and loss.has_states() else []
        # Chunks pay only where the vocabulary is wider than the hidden state. They make gradients before a loss scale
        # is known, which in fp16 are lost without it.
        wide = type(head) is nn.Linear and head.out_features > head.in_features
        if ways and wide and narrow is not torch.float16:
            ways.insert(0, "fused")
        for way, scale in product(ways, loss.scales):
            loss.way, loss.scale = way, scale
            same = torch.allclose(loss.logits(*inputs[:3]), logits, rtol=0, atol=TOLERANCE * _scale(logits))
            if same and abs(float(loss(*inputs)) - own) <= TOLERANCE * max(1.0, abs(own)):
                break
        else:
            loss.way, loss.scale = "own", 1.0
        loss.check_row(batch)
        return loss.way


def check_first_loss(nats: float, targets: int, vocabulary: int) -> None:
    """A new model knows nothing, so its loss is that of a guess among all tokens, the logarithm of their number.

    Seen were 0.94 to 1.11 of it, for widths of 16 to 4096.

    :param nats: loss summed over the targets.
    :raises DropforgeError: if it is not near that, so that weights were not made, or labels are not those of the ids.
    """
    expected, found = math.log(vocabulary), nats / max(1, targets)
    if targets and not abs(found - expected) <= _NEAR * expected:  # NaN is not near
        raise DropforgeError(
            "the new model",
            f"its loss before the first step is {found:.4g}, a guess among {vocabulary} tokens has {expected:.4g}",
            "Its weights were not made as they should be: report this with the log",
        )


def shortened(batch: Batch) -> Batch:
    """At most 2 rows of 256 tokens of a batch, with targets in them: whole logits of more would be gigabytes."""
    width = batch.ids.shape[1]
    keep = min(_PROBE, width)
    row, column = batch.places // width, batch.places % width
    if batch.paired:
        return _shortened_pairs(batch, row, column)
    if batch.labelled:
        return Batch(
            ids=batch.ids[:2, :keep].contiguous(),
            positions=batch.positions[:2, :keep].contiguous(),
            places=(row * keep + column.clamp(max=keep - 1))[row < 2],
            targets=batch.targets[row < 2],
            documents=batch.documents[row < 2],
            tokens=min(batch.tokens, 2 * keep),
            labelled=True,
        )
    near = column[row < 2]
    # From a little before the first target on: a row may begin with a long prompt.
    start = min(max(0, int(near.min()) - 32), width - keep) if len(near) else 0
    inside = (row < 2) & (column >= start) & (column < start + keep - 1)
    return Batch(
        ids=batch.ids[:2, start : start + keep].contiguous(),
        positions=batch.positions[:2, start : start + keep].contiguous(),
        places=(row * keep + column - start)[inside],
        targets=batch.targets[inside],
        documents=batch.documents[inside],
        tokens=min(batch.tokens, 2 * keep),
    )


def _shortened_pairs(batch: Batch, row: torch.Tensor, column: torch.Tensor) -> Batch:
    """The first tokens of the sources, and those of the targets."""
    border, half = batch.positions.shape[1], _PROBE // 2
    heads, tails = min(half, border), min(half, batch.ids.shape[1] - border)
    place = column - (border - 1)
    inside = (row < 2) & (place < tails)
    return Batch(
        ids=torch.cat([batch.ids[:2, :heads], batch.ids[:2, border : border + tails]], 1),
        positions=batch.positions[:2, :heads].contiguous(),
        places=(row * (heads + tails) + heads - 1 + place)[inside],
        targets=batch.targets[inside],
        documents=batch.documents[inside],
        tokens=min(batch.tokens, 2 * (heads + tails)),
    )


def loss_model(model: Any, packed: bool, bf16: bool = False, masked: bool = False) -> LossModel:
    """Wrap a model; rows are packed only if something keeps their documents apart, and those of classifiers and
    encoder-decoders never."""
    if is_classifier(model):
        return LabelLoss(model, bf16)
    if is_seq2seq(model):
        from trainer.model.seq2seq import Seq2SeqLoss

        return Seq2SeqLoss(model, bf16)
    if coefficient(model.config) and balance_of(model) is not None:
        from trainer.model.router import RouterLoss  # it is made of this module's loss

        return RouterLoss(model, packed and (masked or takes_positions(model)), bf16, masked=masked)
    return LossModel(model, packed and (masked or takes_positions(model)), bf16, masked=masked)


def block_causal(positions: torch.Tensor, additive: bool) -> torch.Tensor:
    """A mask that keeps the documents of packed rows apart, and each token from those after it.

    :param positions: (B, L); a document begins where they are 0.
    :param additive: for attention that adds the mask to its scores, where True would be a 1: 0 and the lowest fp32.
    :returns: (B, 1, L, L), True or 0 where a token (third dimension) sees another (fourth).
    """
    documents = (positions == 0).cumsum(-1)
    length = positions.shape[1]
    earlier = torch.ones(length, length, dtype=torch.bool, device=positions.device).tril()
    seen = (documents[:, None, :, None] == documents[:, None, None, :]) & earlier
    if not additive:
        return seen
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, torch.finfo(torch.float32).min)


def _decoder(model: Any) -> Any:
    """The part below the head, or None."""
    decoder = getattr(model, getattr(model, "base_model_prefix", "") or "-", None)
    return decoder if isinstance(decoder, nn.Module) and decoder is not model else None


def _scale(logits: torch.Tensor) -> float:
    return max(1.0, float(logits.abs().max())) if logits.numel() else 1.0
