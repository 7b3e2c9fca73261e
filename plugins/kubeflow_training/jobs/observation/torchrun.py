"""What torchrun says of the rank that failed first, in the last lines that a pod's termination message holds. Pure.

torchrun itself ends with 1, whatever the rank ended with; its last words are a table with the root cause at the end.
"""

from __future__ import annotations

import re
from typing import Any, Final

_CAUSE: Final = "Root Cause (first observed failure):"
_RANK: Final = re.compile(r"^\s*rank\s*: (\d+) \(local_rank: \d+\)", re.M)
_CODE: Final = re.compile(r"^\s*exitcode\s*: (-?\d+) ", re.M)
_TRACEBACK: Final = re.compile(r"^\s*traceback : (.*?)\s*^=+\s*\Z", re.M | re.S)
_NONE: Final = "To enable traceback see"


def root_cause(text: str) -> dict[str, Any]:
    """Rank, exit code (128 + N for signal N) and message of the first failure; empty if the text tells none."""
    _, found, table = text.rpartition(_CAUSE)
    rank, code = _RANK.search(table), _CODE.search(table)
    if not found or rank is None or code is None:
        return {}
    number = int(code[1])
    number = number if number >= 0 else 128 - number
    traceback = _TRACEBACK.search(table)
    words = traceback[1].strip() if traceback and not traceback[1].startswith(_NONE) else ""
    last = words.splitlines()[-1].strip() if words else f"torchrun: rank {rank[1]} ended with exit code {number}"
    # All of the text before it: it may name the cause (out of memory, a broken collective).
    return {"exit_code": number, "rank": int(rank[1]), "message": f"{text.rstrip()}\n{last}"}
