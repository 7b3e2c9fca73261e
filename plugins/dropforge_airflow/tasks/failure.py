"""Errors that a person must mend end a task at once: trying again would only repeat them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress

from airflow.sdk import get_current_context
from airflow.sdk.exceptions import AirflowFailException

from dropforge.errors import DropforgeError
from dropforge.hub import UnreachableError
from dropforge.text import as_line
from dropforge_airflow.run_notes import FAILURE

log = logging.getLogger(__name__)


class MendableError(AirflowFailException):
    """A failure without retries. :param error: what a person can mend, which alerts tell in its parts."""

    def __init__(self, error: DropforgeError) -> None:
        super().__init__(str(error))
        self.error = error


@contextmanager
def no_retry() -> Iterator[None]:
    """Turn an error for people into a failure without retries, with its own text.

    Who is silent is asked again, but only once where no name server knows the host.
    """
    try:
        yield
    except DropforgeError as error:
        log.error("%s", error)
        tries = 1
        with suppress(Exception):  # without it the log alone says why
            ti = get_current_context()["ti"]
            tries = ti.try_number
            ti.xcom_push(FAILURE, as_line(error, 500))
        if isinstance(error, UnreachableError) and not (tries > 1 and _is_unknown_host(error)):
            raise
        raise MendableError(error) from None


def _is_unknown_host(error: BaseException | None) -> bool:
    while error is not None:
        if isinstance(error, socket.gaierror) and error.errno == socket.EAI_NONAME:
            return True
        error = error.__cause__ or error.__context__
    return False
