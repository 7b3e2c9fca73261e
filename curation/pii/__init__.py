"""Personal data and secrets: found by rules and check digits, masked or dropped before anything is made of the text."""

from __future__ import annotations

from curation.pii.hits import KINDS, Hit
from curation.pii.masks import fingerprint, read_key
from curation.pii.stage import Pii, find, make_pii, make_scrub

__all__ = ["KINDS", "Hit", "Pii", "find", "fingerprint", "make_pii", "make_scrub", "read_key"]
