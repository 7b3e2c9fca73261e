"""How a command fails: an exit code, and a word for people that names the thing, the cause and the mend."""

from __future__ import annotations

import os
import sys
import traceback
from typing import Final

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.run import ExitCode
from dropforge.text import escape
from trainer.commands.terminal import Paint

INTERRUPTED: Final = 130  # as shells have it: 128 and the signal's number
PIPE: Final = 141
TERMINATED: Final = 143


def tell(error: Exception) -> int:
    """Say on stderr what went wrong; the exit code."""
    paint = Paint.of(sys.stderr)
    known = as_known(error)
    if known is None:
        traceback.print_exception(error)
        print(f"{paint('error:', 'red')} {type(error).__name__}: {escape(str(error))}", file=sys.stderr)
        return 1
    told = escape(f" {known.thing}: {_sentence(known.cause)}\n{_sentence(known.mend)}")
    print(f"{paint('error:', 'red')}{told}", file=sys.stderr)
    return exit_code(error)


def exit_code(error: Exception) -> int:
    """The code of the design for an error, the same as a rank ends with."""
    if isinstance(error, DataError):
        return ExitCode.BAD_DATA
    if isinstance(error, RecipeError):
        return ExitCode.BAD_RECIPE
    if "torch" in sys.modules:
        from trainer.rank import ending

        return int(ending(error)[0])
    return ExitCode.BAD_RECIPE if isinstance(error, DropforgeError) else 1


def as_known(error: Exception) -> DropforgeError | None:
    """The error as one that a person can mend; None for a fault of ours."""
    if isinstance(error, DropforgeError):
        return error
    text = " ".join(str(error).split())[:300]
    # By name: boto3 need not be installed.
    if type(error).__module__.partition(".")[0] in ("botocore", "boto3"):
        where = f"S3 at {os.environ.get('AWS_ENDPOINT_URL', 'AWS')}"
        if type(error).__name__ == "ClientError":
            return DropforgeError(where, text, "Check the bucket, and what the credentials may do with it")
        return DropforgeError(where, f"it cannot be used ({text})", "Check AWS_ENDPOINT_URL and the credentials")
    if type(error).__name__ == "StorageError":  # by name, because its module needs torch
        return DropforgeError("storage", text, "Nothing was written")
    if isinstance(error, ModuleNotFoundError) and error.name:
        package = error.name.partition(".")[0]
        return DropforgeError(f"package {package}", "it is not installed", f"Install it: pip install {package}")
    if isinstance(error, OSError) and error.filename:
        return DropforgeError(str(error.filename), error.strerror or text, "Check the path, its rights and the room")
    return None


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
