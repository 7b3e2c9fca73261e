"""Two that write at a time, on a server whose audit log commits on its event loop as Airflow's does."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from dropforge_airflow.one_writer import OneWriter
from fastapi import Depends, FastAPI

BUSY = 2.0  # seconds that SQLite waits for another writer
HOLD = 1.0  # seconds for which a task's request has begun to write; a busy machine needs some for the other's to begin


def server(database: Path, begun: asyncio.Event) -> FastAPI:
    """`/task` writes in a thread and commits after its answer is made; `/person` is noted on the loop."""

    def connect() -> sqlite3.Connection:
        return sqlite3.connect(database, timeout=BUSY, check_same_thread=False)

    def session() -> Iterator[sqlite3.Connection]:
        connection = connect()
        yield connection
        connection.commit()
        connection.close()

    own = Depends(session, scope="function")
    app = FastAPI()

    @app.patch("/task")
    def task(connection: sqlite3.Connection = own) -> str:
        connection.execute("INSERT INTO log VALUES ('task')")
        loop.call_soon_threadsafe(begun.set)
        time.sleep(HOLD)
        return "started"

    async def note(connection: sqlite3.Connection = own) -> None:
        connection.execute("INSERT INTO log VALUES ('person')")
        connection.commit()

    @app.post("/person", dependencies=[Depends(note)])
    def person() -> str:
        return "done"

    @app.get("/look")
    def look() -> str:
        return "seen"

    loop = asyncio.get_running_loop()
    with connect() as connection:
        connection.execute("CREATE TABLE log (who TEXT)")
    return app


async def both(database: Path, wrap: Any) -> list[int | str]:
    """What a task that starts and a person in the middle of it are answered, and the kinds of errors."""
    begun = asyncio.Event()
    app = wrap(server(database, begun))
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a", timeout=20) as client:
        task = asyncio.create_task(client.patch("/task"))
        await asyncio.wait_for(begun.wait(), 10)
        answers = await asyncio.gather(task, client.post("/person"), return_exceptions=True)
    return [one.status_code if isinstance(one, httpx.Response) else type(one).__name__ for one in answers]


def test_who_writes_waits_for_who_has_begun(tmp_path: Path) -> None:
    assert asyncio.run(both(tmp_path / "a.db", lambda app: OneWriter(app, alone=True))) == [200, 200]


def test_without_turns_one_of_them_is_refused(tmp_path: Path) -> None:
    """The fault itself: where Airflow no longer has it, the turns can go."""
    found = asyncio.run(both(tmp_path / "a.db", lambda app: OneWriter(app, alone=False)))
    assert "OperationalError" in found


def test_who_reads_waits_for_nobody(tmp_path: Path) -> None:
    async def reads() -> None:
        begun = asyncio.Event()
        app = OneWriter(server(tmp_path / "a.db", begun), alone=True)
        async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://a", timeout=20) as client:
            task = asyncio.create_task(client.patch("/task"))
            await asyncio.wait_for(begun.wait(), 10)
            assert (await client.get("/look")).status_code == 200
            assert not task.done()
            await task

    asyncio.run(reads())


def test_a_request_that_never_ends_holds_up_the_others_only_so_long() -> None:
    async def stuck() -> None:
        passed, forever = asyncio.Event(), asyncio.Event()

        async def app(scope: Any, receive: Any, send: Any) -> None:
            del receive, send
            if scope["path"] == "/stuck":
                await forever.wait()
            passed.set()

        server = OneWriter(app, alone=True, patience=0.1)
        first = asyncio.create_task(server({"type": "http", "method": "POST", "path": "/stuck"}, None, None))
        await asyncio.sleep(0)
        await server({"type": "http", "method": "POST", "path": "/other"}, None, None)
        assert passed.is_set()
        assert not first.done()
        first.cancel()
        with pytest.raises(asyncio.CancelledError):
            await first
        # Whoever gave up has given its turn back.
        passed.clear()
        await asyncio.wait_for(server({"type": "http", "method": "POST", "path": "/other"}, None, None), 5)
        assert passed.is_set()

    asyncio.run(stuck())


@pytest.mark.parametrize(
    ("address", "expected"), [("sqlite:////a.db?timeout=60", True), ("postgresql+psycopg2://h/a", False)]
)
def test_only_on_sqlite(address: str, expected: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__DATABASE__SQL_ALCHEMY_CONN", address)
    assert OneWriter(None)._alone is expected
