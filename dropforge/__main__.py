"""The command `dropforge`, also as `python -m dropforge`."""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command. Ctrl-C ends it without a traceback also while its modules are loaded."""
    try:
        from dropforge.cli.app import main as run
    except KeyboardInterrupt:
        sys.stderr.write("Aborted.\n")
        sys.exit(130)
    run()


if __name__ == "__main__":
    main()
