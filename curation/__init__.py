"""A drop becomes a dataset version.

`curate` reads a drop's files, puts every input row to exactly one end (train, eval, duplicate or a reason of the
quarantine) and publishes shards, ledger, quarantine, card and, last, the manifest. `check` is the gate before training.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from curation.gate import Check, check, checks
    from curation.pipeline import curate, find
    from curation.reasons import Reason, quarantined

__all__ = ["Check", "Reason", "check", "checks", "curate", "find", "quarantined"]

_WHERE = {
    **dict.fromkeys(("Check", "check", "checks"), "gate"),
    **dict.fromkeys(("curate", "find"), "pipeline"),
    **dict.fromkeys(("Reason", "quarantined"), "reasons"),
}


def __getattr__(name: str) -> Any:
    # Loaded when used: a worker process needs the readers alone, and starts in a third of the time.
    if name in _WHERE:
        return getattr(importlib.import_module(f"curation.{_WHERE[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
