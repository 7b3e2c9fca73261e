"""The dataset card: one HTML page that needs nothing else, and the same facts as JSON.

Everything that comes from the drop is escaped, and a content policy in the page forbids scripts and addresses.
"""

from __future__ import annotations

from curation.card.facts import summary
from curation.card.page import render

__all__ = ["render", "summary"]
