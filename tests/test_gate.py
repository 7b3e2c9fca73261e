"""The gate: what passes alone is flaky and green, what fails again is red, and so are many failures."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.smoke  # each case starts pytest several times

HERE = Path(__file__).parents[1]
FLAKY = """
from pathlib import Path

def test_flaky():
    mark = Path(__file__).with_suffix(".mark")
    first = not mark.exists()
    mark.touch()
    assert not first, "the first time"
"""


def gate(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "tests.gate", *words]
    env = {**os.environ, "GATE": str(folder / "rows"), "PYTHONPATH": str(HERE)}
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)


def tier(folder: Path, code: str) -> subprocess.CompletedProcess[str]:
    """Run a test file as a tier by the name `quick`."""
    (folder / "pytest.ini").write_text("[pytest]\n")
    (folder / "test_it.py").write_text(code)
    pytest_alone = str(Path(sys.executable).parent / "pytest")
    return gate(folder, "run", "quick", "--", pytest_alone)


def test_what_passes_alone_is_flaky_and_green(tmp_path: Path) -> None:
    done = tier(tmp_path, FLAKY + "def test_sound(): pass\n")
    assert done.returncode == 0, done.stdout
    assert "FLAKY " in done.stdout
    assert "the first time" in done.stdout.partition("FLAKY ")[2]
    assert gate(tmp_path, "left-out", "cluster", "there is none").returncode == 0
    table = gate(tmp_path, "table")
    assert table.returncode == 0
    lines = table.stdout.splitlines()
    assert lines[1].split()[:6] == ["quick", "2", "1", "1", "0", "0"]
    assert "LEFT OUT: there is none" in lines[2]
    assert lines[-1] == "2 passed, 0 failed"


@pytest.mark.parametrize(
    ("code", "failed"),
    [
        ("def test_broken(): assert False\n", 1),
        ("".join(f"def test_{n}(tmp_path):\n    assert False\n" for n in range(6)), 6),
        ("import nothing_of_this_name\n", 1),
        ("", 1),
        ("import os\ndef test_a(): os._exit(3)\n", 1),
    ],
    ids=["fails-again", "too-many", "no-import", "no-tests", "pytest-dies"],
)
def test_what_is_broken_is_red(tmp_path: Path, code: str, failed: int) -> None:
    done = tier(tmp_path, code)
    assert done.returncode == 1, done.stdout
    assert "FLAKY" not in done.stdout
    assert ("once more, alone" in done.stdout) == (code.startswith("def test_broken"))
    table = gate(tmp_path, "table")
    assert table.returncode == 1
    assert table.stdout.splitlines()[-1] == f"0 passed, {failed} failed"
