"""Worker processes that die: their splits are done once more, and nothing counts twice."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import curation
from dropforge.drop import Drop
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

#: A worker that kills itself once: as `_part` is asked for the nth file's name, or for that of the report.
DYING = """
import os, signal
from pathlib import Path
from curation import kernel, pool

names = kernel._part
left = [{calls}]

def part(path):
    left[0] -= 1
    if (path.suffix == ".json" if {calls} == 0 else left[0] == 0):
        try:
            os.close(os.open({marker!r}, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            pass
        else:
            os.kill(os.getpid(), signal.SIGKILL)
    return names(path)

kernel._part = part
pool.main()
"""


@pytest.mark.parametrize(("calls", "left"), [(0, 0), (5, 2)], ids=["behind the files", "between two files"])
def test_a_worker_killed_before_its_report_leaves_nothing_twice(
    store: FolderStore,
    upload: Callable[..., Drop],
    texts: Callable[..., list[bytes]],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
    left: int,
) -> None:
    """Pitfall of a retry: the files of a split take their names first, its report comes last."""
    files = {f"{n}.jsonl": b"\n".join([*texts(60, 50 * n), b"{broken"]) for n in range(4)}
    drop, marker = upload(files), tmp_path / "died"
    start = subprocess.Popen

    def dying(command: list[str], **how: Any) -> Any:
        assert command[1:] == ["-P", "-m", "curation.pool"]
        return start([sys.executable, "-c", DYING.format(calls=calls, marker=str(marker))], **how)

    with monkeypatch.context() as patch:
        patch.setattr("curation.pool.subprocess.Popen", dying)
        made = curation.curate(store, drop, recipe(workers=2), workdir=tmp_path / "work")
    assert marker.exists(), "a worker was killed"
    assert made.counts["input"] == 4 * 61
    parts = sorted(path.name.partition(".")[2] for path in (tmp_path / "work/parts").iterdir())
    assert [name for name in parts if not name.endswith(".part")] == sorted(
        ["answers.parquet", "faults.parquet", "json", "rows.parquet"] * 4
    )
    assert len([name for name in parts if name.endswith(".part")]) == left  # of a process that is gone; nobody reads it
    assert not [info.key for info in store.list() if ".part" in info.key or ".tmp" in info.key]
    other = FolderStore(tmp_path / "other")
    for key, data in [*files.items(), ("_SUCCESS", b"")]:
        other.put(f"drops/fam/d1/{key}", data)
    whole = curation.curate(other, drop, recipe(workers=1), workdir=tmp_path / "work-whole")
    assert (whole.digest, whole.shards) == (made.digest, made.shards)


def test_a_worker_runs_no_python_file_of_the_folder_where_a_person_stands(
    upload: Callable[..., Drop],
    store: FolderStore,
    texts: Callable[..., list[bytes]],
    recipe: Callable[..., Recipe],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Whoever curates a folder of downloaded data often stands in it."""
    here, marker = tmp_path / "downloaded", tmp_path / "ran"
    here.mkdir()
    for name in ("curation", "struct"):
        (here / f"{name}.py").write_text(f"open({str(marker)!r}, 'w')")
    drop = upload({f"{n}.jsonl": b"\n".join(texts(30, 50 * n)) for n in range(2)})
    monkeypatch.chdir(here)
    made = curation.curate(store, drop, recipe(workers=2), workdir=tmp_path / "work")
    assert (made.counts["input"], marker.exists()) == (60, False)
