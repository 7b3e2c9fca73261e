"""Signals by name."""

from __future__ import annotations

import signal

from dropforge.signals import signal_name


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    assert signal_name(signal.SIGKILL) == "SIGKILL"
    assert signal_name(signal.SIGRTMIN + 6) == f"signal {signal.SIGRTMIN + 6}"
