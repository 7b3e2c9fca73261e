"""Looks are bounded: a place that hangs costs a page its patience and nobody else anything."""

from __future__ import annotations

import asyncio
import threading

from botocore.exceptions import ClientError
from dropforge_airflow.pages.look import _UNDERWAY, Looks, Unseen
from kubeflow_training.jobs.errors import JobRefusedError


def test_a_place_that_hangs_is_given_up_and_the_others_answer() -> None:
    async def body() -> None:
        looks, gate = Looks(workers=1, patience=1.0), threading.Event()
        try:
            asked = [looks.look("S3", number, lambda: gate.wait(60)) for number in range(3)]
            found = await asyncio.gather(*asked, looks.look("MLflow", 0, lambda: "here"))
            assert [item.why for item in found[:3] if isinstance(item, Unseen)] == ["no answer within 1 s"] * 3
            assert found[3] == "here"
            # Who asks meanwhile joins the look that is underway, and the queue has an end.
            calls: list[int] = []
            await looks.look("S3", 0, lambda: calls.append(1))
            assert calls == []
            more = await asyncio.gather(*(looks.look("S3", n, lambda: None) for n in range(3, _UNDERWAY + 5)))
            assert {item.why for item in more if isinstance(item, Unseen)} >= {"too many people look at once"}
        finally:
            gate.set()

    asyncio.run(body())


def test_people_share_a_look_for_a_moment_and_errors_name_no_address() -> None:
    async def body() -> None:
        looks, calls = Looks(patience=60), []

        def read() -> int:
            calls.append(1)
            return len(calls)

        assert await asyncio.gather(*(looks.look("S3", "a", read, fresh=60) for _ in range(5))) == [1] * 5
        assert await looks.look("S3", "a", read, fresh=0) == 2

        def fails(error: Exception) -> Unseen:
            raise error

        denied = ClientError({"Error": {"Code": "AccessDenied", "Message": "key AKIA at http://x"}}, "GetObject")
        told = await looks.look("S3", "b", lambda: fails(denied))
        assert told == Unseen("S3", "it could not be read (AccessDenied)")
        told = await looks.look("MLflow", "c", lambda: fails(OSError("http://user:pass@host")))
        assert told == Unseen("MLflow", "it could not be read (OSError)")
        refused = JobRefusedError("job a/b", "the account may not read it", "Give it the Role")
        told = await looks.look("the job", "d", lambda: fails(refused))
        assert isinstance(told, Unseen)
        assert "Give it the Role" in told.why

    asyncio.run(body())
