"""The asynchronous side of a cluster: requests, streams, sorted errors, and clients that are renewed when refused.

It speaks to the API through the aiohttp session of a `kubernetes_asyncio` client: the generated calls parse every
answer into objects, which a feed of a thousand jobs cannot afford.
"""

from __future__ import annotations

import asyncio
import json
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from kubeflow_training.jobs.errors import (
    BackendUnauthorizedError,
    BackendUnavailableError,
    JobError,
    JobExistsError,
)
from kubeflow_training.jobs.kubernetes.answers import refused

Connect = Callable[[], AbstractAsyncContextManager[Any]]
"""Makes a `kubernetes_asyncio.client.ApiClient` with the credentials of the moment; closes it at the end."""
Params = Iterable[tuple[str, str]]
CONNECTIONS: Final = 1000
"""What a client's pool should allow: every followed log holds one."""
_ANSWER_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 5.0
_RENEW_AFTER: Final = 30.0  # seconds between two new clients because of connection errors
_BUFFER: Final = 1 << 16
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})


class NotThereError(JobError):
    """The API answered 404: no such object, namespace or kind."""


class ExpiredError(JobError):
    """The API answered 410: it no longer knows this resourceVersion, and the list has to be read anew."""


class Backoff:
    """Ever longer waits with jitter, so that a thousand readers do not come back at once."""

    def __init__(self, first: float = 0.5, most: float = 15.0) -> None:
        self._first, self._most, self._count = first, most, 0

    def reset(self) -> None:
        self._count = 0

    def seconds(self) -> float:
        """How long to wait this time."""
        seconds: float = min(self._most, self._first * 2**self._count)
        self._count = min(self._count + 1, 16)
        return seconds * random.uniform(0.5, 1)  # noqa: S311 - jitter

    async def wait(self) -> None:
        await asyncio.sleep(self.seconds())


class AsyncCluster:
    """One cluster as seen by one event loop.

    :param connect: makes a client; called again after a 401, because tokens of exec plugins last for minutes only.
    """

    def __init__(self, connect: Connect) -> None:
        self._connect = connect
        self._session: _Session | None = None
        self._lock = asyncio.Lock()
        self._doubted = False
        self.requests: Counter[str] = Counter()
        """Requests sent, by what they ask for: list, watch, get, log, ..."""

    async def json(
        self, verb: str, path: str, params: Params = (), *, method: str = "GET", body: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The API's answer.

        :raises JobError: one of the kinds of this module and of `jobs.errors`.
        """
        async with self._open(verb, method, path, params, _ANSWER_SECONDS, body) as response:
            with _errors(path):
                data = await response.read()
            try:
                value = json.loads(data)
            except ValueError as error:
                value = error
            if not isinstance(value, dict):  # a proxy's own page, or half an answer
                raise BackendUnavailableError(path, f"its answer is no object: {data[:100]!r}", "It is tried again")
            return value

    @asynccontextmanager
    async def stream(self, verb: str, path: str, params: Params, silence: float) -> AsyncIterator[AsyncIterator[bytes]]:
        """Blocks of bytes as they come; ends when the server ends it.

        :param silence: seconds without a byte after which the connection counts as dead.
        """
        async with self._open(verb, "GET", path, params, silence, None) as response:
            yield _blocks(response, path)

    async def close(self) -> None:
        session, self._session = self._session, None
        if session is not None:
            await session.retire()

    @asynccontextmanager
    async def _open(
        self, verb: str, method: str, path: str, params: Params, silence: float, body: Mapping[str, Any] | None
    ) -> AsyncIterator[Any]:
        for attempt in (1, 2):
            session = await self._current()
            session.users += 1
            try:
                self.requests[verb] += 1
                try:
                    with _errors(path):
                        response = await session.request(method, path, params, silence, body)
                except BackendUnavailableError:
                    self._doubted = True  # the address or its certificate may have changed as well
                    raise
                try:
                    error = None if response.status < 400 else await _refusal(path, response)
                    if error is None:
                        yield response
                        return
                finally:
                    response.close()
                if isinstance(error, BackendUnauthorizedError):
                    await self._renew(session)
                    if attempt == 1:
                        continue
                raise error
            finally:
                session.users -= 1
                await session.close_if_unused()

    async def _current(self) -> _Session:
        session = self._session
        if session is not None and self._doubted and time.monotonic() - session.since > _RENEW_AFTER:
            await self._renew(session)
            session = self._session
        if session is not None:
            return session
        async with self._lock:
            if self._session is None:
                try:
                    self._session = await _Session.make(self._connect)
                except JobError:
                    raise
                except Exception as error:
                    raise BackendUnavailableError(
                        "the cluster's connection", f"{type(error).__name__}: {error}", "It is tried again"
                    ) from error
                self._doubted = False
            return self._session

    async def _renew(self, refused: _Session) -> None:
        """Drop a client whose credentials ran out; its running streams go on until they end."""
        if self._session is refused:
            self._session = None
        await refused.retire()


class _Session:
    """A client, and how many requests use it: it is closed when it is retired and nobody does."""

    def __init__(self, manager: AbstractAsyncContextManager[Any], client: Any) -> None:
        self._manager, self._client = manager, client
        self._retired = self._closed = False
        self.users = 0
        self.since = time.monotonic()

    @classmethod
    async def make(cls, connect: Connect) -> _Session:
        manager = connect()
        return cls(manager, await manager.__aenter__())

    async def request(
        self, method: str, path: str, params: Params, silence: float, body: Mapping[str, Any] | None
    ) -> Any:
        import aiohttp

        headers = {"Accept": "application/json" if "/log" not in path else "*/*"}
        headers["User-Agent"] = self._client.user_agent
        try:
            await self._client.update_params_for_auth(headers, [], ["BearerToken"])
        except Exception as error:  # a plugin that fetches tokens may fail in its own way
            cause = f"its credentials cannot be had: {type(error).__name__}: {error}"
            raise BackendUnavailableError("the cluster's connection", cause, "It is tried again") from error
        rest = self._client.rest_client
        more: dict[str, Any] = {}
        if rest.proxy:
            more |= {"proxy": rest.proxy, "proxy_headers": rest.proxy_headers}
        if rest.server_hostname:
            more["server_hostname"] = rest.server_hostname
        return await rest.pool_manager.request(
            method,
            self._client.configuration.host + path,
            params=list(params),
            headers=headers,
            json=body,
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=_CONNECT_SECONDS, sock_read=silence),
            read_bufsize=_BUFFER,  # flow control per stream; the session's own 2 MiB would add up
            **more,
        )

    async def retire(self) -> None:
        self._retired = True
        await self.close_if_unused()

    async def close_if_unused(self) -> None:
        if self._retired and not self.users and not self._closed:
            self._closed = True
            await self._manager.__aexit__(None, None, None)


async def _blocks(response: Any, path: str) -> AsyncIterator[bytes]:
    while True:
        with _errors(path):
            block = await response.content.readany()
        if not block:
            return
        yield block


class _errors:  # noqa: N801 - read like a function
    """Turns the errors of aiohttp into `BackendUnavailableError`."""

    def __init__(self, thing: str) -> None:
        self._thing = thing

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        import aiohttp

        if isinstance(error, aiohttp.ClientError | OSError | asyncio.TimeoutError):
            text = str(error) or type(error).__name__
            raise BackendUnavailableError(
                self._thing, f"the cluster cannot be reached: {text}", "It is tried again"
            ) from error


async def _refusal(path: str, response: Any) -> JobError:
    with _errors(path):
        text = (await response.content.read(_BUFFER)).decode(errors="replace")
    return refusal(path, response.status, text)


def refusal(thing: str, status: int, text: str) -> JobError:
    """The error that follows from the API's status code, with the server's own words."""
    try:
        message = str(json.loads(text)["message"])
    except (TypeError, ValueError, KeyError):
        message = text.strip()[:500]
    if status == 401:
        return BackendUnauthorizedError(thing, f"401: {message}", "Renew the cluster's credentials")
    if status == 404:
        return NotThereError(thing, f"404: {message}", "Look whether the namespace and the kind exist")
    if status == 409:
        return JobExistsError(thing, message, "Delete it first, or choose another name")
    if status == 410:
        return ExpiredError(thing, f"410: {message}", "It is listed again")
    if status in _PASSING:
        return BackendUnavailableError(thing, f"{status}: {message}", "It is tried again")
    return refused(thing, status, message, "Correct the request")


@asynccontextmanager
async def from_kubeconfig(path: str | None = None) -> AsyncIterator[Any]:
    """A `Connect` for use without Airflow: the current kubeconfig, or the pod's own account."""
    client, config = await asyncio.to_thread(_import)
    configuration = client.Configuration()
    configuration.connection_pool_maxsize = CONNECTIONS
    await config.load_kube_config(config_file=path, client_configuration=configuration)
    async with client.ApiClient(configuration) as made:
        yield made


def _import() -> tuple[Any, Any]:
    """The generated client takes a second to import; a loop must not stand still for it."""
    import aiohttp  # noqa: F401
    from kubernetes_asyncio import client, config

    return client, config
