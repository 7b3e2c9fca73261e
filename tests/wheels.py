"""Wheels for tests: zip files with modules and entry points, as a build tool makes them."""

from __future__ import annotations

import hashlib
import textwrap
import zipfile
from collections.abc import Mapping
from pathlib import Path


def make_wheel(
    folder: Path, modules: Mapping[str, str], groups: Mapping[str, Mapping[str, str]], name: str = "own"
) -> dict[str, str]:
    """A wheel as the recipe's `code` names it. :param groups: entry points by group and name."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}-1.0-py3-none-any.whl"
    lines = [
        line
        for group, entries in groups.items()
        for line in (f"[{group}]", *(f"{k} = {v}" for k, v in entries.items()))
    ]
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for module, text in modules.items():
            archive.writestr(module, textwrap.dedent(text))
        archive.writestr(f"{name}-1.0.dist-info/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(f"{name}-1.0.dist-info/entry_points.txt", "\n".join(lines))
    return named(path)


def named(path: Path) -> dict[str, str]:
    """A file as `code` names it."""
    return {"wheel": str(path), "sha256": hashlib.sha256(path.read_bytes()).hexdigest()}
