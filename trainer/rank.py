"""A rank's process: it does the work of `trainer.training` and ends with a code that says how it went.

Started by `trainer.launch`. Heavy imports come after the signal handler, so that a SIGTERM is never met unprepared.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import tempfile
import time
import traceback
from contextlib import nullcontext, suppress
from importlib import import_module
from pathlib import Path
from typing import TypeGuard

from dropforge.errors import FULL, DataError, DropforgeError, RecipeError, file_error
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store, split_uri
from trainer.compat import check_quantising, check_versions, quiet_libraries
from trainer.config import read_settings
from trainer.node.compiler import check_compiler, open_cache
from trainer.node.device_errors import NodeError, device_error, judge
from trainer.node.heart import Heart, bounds_from_env, keep_flight_records
from trainer.preflight.ranks import hold, preflight_from_env
from trainer.preflight.verdict import PreflightError
from trainer.prepare import node_cache, prepare, scratch_folder
from trainer.report.board import check_board
from trainer.report.console import Console, warn
from trainer.report.wall import Wall, began_from_env
from trainer.state.stop import TOO_EARLY, PreemptedError, StopSignal, die_with_parent

_PEER_FIRST = 1.0  # seconds; whoever caused a failure is to be seen to end first


def run(uri: str, stop: StopSignal, console: Console, heart: Heart | None = None, wall: Wall | None = None) -> None:
    """Do the run at an address. :raises Exception: of many kinds, see `ending`."""
    wall = wall or Wall(began_from_env(os.environ))
    check_versions()
    root, key = split_uri(uri)
    spec = RunSpec.read(open_store(root), key)
    settings = read_settings(spec.recipe)
    check_board(settings.train.tensorboard)
    check_compiler(settings.train.compile)
    os.environ.update(open_cache(settings.compile_cache))
    check_quantising(settings.train.method, settings.train.optimizer)
    if open_store(spec.root).stat("report.json") is not None:
        console.say(f"run {spec.run} is already done")
        return
    given = scratch_folder()
    with (
        tempfile.TemporaryDirectory(prefix="dropforge-") if given is None else nullcontext(str(given)) as name,
        node_cache(settings, console.phase) as node,
    ):
        scratch = Path(name)
        held, shown = preflight_from_env(os.environ), None
        if held is not None:
            console.phase(f"preflight, {held.fabric}")
            shown = hold(held, settings.gpus, scratch, os.environ, stop.check, lambda: import_module("torch"))
            console.say(f"preflight: {shown}")
        if os.environ.get("LOCAL_RANK", "0") == "0":
            first = os.environ.get("RANK", "0") == "0"
            with wall.during("data"):
                if settings.base.start != "base":
                    from trainer.restore import bring_start

                    spec = bring_start(spec, console.phase, stop.check, first=first, node=node)
                prepare(spec, settings, scratch, stop.check, console.phase, first=first, node=node)
        from trainer.gang import gang_from_env, set_threads
        from trainer.model.deterministic import enable
        from trainer.training import train

        quiet_libraries()
        if settings.train.deterministic:
            enable()
        gang = gang_from_env(settings.gpus)
        set_threads(gang.local_world)
        train(spec, settings, gang, scratch, stop, console, heart or Heart(), wall, shown)


def is_full(error: BaseException) -> TypeGuard[OSError]:
    """Whether a file could not be written for want of room."""
    return isinstance(error, OSError) and error.errno in FULL


def ending(error: BaseException) -> tuple[int, str]:
    """Exit code and message for what ended a rank."""
    from trainer.data.hub import UnreachableError
    from trainer.gang import CollectiveError
    from trainer.loop.divergence import DivergedError
    from trainer.model.export import ExportError
    from trainer.state.checkpoint import StorageError

    text = str(error)
    if isinstance(error, PreemptedError):
        return ExitCode.PREEMPTED, text
    if isinstance(error, ExportError):  # another try may do
        return 1, text
    if is_full(error):
        if error.filename is None:
            places = f"{tempfile.gettempdir()} and for the run's folder"
            return 1, f"a disk is full ({error.strerror}): make room for {places}"
        return 1, f"{file_error(error)}; another try continues from what is there"
    if isinstance(error, FileNotFoundError) and str(error.strerror).startswith("No usable temporary directory"):
        mend = "Mount a folder at /tmp, or name one in TMPDIR"
        return ExitCode.BAD_RECIPE, f"no folder for temporary files can be written where this runs. {mend}"
    if words := device_error(error):  # whatever it has become on its way
        judged = judge(words)
        if not isinstance(error, RecipeError) or judged[0] != ExitCode.BAD_RECIPE:  # which says more of it
            return judged
    match error:
        case RecipeError():
            return ExitCode.BAD_RECIPE, text
        case DataError():
            return ExitCode.BAD_DATA, text
        case DivergedError():
            return ExitCode.DIVERGED, text
        case CollectiveError():
            return ExitCode.HARDWARE, f"the ranks lost each other: {text}. Look for a rank that ended first"
        case StorageError():
            return ExitCode.HARDWARE, text
        case PreflightError():
            return error.code, text
        case NodeError():
            return ExitCode.NODE, text
        case UnreachableError():  # another try may do
            return 1, text
        case DropforgeError():
            return ExitCode.BAD_RECIPE, text
        case _:
            return 1, f"{type(error).__name__}: {' '.join(text.split())[:1000]}"


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        warn("usage: python -m trainer.rank ADDRESS_OF_RUN_JSON")
        return 2
    rank = int(os.environ.get("RANK", 0))
    if "DROPFORGE_LAUNCHER" in os.environ:
        die_with_parent(int(os.environ["DROPFORGE_LAUNCHER"]))
    stop = StopSignal()
    stop.install(lambda: _leave_at_once(rank))
    console = Console(quiet=rank != 0)
    heart = Heart(rank, bounds_from_env(os.environ), lambda: stop.looks)
    folder = scratch_folder()
    if folder is not None:
        tempfile.tempdir = str(folder)  # a model half written must not stay behind when this process is killed
        heart.start(folder)
    try:
        run(arguments[0], stop, console, heart)
    except BaseException as error:
        code, message = ending(error)
        if code == 1 and not is_full(error):
            traceback.print_exc()
        leave_word(rank, int(code), message)
        warn(message)
        if code == ExitCode.HARDWARE:
            _keep_flight_records(rank)
            time.sleep(_PEER_FIRST)
        return int(code)
    finally:
        stop.uninstall()
        heart.end()
    leave_word(rank, 0, "done")
    return 0


def _leave_at_once(rank: int) -> None:
    """End because of a SIGTERM before training, whatever the main thread is in: nothing can be lost."""
    leave_word(rank, ExitCode.PREEMPTED, TOO_EARLY)
    warn(TOO_EARLY)
    os._exit(ExitCode.PREEMPTED)


def leave_word(rank: int, code: int, message: str) -> None:
    """Tell the launcher how it went; it writes the termination message. A full disk must not change the exit code."""
    folder = scratch_folder()
    if folder is not None:
        temporary = folder / f".outcome-{rank}"
        with suppress(OSError):  # the launcher takes the last line of the log
            temporary.write_text(json.dumps({"code": code, "message": message}))
            temporary.rename(folder / f"outcome-{rank}.json")


def _keep_flight_records(rank: int) -> None:
    """Leave the last collectives for the launcher to keep: gloo's recorder writes nothing by itself."""
    folder = scratch_folder()
    if folder is not None:
        with suppress(OSError):
            keep_flight_records(folder, rank)


def leave_process(code: int) -> None:
    """End this rank: threads of collectives may hang in an ordinary exit once a peer is gone."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    faulthandler.enable()
    leave_process(main())
