"""Puts a file into an Airflow as its `airflow_local_settings.py`, which each of its processes imports."""

from __future__ import annotations

import shutil
from pathlib import Path


def install(home: Path, source: str | Path) -> None:
    """Copy the file. :param home: the folder of an Airflow that has not started."""
    folder = home / "config"
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, folder / "airflow_local_settings.py")
