"""Markdown tables as tests read them."""

from __future__ import annotations

import re


def narrow(markdown: str) -> str:
    """A table without the spaces that put its columns under each other."""
    return re.sub(" +", " ", markdown)
