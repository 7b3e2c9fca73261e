"""Where the DAG files are: in a clone, or in the installed package."""

from __future__ import annotations

import os
from pathlib import Path

import dropforge
from dropforge.errors import DropforgeError


def source_root() -> Path:
    """The folder that holds `dags/`: a clone, or what the installed package brings.

    :raises DropforgeError: if they are not there.
    """
    package = Path(dropforge.__file__).parent
    named = os.environ.get("DROPFORGE_ROOT")
    for root in (Path(named),) if named else (package.parent, package):
        if (root / "dags" / "finetune.py").is_file():
            return root
    raise DropforgeError(
        f"folder {named or package}", "it holds no `dags`", "Install Dropforge again, or set DROPFORGE_ROOT to a clone"
    )
