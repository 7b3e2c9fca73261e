"""A fork that stalls or dies at any moment: its service runs once all the same, and what came before it runs on."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

# Imported by the nursery: at the moment that is asked for, stops or kills the one of the second order's three
# processes that is there.
MOMENT = """
import json, os
nursery, orders, load, fork, leave = os.getpid(), 0, json.loads, os.fork, os._exit
def at(moment):
    if orders == 2 and moment == os.environ["MOMENT"]:
        os.kill(os.getpid(), int(os.environ["SIGNAL"]))
def loads(text):
    global orders
    orders += 1
    at("the order is read")
    return load(text)
def forked():
    who = "nursery" if os.getpid() == nursery else "child"
    at(f"before the {who} forks")
    if pid := fork():
        at(f"after the {who} forked")
    elif who == "child":
        at("in the fork")
    return pid
def left(code):
    at("before the child ends")
    leave(code)
json.loads, os.fork, os._exit = loads, forked, left
"""

SERVICE = "import os, signal\nopen(f'seen/{__name__}-{os.getpid()}', 'w').close()\nsignal.pause()\n"

SUPERVISE = """
import os, signal, sys, time
from pathlib import Path
from dropforge.stack import nursery, processes
from dropforge.stack.services import Service
from dropforge.stack.supervisor import Supervisor

def until(condition):
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline, [seen(), processes.own_descendants()]
        found._round()
        time.sleep(0.02)

def seen():
    return sorted(int(path.name.split("-")[1]) for path in Path("seen").iterdir())

def all_were_seen():
    return [process.pid for process in processes.own_descendants()] == seen()

processes.become_subreaper()
nursery._PATIENCE = 0.3
folder, env = Path.cwd(), {**os.environ, "PYTHONPATH": os.getcwd()}
one, two, three = (
    Service(name, name, (), env, lambda _: True, after=after, preload=("moment",))
    for name, after in (("one", ()), ("two", ("one",)), ("three", ("two",)))
)
found = Supervisor(folder, {}, [one, two, three], None, (1, 1), 0, os.open("mark", os.O_CREAT))
try:
    found._open_nursery()
    opened = processes.look(found._nursery.pid)
    until(lambda: all(watched.settled for watched in found.watched))
    assert found._nursery is None
    until(lambda: not processes.alive(opened))
    pids = [watched.state.pid for watched in found.watched]
    assert all(processes.look(pid).parent == os.getpid() for pid in pids)  # who else would learn of their ends?
    # The machine goes on.
    for process in processes.own_descendants():
        processes.send(process, signal.SIGCONT)
    until(all_were_seen)
    assert seen() == sorted(pids)
    assert found.watched[0].state.restarts == found.watched[2].state.restarts == 0
    # Another can take the nursery's place.
    again = nursery.Nursery(("moment",), env, folder, folder / "logs" / "nursery.log", ())
    until(lambda: again.ready())
    assert again.spawn("two", (), folder / "logs" / "two.log") is not None
    again.close()
    until(all_were_seen)
    assert len(seen()) == 4
finally:
    processes.end_all(processes.own_descendants, 0.0)
"""


@pytest.mark.parametrize("number", [signal.SIGSTOP, signal.SIGKILL], ids=["stalls", "dies"])
@pytest.mark.parametrize(
    "moment",
    [
        "the order is read",
        "before the nursery forks",
        "after the nursery forked",
        "before the child forks",
        "after the child forked",
        "before the child ends",
        "in the fork",
    ],
)
def test_a_service_runs_once_at_whatever_moment_its_fork_stalls_or_dies(
    tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    for name, text in (("moment", MOMENT), *((name, SERVICE) for name in ("one", "two", "three"))):
        (tmp_path / f"{name}.py").write_text(text)
    for name in ("seen", "logs"):
        (tmp_path / name).mkdir()
    env = {**os.environ, "MOMENT": moment, "SIGNAL": str(int(number))}
    run = subprocess.run(
        [sys.executable, "-c", SUPERVISE], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert run.returncode == 0, run.stderr[-3000:] + (tmp_path / "logs" / "nursery.log").read_text()
