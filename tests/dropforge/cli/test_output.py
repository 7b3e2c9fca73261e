"""Output that cannot be written is an error of one paragraph, or the exit code alone where that cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

# Through rich, which writes at once, and as text that waits for the end; the latter to a pipe that nobody reads too.
RICH = "import sys; from dropforge.cli import app; sys.argv[1:] = ['--help']; app.main()"
PLAIN = "from dropforge.cli import app; app.app = lambda: print('words'); app.main()"


@pytest.mark.parametrize(
    ("code", "place", "cause"),
    [
        (RICH, "/dev/full", "No space left on device. Make room on the disk that it goes to."),
        (PLAIN, "/dev/full", "No space left on device. Make room on the disk that it goes to."),
        (PLAIN, "", "Broken pipe. Let the program that reads it run until its end."),
    ],
    ids=["rich", "plain", "pipe"],
)
def test_output_that_cannot_be_written_is_told(code: str, place: str, cause: str) -> None:
    if place:
        output = os.open(place, os.O_WRONLY)
    else:
        reader, output = os.pipe()
        os.close(reader)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, text=True, check=False)
    os.close(output)
    assert " ".join(done.stderr.split()) == f"error: what the command writes: {cause}"
    assert done.returncode == 2


def test_an_error_that_cannot_be_told_is_in_the_exit_code() -> None:
    with Path("/dev/full").open("wb") as full:
        done = subprocess.run([sys.executable, "-c", PLAIN], stdout=full, stderr=full, check=False)
    assert done.returncode == 2


def test_a_word_that_is_no_utf8_is_named() -> None:
    code = "import sys; from dropforge.cli import app; app.app = lambda: sys.argv[1].encode(); app.main()"
    done = subprocess.run([sys.executable, "-c", code, b"caf\xe9"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (2, "")
    told = r"error: the word 'caf\udce9': it is no UTF-8. Write it in UTF-8, or another one."
    assert " ".join(done.stderr.split()) == told


STREAMS = """
import os, sys
from pathlib import Path
from dropforge.cli import app
places = lambda: [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
def told():
    sys.stdout.buffer.write(b"as logs does")
    sys.stdout.isatty(), sys.stdin.isatty(), sys.stderr.write("x")
    Path(sys.argv[1]).write_text("\\n".join(places()))
app.app = told
app.main()
"""


@pytest.mark.parametrize("closed", [(0, 1, 2), (2,)], ids=["all", "one"])
def test_a_command_without_standard_streams_opens_no_file_in_their_place(
    closed: tuple[int, ...], tmp_path: Path
) -> None:
    def close() -> None:
        for number in closed:
            os.close(number)

    seen = tmp_path / "seen"
    subprocess.run([sys.executable, "-c", STREAMS, str(seen)], preexec_fn=close, check=True)
    found = seen.read_text().splitlines()
    assert {found[number] for number in closed} == {os.devnull}


@pytest.mark.parametrize("columns", ["0", ""])
def test_a_terminal_of_no_columns_is_written_to(columns: str) -> None:
    env = {**os.environ, "COLUMNS": columns}
    done = subprocess.run([sys.executable, "-c", RICH], env=env, capture_output=True, text=True, check=True)
    assert "Clusters" in done.stdout


C_LOCALE = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
TELLING = {
    "dropforge": "from dropforge.cli import app\napp.app = told\napp.main()",
    "trainer": "from trainer import __main__ as app\napp.plan.main = lambda _: told()\napp.main(['plan', 'x'])",
}


@pytest.mark.parametrize("program", TELLING)
@pytest.mark.parametrize("locale", [C_LOCALE, {"PYTHONIOENCODING": "latin-1"}], ids=["C", "latin-1"])
def test_a_name_that_the_locale_cannot_write_is_spelled_out(program: str, locale: dict[str, str]) -> None:
    told = "from dropforge.terminal import Console\ndef told():\n    Console().print('\\u9879')\n    print('\\u76ee')\n"
    command = [sys.executable, "-c", f"import sys\n{told}{TELLING[program]}"]
    done = subprocess.run(command, env={**os.environ, **locale}, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()) == (0, ["\\u9879", "\\u76ee"]), done.stderr
