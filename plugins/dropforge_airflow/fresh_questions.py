"""A question that is asked again, after a clear, is shown as it is asked now.

Airflow keeps the question of a task that was cleared: subject, text and reviewers of before, to which an answer would
be given that counts for what is asked now. The plugin puts this in front of the API by which tasks ask.
"""

from __future__ import annotations

import asyncio
import re
from typing import TYPE_CHECKING, Any, Final
from uuid import UUID

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

#: Where a task asks, below what Airflow is mounted under.
_ASKED: Final = re.compile(r"/execution/hitlDetails/([0-9a-fA-F-]{32,36})/?")
_CREATED: Final = 201
_OURS: Final = "dropforge_"


class FreshQuestions:
    """An ASGI middleware: what Airflow has taken from a task of our DAGs is what it shows before the task is answered.

    An error of the database is the answer to the task, which then asks once more.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        asks = scope["type"] == "http" and scope["method"] == "POST"
        # The whole of the path: names of runs, which people choose, may hold such a piece.
        asked = _ASKED.fullmatch(scope["path"].removeprefix(scope.get("root_path", ""))) if asks else None
        if asked is None:
            await self._app(scope, receive, send)
            return
        body = bytearray()

        async def reading() -> Message:
            message = await receive()
            body.extend(message.get("body", b""))
            return message

        async def answering(message: Message) -> None:
            # Airflow has looked at the token by now, and that it is this task's.
            if message["type"] == "http.response.start" and message["status"] == _CREATED:
                await asyncio.to_thread(show, UUID(asked[1]), bytes(body))
            await send(message)

        await self._app(scope, reading, answering)


def show(task_instance: UUID, question: bytes) -> None:
    """Make the question that Airflow shows of a task of ours the one that it asks. :param question: as it was sent."""
    from airflow.api_fastapi.execution_api.datamodels.hitl import HITLDetailRequest
    from airflow.models.hitl import HITLDetail
    from airflow.models.taskinstance import TaskInstance
    from airflow.utils.session import create_session
    from sqlalchemy import select, update

    asked = HITLDetailRequest.model_validate_json(question)
    of_ours = select(TaskInstance.id).where(TaskInstance.dag_id.startswith(_OURS, autoescape=True))
    shown = update(HITLDetail).where(HITLDetail.ti_id == task_instance, HITLDetail.ti_id.in_(of_ours))
    with create_session(scoped=False) as session:
        session.execute(
            shown.values(
                subject=asked.subject,
                body=asked.body,
                options=asked.options,
                defaults=asked.defaults,
                assignees=[user.model_dump() for user in asked.assigned_users],
            )
        )


def middleware() -> dict[str, Any]:
    """Return it as a plugin names it."""
    return {"middleware": FreshQuestions, "args": [], "kwargs": {}, "name": "Dropforge's questions as they are asked"}
