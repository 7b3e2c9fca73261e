"""Names of runs as arguments of commands, completed by the shell."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import typer

from dropforge import layout
from dropforge.client.comparing.find import names_like
from dropforge.client.connection import connect
from dropforge.rest import Rest

_COMPLETED: Final = 200  # names


def complete_run(context: typer.Context, incomplete: str) -> list[str]:
    """Names of runs that begin like this, for the shell."""
    try:
        state = context.params.get("state")
        connection = connect(Path(state) if state else None)
        if "/" in incomplete:
            family, _, begin = incomplete.partition("/")
            names = [f"{family}/{drop}" for drop in connection.store.folders(layout.family_prefix(family), _COMPLETED)]
            found = [name for name in names if name.startswith(f"{family}/{begin}")]
        else:
            found = names_like(Rest(connection.settings.tracking_uri), incomplete)
        return [name for name in found if name.isprintable()]  # the shell prints them as they are
    except Exception:  # nobody to ask: the shell completes nothing
        return []


RUN_HELP: Final = (
    "A run: FAMILY/DROP (FAMILY/DROP#2 for its second run), FAMILY/VERSION, FAMILY@ALIAS, its name or the beginning "
    "of it, its id in Airflow, or FAMILY for its newest run."
)
RunArgument = Annotated[str, typer.Argument(help=RUN_HELP, autocompletion=complete_run, metavar="RUN")]
OptionalRunArgument = Annotated[
    str | None, typer.Argument(help=RUN_HELP, autocompletion=complete_run, metavar="RUN", show_default="the newest run")
]
RunsArgument = Annotated[
    list[str],
    typer.Argument(help=f"2 to 50 runs. {RUN_HELP}", autocompletion=complete_run, metavar="RUN", show_default=False),
]
