"""The supervisor's parent between two supervisors: a fork that fails, a signal that comes just then."""

from __future__ import annotations

import subprocess
import sys

import pytest

BEGIN = """
import os, signal, sys, time
from dropforge.stack import respawn as module

forks, fork = [], os.fork
"""
ONE = "print('supervised', flush=True)"
# One that ends when it is told to, as the supervisor does.
TOLD = """
    signal.signal(signal.SIGTERM, lambda *_: os._exit(0))
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])
    time.sleep(30)
    os._exit(9)
"""
NO_ROOM = """
def first_fails():
    forks.append(1)
    if len(forks) == 1:
        raise OSError(11, "no room")
    return fork()
os.fork = first_fails
"""
MEANWHILE = """
def told_meanwhile():
    os.kill(os.getpid(), signal.SIGTERM)
    return fork()
os.fork = told_meanwhile
"""
BETWEEN = """
def told_between(seconds):
    os.kill(os.getpid(), signal.SIGTERM)
time.sleep = told_between
"""


@pytest.mark.parametrize(
    ("happens", "supervise", "code", "told"),
    [
        (NO_ROOM, ONE, 0, ["supervised"]),  # another try
        (MEANWHILE, TOLD, 0, []),  # passed on
        (BETWEEN, "print('supervised', flush=True); os._exit(7)", 1, ["supervised"]),  # no other one
    ],
    ids=["no-room", "told-meanwhile", "told-between"],
)
def test_a_parent_follows_what_happens_between_two_supervisors(
    happens: str, supervise: str, code: int, told: list[str]
) -> None:
    script = f"{BEGIN}{happens}\ndef supervise():\n    {supervise.strip()}\nsys.exit(module.respawn(supervise))"
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=25)
    assert (ended.returncode, ended.stdout.split()) == (code, told), ended.stderr
