"""Faults inside ranks that `trainer.launch` starts: Python code that runs after the import of a module."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_SITE = '''
import sys
from importlib.machinery import PathFinder

CODE = {code!r}

class After:
    """Runs code in the namespace of a module once it is imported."""
    def find_spec(self, name, path=None, target=None):
        if name not in CODE:
            return None
        found = PathFinder.find_spec(name, path, target)
        execute = found.loader.exec_module
        def both(module):
            execute(module)
            exec(compile(CODE[name], "fault", "exec"), vars(module))
        found.loader.exec_module = both
        return found

sys.meta_path.insert(0, After())
'''

# For a single fault: one line that a test can wait for, and a wait that only a signal ends.
_TOOLS = """
import os, sys, time
def hold(seconds=300):
    print("HOLD", os.environ.get("RANK"), os.getpid(), flush=True)
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        time.sleep(0.05)
"""


def fault(folder: Path, module: str, code: str) -> dict[str, str]:
    """Environment of a launcher whose ranks run `code` after they have imported `module`."""
    return faults(folder, {module: _TOOLS + code})


def faults(folder: Path, code: Mapping[str, str]) -> dict[str, str]:
    """The same for several modules, without the tools."""
    place = folder / "fault"
    place.mkdir(exist_ok=True)
    (place / "sitecustomize.py").write_text(_SITE.format(code=dict(code)))
    return {"PYTHONPATH": os.pathsep.join(filter(None, [str(place), os.environ.get("PYTHONPATH", "")]))}
