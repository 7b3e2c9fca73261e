"""`dropforge logs` prints what the trainer kept, whole or its end."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
import threading
import time

import pytest

from dropforge import layout, tracking
from dropforge.run import RunSpec
from dropforge.store import S3Store
from tests.dropforge.cli.conftest import DagRun, FakeAirflow, Terminal

FIRST, SECOND = "20261121T100000.000000Z", "20261121T110000.000000Z"


def line(second: int, text: str) -> str:
    return f"2026-11-21T10:00:{second:02d}.000Z {text}\n"


def keep(store: S3Store, pod: str, began: str, number: int, *lines: str, run: str = "fam-1") -> str:
    key = layout.run_prefix(run) + layout.log_key(pod, began, number)
    store.put(key, gzip.compress("".join(lines).encode()))
    return key


@pytest.fixture
def run(s3_store: S3Store) -> str:
    """A run of two pods, one of which was started again."""
    s3_store.put(layout.run_key("fam-1"), b"{}")
    keep(s3_store, "p-master-0", FIRST, 1, line(1, "[rank 0] a"), line(4, "[rank 0] b é \x0b \u2028"))
    keep(s3_store, "p-master-0", FIRST, 2, line(5, "[rank 0] c"), line(5, "[rank 0] d"))
    keep(s3_store, "p-master-0", SECOND, 1, line(9, "[rank 0] e"))
    keep(s3_store, "p-worker-0", FIRST, 1, line(2, "[rank 1] a"), line(6, "[rank 1] b"))
    keep(s3_store, "p-master-0", FIRST, 1, line(1, "of another run"), run="fam-12")
    return "fam-1"


def test_all_pods_are_printed_in_the_order_of_time(terminal: Terminal, run: str) -> None:
    done = terminal("logs", run)
    assert done.exit_code == 0
    assert done.stdout_bytes.decode() == "".join(
        [
            line(1, "[rank 0] a"),
            line(2, "[rank 1] a"),
            line(4, r"[rank 0] b é \x0b \u2028"),
            line(5, "[rank 0] c"),
            line(5, "[rank 0] d"),
            line(6, "[rank 1] b"),
            line(9, "[rank 0] e"),
        ]
    )


def test_lines_for_programs_are_printed_where_they_are_asked_for(
    terminal: Terminal, run: str, s3_store: S3Store
) -> None:
    mark, own = line(7, '[rank 0] @progress {"step": 3}'), line(7, "[rank 0] @progress of a person's own")
    keep(s3_store, "p-master-0", FIRST, 3, mark, own, mark)
    assert mark not in terminal("logs", run).output
    assert own in terminal("logs", run).output
    assert terminal("logs", run, "--rank", "0", "-n", "4").output == (
        line(5, "[rank 0] c") + line(5, "[rank 0] d") + own + line(9, "[rank 0] e")
    )
    assert terminal("logs", run, "--raw").output.count(mark) == 2


def test_one_pod_and_the_last_lines(terminal: Terminal, run: str, s3_store: S3Store) -> None:
    assert terminal("logs", run, "--pod", "p-worker-0").output == line(2, "[rank 1] a") + line(6, "[rank 1] b")
    assert terminal("logs", run, "--tail", "2").output == line(6, "[rank 1] b") + line(9, "[rank 0] e")
    broken = layout.run_prefix(run) + layout.log_key("p-master-0", FIRST, 1)
    s3_store.put(broken, b"none")
    done = terminal("logs", run, "--pod", "p-master-0", "-n", "2")  # what is older is not even fetched
    assert done.output == line(5, "[rank 0] d") + line(9, "[rank 0] e")
    assert broken in str(terminal("logs", run).exception)


def test_colours_come_through_and_nothing_else_that_steers_a_terminal(terminal: Terminal, s3_store: S3Store) -> None:
    s3_store.put(layout.run_key("fam-1"), b"{}")
    hostile = "\x1b[1;31mred\x1b[0m \x1b]52;c;aGk=\x07 \x1b[2J\x1b[H \x1b]0;mine\x1b\\ \x9b2J"
    hostile += " \rover \u202eback \x1b[1;8munseen\x1b[38;5;8m"
    key = keep(s3_store, "p-master-0", FIRST, 1, line(1, hostile))
    done = terminal("logs", "fam-1").stdout_bytes.decode()
    assert done == line(
        1,
        "\x1b[1;31mred\x1b[0m "
        + r"\x1b]52;c;aGk=\x07 \x1b[2J\x1b[H \x1b]0;mine\x1b"
        + "\\ "
        + r"\x9b2J \rover \u202eback \x1b[1;8munseen"
        + "\x1b[38;5;8m\x1b[0m",
    )
    s3_store.put(key, gzip.compress(b"2026-11-21T10:00:01.000Z \xff\x9b2J\n"))
    assert terminal("logs", "fam-1").stdout_bytes == rb"2026-11-21T10:00:01.000Z \xff\x9b2J" + b"\n"
    s3_store.put(key, gzip.compress(b"2026-11-21T10:00:01.000Z of Windows\r\n"))
    assert terminal("logs", "fam-1").stdout_bytes == b"2026-11-21T10:00:01.000Z of Windows\n"


def test_a_piece_that_somebody_made_is_read_to_a_bound(
    terminal: Terminal, run: str, s3_store: S3Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pod may write what it likes; a piece of the trainer's is far below the bound."""
    monkeypatch.setattr("dropforge.cli.logs._PIECE", 2 << 20)
    keep(s3_store, "p-worker-1", FIRST, 1, line(7, "honest"), line(7, "x" * (8 << 20)), line(8, "behind"))
    done = terminal("logs", run)
    assert done.exit_code == 0
    assert len(done.stdout_bytes) < 3 << 20
    assert line(7, "honest").encode() in done.stdout_bytes
    assert line(9, "[rank 0] e").encode() in done.stdout_bytes
    assert b"behind" not in done.stdout_bytes
    assert "longer than 2 MiB; the rest is left out" in done.stderr
    assert "p-worker-1" in done.stderr
    assert len(terminal("logs", run, "--pod", "p-worker-1", "--tail", "1").stdout_bytes) < 3 << 20


def test_one_rank_alone(terminal: Terminal, run: str, s3_store: S3Store) -> None:
    keep(s3_store, "p-worker-0", FIRST, 2, line(7, "[rank 11] x"), line(8, "[pod p-worker-0] said [rank 1] y"))
    keep(s3_store, "p-worker-0", FIRST, 3, line(8, f"[rank {'9' * 5000}] of no rank that there is"))
    assert terminal("logs", run, "--rank", "1").output == line(2, "[rank 1] a") + line(6, "[rank 1] b")
    assert terminal("logs", run, "-r", "0", "-n", "2").output == line(5, "[rank 0] d") + line(9, "[rank 0] e")
    assert "ranks that wrote: 0, 1, 11." in f"{terminal('logs', run, '-r', '2').exception}."


def test_what_comes_is_printed_once_until_the_run_is_over(
    terminal: Terminal, run: str, s3_store: S3Store, airflow: FakeAirflow
) -> None:
    dag_run = airflow.add(DagRun("manual__1", "running"))
    spec = RunSpec(run, "fam", 1, "", "", "", "0" * 64, {"train": {"method": "full"}}, "code")
    opened = tracking.open_run(os.environ["MLFLOW_TRACKING_URI"], spec, {}, {tracking.TAG_DAG_RUN: dag_run.name})
    dag_run.ends_at_look = 2

    def more() -> None:
        while dag_run.looks < 1:
            time.sleep(0.01)
        keep(s3_store, "p-worker-0", SECOND, 1, line(12, "[rank 1] z"), line(13, "[rank 0] none of it"))

    try:
        thread = threading.Thread(target=more)
        thread.start()
        printed = terminal("logs", run, "--rank", "1", "-n", "1", "--follow").output
        thread.join()
        assert printed in (line(6, "[rank 1] b") + line(12, "[rank 1] z"), line(12, "[rank 1] z"))
    finally:
        tracking.client(os.environ["MLFLOW_TRACKING_URI"]).delete_run(opened.run_id)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["nobody"], "run nobody: MLflow knows no such run"),
        (["fam-1/logs"], "drop fam-1/logs: there is no _SUCCESS yet"),
        (["silent"], "run silent: it has no log yet"),
        (["fam-1", "--pod", "p"], "the run has no log of it, but of p-master-0, p-worker-0"),
    ],
)
def test_what_is_not_there_is_said(
    terminal: Terminal, run: str, s3_store: S3Store, words: list[str], told: str
) -> None:
    s3_store.put(layout.run_key("silent"), b"{}")
    assert told in str(terminal("logs", *words).exception)


def test_a_run_that_failed_before_it_was_opened_says_why(terminal: Terminal, airflow: FakeAirflow) -> None:
    airflow.add(DagRun("manual__7", "failed", ("failed",), "`base.model`: /etc: it is not among what may be read"))
    told = str(terminal("logs", "manual__7").exception)
    assert "plan failed: `base.model`: /etc: it is not among what may be read" in told
    assert "dropforge resume manual__7" in told


def test_a_reader_that_has_enough_ends_it_quietly(terminal: Terminal, run: str, s3_store: S3Store) -> None:
    keep(s3_store, "p-master-0", SECOND, 2, *(line(10, f"[rank 0] {n}") for n in range(50_000)))
    command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", "logs", run]
    process = subprocess.Popen(
        [*command, "--state", str(terminal.state)], env=os.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline().decode() == line(1, "[rank 0] a")
    process.stdout.close()
    process.stdout = None
    assert process.communicate(timeout=60)[1] == b""
