"""Memory ceilings, measured in a child process that does nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from curation.engines.choice import choose, opened
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe

CHILD = """
import sys
from pathlib import Path
from curation import curate
from dropforge.drop import read_drop
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

def peak():  # Of this program alone: ru_maxrss begins with that of the program which started it.
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM:"))

root = Path(sys.argv[1])
store = FolderStore(root / "bucket")
recipe = load_recipe("tiny", {"curation": {"workers": 1}})
before = peak()
manifest = curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "w")
after = peak()
print("\\nadded", (after - before) // 1024, manifest.counts, "pandas" in sys.modules)
"""


def curate_in_child(root: Path) -> tuple[int, str]:
    """(MiB that curation added to the peak of resident memory, what it printed)."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(root)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    # Before it may stand a progress bar, which DuckDB shows under `python -c` when a query takes two seconds.
    printed = done.stdout.rpartition("\nadded ")[2]
    return int(printed.split()[0]), printed


@pytest.mark.parametrize("name", ["huge.jsonl", "huge.json", "huge.csv", "huge.txt"])
def test_one_huge_row_is_quarantined_in_bounded_memory(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bucket" / "drops" / "fam" / "d"
    folder.mkdir(parents=True)
    with (folder / name).open("wb") as file:
        head, row, tail = {
            "huge.jsonl": (b"", b'{"text": "good %d"}\n', b""),
            "huge.json": (b"[", b'{"text": "good %d"},\n', b'{"text": "last"}]'),
            "huge.csv": (b"text\n", b"good %d\n", b""),
            "huge.txt": (b"", b"good %d\n\n", b""),
        }[name]
        file.write(head)
        for number in range(30):
            file.write(row % number)
        start, end = row.split(b"good %d")
        file.write(start)
        for _ in range(300):
            file.write(b"x" * (1 << 20))
        file.write(end)
        for number in range(30, 60):
            file.write(row % number)
        file.write(tail)
    (folder / "_SUCCESS").touch()
    added, printed = curate_in_child(tmp_path)
    assert "'too_large': 1" in printed
    assert f"'input': {62 if tail else 61}" in printed
    assert added < 150
    assert printed.split()[-1] == "False", "curation must not load pandas: it costs more time than a small drop"


@pytest.mark.parametrize("name", ["huge.parquet", "huge.arrow"])
def test_one_huge_cell_is_quarantined_and_never_becomes_an_object(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "bucket" / "drops" / "fam" / "d"
    folder.mkdir(parents=True)
    size = 120 << 20
    texts = [*(f"good {number}" for number in range(30)), "x" * size, *(f"good {number}" for number in range(30, 60))]
    table = pa.table({"text": texts})
    if name == "huge.arrow":
        with pa.ipc.new_stream(folder / name, table.schema) as stream:
            stream.write_table(table)
    else:
        pq.write_table(table, folder / name)
    (folder / "_SUCCESS").touch()
    added, printed = curate_in_child(tmp_path)
    assert "'too_large': 1" in printed
    assert "'input': 61" in printed
    # A cell of Arrow is held once; one of Parquet thrice: in its page, in the dictionary, and as it is handed out.
    assert added < (480 if name == "huge.parquet" else 215)


def test_many_rows_are_sorted_in_bounded_memory(tmp_path: Path) -> None:
    folder = tmp_path / "bucket" / "drops" / "fam" / "d"
    folder.mkdir(parents=True)
    with (folder / "a.jsonl").open("wb") as file:
        for number in range(40_000):
            file.write(b'{"text": "%d %s"}\n' % (number, b"word " * 1_000))
    (folder / "_SUCCESS").touch()
    added, printed = curate_in_child(tmp_path)
    assert "'input': 40000" in printed
    assert added < 900


@pytest.mark.parametrize(("asked", "held"), [({}, "488.2 MiB"), ({"memory": "300MB"}, "286.1 MiB")])
def test_the_recipes_memory_reaches_duckdb(
    tmp_path: Path, recipe: Callable[..., Recipe], asked: dict[str, str], held: str
) -> None:
    settings = recipe(**asked).curation
    with opened(choose(settings, 0), settings, tmp_path / "e") as engine, engine.tables(tmp_path / "t") as tables:
        assert tables.one("select current_setting('memory_limit')") == (held,)


@pytest.mark.parametrize("memory", ["0MB", "512", "2 GB", "512mb", "1e3MB", "80%", "1GB'; select 1", 512])
def test_memory_that_is_no_amount_is_refused(recipe: Callable[..., Recipe], memory: object) -> None:
    with pytest.raises(RecipeError, match=r"curation\.memory"):
        recipe(memory=memory)
