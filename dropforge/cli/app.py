"""`dropforge`: the one command and its subcommands."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, TextIO

import typer

from dropforge import __version__
from dropforge.cli import (
    approve,
    bench,
    browse,
    checkpoints,
    compare,
    curate,
    dags,
    demo,
    drops,
    env,
    explain,
    family,
    follow,
    forget,
    images,
    init,
    install,
    instances,
    letters,
    logs,
    manifests,
    metrics,
    profile,
    queue,
    queues,
    recipes,
    resume,
    rollback,
    runs,
    secret,
    services,
    shell,
    stop,
    submit,
    sweep,
    top,
)
from dropforge.client.s3 import asking_s3
from dropforge.errors import MENDS, DropforgeError, file_error
from dropforge.proxies import spare_this_machine
from dropforge.standard_streams import escape_unencodable, hold_standard_streams
from dropforge.terminal import Console, Text
from dropforge.text import has_surrogates

# Errors of output, or of a file that was open already: they come without a name.
_UNNAMED: Final = {
    errno.ENOSPC: "Make room on the disk that it goes to",
    errno.EDQUOT: MENDS[errno.EDQUOT],
    errno.EFBIG: MENDS[errno.EFBIG],
    errno.EPIPE: "Let the program that reads it run until its end",
    errno.EIO: "See to the disk that it is on",
}
app = typer.Typer(
    name="dropforge",
    help="Drop data into S3; get back a fine-tuned, evaluated, registered model.",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_show_locals=False,
)


def _show_version(asked: bool) -> None:
    if asked:
        typer.echo(f"dropforge {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Show the version and exit.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    """Options of the command itself."""


# In the order of `dropforge --help`.
COMMANDS: Final[Mapping[str, Mapping[str, Callable[..., Any] | typer.Typer]]] = {
    "The stack on this machine": {
        "demo": demo.demo,
        "up": services.up,
        "down": services.down,
        "status": services.status,
        "open": browse.open_page,
        "env": env.env,
        "doctor": services.doctor,
    },
    "Recipes and data": {
        "init": init.init,
        "presets": recipes.presets_command,
        "plan": recipes.plan,
        "drop": drops.drop_command,
        "family": family.app,
        "letters": letters.letters,
        "curate": curate.curate,
        "explain": explain.explain,
        "forget": forget.forget,
        "rebuild": forget.rebuild,
    },
    "Runs": {
        "submit": submit.submit,
        "sweep": sweep.sweep,
        "follow": follow.follow_command,
        "runs": runs.runs,
        "logs": logs.logs,
        "top": top.top,
        "compare": compare.compare,
        "checkpoints": checkpoints.checkpoints,
        "stop": stop.stop,
        "resume": resume.resume,
        "queue": queue.app,
        "shell": shell.shell,
        "profile": profile.profile,
    },
    "Models": {"approve": approve.approve, "rollback": rollback.rollback},
    "Clusters": {
        "install": install.install,
        "dags": dags.dags,
        "images": images.app,
        "manifests": manifests.manifests,
        "secret": secret.secret,
        "queues": queues.app,
        "instances": instances.instances,
        "bench": bench.app,
        "render": recipes.render,
        "metrics": metrics.metrics,
    },
}
for _panel, _commands in COMMANDS.items():
    for _name, _command in _commands.items():
        if isinstance(_command, typer.Typer):
            app.add_typer(_command, name=_name, rich_help_panel=_panel)
        else:
            app.command(_name, rich_help_panel=_panel)(_command)
# As other queues call it.
app.command("dlq", hidden=True)(letters.letters)


def main() -> None:
    """Run the command; an error that a person can mend is told in one paragraph, without a traceback."""
    hold_standard_streams()
    escape_unencodable()
    if not os.environ.get("COLUMNS", "1").strip("0"):
        del os.environ["COLUMNS"]  # on a terminal of no columns rich prints nothing
    spare_this_machine(os.environ)
    try:
        _run()
    except DropforgeError as error:
        # As plain text: names from outside may look like markup.
        told = Text.assemble(("error:", "red"), f" {error.thing}: {_sentence(error.cause)}\n{_sentence(error.mend)}")
        with contextlib.suppress(OSError):  # what cannot be told is still said by the exit code
            Console(stderr=True).print(told)
        for stream in (sys.stdout, sys.stderr):
            _give_up_on(stream)
        sys.exit(2)


def _run() -> None:
    """:raises DropforgeError: for every error that a person can mend."""
    try:
        try:
            with asking_s3():
                app()
        finally:
            if sys.stdout is not None:  # at the interpreter's end it would be too late to tell that it failed
                sys.stdout.flush()
    except OSError as error:
        if error.filename is not None:
            raise file_error(error) from error
        if error.errno in _UNNAMED:
            cause, mend = error.strerror or str(error), _UNNAMED[error.errno]
            thing = "what the command reads or writes" if error.errno == errno.EIO else "what the command writes"
            raise DropforgeError(thing, cause, mend) from error
        raise
    except UnicodeEncodeError as error:
        word = next(filter(has_surrogates, sys.argv), None)
        if word is None:
            raise
        raise DropforgeError(f"the word {word!r}", "it is no UTF-8", "Write it in UTF-8, or another one") from error


def _give_up_on(stream: TextIO | None) -> None:
    """Let what cannot be written go, or the interpreter would end with an error of its own."""
    if stream is None:
        return
    try:
        stream.flush()
    except OSError:
        with contextlib.suppress(OSError), Path(os.devnull).open("wb") as nowhere:
            os.dup2(nowhere.fileno(), stream.fileno())


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
