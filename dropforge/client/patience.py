"""How long a command waits for services that do not answer: a minute, and not at all for a stopped stack."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from dropforge import tracking
from dropforge.errors import DropforgeError
from dropforge.rest import STRANGE, UNANSWERED
from dropforge.stack.state import is_running, read_state

LIMIT: Final = 60.0  # seconds; a service that is restarted is back before


@dataclass
class Patience:
    """Tells a service that is away for a moment from one that is gone.

    :param stack: folder of the embedded stack; None where the services are others'.
    :param afterwards: the command that goes on once the services are back.
    """

    stack: Path | None
    afterwards: str
    _since: float = field(default_factory=time.monotonic, init=False)

    def check_stack(self) -> None:
        """:raises DropforgeError: if the stack is stopped, or about to be."""
        if self.stack is None:
            return
        state = read_state(self.stack)
        if is_running(self.stack) and (state is None or state.phase != "stopping"):
            return
        mend = f"Start it with `dropforge up`, and unfinished runs continue; then `{self.afterwards}`"
        raise DropforgeError(f"stack in {self.stack}", "it was stopped meanwhile", mend)

    def answered(self) -> None:
        """Begin to count anew."""
        self._since = time.monotonic()

    def bear(self, error: DropforgeError, limit: float = LIMIT) -> None:
        """Return if it is worth while to ask again. :param limit: seconds of silence that are borne.

        :raises DropforgeError: if nothing has answered for longer.
        """
        silent = time.monotonic() - self._since
        if silent > limit:
            mend = f"{error.mend.rstrip('.')}; then `{self.afterwards}`"
            raise DropforgeError(error.thing, f"{error.cause.rstrip('.')}, for {silent:.0f} s now", mend) from error


@contextmanager
def asking_mlflow(tracking_uri: str) -> Iterator[None]:
    """Ask MLflow's server without its client's minutes of retries.

    :raises DropforgeError: instead of MLflow's own exception.
    """
    from google.protobuf.json_format import ParseError  # type: ignore[import-untyped]
    from mlflow.exceptions import MlflowException

    try:
        with tracking.short_patience():
            yield
    except DropforgeError:
        raise
    except MlflowException as error:
        raise _no_answer(tracking_uri, error) from error
    except (ParseError, *STRANGE) as error:
        raise _no_answer(tracking_uri, _no_mlflow(error)) from error


@contextmanager
def asking_rest(tracking_uri: str) -> Iterator[None]:
    """Ask MLflow's server by `Rest`, which does without the seconds that importing mlflow takes.

    :raises DropforgeError: instead of what the connection raises, and of what reading an answer of others does.
    """
    try:
        yield
    except DropforgeError:
        raise
    except UNANSWERED as error:
        raise _no_answer(tracking_uri, error) from error
    except STRANGE as error:
        raise _no_answer(tracking_uri, _no_mlflow(error)) from error


def _no_mlflow(error: Exception) -> ValueError:
    return ValueError(f"none of MLflow's: {type(error).__name__} {error}")


def _no_answer(tracking_uri: str, error: Exception) -> DropforgeError:
    cause = f"it gives no answer that helps ({' '.join(str(error).split())[:200]})"
    return DropforgeError(f"MLflow at {tracking_uri}", cause, "See its log, or start it with `dropforge up`")
