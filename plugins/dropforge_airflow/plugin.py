"""The one file that Airflow's plugin manager executes (see `plugins/.airflowignore`), in each of Airflow's processes.

So it imports next to nothing: the pages are loaded by the first request for one, which only the API server gets.
"""

from __future__ import annotations

import asyncio
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from dropforge_airflow import body_limit, fresh_questions, heartbeats, run_notes, write_guard

PREFIX = "/dropforge"


class Pages:
    """The pages as an ASGI application that is made when it is first asked."""

    def __init__(self) -> None:
        self._app: Any = None

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if self._app is None:
            from dropforge_airflow.pages.routes import make_app

            self._app = await asyncio.to_thread(make_app)
        await self._app(scope, receive, send)


def _tab(name: str, destination: str, route: str) -> dict[str, str]:
    # No `external_views`: Airflow puts those into a sandbox, from which no link to MLflow opens.
    return {
        "name": name,
        # Each is a module of its own to the browser, because the UI takes what a module sets while it is loaded.
        "bundle_url": f"{PREFIX.removeprefix('/')}/static/frame.js?for={route}",
        "destination": destination,
        "url_route": route,
    }


class DropforgePlugin(AirflowPlugin):
    """Dropforge's pages: a tab on each task and run, and the families; DAGs, assets and triggers need no plugin."""

    name = "dropforge"
    listeners = [heartbeats, run_notes]  # noqa: RUF012
    fastapi_apps = [{"app": Pages(), "url_prefix": PREFIX, "name": "Dropforge"}]  # noqa: RUF012 - the base declares it so
    fastapi_root_middlewares = [  # noqa: RUF012
        *body_limit.middlewares(),
        write_guard.middleware(),
        fresh_questions.middleware(),
    ]
    react_apps = [  # noqa: RUF012
        _tab("Training", "task_instance", "dropforge-task"),
        _tab("Dropforge", "dag_run", "dropforge-run"),
        _tab("Families", "nav", "dropforge-families"),
    ]
