"""`dropforge letters`: what arrived and led to no run, why, and sending it once more."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC
from typing import TYPE_CHECKING, Annotated, Final

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.listing import Cell, Output, OutputOption, print_table, print_values
from dropforge.client.connection import Connection, connect
from dropforge.errors import DataError, DropforgeError
from dropforge.letters import Letter, superseded_letters
from dropforge.letters import letters as dead_letters
from dropforge.store import S3Store
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mypy_boto3_sqs import SQSClient

console = Console()


def letters(
    ids: Annotated[list[str] | None, typer.Argument(help="Only these, as the list names them.")] = None,
    replay: Annotated[bool, typer.Option("--replay", help="Send them once more.")] = False,
    discard: Annotated[bool, typer.Option("--discard", help="Delete them; a drop's files stay.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="With --replay or --discard: all that are listed.")] = False,
    superseded: Annotated[
        bool, typer.Option("--superseded", help="Those that get no run because a newer drop came.")
    ] = False,
    output: OutputOption = Output.TABLE,
    limit: Annotated[int, typer.Option(help="How many drops, and how many messages, at most.", min=1)] = 100,
    state: StateOption = None,
) -> None:
    """List dead letters: messages that are not S3 events, and finished drops that cannot be used, with the reason.

    With an ID the whole message is shown. Fix what was wrong, then send it again:
    dropforge letters support/2026-11-20 --replay

    `dropforge dlq` is the same command.
    """
    if replay and discard:
        raise typer.BadParameter("choose one", param_hint="--replay, --discard")
    if (replay or discard) and not ids and not everything:
        raise typer.BadParameter("name dead letters, or give --all", param_hint="IDS")
    connection = connect(state)
    with _found(connection, limit, ids or [], superseded=superseded) as found:
        chosen = _chosen(found, ids or [])
        if replay or discard:
            _do(chosen, replay=replay)
            return
        if output is not Output.TABLE:
            print_values([_values(letter) for letter in chosen], _NAMES, output)
            return
        _show(chosen, whole=bool(ids))
        if len(chosen) >= limit and not ids:
            console.print(
                Text(f"There may be more: --limit {10 * limit} shows up to as many drops and messages.", "dim")
            )


@contextmanager
def _found(connection: Connection, limit: int, only: Collection[str], *, superseded: bool) -> Iterator[list[Letter]]:
    store = _store(connection)
    if superseded:
        yield superseded_letters(store, limit, only)
        return
    with dead_letters(store, _sqs(connection), connection.settings.queue_url, limit, only) as found:
        yield found


def _do(chosen: Sequence[Letter], *, replay: bool) -> None:
    """Send letters again, or delete them; one that cannot be sent holds up no other."""
    failed = 0
    for letter in chosen:
        try:
            letter.replay() if replay else letter.discard()
            console.print(Text(f"{'Sent again' if replay else 'Deleted'}: {letter.id}"))
        except DropforgeError as error:
            failed += 1
            console.print(Text(f"Not sent: {error}", "red"))
    if replay and failed < len(chosen):
        console.print("Intake looks at them within a minute; what is still wrong becomes a dead letter again.")
    if failed:
        raise typer.Exit(1)


def _store(connection: Connection) -> S3Store:
    assert isinstance(connection.store, S3Store)
    return connection.store


def _sqs(connection: Connection) -> SQSClient | None:
    import boto3

    return boto3.session.Session().client("sqs") if connection.settings.queue_url else None


def _chosen(found: Sequence[Letter], ids: Sequence[str]) -> list[Letter]:
    if not ids:
        return list(found)
    known = {letter.id: letter for letter in found}
    for asked in ids:
        if asked not in known:
            raise DataError(
                f"dead letter {asked!r}", "there is none with that name", "List them with `dropforge letters`"
            )
    return [known[asked] for asked in dict.fromkeys(ids)]


_NAMES: Final = ("id", "since", "reason", "mend", "message")


def _values(letter: Letter) -> dict[str, Cell]:
    """What programs get."""
    since = f"{letter.at.astimezone(UTC):%FT%TZ}" if letter.at else None
    return dict(zip(_NAMES, (letter.id, since, letter.reason, letter.mend or None, letter.body or None), strict=True))


def _show(found: Sequence[Letter], *, whole: bool) -> None:
    if not found:
        console.print("There are no dead letters.")
        return
    rows = [
        (letter.id, f"{letter.at:%Y-%m-%d %H:%M}" if letter.at else "-", letter.reason, letter.mend or "-")
        for letter in found
    ]
    print_table(("id", "since", "reason", "fix"), rows, console)
    for letter in found if whole else ():
        if letter.body:
            console.print(Text(f"\n{letter.id}:\n{letter.body}"))
