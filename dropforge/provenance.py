"""Which code made a model: a digest of the sources that shape it, and the git revision where there is one."""

from __future__ import annotations

import hashlib
import os
import subprocess
from functools import cache
from importlib.util import find_spec
from pathlib import Path

# Packages whose change can change a model. Airflow's side only starts jobs.
_PACKAGES = ("trainer", "dropforge")


@cache
def code_digest() -> str:
    """SHA-256 over the names and bytes of the Python files that train."""
    state = hashlib.sha256()
    for package in _PACKAGES:
        found = find_spec(package)
        if found is None or found.origin is None:
            continue
        folder = Path(found.origin).parent
        # What starts jobs and serves people does not shape a model.
        skipped = {folder / "cli", folder / "stack", folder / "commands"}
        for path in sorted(folder.rglob("*.py")):
            if not skipped.intersection(path.parents):
                state.update(f"{package}/{path.relative_to(folder).as_posix()}\0".encode())
                state.update(path.read_bytes())
    return state.hexdigest()


@cache
def git_revision() -> str:
    """The commit this code was made from, `+` behind it if files changed since; empty where nobody knows.

    `DROPFORGE_GIT` tells it where there is no checkout, as in an image.
    """
    if known := os.environ.get("DROPFORGE_GIT"):
        return known
    folder = Path(__file__).parent

    def git(*words: str) -> str:
        done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, timeout=20)
        return done.stdout.strip() if done.returncode == 0 else ""

    try:
        revision = git("rev-parse", "HEAD")
        return revision + ("+" if revision and git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.TimeoutExpired):
        return ""
