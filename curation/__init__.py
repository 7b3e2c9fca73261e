"""A drop becomes a dataset version.

`curate` reads a drop's files, puts every input row to exactly one end (train, eval, duplicate or a reason of the
quarantine) and publishes shards, ledger, quarantine, card and, last, the manifest. `check` is the gate before training.
"""

from curation.gate import Check, check, checks
from curation.pipeline import curate, find
from curation.reasons import Reason, quarantined

__all__ = ["Check", "Reason", "check", "checks", "curate", "find", "quarantined"]
