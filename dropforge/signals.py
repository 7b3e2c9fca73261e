"""Names of signals, for people."""

from __future__ import annotations

import signal


def signal_name(number: int) -> str:
    """Return `SIGKILL`, or `signal 40` for a real-time signal, which has no name."""
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
