"""A model of the same config with few of its blocks: what follows from a model's code is tried on it."""

from __future__ import annotations

import copy
from typing import Any, Final

_BLOCKS: Final = 2


def shortened_config(config: Any) -> tuple[Any, int]:
    """A copy of a config with few blocks, but each kind of block that it has; and how many it has then."""
    short = copy.deepcopy(config)
    kinds = getattr(config, "layer_types", None)
    whole = int(getattr(config, "num_hidden_layers", 0) or 0)
    for name in ("num_decoder_layers", "decoder_layers"):  # of an encoder-decoder, whose other number is its encoder's
        if getattr(config, "is_encoder_decoder", False) and (count := getattr(config, name, None)):
            setattr(short, name, min(int(count), _BLOCKS))
    keep = min(whole, _BLOCKS if not kinds else max(_BLOCKS, 1 + max(kinds.index(kind) for kind in set(kinds))))
    if keep:
        short.num_hidden_layers = keep
        if kinds:
            short.layer_types = kinds[:keep]
    return short, keep or whole
