"""How a model attends, and how its rows are packed: chosen per model, precision and device, tried, and recorded.

Packed documents are kept apart in one of two ways. By position ids alone, without a mask and without a cache: the
library then makes each layer's mask itself, sliding windows and chunks included. Or by own block-causal masks, for
models that know no such positions; a layer with a window would silently lose it under such a mask, so those models
are padded instead. Which of them holds is decided by `trainer.model.isolation` on the model itself.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import Any, Final, Literal

import torch

from dropforge.errors import DropforgeError, RecipeError
from trainer.config import AttentionName
from trainer.gang import Gang
from trainer.model.build import context_of, is_classifier, is_seq2seq
from trainer.model.isolation import TOLERANCE, Isolation, check_isolation
from trainer.model.loss import LabelLoss, LossModel, Precision, loss_model
from trainer.model.seq2seq import Seq2SeqLoss
from trainer.node.device_errors import device_error

Packing = Literal["positions", "mask", "padded"]
ON_GPU: Final = ("flash_attention_2", "flex_attention")  # neither has a backward pass on a CPU
_HALF: Final = "flash_attention_2"  # has no arithmetic but that of 16 bits
_KEY: Final = "recipe key `train.attention`"
_PLAIN: Final = 64  # tokens that show what an implementation leaves out, as soft-capping


@dataclass(frozen=True)
class Attention:
    """What was chosen.

    :param name: the implementation as the library names it, read from the model and not from the request.
    :param packing: how documents of a row are kept apart; `padded` rows hold one each.
    :param deviation: largest difference of its logits from eager attention's, as a part of the largest logit; None
        where nothing was compared.
    :param passed_over: implementations that `auto` did not take, each with the reason.
    :param exact: what attends in passes in fp32, where `name` cannot; see `LossModel.exact`.
    """

    name: str
    packing: Packing
    isolation: Isolation
    deviation: float | None = None
    passed_over: tuple[str, ...] = ()
    exact: str | None = None

    @property
    def packs(self) -> bool:
        return self.packing != "padded"

    @property
    def masked(self) -> bool:
        """Whether own masks keep the documents apart."""
        return self.packing == "mask"

    def plain(self) -> dict[str, Any]:
        """For the report, as JSON values."""
        found = {"attention": self.name, "by": self.packing, **asdict(self.isolation), "deviation": self.deviation}
        found["in_fp32"] = self.exact
        kept = {key: value for key, value in found.items() if value is not None and value != math.inf}
        return kept | {"passed_over": list(self.passed_over)}

    def __str__(self) -> str:
        compared = "" if self.deviation is None else f", {self.deviation:.1e} from eager"
        over = f"; skipped {'; '.join(self.passed_over)}" if self.passed_over else ""
        by = {"positions": "rows packed by position ids", "mask": "rows packed by own masks", "padded": "rows padded"}
        exact = f", in fp32 {self.exact}" if self.exact else ""
        return f"{self.name}{compared}{exact}, {by[self.packing]}{over}"


def choose(
    model: Any, *, asked: AttentionName, precision: Precision, length: int, pack: bool, deterministic: bool = False
) -> Attention:
    """Set the model's attention and decide how rows are packed.

    :param model: in fp32 and on its device. :param asked: what the recipe names; `auto` takes the first that is sound.
    :param length: longest row in tokens. :param pack: whether the recipe allows packing.
    :raises RecipeError: if what the recipe names is not what would run, or computes something else than eager.
    """
    device = model.get_input_embeddings().weight.device
    reference, default = _reference(model), _name(model)
    passed_over: list[str] = []
    for name in candidates(asked, default, precision, device, deterministic):
        reason = _refusal(name, precision, device, deterministic) or _switch(model, name)
        bf16 = name in ON_GPU and precision == "bf16"
        deviation = None
        if not reason and reference is not None and name != "eager":
            deviation = _deviation(_plain_logits(model, bf16), reference)
            if not deviation <= (5e-2 if bf16 else TOLERANCE):  # NaN is no agreement
                reason = (
                    f"its logits differ from eager attention's by {deviation:.2g}: it leaves out a part of this model"
                )
        if not reason:
            found = _packing(model, name, length, pack, bf16, deviation, tuple(passed_over))
            exact = _exact(model, found, length, pack, (default, "eager"), reference) if name == _HALF else None
            if name != _HALF or exact is not None:
                return replace(found, exact=exact)
            reason = f"nothing else keeps documents apart {found.packing!r} in fp32, for checks and evaluations"
        if asked != "auto":
            raise RecipeError(_KEY, f"{type(model).__name__} does not run `{asked}`: {reason}", "Use `auto`")
        passed_over.append(f"{name}: {reason}")
    raise RecipeError(_KEY, f"no attention works: {'; '.join(passed_over)}", "Choose another model")


def candidates(
    asked: AttentionName, default: str, precision: Precision, device: torch.device, deterministic: bool
) -> tuple[str, ...]:
    """Implementations in the order in which they are tried. :param default: what the library takes by itself."""
    if asked != "auto":
        return (asked,)
    flash = not _refusal(_HALF, precision, device, deterministic)
    return tuple(dict.fromkeys((*([_HALF] if flash else []), default, "eager")))


def windowed(config: Any) -> bool:
    """Whether a layer sees only a window or a chunk of its row, or none of it: an own mask would say otherwise."""
    for part in (config, config.get_text_config()):  # a composite model keeps its decoder's settings apart
        if getattr(part, "sliding_window", None) or getattr(part, "attention_chunk_size", None):
            return True
        if any(kind != "full_attention" for kind in getattr(part, "layer_types", None) or ()):
            return True
    return False


def agree_packing(gang: Gang, attention: Attention) -> Attention:
    """What all ranks do: if one of them pads, or packs otherwise, all pad. All ranks take part.

    :raises DropforgeError: if their implementations differ.
    """
    everyone = gang.gather((attention.name, attention.packing, attention.isolation.reason))
    names = [name for name, _, _ in everyone]
    if len(set(names)) > 1:
        raise DropforgeError(
            "the ranks",
            f"they attend differently: {', '.join(names)}",
            "Run the same image on all nodes, or name one in `train.attention`",
        )
    if len({packing for _, packing, _ in everyone}) == 1:
        return attention
    rank = next(rank for rank, found in enumerate(everyone) if found[1] != "positions")
    reason = everyone[rank][2] or "it packs by own masks"
    isolation = replace(attention.isolation, packs=False, reason=f"rank {rank} cannot do as the others ({reason})")
    return replace(attention, packing="padded", isolation=isolation)


def _exact(
    model: Any, chosen: Attention, length: int, pack: bool, names: tuple[str, ...], reference: torch.Tensor | None
) -> str | None:
    """What attends in fp32 on the same rows as `chosen`, which only knows 16 bits; None if nothing does."""
    for name in dict.fromkeys(names):
        if name in ON_GPU or _switch(model, name):
            continue
        sound = name == "eager" or reference is None or _deviation(_plain_logits(model, False), reference) <= TOLERANCE
        found = sound and _packing(model, name, length, pack, False, None, ())
        _switch(model, chosen.name)
        if found and found.packing == chosen.packing:
            return name
    return None


def _packing(
    model: Any, name: str, length: int, pack: bool, bf16: bool, deviation: float | None, over: tuple[str, ...]
) -> Attention:
    if is_classifier(model):
        isolation = Isolation(False, 0.0, "a classifier reads one document a row")
        return Attention(name, "padded", isolation, deviation, over)
    if is_seq2seq(model):
        isolation = Isolation(False, 0.0, "an encoder-decoder reads one source and writes one target a row")
        return Attention(name, "padded", isolation, deviation, over)
    if not pack:
        return Attention(name, "padded", Isolation(False, 0.0, "as the recipe sets it"), deviation, over)
    found = check_isolation(LossModel(model, True, bf16), length)
    if found.packs or name in ON_GPU or windowed(model.config):
        return Attention(name, "positions" if found.packs else "padded", found, deviation, over)
    masked = check_isolation(LossModel(model, True, bf16, masked=True), length)
    if masked.packs:
        return Attention(name, "mask", masked, deviation, over)
    reason = f"by position ids: {found.reason}; by own masks: {masked.reason}"
    return Attention(name, "padded", replace(found, reason=reason), deviation, over)


def _refusal(name: str, precision: Precision, device: torch.device, deterministic: bool) -> str:
    """Why an implementation cannot run here, whatever the model; empty if it can."""
    if name not in ON_GPU:
        return ""
    if device.type != "cuda":
        return "it needs a GPU"
    if name == "flex_attention":
        return "it is not known to be deterministic" if deterministic else ""
    from transformers.utils.import_utils import is_flash_attn_2_available

    if precision != "bf16":
        return "it needs `train.precision: bf16`"
    return "" if is_flash_attn_2_available() else "the package flash-attn is not installed"


def _switch(model: Any, name: str) -> str:
    """Have the model attend so; why it does not, or empty."""
    if _name(model) == name:
        return ""
    try:
        model.set_attn_implementation(name)
    except (ValueError, ImportError) as error:
        return " ".join(str(error).split())[:200]
    ran = _name(model)
    return "" if ran == name else f"the library runs `{ran}` instead"


def _name(model: Any) -> str:
    """What the model's decoder runs, by its own word."""
    return str(model.config.get_text_config()._attn_implementation)


@torch.no_grad()
def _plain_logits(model: Any, bf16: bool) -> torch.Tensor:
    """(64, V) logits of one document, or its (64, H) hidden states where a head would make one of them all."""
    weight = model.get_input_embeddings().weight
    generator = torch.Generator().manual_seed(0)
    context = context_of(model) or _PLAIN
    ids = torch.randint(0, weight.shape[0], (1, min(_PLAIN, context)), generator=generator).to(weight.device)
    training = model.training
    model.eval()
    try:
        loss = loss_model(model, False, bf16)
        if isinstance(loss, LabelLoss):
            return loss.states(ids)
        if isinstance(loss, Seq2SeqLoss):
            return loss.alone(ids)
        places = torch.arange(ids.numel(), device=ids.device)
        return loss.logits(ids, places[None], places)
    finally:
        model.train(training)


def _reference(model: Any) -> torch.Tensor | None:
    """Logits of eager attention, the plain formula; None where the model cannot be asked for it."""
    before = _name(model)
    if _switch(model, "eager"):
        return None
    try:
        return _plain_logits(model, False)
    except (RuntimeError, ValueError, TypeError, NotImplementedError) as error:
        if device_error(error):
            raise
        return None
    finally:
        _switch(model, before)


def _deviation(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max()) / max(1.0, float(expected.abs().max()))
