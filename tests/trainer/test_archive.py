"""The whole log of a pod reaches the run's folder in order and once, and a store that is away costs the run nothing."""

from __future__ import annotations

import gzip
import os
import re
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from dropforge import layout
from dropforge.store import FolderStore, S3Store, Store, open_store
from trainer.report.archive import Archive

from .toy import REPOSITORY, Toy, write_dataset

POD = "train-x-master-0"
NOWHERE = "http://127.0.0.1:9"
STAMP = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ")


def pieces(store: Store, pod: str = POD) -> list[str]:
    return [item.key for item in store.list(f"logs/{pod}/")]


def kept(store: Store, pod: str = POD) -> list[str]:
    """The lines of a pod's log, without their times."""
    lines = "".join(gzip.decompress(store.get(key)).decode() for key in pieces(store, pod)).split("\n")[:-1]
    stamps = [line[:24] for line in lines]
    assert all(STAMP.match(line) for line in lines)
    assert stamps == sorted(stamps)
    return [line[25:] for line in lines]


def until(true: Callable[[], object], seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture
def begin() -> Iterator[Callable[..., Archive]]:
    """Archives on a store; this process has its own streams again afterwards."""
    streams = sys.stdout, sys.stderr
    made: list[Archive] = []

    def make(store: Store | str, **more: Any) -> Archive:
        archive = Archive(POD, **more)
        archive.open(store if isinstance(store, str) else store.uri)
        made.append(archive)
        return archive

    yield make
    sys.stdout, sys.stderr = streams
    for archive in made:  # no thread of a test goes on
        archive._closing = True
        archive._waiting.clear()
        archive._wake.set()


def test_all_lines_of_all_ranks_are_kept_in_order_and_once(store: Store, begin: Callable[..., Archive]) -> None:
    archive = begin(store, every=0.05)
    lines = [[f"[rank {rank}] {n} {'é' * 300}" for n in range(3000)] for rank in range(4)]
    threads = [threading.Thread(target=lambda own=own: [archive.keep(line) for line in own]) for own in lines]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    archive.close(30)
    found = kept(store)
    assert len(found) == 12000
    assert [[line for line in found if line.startswith(f"[rank {rank}]")] for rank in range(4)] == lines
    assert len(pieces(store)) >= 2  # 7 MB


def test_the_beginning_is_kept_soon_and_the_rest_by_the_minute(store: Store, begin: Callable[..., Archive]) -> None:
    archive = begin(store)
    archive.keep("first")
    until(lambda: kept(store) == ["first"], 20)
    begun = time.monotonic()
    archive.keep("second")
    assert begun + 4 <= archive._due <= time.monotonic() + 4  # twice as long as the first
    archive._number = 20
    archive._fresh()
    begun = time.monotonic()
    archive.keep("much later")
    assert begun + 60 <= archive._due <= time.monotonic() + 60


def test_a_line_is_there_before_the_end_and_a_quiet_time_makes_no_objects(
    store: Store, begin: Callable[..., Archive]
) -> None:
    archive = begin(store, every=0.05)
    archive.keep("[rank 0] one")
    until(lambda: kept(store) == ["[rank 0] one"])
    archive.keep("[rank 0] two")
    until(lambda: kept(store) == ["[rank 0] one", "[rank 0] two"])
    archive.close(30)
    assert len(pieces(store)) == 2


def test_what_the_launcher_prints_is_kept_too_and_still_printed(
    store: Store, begin: Callable[..., Archive], capsys: pytest.CaptureFixture[str]
) -> None:
    archive = begin(store)
    print("a warning\nof two lines", file=sys.stderr)
    print("begun, ", end="")
    print("ended")
    archive.close(30)
    print("afterwards")
    assert kept(store) == [f"[pod {POD}] {text}" for text in ("a warning", "of two lines", "begun, ended")]
    out = capsys.readouterr()
    assert (out.err, out.out) == ("a warning\nof two lines\n", "begun, ended\nafterwards\n")


def test_the_same_pod_started_again_adds_to_its_log(store: Store, begin: Callable[..., Archive]) -> None:
    for life in range(3):
        archive = begin(store)
        archive.keep(f"[rank 0] life {life}")
        archive.close(30)
    assert kept(store) == [f"[rank 0] life {life}" for life in range(3)]


def test_lines_wait_for_a_store_that_is_away(
    s3_store: S3Store,
    begin: Callable[..., Archive],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    there = os.environ["AWS_ENDPOINT_URL"]
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    archive = begin(s3_store, every=0.05)
    for n in range(100):
        archive.keep(f"[rank 0] {n}")
        time.sleep(0.005)
    until(lambda: len(archive._waiting) > 1)
    monkeypatch.setenv("AWS_ENDPOINT_URL", there)
    until(lambda: not archive._waiting)
    archive.keep("[rank 0] 100")
    archive.close(30)
    found = kept(s3_store)
    assert [line for line in found if line.startswith("[rank")] == [f"[rank 0] {n}" for n in range(101)]
    told = capsys.readouterr().err.splitlines()
    assert len(told) == 2  # that it is away, and that it is back, each once
    assert "does not take the log (EndpointConnectionError)" in told[0]
    assert [f"[pod {POD}] {line}" for line in told] == [line for line in found if line.startswith("[pod")]


def test_a_bucket_that_refuses_is_named_without_its_words(
    s3_store: S3Store, begin: Callable[..., Archive], capsys: pytest.CaptureFixture[str]
) -> None:
    archive = begin(f"{s3_store.uri}-not-there", every=0.01)
    archive.keep("[rank 0] x")
    told: list[str] = []  # it is noted first and told then
    until(lambda: told.append(capsys.readouterr().err) or "does not take the log (NoSuchBucket)" in "".join(told))


@pytest.mark.parametrize("silent", [True, False])
def test_the_end_does_not_wait_for_long(
    silent: bool, begin: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "confidential")
    with socket.create_server(("127.0.0.1", 0)) as deaf:  # takes connections, and answers nothing
        monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{deaf.getsockname()[1]}" if silent else NOWHERE)
        archive = begin("s3://bucket/runs/r")
        for n in range(7):
            archive.keep(f"[rank 0] {n}")
        began = time.monotonic()
        archive.close(1)
        assert 0.9 < time.monotonic() - began < 15  # one answer alone is waited for 20 s at least
    told = capsys.readouterr().err
    assert told == "7 lines of the log are not at s3://bucket/runs/r/logs/: the store did not take them in time\n"


def test_the_end_of_the_grace_is_not_overrun(begin: Callable[..., Archive], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", NOWHERE)
    archive = begin("s3://bucket/runs/r")
    archive.keep("[rank 0] x")
    left = [2.0, 1.0, 0.6, 0.4]
    began = time.monotonic()
    archive.close(60, lambda: left.pop(0))
    assert left == []
    assert time.monotonic() - began < 30


def test_what_is_too_much_for_memory_is_left_out_and_counted(
    tmp_path: Path,
    begin: Callable[..., Archive],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # A piece that the clock ends moves the ends of all later ones, and the last may then be too much for memory too.
    monkeypatch.setattr("trainer.report.archive._FIRST", 60.0)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "logs").write_text("in the way")  # nothing can be written below a file
    archive = begin(str(tmp_path / "run"), held=100_000)
    total = 200_000
    for n in range(total):
        archive.keep(f"[rank 0] {n} {n * 7919 % 104729} {'x' * 100}")
    (tmp_path / "run" / "logs").unlink()
    archive.close(30)
    lines = kept(FolderStore(tmp_path / "run"))
    own = [line for line in lines if line.startswith("[pod")]  # "takes the log again" comes when lines are kept again
    first, *rest = [line for line in lines if line not in own]
    left_out = int(re.fullmatch(r"-- (\d+) lines left out: the store did not take them --", first).group(1))  # type: ignore[union-attr]
    numbers = [int(line.split()[2]) for line in rest]
    assert numbers == list(range(numbers[0], total))
    assert numbers  # the last ones are there
    assert left_out - (capsys.readouterr().err.count("\n") - len(own)) == numbers[0]


MEASURE = """
import resource, sys
from trainer.report import archive as module
from trainer.report.archive import Archive
module._FIRST = 60.0  # pieces end by their size alone, however long this takes
archive = Archive("p")
archive.open(sys.argv[1])
lines = [f"[rank 0] step {n}/2000: loss {n * 7919 % 104729 / 104729:.4f} " + "words " * 12 for n in range(2000)]
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
for line in lines * 85:
    archive.keep(line)
assert archive._number == 5  # pieces: 20 MB
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


@pytest.mark.parametrize("away", [False, True])
def test_twenty_megabytes_take_little_memory(tmp_path: Path, away: bool) -> None:
    if away:
        (tmp_path / "logs").write_text("in the way")
    command = [sys.executable, "-c", MEASURE, str(tmp_path)]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=120, check=True)
    assert int(done.stdout) < 8000  # KB


@pytest.mark.parametrize("name", ["", "..", "../../secrets", "a/b", "-", "x" * 300, "a\nb", "a\udcffb"])
def test_a_hostile_pod_name_stays_in_the_runs_folder(tmp_path: Path, name: str) -> None:
    store = FolderStore(tmp_path)
    key = layout.log_key(name, "20261121T100000.000000Z", 1)
    assert re.fullmatch(r"logs/[A-Za-z0-9][A-Za-z0-9._-]*/20261121T100000\.000000Z-000001\.log\.gz", key)
    store.put(key, b"x")
    assert [item.key for item in store.list("logs/")] == [key]
    assert layout.log_key("a b", "t", 1) != layout.log_key("a/b", "t", 1)


@pytest.mark.dist
def test_a_killed_launcher_leaves_its_log_in_s3(s3_store: S3Store, toy_rows: dict[str, Any]) -> None:
    toy = Toy(s3_store.uri, write_dataset(s3_store, toy_rows))
    uri = toy.run("killed", train={"max_steps": 4000, "checkpoint_every": 2000})
    code = "import sys; from trainer.launch import main; main([sys.argv[1]], archive_every=0.3)"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("MLFLOW_", "PET_"))}
    process = subprocess.Popen(
        [sys.executable, "-c", code, uri],
        env=clean | {"POD_NAME": POD, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"},
        cwd=REPOSITORY, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    try:
        store = open_store(toy.files("killed").uri)
        printed = []
        for line in process.stdout:
            printed.append(line.rstrip("\n"))
            if line.startswith('@progress {"step": 20,'):
                break
        threading.Thread(target=process.stdout.read, daemon=True).start()  # the pipe must not fill
        wanted = [line[10:] if "Z [rank 0] " in line else f"[rank 0] {line}" for line in printed]
        until(lambda: wanted[-1] in kept(store), 60)
    finally:
        process.kill()
        process.wait(20)
    # Lines of stdout and stderr, which are two pipes, may have changed places.
    assert sorted(kept(store)[: len(wanted)]) == sorted(wanted)
    assert {key.split("/")[1] for key in (item.key for item in store.list("logs/"))} == {POD}
