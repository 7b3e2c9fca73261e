"""`dropforge compare`: what differs between runs, in the terminal, as JSON, and as a page that MLflow can keep."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dropforge import layout, tracking
from dropforge.cli.comparing import links
from dropforge.cli.comparing.page import render
from dropforge.cli.comparing.plain import as_json
from dropforge.cli.comparing.terminal import show
from dropforge.cli.connect import StateOption
from dropforge.cli.named import RunsArgument
from dropforge.client.comparing.fetch import collect
from dropforge.client.comparing.find import check_number
from dropforge.client.connection import connect
from dropforge.client.named import name_for_mlflow
from dropforge.client.patience import asking_mlflow, asking_rest
from dropforge.comparison import ComparedRun
from dropforge.comparison import compare as compared
from dropforge.errors import DataError, DropforgeError
from dropforge.terminal import Console
from dropforge.whole_file import write_whole

_NAME: Final = 150  # characters of a kept page's name
console = Console()


def compare(
    runs: RunsArgument,
    every: Annotated[bool, typer.Option("--all", help="Show values that are equal, too.")] = False,
    as_plain: Annotated[bool, typer.Option("--json", help="Print the comparison as JSON.")] = False,
    html: Annotated[
        Path | None,
        typer.Option(help="Write a page with plots, verdicts and answers to the same prompts.", show_default=False),
    ] = None,
    keep: Annotated[bool, typer.Option("--keep", help="Keep the page as an artifact of the first run.")] = False,
    state: StateOption = None,
) -> None:
    """Show what differs between runs: recipe, data, metrics, curves, verdicts and answers.

    Example: dropforge compare support-answers-1-3f2a support-answers@champion --html comparison.html
    """
    _check(runs, html)
    connection = connect(state)
    uri = connection.settings.tracking_uri
    runs = [name_for_mlflow(connection, run) for run in runs]
    page = html is not None or keep
    with asking_rest(uri):
        found = collect(uri, runs, verdicts=page or as_plain, answers=page)
    comparison = compared(found.runs)
    view = links.compare_view(uri, found.runs)
    said = Console(stderr=True) if as_plain else console  # what is printed as JSON is nothing but that
    if as_plain:
        typer.echo(json.dumps(as_json(comparison, view, every=every), indent=1, allow_nan=False))
    else:
        show(comparison, console, every=every)
    if page:
        text = render(comparison, found.answers, uri, time.time())
        if html is not None:
            write(html, text)
            _say(said, f"Page: {html}")
        if keep:
            _say(said, f"Kept: {_keep(uri, found.runs, text)}")
    if not as_plain:
        _say(said, f"MLflow's compare view: {view}")


def _check(runs: Sequence[str], html: Path | None) -> None:
    """Refuse what cannot work before anything is asked. :raises DropforgeError: with the mend."""
    check_number(runs)
    if html is not None and html.is_dir():
        raise DataError(f"page {html}", "it is a folder", f"Name a file, such as {html / 'comparison.html'}")
    if html is not None and not html.absolute().parent.is_dir():
        raise DataError(f"page {html}", f"there is no folder {html.parent}", "Make it, or name another file")


def write(path: Path, text: str) -> None:
    """Write the page whole or not at all. :raises DropforgeError: if it cannot be written."""
    try:
        write_whole(path, text.encode())
    except OSError as error:
        raise DropforgeError(f"page {path}", f"it cannot be written ({error.strerror})", "Name another file") from error


def _keep(uri: str, runs: Sequence[ComparedRun], text: str) -> str:
    """Put the page among the first run's artifacts. :returns: where MLflow shows it."""
    path = f"comparisons/{_file_name(runs)}.html"
    with asking_mlflow(uri):
        tracking.client(uri).log_text(runs[0].run_id, text, path)
    return links.artifact_page(uri, runs[0], path)


def _file_name(runs: Sequence[ComparedRun]) -> str:
    """The same for the same runs. Names from outside may be no names of files."""
    joined = "--".join(run.name for run in runs)
    if len(joined) <= _NAME and all(layout.is_run(run.name) for run in runs):
        return joined
    return hashlib.sha256("\n".join(run.run_id for run in runs).encode()).hexdigest()[:16]


def _say(console: Console, text: str) -> None:
    # Links are neither broken nor coloured, and names from outside may look like markup.
    console.print(text, soft_wrap=True, markup=False, highlight=False)
