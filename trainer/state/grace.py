"""What is still saved between SIGTERM and SIGKILL, from how long saves took so far."""

from __future__ import annotations

from enum import Enum
from typing import Final

_RESERVE: Final = 1.2  # of the slowest so far


class LastSave(Enum):
    """Where the state goes before the end."""

    BOTH = "both"
    FAST = "fast"
    NONE = "none"


def last_save(left: float, fast: float, durable: float, uploading: bool) -> LastSave:
    """What fits into the rest of the grace; a pure function.

    :param left: seconds. :param fast, durable: seconds of the slowest save and upload so far, 0 if there was none.
    :param uploading: whether an upload is going on; another one would have to wait for it.
    """
    if not uploading and left >= _RESERVE * (fast + durable):
        return LastSave.BOTH
    return LastSave.FAST if left >= _RESERVE * fast and left > 0 else LastSave.NONE
