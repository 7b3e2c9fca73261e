"""What `train.compile` needs of a machine beside torch: a C++ compiler and Python's headers.

Standard library only, because the trainer asks as well.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sysconfig
from collections.abc import Mapping
from pathlib import Path

from dropforge.errors import DropforgeError

_MEND = "Install it (Debian: `apt-get install g++`; another one is named by CXX), or leave `train.compile` out"


def find_compiler(env: Mapping[str, str] = os.environ, include: Path | None = None) -> str:
    """The first line that the C++ compiler says of itself: that of `CXX`, else `g++`, as torch looks for it.

    :param include: folder of Python's headers; this Python's own, if not given.
    :raises DropforgeError: if it does not run, or there are no headers.
    """
    command = shlex.split(env.get("CXX") or "g++")
    try:
        told = subprocess.run([*command, "--version"], check=True, capture_output=True, text=True, timeout=20).stdout
    except (OSError, subprocess.SubprocessError) as error:
        cause = f"`{command[0]}` does not run ({' '.join(str(error).split())[:200]})"
        raise DropforgeError("the C++ compiler", cause, _MEND) from error
    headers = include or Path(sysconfig.get_path("include"))
    if not (headers / "Python.h").is_file():
        raise DropforgeError(
            "the C++ compiler",
            f"{headers} has no Python.h",
            "Install Python's headers (Debian: `apt-get install python3-dev`), or leave `train.compile` out",
        )
    return told.partition("\n")[0]
