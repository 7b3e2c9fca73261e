"""An embedded stack of its own for a bench, whose DAGs the bench chooses."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from dropforge.client.connection import Connection, connect
from dropforge.stack import control
from dropforge.stack.databases import Databases
from dropforge.stack.state import read_state

REPOSITORY = Path(__file__).parents[1]


@contextmanager
def stack(dags: Mapping[str, Path], state: Path | None = None) -> Iterator[Connection]:
    """A running stack with these files as its DAGs, stopped at the end.

    :param dags: the files by the names that they have in Airflow's folder.
    :param state: the stack's folder, which stays; without it a temporary one that does not.
    """
    folder = state.absolute() if state else Path(tempfile.mkdtemp(prefix="dropforge-bench-"))
    root = folder / "root"
    (root / "dags").mkdir(parents=True, exist_ok=True)
    for name, path in {"plugins": REPOSITORY / "plugins", **{f"dags/{name}": at for name, at in dags.items()}}.items():
        (root / name).unlink(missing_ok=True)
        (root / name).symlink_to(path)
    os.environ["DROPFORGE_ROOT"] = str(root)
    control.start(folder)
    try:
        control.wait_ready(folder)
        yield connect(folder)
    finally:
        control.stop(folder)
        if state is None:
            shutil.rmtree(folder, ignore_errors=True)


def restarts(folder: Path, service: str) -> tuple[int | None, int]:
    """The process of a service that lives, and how often it was started again."""
    found = read_state(folder)
    assert found is not None
    return found.services[service].pid, found.services[service].restarts


def ask(folder: Path, question: str, *values: Any) -> list[tuple[Any, ...]]:
    """Rows of Airflow's database: its REST interface tells a hundred at a time and takes time from the scheduler."""
    databases = Databases.of(folder)
    with closing(databases.connect(databases.name("airflow"))) as database, database.cursor() as cursor:
        cursor.execute(question, values)
        return cursor.fetchall()
