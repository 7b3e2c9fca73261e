"""What the parsers of all commands share."""

from __future__ import annotations

import argparse
from typing import Any


def subparser(commands: Any, name: str, summary: str, description: str, epilog: str) -> argparse.ArgumentParser:
    """The parser of one command; its epilog keeps its lines."""
    parser: argparse.ArgumentParser = commands.add_parser(
        name,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    return parser


def positive(text: str) -> int:
    """A whole number of at least 1."""
    return _at_least(1, text)


def natural(text: str) -> int:
    """A whole number of at least 0."""
    return _at_least(0, text)


def _at_least(least: int, text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = least - 1
    if value < least:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number of at least {least}")
    return value
