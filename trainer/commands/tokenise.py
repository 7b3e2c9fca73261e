"""`python -m trainer tokenise`: tokenise and pack before GPUs are taken."""

from __future__ import annotations

import argparse
from typing import Any

from trainer.commands.addresses import open_run
from trainer.commands.arguments import subparser
from trainer.commands.terminal import tell

_EPILOG = """\
The rows are read, checked, tokenised and packed as the run does it; the plan lands in the run's folder and the tokens
beside the dataset, where later attempts and other runs find them. No GPU and no weights are needed. A run that has its
plan is left as it is. `python -m trainer.ahead ADDRESS_OF_RUN_JSON` is the same for a pod.

example:
  python -m trainer tokenise s3://dropforge/runs/python-help-9ab3f12c77d0
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands, "tokenise", "tokenise and pack ahead", "Prepare a run's rows before it is started.", _EPILOG
    )
    parser.add_argument("run", metavar="RUN", help="address of a run's folder or run.json, or a run's name")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Prepare; returns the exit code."""
    spec = open_run(arguments.run)
    from trainer.ahead import tokenise_ahead

    tokenise_ahead(spec, lambda: None, tell)
    return 0
