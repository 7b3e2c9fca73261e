"""`python -m trainer COMMAND`: look at a run before, during and after the training, or start it."""

from __future__ import annotations

import _thread
import argparse
import os
import signal
import sys
import threading
import warnings
from types import FrameType
from typing import Any

from dropforge.standard_streams import escape_unencodable
from trainer.commands import doctor, evaluate, export, inspect, plan, run, tokenise
from trainer.commands.errors import INTERRUPTED, PIPE, TERMINATED, tell

_EPILOG = """\
An ADDRESS is s3://BUCKET/..., a folder or a file; a run's bare name is looked up in the bucket of DROPFORGE_BUCKET.

exit codes:
  0    done
  2    the command line is wrong
  10   the recipe or an address is wrong     11   the data or a checkpoint is broken
  12   the training diverged                 20   preempted: start it again, it resumes
  21   hardware or a lost rank               22   this node is broken
  130  Ctrl-C                                1    anything else

example:
  python -m trainer plan s3://dropforge/runs/python-help-9ab3f12c77d0
"""


def make_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = argparse.ArgumentParser(
        prog="python -m trainer",
        description="Plan, start, measure, export and inspect trainings.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)
    for command in (plan, tokenise, run, evaluate, export, inspect, doctor):
        command.add(commands)
    return parser


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code. What a person can mend is told without a traceback."""
    escape_unencodable()
    arguments = make_parser().parse_args(argv)
    signal.signal(signal.SIGTERM, _terminate)
    sys.unraisablehook = _unraisable
    if not sys.warnoptions:
        warnings.simplefilter("ignore", FutureWarning)  # of libraries to one another
    try:
        code: int = arguments.main(arguments)
        sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        print("stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read has seen enough; what is left in the buffer must not raise again at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return PIPE
    except Exception as error:
        return tell(error)


def _terminate(number: int, frame: FrameType | None) -> Any:
    del number, frame
    raise SystemExit(TERMINATED)  # temporary folders are removed on the way out


def _unraisable(event: Any) -> None:
    # A Ctrl-C that comes within a finalizer is swallowed by Python, so it is given again a moment later.
    if event.exc_type is KeyboardInterrupt:
        threading.Timer(0.05, _thread.interrupt_main).start()
    else:
        sys.__unraisablehook__(event)


if __name__ == "__main__":
    sys.exit(main())
