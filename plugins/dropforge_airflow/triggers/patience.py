"""Waiting out troubles in a trigger: blocking calls off the event loop, longer pauses, one line per trouble."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


async def in_thread(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call in a thread of its own.

    A daemon thread, because a long poll in the loop's executor would hold up the triggerer's exit by 20 s.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result: T | None = None
        problem: BaseException | None = None
        try:
            result = call(*args, **kwargs)
        except BaseException as error:
            problem = error
        with contextlib.suppress(RuntimeError):  # the loop is gone
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=work, name=f"dropforge-{getattr(call, '__name__', 'call')}", daemon=True).start()
    return await future


class Patience:
    """Pauses that double while a trouble lasts, and one log line when it begins, changes or ends.

    :param what: what waits, for the log line.
    """

    def __init__(self, what: str, log: logging.Logger, *, first: float = 1.0, longest: float = 60.0) -> None:
        self._what, self._log, self._first, self._longest = what, log, first, longest
        self._pause = first
        self._said = ""

    def pause(self, error: Exception) -> float:
        """Seconds to wait after `error`."""
        text = " ".join(str(error).split()) or type(error).__name__
        pause, self._pause = self._pause, min(2 * self._pause, self._longest)
        if text != self._said:
            self._log.error(
                "%s waits: %s. It tries again by itself, at the latest every %g s", self._what, text, self._longest
            )
            self._said = text
        return pause

    def over(self) -> None:
        """Note that all is well."""
        if self._said:
            self._log.info("%s works again", self._what)
        self._pause, self._said = self._first, ""
