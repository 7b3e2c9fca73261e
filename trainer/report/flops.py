"""Model FLOPs: the floating-point operations that a training needs, whatever the program spends, and peaks of devices.

A weight of a matrix costs 2 per token forward, 2 for the gradient of its input and 2 for its own: 6 if it is trained,
4 if it is frozen above a trained one, 2 below all of them. Attention costs 4 per token, token of its context and width
forward, and 8 backward; as in PaLM's definition of MFU (https://arxiv.org/abs/2204.02311, appendix B) the causal half
is not left out, but the context is that of the document, not of the row. Embeddings are looked up and cost nothing.
The head is counted for targets only: other tokens need no logits. What is computed again to save memory counts once.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray
from torch import nn

from trainer.model.quantised import Nf4Linear

PEAK_VARIABLE: Final = "DROPFORGE_PEAK_TFLOPS"
_LAYER: Final = re.compile(r"\.(\d+)\.")
_EXPERTS: Final = re.compile(r"\.experts\.")
_DECODER: Final = re.compile(r"\.decoder\.")
_CROSS: Final = re.compile(r"\.(EncDecAttention\.[kv]|encoder_attn\.[kv]_proj)\.")  # they read the encoder's states

# By the name that CUDA tells: dense bf16 with sums in fp32, and fp32 without tensor cores, in TFLOPS of the vendors'
# data sheets. None where there is no such arithmetic. The first pattern that fits counts.
PEAKS: Final[tuple[tuple[str, float | None, float | None], ...]] = (
    (r"\bGB200\b", 2500.0, None),
    (r"\bB200\b", 2250.0, None),
    (r"\bGH200\b|\bH200\b", 989.4, 66.9),
    (r"\bH100 NVL\b", 835.5, 60.0),
    (r"\bH100 PCIe\b", 756.0, 51.2),
    (r"\bH100\b|\bH800\b", 989.4, 66.9),
    (r"\bA100\b|\bA800\b", 312.0, 19.5),
    (r"\bA40\b", 149.7, 37.4),
    (r"\bA30\b", 165.0, 10.3),
    (r"\bA10G\b", 70.0, 35.0),
    (r"\bA10\b", 125.0, 31.2),
    (r"\bL40S\b", 362.0, 91.6),
    (r"\bL40\b", 181.0, 90.5),
    (r"\bL4\b", 121.0, 30.3),
    (r"\bV100\b", None, 15.7),
    (r"\bT4\b", None, 8.1),
    (r"\bMI300X\b", 1307.4, 163.4),
    (r"\bRTX 6000 Ada\b", 364.2, 91.1),
    (r"\bRTX A6000\b", 154.8, 38.7),
    (r"\bRTX 4090\b", 165.2, 82.6),
    (r"\bRTX 3090\b", 71.0, 35.6),
)
# Of those whose tensor cores know fp16 and no bf16; the others do both alike.
FP16_PEAKS: Final[tuple[tuple[str, float], ...]] = (
    (r"\bV100S\b", 130.0),
    (r"\bV100-PCIE\b", 112.0),
    (r"\bV100\b", 125.0),
    (r"\bT4\b", 65.0),
)


@dataclass(frozen=True)
class Flops:
    """Forward and backward pass together.

    :param token: of each token, attention and head left out. :param target: of each target, for the head.
    :param attention: of each token for its whole context, on the average of the data.
    """

    token: float = 0.0
    target: float = 0.0
    attention: float = 0.0

    def of(self, tokens: float, targets: float) -> float:
        """Of this many tokens, of which so many are targets."""
        return tokens * (self.token + self.attention) + targets * self.target


@dataclass(frozen=True)
class Gauge:
    """What the speed of a training is measured against.

    :param flops: what the model needs; None if that cannot be counted.
    :param peak: FLOPs per second that one device can do; None if nobody has said. :param devices: one for each rank.
    """

    flops: Flops | None = None
    peak: float | None = None
    devices: int = 1

    def mfu(self, tokens: float, targets: float, seconds: float) -> float | None:
        """Model FLOPs utilisation: the share of the peak that the model's own FLOPs took."""
        if self.flops is None or self.peak is None or seconds <= 0:
            return None
        return self.flops.of(tokens, targets) / seconds / (self.peak * self.devices)


def make_gauge(
    model: nn.Module,
    lengths: NDArray[np.integer[Any]],
    *,
    device: str,
    devices: int,
    precision: str,
    env: Mapping[str, str],
    say: Callable[[str], None],
    targets: NDArray[np.integer[Any]] | None = None,
) -> Gauge:
    """Count the model and look the device up; what cannot be told is said, and ends no training.

    :param targets: of an encoder-decoder, see `model_flops`.
    """
    flops, peak = None, None
    try:
        flops = model_flops(model, lengths, targets)
    except Exception as error:  # a config of a kind that nobody thought of
        say(f"no MFU: the FLOPs of {type(model).__name__} cannot be counted ({type(error).__name__}: {error})")
    try:
        peak = peak_flops(device, precision, env)
        if peak is None and device != "cpu":
            say(f"no MFU: the {precision} peak of {device} is not known; {PEAK_VARIABLE} sets it")
    except ValueError as error:
        say(f"no MFU: {PEAK_VARIABLE}: {error}")
    return Gauge(flops, peak, devices)


def model_flops(
    model: nn.Module, lengths: NDArray[np.integer[Any]], targets: NDArray[np.integer[Any]] | None = None
) -> Flops:
    """Count a model's weights, before or after it is shared among ranks.

    :param model: a Hugging Face model for causal language modelling or an encoder-decoder, with adapters or without.
    :param lengths: (D,) tokens of the documents of an epoch.
    :param targets: (D,) of an encoder-decoder, those of them that its decoder reads; the encoder reads the others.
    """
    config = model.config.get_text_config()  # type: ignore[operator, union-attr]
    embeddings = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    head = {id(weight) for weight in _head(model)}
    experts = _share_of_experts(config)
    packed = {
        id(part.weight): part.in_features * part.out_features for part in model.modules() if isinstance(part, Nf4Linear)
    }
    token, target, trained = 0.0, 0.0, False
    lowest: int | None = None  # the first layer whose backward pass is needed
    for name, weight in model.named_parameters():
        if weight.requires_grad and id(weight) not in embeddings and not trained:
            trained = True
            found = _LAYER.search(name)
            lowest = int(found[1]) if found else 0
        # A trained embedding needs the gradient of all that stands above it.
        if weight.requires_grad and id(weight) in embeddings:
            trained, lowest = True, 0
        size = packed.get(id(weight), weight.numel() if weight.ndim > 1 else 0)
        if not size or (id(weight) in embeddings and id(weight) not in head):
            continue
        each = (6.0 if weight.requires_grad else 4.0 if trained else 2.0) * size
        if id(weight) in head or (targets is not None and _DECODER.search(f".{name}") and not _CROSS.search(name)):
            target += each
        else:
            token += each * (experts if _EXPERTS.search(f".{name}") else 1.0)
    attention = 0.0
    width = config.num_attention_heads * (getattr(config, "head_dim", None) or _head_size(config))
    if targets is not None:
        passes = 12.0 if trained else 4.0
        # A target passes the decoder and no encoder.
        return Flops(token, target - token, passes * width * _mean_pairs(config, lengths - targets, targets))
    for layer, window in enumerate(_windows(config)):
        passes = 12.0 if trained and lowest is not None and layer >= lowest else 4.0
        attention += passes * width * mean_context(lengths, window)
    return Flops(token, target, attention)


def _mean_pairs(config: Any, sources: NDArray[np.integer[Any]], targets: NDArray[np.integer[Any]]) -> float:
    """Places that a token sees in all layers together, on the average: sources see each other, and targets both."""
    read, written = (np.asarray(part, dtype=np.float64) for part in (sources, targets))
    names = ("num_decoder_layers", "decoder_layers", "num_hidden_layers")
    decoder = next(int(count) for name in names if (count := getattr(config, name, None)))
    seen = int(config.num_hidden_layers) * (read * read).sum() + decoder * (written * (written + read)).sum()
    return float(seen / max(1.0, (read + written).sum()))


def mean_context(lengths: NDArray[np.integer[Any]], window: int | None = None) -> float:
    """Length of its document, or of the window if that is shorter, for a token of the data on the average."""
    sizes = np.asarray(lengths, dtype=np.float64)
    seen = sizes if window is None else np.minimum(sizes, window)
    return float((sizes * seen).sum() / max(1.0, sizes.sum()))


def peak_flops(device: str, precision: str, env: Mapping[str, str]) -> float | None:
    """FLOPs per second that a device can do at most; None where nobody has said.

    :param device: name of the GPU, or `cpu`, whose peak is not known. :param precision: `fp32`, `tf32`, `bf16` or
        `fp16`.
    :param env: `DROPFORGE_PEAK_TFLOPS` wins over the table. :raises ValueError: if it is no positive number.
    """
    told = env.get(PEAK_VARIABLE)
    if told:
        value = float(told)
        if not 0 < value < float("inf"):
            raise ValueError(f"{told} is no positive number")
        return value * 1e12
    if precision == "fp16":
        for pattern, fp16 in FP16_PEAKS:
            if re.search(pattern, device):
                return fp16 * 1e12
    for pattern, bf16, fp32 in PEAKS:
        if re.search(pattern, device):
            if precision == "tf32":  # by the data sheets half of bf16, on the GPUs that have it
                return None if bf16 is None else bf16 / 2 * 1e12
            found = fp32 if precision == "fp32" else bf16
            return None if found is None else found * 1e12
    return None


def _head(model: nn.Module) -> list[nn.Parameter]:
    head = model.get_output_embeddings()  # type: ignore[operator]
    return list(head.parameters()) if head is not None else []


def _head_size(config: Any) -> int:
    return int(config.hidden_size) // int(config.num_attention_heads)


def _windows(config: Any) -> list[int | None]:
    """For each layer how far back it attends, None for all of the document."""
    layers = int(config.num_hidden_layers)
    window = getattr(config, "sliding_window", None) if getattr(config, "use_sliding_window", True) else None
    chunk = getattr(config, "attention_chunk_size", None)
    kinds = getattr(config, "layer_types", None)
    if not kinds:
        return [window] * layers
    reach = {"sliding_attention": window, "chunked_attention": chunk, "linear_attention": 0}
    return [reach.get(kind) for kind in kinds]


def _share_of_experts(config: Any) -> float:
    """Share of a mixture's experts that a token passes through."""
    chosen = getattr(config, "num_experts_per_tok", None)
    names = ("num_local_experts", "num_experts", "n_routed_experts")
    there = next((getattr(config, name) for name in names if getattr(config, name, None)), None)
    return chosen / there if chosen and there else 1.0
