"""`python -m trainer.ahead ADDRESS_OF_RUN_JSON`: tokenise and pack before GPUs are taken.

What a run prepares lands in its folder, and its tokens beside the dataset, so the ranks take both over when they start.
It needs neither a GPU nor a base model's weights. A run that has its plan already is left as it is.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from dropforge.errors import DropforgeError
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store, split_uri, wait_for_s3
from trainer.compat import check_versions
from trainer.config import read_settings
from trainer.launch import Verdict, write_termination_message
from trainer.prepare import node_cache, prepare
from trainer.rank import ending
from trainer.report.console import Console, warn
from trainer.state.stop import StopSignal


def tokenise_ahead(spec: RunSpec, check: Callable[[], None], say: Callable[[str], None]) -> None:
    """Prepare what the ranks will take over.

    :param check: called now and then; it may raise to stop.
    :raises DataError: if the dataset is not what the run was planned for, or too few of its rows teach anything.
    """
    settings = read_settings(spec.recipe)
    with tempfile.TemporaryDirectory(prefix="dropforge-ahead-") as name, node_cache(settings, say) as node:
        if settings.base.start != "base":
            from trainer.restore import bring_start

            spec = bring_start(spec, say, check, node=node)
        prepare(spec, settings, Path(name), check, say, weights=False, node=node)


def main(argv: list[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        warn("usage: python -m trainer.ahead ADDRESS_OF_RUN_JSON")
        return 2
    stop = StopSignal()
    stop.install()
    try:
        check_versions()
        root, key = split_uri(arguments[0])
        tokenise_ahead(RunSpec.read(open_store(root), key), stop.check, Console().phase)
        verdict = Verdict(ExitCode.DONE, "done")
    except (Exception, KeyboardInterrupt) as error:
        code, message = ending(error)
        if not isinstance(error, DropforgeError) and code == 1:
            import traceback

            traceback.print_exc()
        warn(message)
        verdict = Verdict(code, message, 0)
    finally:
        stop.uninstall()
    write_termination_message(verdict, env)
    return int(verdict.code)


if __name__ == "__main__":
    wait_for_s3()
    raise SystemExit(main())
