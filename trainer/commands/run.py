"""`python -m trainer run`: train, as the container does."""

from __future__ import annotations

import argparse
import os
import sys
from contextlib import suppress
from typing import Any

from trainer.commands.addresses import open_run, run_uri
from trainer.commands.arguments import positive, subparser

_EPILOG = """\
A run that was interrupted goes on from its newest whole checkpoint; one that is done is left alone. Ctrl-C ends it at
once; SIGTERM saves a checkpoint first. `python -m trainer.launch ADDRESS_OF_RUN_JSON` is the same without options.

example:
  python -m trainer run s3://dropforge/runs/python-help-9ab3f12c77d0 --ranks 2
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(commands, "run", "train, or go on training", "Train a run on this machine.", _EPILOG)
    parser.add_argument("run", metavar="RUN", help="address of the run's folder or run.json, or the run's name")
    parser.add_argument(
        "--ranks", type=positive, help="processes of this node (default: PET_NPROC_PER_NODE of the environment, or 1)"
    )
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Train; the process ends here, with the code of the rank that failed first."""
    from trainer import launch

    open_run(arguments.run)  # a wrong address is told like anywhere else, before anything is started
    if arguments.ranks is not None:
        os.environ["PET_NPROC_PER_NODE"] = str(arguments.ranks)
    code = launch.main([run_uri(arguments.run)])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)  # as the launcher: an ordinary exit would wait for threads that may hang
