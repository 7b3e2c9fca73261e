"""The identity of the code that trains: part of a run's name, so that other code makes another run."""

from __future__ import annotations

import functools
import hashlib
import importlib.util
import os
import subprocess
from pathlib import Path

PACKAGES = ("dropforge", "trainer")


@functools.cache
def code_digest() -> str:
    """Digest of the trainer's sources where they are installed: 16 hexadecimal digits, empty where they are not.

    On Kubernetes the trainer lives in its image only; the image's reference is then the code's identity.
    """
    state = hashlib.sha256()
    for package in PACKAGES:
        spec = importlib.util.find_spec(package)
        if spec is None or not spec.submodule_search_locations:
            return ""
        root = Path(next(iter(spec.submodule_search_locations)))
        for path in sorted(root.rglob("*.py")):
            state.update(f"\0{package}/{path.relative_to(root).as_posix()}\0".encode() + path.read_bytes())
    return state.hexdigest()[:16]


@functools.cache
def git_commit() -> str:
    """The commit that is checked out: `DROPFORGE_GIT`, else what git says of this file's folder, else empty."""
    if known := os.environ.get("DROPFORGE_GIT"):
        return known
    command = ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    except (OSError, subprocess.TimeoutExpired):
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""
