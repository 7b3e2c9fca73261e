"""Before a stack starts: folders, ports and secrets; and what `doctor` says."""

from __future__ import annotations

import contextlib
import fcntl
import importlib.metadata
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from dropforge.cli.app import app
from dropforge.client.connection import running_stack
from dropforge.errors import DropforgeError
from dropforge.source_root import source_root
from dropforge.stack import control, doctor, processes, services, supervisor
from dropforge.stack.doctor import Level
from dropforge.stack.secrets import read_secrets
from dropforge.stack.state import (
    StackState,
    check_folder,
    client_env,
    is_running,
    lock_path,
    mark_path,
    read_state,
    take_lock,
    write_state,
)
from tests.stack.test_supervisor import until

SMALL = """
import sys
from pathlib import Path
from dropforge.stack.supervisor import supervise
given = dict(zip(sys.argv[4::2], sys.argv[5::2]))
ports = {"objects": 1, "mlflow": 2, "airflow": 3}
supervise(Path(given["--state"]), ports, [], lock=int(given["--lock"]))
"""
PYTHON = sys.executable
ASLEEP = """
import os, time
from pathlib import Path
Path(__file__).with_name("pid").write_text(str(os.getpid()))
time.sleep(600)
"""


@pytest.fixture
def taken() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port: int = listener.getsockname()[1]
        yield port


def test_a_taken_port_that_was_asked_for_is_an_error_with_its_mend(tmp_path: Path, taken: int) -> None:
    with pytest.raises(DropforgeError) as error:
        control.start(tmp_path / "state", {"airflow": taken})
    assert str(taken) in error.value.thing
    assert "--airflow-port" in error.value.mend
    assert not is_running(tmp_path / "state")


def test_remembered_ports_are_kept_if_free_and_replaced_if_not(taken: int) -> None:
    first = control.choose_ports({}, {})
    assert control.choose_ports({}, first) == first
    moved = control.choose_ports({}, {**first, "mlflow": taken})
    assert moved["mlflow"] != taken
    assert {name: port for name, port in moved.items() if name != "mlflow"} == {
        name: port for name, port in first.items() if name != "mlflow"
    }
    assert len(set(moved.values())) == 3


def test_ports_for_pods_are_free_on_their_address_too() -> None:
    first = control.choose_ports({}, {}, "127.0.0.2")
    with contextlib.ExitStack() as held:
        for port in first.values():
            held.enter_context(socket.create_server(("127.0.0.2", port)))
        assert control.choose_ports({}, first) == first
        moved = control.choose_ports({}, first, "127.0.0.2")
        assert {name for name, port in first.items() if moved[name] == port} == {"airflow"}
        with pytest.raises(DropforgeError, match=rf"port {first['mlflow']} of 127\.0\.0\.2 is taken"):
            control.choose_ports({"mlflow": first["mlflow"]}, {}, "127.0.0.2")


@pytest.mark.parametrize("name", ["per%cent", "dollar$HOME", "a?b", "a#b", "a\rb", "a\x1b", "a\udcff"])
def test_folders_that_addresses_cannot_name_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(DropforgeError, match="--state"):
        check_folder(tmp_path / name)


def test_a_folder_that_cannot_be_made_is_an_error_for_people(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DropforgeError, match="--state"):
        control.start(tmp_path / "file" / "state")


def test_a_file_is_no_state_folder_and_a_broken_state_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(DropforgeError, match="not a folder"):
        check_folder(tmp_path / "file")
    for text in ("{bad", "{}", "[]"):
        (tmp_path / "stack.json").write_text(text)
        with pytest.raises(DropforgeError, match=r"stack.json: it cannot be read .* Delete it"):
            read_state(tmp_path)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root makes folders that are another user's")
@pytest.mark.parametrize("link", [False, True], ids=["folder", "link"])
def test_a_folder_that_another_user_made_is_obeyed_by_no_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, link: bool
) -> None:
    """In a shared folder anybody may make `.dropforge`: it would say where data go, and what `down` ends."""
    folder = tmp_path / ".dropforge"
    folder.mkdir()
    with subprocess.Popen(["sleep", "300"]) as other:
        found = processes.look(other.pid)
        assert found is not None
        traces = processes.Traces(processes.boot_id(), "id", mark_path(folder), frozenset({found.identity}))
        ports = {"objects": 1, "mlflow": 2, "airflow": 3}
        write_state(StackState(folder, "ready", ports, {}, (1, 1), traces, 0.0, read_secrets(folder)))
        if link:
            (tmp_path / "own").mkdir()
            folder.rename(tmp_path / "own" / "stack")
            folder.symlink_to(tmp_path / "own" / "stack")
        os.chown(folder, 12345, -1, follow_symlinks=False)
        monkeypatch.chdir(tmp_path)
        for command in ("env", "down", "up", "doctor", "runs"):
            done = CliRunner().invoke(app, [command])
            assert isinstance(done.exception, DropforgeError), command
            assert "another user of this machine (uid 12345)" in str(done.exception)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("part", ["airflow/config/airflow_local_settings.py", "objects/objects.db", "stack.json"])
def test_a_stack_that_came_with_an_archive_is_not_started(tmp_path: Path, part: str) -> None:
    folder = tmp_path / ".dropforge"
    (folder / part).parent.mkdir(parents=True)
    (folder / part).write_text("raise SystemExit")
    folder.chmod(0o755)
    with pytest.raises(DropforgeError, match=r"others may enter it.*chmod 700"):
        control.start(folder)
    assert not (folder / "secrets.json").exists()


def test_a_link_in_the_mark_s_place_makes_no_process_part_of_a_stack(tmp_path: Path) -> None:
    (tmp_path / "held").touch()
    mark_path(tmp_path).symlink_to(tmp_path / "held")
    with (tmp_path / "held").open() as held, subprocess.Popen(["sleep", "300"], stdin=held) as other:
        control.stop(tmp_path)
        assert other.poll() is None
        other.kill()


def test_what_is_started_looks_for_no_module_where_a_person_stands() -> None:
    """`python -m` looks there first: whoever typed `dropforge up` in a folder of strangers' files ran those."""
    packages = ("dropforge", "curation", "plugins/kubeflow_training", "plugins/dropforge_airflow")
    texts = [path.read_text() for package in packages for path in sorted((source_root() / package).rglob("*.py"))]
    started = [line for text in texts for line in re.findall(r"sys\.executable, .*", text)]
    assert len(started) >= 6
    assert not [line for line in started if not line.startswith('sys.executable, "-P", "-m", ')]


def test_secrets_are_made_once_and_private(tmp_path: Path) -> None:
    first = read_secrets(tmp_path / "state")
    assert read_secrets(tmp_path / "state") == first
    assert read_secrets(tmp_path / "other") != first
    path = tmp_path / "state" / "secrets.json"
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert first.access_key not in repr(first)


def test_the_supervisors_log_is_private_before_anything_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "executable", "/bin/false")
    before = os.umask(0)
    try:
        with pytest.raises(DropforgeError, match="ended at once"):
            control.start(tmp_path / "state")
    finally:
        os.umask(before)
    log = tmp_path / "state" / "logs" / "supervisor.log"
    assert (log.stat().st_size, log.stat().st_mode & 0o777) == (0, 0o600)


@pytest.fixture
def small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The folder of a stack without services, whose supervisor `control.start` starts."""
    script, program = tmp_path / "small.py", tmp_path / "python"
    script.write_text(SMALL)
    program.write_text(f"#!/bin/sh\nexec {sys.executable} {script} $*\n")
    program.chmod(0o700)
    monkeypatch.setattr(sys, "executable", str(program))
    yield tmp_path / "state"
    control.stop(tmp_path / "state")


def test_of_many_that_start_a_stack_one_does(small: Path) -> None:
    with ThreadPoolExecutor() as pool:
        assert sorted(pool.map(lambda _: control.start(small), range(5))) == [False] * 4 + [True]
    assert control.wait_ready(small).phase == "ready"
    said = (small / "logs" / "supervisor.log").read_text()
    assert "another supervisor" not in said
    assert "stopped" not in said


STARTED_WITHOUT_STREAMS = """
import sys
from pathlib import Path
from dropforge.stack import control
sys.executable = sys.argv[2]
control.start(Path(sys.argv[1]))
"""


def without_streams(*command: str) -> int:
    """The exit code of a program that is started with its standard streams closed."""
    started = subprocess.run(command, preexec_fn=lambda: os.closerange(0, 3), check=False, timeout=60)
    return started.returncode


def test_a_stack_that_is_started_without_standard_streams_keeps_its_lock(small: Path) -> None:
    program = sys.executable
    assert without_streams(PYTHON, "-c", STARTED_WITHOUT_STREAMS, str(small), program) == 0
    assert control.wait_ready(small).phase == "ready"
    assert is_running(small)
    assert "stopped" not in (small / "logs" / "supervisor.log").read_text()


def test_what_recipes_may_read_is_kept_until_it_is_set_again(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DROPFORGE_READABLE", "hub:* /models/")
    kept = []
    for given in (None, None, "hub:*"):
        if given is not None:
            monkeypatch.setenv("DROPFORGE_READABLE", given)
        assert control.start(small)
        kept.append(control.wait_ready(small).readable)
        assert control.stop(small)
        monkeypatch.delenv("DROPFORGE_READABLE", raising=False)
    assert kept == ["hub:* /models/", "hub:* /models/", "hub:*"]


def test_nobody_starts_a_stack_between_the_look_and_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, others = tmp_path / "state", []
    ports, traces = {"objects": 1, "mlflow": 2, "airflow": 3}, processes.Traces("boot", "id", tmp_path, frozenset())
    write_state(StackState(folder, "ready", ports, {}, (1, 1), traces, 0.0, read_secrets(folder)))

    def others_start(*_: object) -> bool:
        others.append(control.start(folder))
        with pytest.raises(DropforgeError, match="not running"):  # what a killed one wrote is not taken for its word
            running_stack(folder, "Start it")
        return False

    monkeypatch.setattr(control, "_end_left", others_start)
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with pytest.raises(DropforgeError, match="ended at once"):
        control.start(folder)
    assert others == [False]
    state = read_state(folder)
    assert state is not None
    assert (state.phase, state.ports) == ("stopped", ports)


def test_a_copy_of_a_folder_whose_stack_runs_ends_nothing_of_it(small: Path, tmp_path: Path) -> None:
    copy = tmp_path / "copy"
    assert control.start(small)
    state = control.wait_ready(small)
    shutil.copytree(small, copy)
    for attempt in (control.stop, control.start):
        with pytest.raises(DropforgeError, match=f"copied from .*its supervisor is process {state.supervisor[0]}"):
            attempt(copy)
    assert is_running(small)
    assert control.wait_ready(small).supervisor == state.supervisor
    assert control.stop(small)
    assert not control.stop(copy)


def test_down_ends_a_stack_whose_supervisor_is_only_about_to_start(
    small: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert control.start(small)
    assert control.stop(small)  # so that there is a state already, of another supervisor
    chosen, asked = threading.Event(), control.choose_ports
    monkeypatch.setattr(control, "choose_ports", lambda *given: (chosen.wait(), asked(*given))[1])
    with ThreadPoolExecutor() as pool:
        starting = pool.submit(control.start, small)
        until(lambda: is_running(small))
        stopping = pool.submit(control.stop, small)
        assert not starting.done()
        chosen.set()
        assert stopping.result()
        assert not is_running(small)
        with contextlib.suppress(DropforgeError):  # it may see that its supervisor ended
            starting.result()


def test_a_supervisor_that_does_not_show_up_is_ended_and_told(
    small: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert control.start(small)
    before = control.wait_ready(small)
    control.stop(small)
    write_state(before)  # as a killed one leaves it
    (tmp_path / "small.py").write_text(ASLEEP)
    monkeypatch.setattr(control, "SHOWN_LIMIT", 1.0)
    with pytest.raises(DropforgeError, match=r"the supervisor: it did not write its state in 1 s.*supervisor\.log"):
        control.start(small)
    assert not is_running(small)
    assert processes.look(int((tmp_path / "pid").read_text())) is None


def test_who_looks_keeps_no_supervisor_away(tmp_path: Path) -> None:
    lock_path(tmp_path).touch()
    looks = os.open(lock_path(tmp_path), os.O_RDONLY)
    fcntl.flock(looks, fcntl.LOCK_SH)
    assert not is_running(tmp_path)
    threading.Timer(0.05, os.close, (looks,)).start()
    lock = take_lock(tmp_path)
    assert lock is not None
    assert is_running(tmp_path)
    assert take_lock(tmp_path) is None
    os.close(lock)
    assert not is_running(tmp_path)


@pytest.mark.parametrize("port", [-1, 0, 65536, 99999999, 1.5, "1"])
def test_a_state_with_ports_that_are_none_is_broken(tmp_path: Path, port: object) -> None:
    state = {"phase": "ready", "services": {}, "supervisor": [1, 1], "started": 0}
    state |= {"ports": {"objects": port}, "traces": {"boot": "b", "stack_id": "i", "processes": []}}
    (tmp_path / "stack.json").write_text(json.dumps(state))
    with pytest.raises(DropforgeError, match=r"stack\.json: it cannot be read .* Delete it"):
        control.start(tmp_path)
    assert not is_running(tmp_path)
    assert any("stack.json" in one.found for one in doctor.examine(tmp_path) if one.level is Level.FAIL)


@pytest.mark.parametrize("name", ["logs", "supervisor.lock", "logs/supervisor.log"])
def test_a_start_names_what_is_in_the_place_of_its_files(tmp_path: Path, name: str) -> None:
    path = tmp_path / "state" / name
    path.parent.mkdir(parents=True)
    path.touch() if name == "logs" else path.mkdir()
    with pytest.raises(DropforgeError, match=f"file {path}: .* is in its place. Move that away"):
        control.start(tmp_path / "state")


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("airflow", "file"),
        ("cluster", "file"),
        ("tmp", "loop"),
        ("airflow/passwords.json", "folder"),
        ("stack.mark", "folder"),
        ("stack.mark", "loop"),
    ],
)
def test_a_supervisor_names_what_is_in_the_place_of_its_files(tmp_path: Path, name: str, kind: str) -> None:
    read_secrets(tmp_path)
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    if kind == "loop":
        path.symlink_to(path)
    else:
        path.touch() if kind == "file" else path.mkdir()
    ports = [word for one, port in control.choose_ports({}, {}).items() for word in (f"--{one}-port", str(port))]
    before = os.umask(0o077)
    try:
        with pytest.raises(SystemExit, match=f"^error: file {path}: .*ove that away"):
            supervisor.main(["--state", str(tmp_path), *ports])
    finally:
        os.umask(before)
    [found] = doctor.misplaced(tmp_path)
    assert (found.level, found.found.split(":")[0]) == (Level.FAIL, str(path))
    assert not list(path.parent.glob(".*"))


def test_doctor_names_a_file_that_is_a_folders_and_a_log_that_is_a_pipe(tmp_path: Path) -> None:
    (tmp_path / "database").touch()
    (tmp_path / "logs").mkdir()
    os.mkfifo(tmp_path / "logs" / "web.log")
    found = [(one.level, one.found) for one in doctor.misplaced(tmp_path)]
    assert found == [
        (Level.FAIL, f"{tmp_path}/database: it is no folder"),
        (Level.FAIL, f"{tmp_path}/logs/web.log: it is no regular file"),
    ]


def test_why_a_supervisor_ended_at_once_is_told(tmp_path: Path) -> None:
    (tmp_path / "airflow").touch()
    with pytest.raises(DropforgeError, match=f"at once: file {tmp_path}/airflow: something else is in its place"):
        control.start(tmp_path)
    assert not is_running(tmp_path)


def test_nothing_was_ever_started_here(tmp_path: Path) -> None:
    assert read_state(tmp_path) is None
    assert not is_running(tmp_path)
    assert not control.stop(tmp_path)


def test_services_get_their_own_world_and_secrets_stay_out_of_arguments(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTOR", "CeleryExecutor")
    monkeypatch.setenv("AWS_PROFILE", "production")
    monkeypatch.setenv("MLFLOW_RUN_ID", "abc")
    secrets = read_secrets(tmp_path)
    ports = {"objects": 1, "mlflow": 2, "airflow": 3}
    found = services.services(tmp_path, ports, secrets)
    values = set(vars(secrets).values())
    for service in found:
        assert "AWS_PROFILE" not in service.env
        assert "MLFLOW_RUN_ID" not in service.env
        assert service.env.get("AIRFLOW__CORE__EXECUTOR") in {None, "LocalExecutor"}
        assert service.env["AWS_ENDPOINT_URL"] == "http://127.0.0.1:1"
        assert not any(value in argument for value in values for argument in service.command)
        assert "0.0.0.0" not in " ".join(service.command)
    scheduler = next(service for service in found if service.name == "airflow-scheduler")
    assert "--skip-serve-logs" in scheduler.command
    assert scheduler.env["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == "http://127.0.0.1:3/execution/"
    connection = json.loads(scheduler.env["AIRFLOW_CONN_DROPFORGE_S3"])
    assert connection["extra"]["endpoint_url"] == "http://127.0.0.1:1"
    assert client_env(tmp_path, ports, secrets).items() <= scheduler.env.items()


def test_doctor_finds_this_machine_fit(tmp_path: Path) -> None:
    findings = doctor.examine(tmp_path / "state")
    assert {finding.check for finding in findings} >= {"python", "disk", "memory", "mlflow", "state folder", "clock"}
    for finding in findings:
        assert (finding.mend == "") == (finding.level is Level.OK)
    assert not [finding for finding in findings if finding.level is Level.FAIL]


def test_doctor_names_what_is_missing_or_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PACKAGES", {"mlflow": (99,), "no-such-package": (1,)})
    old, missing = doctor.packages(tmp_path)
    assert (old.level, missing.level) == (Level.FAIL, Level.FAIL)
    assert "99" in old.mend
    (tmp_path / "file").write_text("")
    [unwritable] = doctor.state_folder(Path("/proc/none"))
    assert unwritable.level is Level.FAIL
    assert "--state" in unwritable.mend


def test_doctor_says_whether_blocks_can_be_compiled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [found] = doctor.compiler(tmp_path)
    assert (found.level, found.mend) == (Level.OK, "")
    monkeypatch.setenv("CXX", "/nowhere/g++")
    [found] = doctor.compiler(tmp_path)
    assert found.level is Level.WARN  # nothing else needs it
    assert "`train.compile` is refused" in found.found


def test_doctor_says_whether_spark_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    java = tmp_path / "bin" / "java"
    java.parent.mkdir()
    monkeypatch.setenv("JAVA_HOME", str(tmp_path))
    monkeypatch.setattr(importlib.metadata, "version", lambda name: "4.3.0")
    for release, level in (("17.0.15", Level.OK), ("21", Level.OK), ("1.8.0_412", Level.WARN), ("11.0.2", Level.WARN)):
        java.write_text(f"#!/bin/sh\necho 'openjdk version \"{release}\" 2025-04-15' >&2\n")
        java.chmod(0o755)
        [found] = doctor.spark(tmp_path)
        assert found.level is level
        assert (
            ("`curation.engine: spark` is refused" in found.found)
            == ("embedded" in found.mend)
            == (level is Level.WARN)
        )
    java.unlink()
    [found] = doctor.spark(tmp_path)
    assert "does not start" in found.found


@pytest.mark.parametrize(
    ("version", "numbers"),
    [("2.15.0+cpu", (2, 15, 0)), ("3.3.2", (3, 3, 2)), ("5.3.0rc1", (5, 3, 0)), ("1.dev0", (1,))],
)
def test_versions_are_compared_by_number(version: str, numbers: tuple[int, ...]) -> None:
    assert doctor.release(version) == numbers


def test_the_key_of_pseudonyms_reaches_curation_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Code of a recipe runs in pods, which have what the cluster has; with the key it could undo them."""
    monkeypatch.setenv("DROPFORGE_PII_KEY", "k" * 40)
    ports = {"objects": 1, "mlflow": 2, "airflow": 3}
    found = services.services(tmp_path, ports, read_secrets(tmp_path))
    assert [one.name for one in found if "DROPFORGE_PII_KEY" in one.env] == ["airflow-scheduler"]
