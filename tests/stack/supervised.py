"""A supervisor with some of the stack's own services."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dropforge.stack import control
from dropforge.stack.state import read_state
from tests.stack.test_supervisor import until

_SUPERVISE = """
import sys
from dataclasses import replace
from pathlib import Path
from dropforge.stack import control, services
from dropforge.stack.secrets import read_secrets
from dropforge.stack.supervisor import supervise
folder = Path(sys.argv[1])
ports, secrets = control.choose_ports({}, {}), read_secrets(folder)
services.prepare(folder, secrets)
wanted = {one.name: one for one in services.services(folder, ports, secrets)}
supervise(folder, ports, eval(sys.argv[2]))
"""


@contextmanager
def supervised(folder: Path, chosen: str) -> Iterator[None]:
    """Services of this new state folder, ready, until the end.

    :param chosen: Python for a list of them, of `wanted`, the stack's services by their names.
    """
    (folder / "logs").mkdir(mode=0o700, parents=True)
    supervisor = subprocess.Popen([sys.executable, "-c", _SUPERVISE, str(folder), chosen], cwd=folder.parent)
    try:
        until(lambda: read_state(folder) is not None)
        control.wait_ready(folder)
        yield
    finally:
        control.stop(folder)
        supervisor.kill()
        supervisor.wait()
