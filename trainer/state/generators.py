"""The random state of a rank: torch's generators, NumPy's and Python's, as tensors."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np
import torch


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The random state of this rank."""
    version, words, spare = random.getstate()
    own = np.random.get_state(legacy=False)
    state = own["state"]
    states = {
        "torch": torch.get_rng_state(),
        "python": torch.tensor([version, *words], dtype=torch.int64),
        "python_spare": torch.tensor([] if spare is None else [spare], dtype=torch.float64),
        "numpy": torch.tensor([*state["key"].tolist(), state["pos"], own["has_gauss"]], dtype=torch.int64),
        "numpy_spare": torch.tensor([own["gauss"]], dtype=torch.float64),
    }
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put this rank's random state back."""
    torch.set_rng_state(states["torch"])
    version, *words = states["python"].tolist()
    spare = states["python_spare"].tolist()
    random.setstate((version, tuple(words), spare[0] if spare else None))
    *key, place, has_spare = states["numpy"].tolist()
    np.random.set_state(("MT19937", np.array(key, dtype=np.uint32), place, has_spare, states["numpy_spare"].item()))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def seed_generators(seed: int) -> None:
    """Begin all generators anew."""
    torch.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
