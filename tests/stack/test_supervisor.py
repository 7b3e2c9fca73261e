"""The process that owns the stack, with small services that misbehave in the ways the real ones do."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dropforge.errors import DropforgeError
from dropforge.stack import control, processes
from dropforge.stack.services import LOCAL
from dropforge.stack.state import StackState, is_running, read_state, state_path, take_lock
from dropforge.stack.supervisor import port_trouble

# Starts a child that leaves no trace but one: a session, a name, descriptors and an environment of its own.
WILD = """
import os, subprocess, sys, time
from pathlib import Path
Path("seen").mkdir(exist_ok=True)
def note(): Path("seen", str(os.getpid())).touch()
note()
hide = '''
import os, sys, time
from setproctitle import setproctitle
os.closerange(3, 100)
if os.fork(): os._exit(0)
os.setsid()
setproctitle("nothing to see")
open("seen/%d" % os.getpid(), "w").close()
time.sleep(600)
'''
subprocess.Popen([sys.executable, "-c", hide], env={"PATH": "/usr/bin"}, start_new_session=True)
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
time.sleep(600)
"""

WEB = """
import http.server, signal, sys, threading
class Handler(http.server.SimpleHTTPRequestHandler):
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler)
# As an API server that quits while what surrounds it goes on.
signal.signal(signal.SIGUSR1, lambda *_: server.socket.close())
threading.Thread(target=server.serve_forever, daemon=True).start()
while True: signal.pause()
"""

SUPERVISE = """
import sys
from pathlib import Path
from dropforge.stack import health, supervisor
from dropforge.stack.services import Service
from dropforge.stack.supervisor import supervise
folder, web_port = Path(sys.argv[1]), int(sys.argv[2])
lifeline = int(sys.argv[3]) if len(sys.argv) > 3 else None
if (folder / "often").exists():
    supervisor._BACKOFF = (0.02,) * 3
env = {"PATH": "/usr/bin:/bin", "PYTHONPATH": str(folder)}
services = [
    Service("web", "web", (str(web_port),), env, lambda _: health.answers(web_port, "/"), web_port, check_every=0.2,
            hosts=("127.0.0.1", "127.0.0.2")),
    Service("wild", "wild", (), env, lambda _: len(list((folder / "seen").iterdir())) >= 2, after=("web",)),
]
if (folder / "broken.py").exists():
    services.append(Service("broken", "broken", (), env, lambda _: False))
if (folder / "odd.py").exists():
    services.insert(0, Service("odd", "odd", (), env, lambda _: {}["token"]))
if (folder / "told.py").exists():
    told = lambda _: health.answers(web_port, "/")
    services.append(Service("told", "told", (), env, told, after=("web",), check_every=0.2, told_by="web"))
if (folder / "forked.py").exists():
    services.append(Service("forked", "forked", (), env, lambda _: True, preload=("json",)))
supervise(folder, {"objects": 1, "mlflow": 2, "airflow": web_port}, services, lifeline)
"""


class Stack:
    def __init__(self, folder: Path) -> None:
        self.folder = folder
        (folder / "logs").mkdir(parents=True)
        (folder / "wild.py").write_text(WILD)
        (folder / "web.py").write_text(WEB)
        self.port = control.choose_ports({}, {})["airflow"]
        self.process: subprocess.Popen[bytes] | None = None

    def start(self, lifeline: int | None = None) -> Stack:
        arguments = [str(self.folder), str(self.port)] + ([str(lifeline)] if lifeline is not None else [])
        self.process = subprocess.Popen(
            [sys.executable, "-c", SUPERVISE, *arguments],
            stderr=(self.folder / "logs" / "supervisor.log").open("ab"),
            pass_fds=() if lifeline is None else (lifeline,),
        )
        pid = self.process.pid
        until(lambda: (found := read_state(self.folder)) is not None and found.supervisor[0] == pid)
        return self

    @property
    def state(self) -> StackState:
        state = read_state(self.folder)
        assert state is not None
        return state

    def pid(self, service: str) -> int:
        pid = self.state.services[service].pid
        assert pid is not None
        return pid

    def seen(self) -> list[processes.Process]:
        """Every process that noted its number and still lives."""
        pids = [int(path.name) for path in (self.folder / "seen").iterdir()] if (self.folder / "seen").is_dir() else []
        return [process for pid in pids if (process := processes.look(pid)) is not None and not process.zombie]


def until(condition: Callable[[], bool], limit: float = 30.0) -> None:
    deadline = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.02)


def supervisor(state: StackState) -> processes.Process:
    """The process that supervises, whose parent the state names."""
    return supervisor_of(state.supervisor[0])


def supervisor_of(parent: int) -> processes.Process:
    table = processes.table()
    (found,) = [process for process in table.values() if process.parent == parent and process.session != process.pid]
    return found


def kill_supervisor(state: StackState) -> None:
    """SIGKILL to it and to the parent that would start another, at once."""
    found, (parent, _) = supervisor(state), state.supervisor
    for pid, number in ((parent, signal.SIGSTOP), (found.pid, signal.SIGKILL), (parent, signal.SIGKILL)):
        os.kill(pid, number)
    until(lambda: not is_running(state.folder))


@pytest.fixture
def stack(tmp_path: Path) -> Iterator[Stack]:
    found = Stack(tmp_path / "state")
    try:
        yield found
        control.stop(found.folder)
    finally:  # a test that failed may have left a state that nobody can read
        if found.process is not None:
            found.process.kill()
            found.process.wait()
        for process in found.seen():
            processes.send(process, signal.SIGKILL)


def test_a_service_that_dies_is_said_and_started_again(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    old = stack.pid("web")
    os.kill(old, signal.SIGKILL)
    until(lambda: stack.state.services["web"].restarts == 1)
    control.wait_ready(stack.folder)
    assert stack.pid("web") != old
    said = (stack.folder / "logs" / "supervisor.log").read_text()
    assert "web: restarting (it ended with signal SIGKILL" in said


def test_a_service_lives_on_while_the_one_that_tells_of_it_is_away(stack: Stack) -> None:
    (stack.folder / "told.py").write_text("import signal\nsignal.pause()\n")
    control.wait_ready(stack.start().folder)
    os.kill(stack.pid("web"), signal.SIGUSR1)
    until(lambda: stack.state.services["web"].restarts == 1)
    control.wait_ready(stack.folder)
    assert stack.state.services["told"].restarts == 0
    said = (stack.folder / "logs" / "supervisor.log").read_text()
    assert "web: it does not answer" in said
    assert "told: it does not answer" not in said


def test_a_service_that_lives_but_answers_no_more_is_started_again(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    old = stack.pid("web")
    os.kill(old, signal.SIGUSR1)
    until(lambda: stack.state.phase == "degraded")
    until(lambda: stack.state.services["web"].restarts == 1)
    assert control.wait_ready(stack.folder).services["web"].pid != old


def test_down_leaves_no_process_and_can_be_repeated(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    assert len(stack.seen()) >= 2
    assert control.stop(stack.folder)
    assert stack.seen() == []
    assert stack.state.phase == "stopped"
    assert not control.stop(stack.folder)


@pytest.mark.parametrize("also", [(), ("wild",)], ids=["supervisor", "supervisor and service"])
def test_what_a_killed_supervisor_leaves_is_found_and_ended(stack: Stack, also: tuple[str, ...]) -> None:
    control.wait_ready(stack.start().folder)
    seen = stack.seen()
    leaders = {name: processes.look(stack.pid(name)) for name in stack.state.services}
    # The state is written down at most once a second; what hides meanwhile must be in it.
    until(lambda: all((one.pid, one.start) in stack.state.traces.processes for one in seen if one.session == one.pid))
    for name in also:
        os.kill(stack.pid(name), signal.SIGKILL)
    kill_supervisor(stack.state)
    assert not is_running(stack.folder)
    assert stack.seen()
    assert control.stop(stack.folder)
    assert stack.seen() == []
    assert not any(leader is not None and processes.alive(leader) for leader in leaders.values())


def test_a_killed_supervisor_is_followed_by_another_that_has_the_services_again(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    before, old, seen = stack.state, supervisor(stack.state), stack.seen()
    os.kill(old.pid, signal.SIGKILL)
    until(lambda: stack.state.traces.stack_id != before.traces.stack_id)
    assert is_running(stack.folder)
    after = control.wait_ready(stack.folder)
    assert after.supervisor == before.supervisor
    assert supervisor(after).identity != old.identity
    assert not any(processes.alive(process) for process in seen)
    os.kill(stack.pid("web"), signal.SIGKILL)
    until(lambda: stack.state.services["web"].restarts == 1)
    said = (stack.folder / "logs" / "supervisor.log").read_text()
    assert "the supervisor ended with signal SIGKILL" in said
    assert control.stop(stack.folder)
    assert stack.seen() == []


def test_a_supervisor_that_nobody_would_follow_ends_its_services(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    os.kill(stack.state.supervisor[0], signal.SIGKILL)
    until(lambda: not is_running(stack.folder))
    assert stack.seen() == []
    assert stack.state.phase == "stopped"


def test_a_supervisor_that_cannot_live_is_given_up(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    while is_running(stack.folder):
        with contextlib.suppress(ValueError, ProcessLookupError):  # between two there is none
            os.kill(supervisor(stack.state).pid, signal.SIGKILL)
    assert stack.seen() == []


def test_services_are_watched_and_ended_though_no_state_can_be_written(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    web, wild, path = stack.pid("web"), stack.pid("wild"), state_path(stack.folder)
    path.unlink()
    path.mkdir()
    os.kill(web, signal.SIGKILL)
    until(lambda: not port_trouble(stack.port, [LOCAL]))
    until(lambda: bool(port_trouble(stack.port, [LOCAL])))
    with pytest.raises(DropforgeError, match=r"stack\.json.*cannot be read.*dropforge up"):
        read_state(stack.folder)
    path.rmdir()
    until(lambda: path.is_file() and stack.state.services["web"].restarts == 1)
    assert stack.pid("wild") == wild
    assert "stack.json cannot be written" in (stack.folder / "logs" / "supervisor.log").read_text()
    path.unlink()
    path.mkdir()
    assert stack.process is not None
    stack.process.terminate()
    until(lambda: not is_running(stack.folder))
    assert stack.seen() == []
    path.rmdir()


@pytest.mark.parametrize("alive", [True, False], ids=["running", "killed"])
def test_a_stack_whose_state_is_deleted_is_found_all_the_same(stack: Stack, alive: bool) -> None:
    control.wait_ready(stack.start().folder)
    seen = stack.seen()
    if not alive:
        kill_supervisor(stack.state)
    else:
        os.kill(supervisor(stack.state).pid, signal.SIGSTOP)  # it would write the state again
    state_path(stack.folder).unlink()
    if alive:
        assert stack.process is not None
        resumed = threading.Timer(1.0, os.kill, (supervisor_of(stack.process.pid).pid, signal.SIGCONT))
        resumed.start()
    assert control.stop(stack.folder)
    assert not is_running(stack.folder)
    # Of the killed one, who holds nothing of the stack any more and was in its file alone is not found.
    found = [process for process in seen if processes.alive(process)]
    assert found == [] if alive else len(found) < len(seen)


def test_a_state_that_is_deleted_is_written_again(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    before = stack.state
    state_path(stack.folder).unlink()
    until(lambda: state_path(stack.folder).exists())
    assert stack.state == before


@pytest.mark.parametrize("replaced", [False, True], ids=["removed", "another stack's"])
def test_a_stack_whose_folder_is_gone_ends_and_leaves_the_next_alone(stack: Stack, replaced: bool) -> None:
    control.wait_ready(stack.start().folder)
    seen = stack.seen()
    assert stack.process is not None
    stack.folder.rename(stack.folder.with_name("away"))
    if replaced:
        stack.folder.mkdir()
        other = take_lock(stack.folder)
        assert other is not None
        state_path(stack.folder).write_text("another's")
    assert stack.process.wait(10) == 0
    assert [process for process in seen if processes.alive(process)] == []
    assert "was removed, or is another stack's" in (stack.folder.with_name("away") / "logs/supervisor.log").read_text()
    if replaced:
        assert state_path(stack.folder).read_text() == "another's"
        os.close(other)
        shutil.rmtree(stack.folder)
    assert not stack.folder.exists()


@pytest.mark.parametrize("linked", [False, True], ids=["", "by a link"])
def test_what_a_removed_folder_s_stack_left_is_found_and_ended(stack: Stack, tmp_path: Path, linked: bool) -> None:
    control.wait_ready(stack.start().folder)
    web = processes.look(stack.pid("web"))
    assert web is not None
    kill_supervisor(stack.state)
    seen, folder = stack.seen(), stack.folder
    if linked:
        (tmp_path / "link").symlink_to(tmp_path)
        folder = tmp_path / "link" / folder.name
    shutil.rmtree(stack.folder)
    assert control.stop(folder)
    assert not processes.alive(web)
    assert len([process for process in seen if processes.alive(process)]) <= 1  # it holds nothing of the stack
    for process in seen:
        processes.send(process, signal.SIGKILL)


def test_what_nobody_expects_of_one_service_harms_no_other(stack: Stack) -> None:
    """One's check raises, the other ends by a signal without a name."""
    (stack.folder / "odd.py").write_text("import signal\nsignal.pause()\n")
    stack.start()
    until(lambda: stack.state.services["wild"].status == "healthy")
    old = stack.pid("wild")
    os.kill(old, signal.SIGRTMIN + 6)
    until(lambda: stack.state.services["wild"].restarts == 1)
    until(lambda: stack.state.services["wild"].status == "healthy")
    said = (stack.folder / "logs" / "supervisor.log").read_text()
    assert f"wild: restarting (it ended with signal {signal.SIGRTMIN + 6}" in said
    assert stack.state.services["odd"].status == "starting"


def test_traces_of_another_boot_mean_nothing(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    traces = stack.state.traces
    assert {process.pid for process in processes.leftovers(traces)} >= {one.pid for one in stack.seen()}
    assert os.getpid() not in {process.pid for process in processes.leftovers(traces)}
    other = processes.Traces("another boot", traces.stack_id, traces.mark, traces.processes)
    assert processes.leftovers(other) == []


def test_a_service_that_cannot_start_fails_with_its_last_words(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    (stack.folder / "broken.py").write_text("raise SystemExit('the cause of it all')")
    stack.start()
    with pytest.raises(DropforgeError) as error:
        control.wait_ready(stack.folder)
    assert error.value.thing == "service broken"
    assert "exit code 1" in error.value.cause
    assert "the cause of it all" in error.value.mend


def test_the_stack_ends_with_its_terminal(stack: Stack) -> None:
    reader, writer = os.pipe()
    control.wait_ready(stack.start(lifeline=reader).folder)
    os.close(reader)
    os.close(writer)
    until(lambda: not is_running(stack.folder))
    assert stack.seen() == []


def test_a_second_supervisor_gives_way(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    again = subprocess.run(
        [sys.executable, "-c", SUPERVISE, str(stack.folder), str(stack.port)], capture_output=True, check=False
    )
    assert again.returncode == 3
    assert stack.state.phase == "ready"
    assert not control.start(stack.folder)


def test_a_port_that_somebody_took_meanwhile_is_said(stack: Stack) -> None:
    holder = subprocess.Popen([sys.executable, "-c", WEB, str(stack.port)])
    try:
        until(lambda: bool(port_trouble(stack.port, [LOCAL])))
        stack.start()
        until(lambda: "is taken by another program" in stack.state.services["web"].message)
    finally:
        holder.kill()
        holder.wait()
    control.wait_ready(stack.folder)


@pytest.mark.parametrize("taken", ["127.0.0.1", "127.0.0.2", "a pipe"])
def test_what_keeps_a_service_from_starting_may_stay_as_long_as_it_likes(stack: Stack, taken: str) -> None:
    (stack.folder / "often").touch()
    control.wait_ready(stack.start().folder)
    log, supervises = stack.folder / "logs" / "web.log", supervisor(stack.state)
    os.kill(supervises.pid, signal.SIGSTOP)
    os.kill(stack.pid("web"), signal.SIGKILL)
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if taken == "a pipe":
            log.unlink()
            os.mkfifo(log)
        else:
            until(lambda: not port_trouble(stack.port, [taken]))
            other.bind((taken, stack.port))
            other.listen()
        os.kill(supervises.pid, signal.SIGCONT)
        until(lambda: stack.state.services["web"].restarts > 8)
        assert stack.state.services["web"].status == "restarting"
    if taken == "a pipe":
        log.unlink()
    control.wait_ready(stack.folder)


def test_a_pipe_in_place_of_a_log_stops_one_service_alone(stack: Stack) -> None:
    for name in ("odd", "forked"):
        (stack.folder / f"{name}.py").write_text("import signal\nsignal.pause()\n")
    logs = [stack.folder / "logs" / f"{name}.log" for name in ("web", "forked")]
    for log in logs:
        os.mkfifo(log)
    stack.start()
    for log in logs:
        until(
            lambda log=log: (
                f"it is no regular file, as a log has to be: '{log}'" in stack.state.services[log.stem].message
            )
        )
        log.unlink()
    assert stack.state.services["odd"].status == "starting"
    until(lambda: {stack.state.services[name].status for name in ("web", "wild", "forked")} == {"healthy"})
    said = (stack.folder / "logs" / "supervisor.log").read_text()
    assert said.index("forked: restarting (it cannot be started") < said.index("forked: starting")


def test_the_state_of_a_killed_supervisor_is_not_believed(stack: Stack, monkeypatch: pytest.MonkeyPatch) -> None:
    control.wait_ready(stack.start().folder)
    kill_supervisor(stack.state)
    assert stack.state.phase == "ready"
    lock = take_lock(stack.folder)  # as who starts another
    assert lock is not None
    monkeypatch.setattr(control, "START_LIMIT", 0.2)
    seen: list[StackState] = []
    with pytest.raises(DropforgeError, match="its supervisor did not get ready"):
        control.wait_ready(stack.folder, seen.append)
    assert seen == []
    os.close(lock)


def test_only_the_owner_can_read_the_state(stack: Stack) -> None:
    control.wait_ready(stack.start().folder)
    for path in stack.folder.iterdir():
        if path.name in {"stack.json", "secrets.json", "supervisor.lock", "stack.mark"}:
            assert path.stat().st_mode & 0o777 == 0o600, path
    text = (stack.folder / "stack.json").read_text() + (stack.folder / "logs" / "supervisor.log").read_text()
    secrets = stack.state.secrets
    assert secrets.secret_key not in text
    assert secrets.airflow_password not in text
    assert secrets.secret_key not in repr(stack.state)


def test_the_log_of_a_running_service_is_cut(stack: Stack) -> None:
    stack.start()
    until(lambda: stack.state.services["web"].status == "healthy")
    pid, path = stack.pid("web"), stack.folder / "logs" / "web.log"
    os.truncate(path, 17 << 20)
    until(lambda: path.stat().st_size == 0)
    assert path.with_suffix(".log.1").stat().st_size == 17 << 20
    assert stack.pid("web") == pid
