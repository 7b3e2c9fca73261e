"""Looking at S3, MLflow and clusters for a page: in threads of our own, few of them, and never for long.

The pages live in Airflow's API server. A service that is away may cost it neither its event loop nor its own threads,
and ten people who watch one run cost as much as one of them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Hashable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final, TypeVar

T = TypeVar("T")

WORKERS: Final = 4  # for each place
PATIENCE: Final = 6.0  # seconds that a page waits for one of its parts
FRESH: Final = 2.0  # seconds for which a look is shared
_REMEMBERED: Final = 60.0  # seconds
_UNDERWAY: Final = 100  # looks at once


@dataclass(frozen=True)
class Unseen:
    """A part of a page that could not be read, and why; in words that name no address."""

    what: str
    why: str

    def as_dict(self) -> dict[str, str]:
        return {"what": self.what, "why": self.why}


class BusyError(Exception):
    """Too many looks at one place are underway."""


class Looks:
    """A few threads for each place, and what was seen there in the last moments."""

    def __init__(self, workers: int = WORKERS, patience: float | None = None, fresh: float = FRESH) -> None:
        self._workers, self._patience, self._fresh = workers, patience or PATIENCE, fresh
        # One for each place: threads that wait for S3 must not be those that would ask MLflow.
        self._pools: dict[str, ThreadPoolExecutor] = {}
        self._seen: dict[Hashable, tuple[float, Future[Any]]] = {}

    async def look(
        self, place: str, key: Hashable, read: Callable[[], T], fresh: float | None = None, pool: str | None = None
    ) -> T | Unseen:
        """What `read` finds, or why it found nothing in time. Whoever asks for the same key joins the look underway.

        :param place: like "S3"; part of the key. :param fresh: for how many seconds the answer holds.
        :param pool: whose threads look, if several places share them; else the place's.
        """
        try:
            # Shielded, because others may wait for the same look.
            found = asyncio.shield(asyncio.wrap_future(self._future(place, key, read, fresh, pool or place)))
            return await asyncio.wait_for(found, self._patience)
        except TimeoutError:
            return Unseen(place, f"no answer within {self._patience:g} s")
        except Exception as error:
            return Unseen(place, reason(error))

    def _future(
        self, place: str, key: Hashable, read: Callable[[], Any], fresh: float | None, pool: str
    ) -> Future[Any]:
        now, holds = time.monotonic(), self._fresh if fresh is None else fresh
        began, found = self._seen.get((place, key), (0.0, None))
        if found is not None and (not found.done() or now - began < holds):
            return found
        self._forget(now)
        if sum(1 for _, future in self._seen.values() if not future.done()) >= _UNDERWAY:
            raise BusyError
        threads = self._pools.setdefault(pool, ThreadPoolExecutor(self._workers, f"dropforge-{pool}"))
        made = threads.submit(read)
        self._seen[place, key] = (now, made)
        return made

    def _forget(self, now: float) -> None:
        for key in [key for key, (when, future) in self._seen.items() if future.done() and now - when > _REMEMBERED]:
            del self._seen[key]


def reason(error: BaseException) -> str:
    """Why something could not be read: our own words, else the kind of error; others' texts may hold addresses."""
    from kubeflow_training.jobs.errors import JobError

    from dropforge.errors import DropforgeError

    if isinstance(error, DropforgeError | JobError):
        return str(error)[:500]
    if isinstance(error, BusyError):
        return "too many people look at once"
    response = getattr(error, "response", None)
    code = (response.get("Error") or {}).get("Code") if isinstance(response, dict) else None
    return f"it could not be read ({str(code or type(error).__name__)[:60]})"
