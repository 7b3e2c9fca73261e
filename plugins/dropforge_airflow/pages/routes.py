"""The routes. Each that shows anything names its DAG in the path, and asks for the user's rights on that DAG."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

from airflow.api_fastapi.core_api.security import GetUserDep
from fastapi import APIRouter, FastAPI, HTTPException, Query, Request
from fastapi.responses import FileResponse, JSONResponse, Response

from dropforge.settings import Settings, from_env
from dropforge_airflow.assets import FINETUNE_DAG
from dropforge_airflow.pages import course, folder, gang, ledgers, lines, shown, task, versions
from dropforge_airflow.pages import family as family_view
from dropforge_airflow.pages.look import Looks, Unseen
from dropforge_airflow.pages.rights import SEES_RUNS, SEES_TASKS, sees_logs
from dropforge_airflow.pages.stores import open_store

STATIC: Final = Path(__file__).parent / "static"
_HEADERS: Final = {
    # Nothing but our own files, and frames of Airflow alone.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; "
    "img-src 'self' data:; frame-ancestors 'self'; base-uri 'none'; form-action 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}
# A card is written where pods write: nothing of it runs, whatever it holds.
_CARD_HEADERS: Final = _HEADERS | {
    "Content-Security-Policy": "sandbox; default-src 'none'; style-src 'unsafe-inline'; img-src data:; "
    "frame-ancestors 'self'; base-uri 'none'; form-action 'none'"
}
_ASSETS: Final = {"frame.js": "text/javascript", "task.js": "text/javascript", "draw.js": "text/javascript"} | {
    "family.js": "text/javascript",
    "page.css": "text/css",
}

_WORDS: Final = {
    401: "Log in to Airflow, then reload this page.",
    403: "You may not see this: it takes the right to read the runs of dropforge_finetune.",
}

RunId = Annotated[str, Query(max_length=250)]
TaskId = Annotated[str | None, Query(max_length=250)]
MapIndex = Annotated[int, Query(ge=-1, le=1_000_000)]
Name = Annotated[str, Query(max_length=40, pattern=r"^[a-z0-9](?:[a-z0-9-]*[a-z0-9])?$")]
Family = Name | None
Digest = Annotated[str, Query(pattern=r"^[0-9a-f]{64}$")]
Replica = Annotated[str | None, Query(max_length=80, pattern=r"^[A-Za-z0-9.-]+$")]

router = APIRouter()


def make_app() -> FastAPI:
    """The pages as an application of their own, which Airflow mounts."""
    app = FastAPI(title="Dropforge", docs_url=None, redoc_url=None, openapi_url=None)
    app.state.looks = Looks()
    app.include_router(router)
    app.add_exception_handler(HTTPException, _refused)
    return app


async def _refused(request: Request, error: Exception) -> Response:
    """Why nothing is shown: as JSON to the pages' script, as a sentence to a person."""
    assert isinstance(error, HTTPException)
    if request.url.path.endswith(".json"):
        return JSONResponse({"detail": error.detail}, error.status_code, headers=_HEADERS)
    text = _WORDS.get(error.status_code, "There is no such page.")
    return Response(text, error.status_code, headers=_HEADERS, media_type="text/plain")


@router.get("/static/{name}")
async def asset(name: str) -> Response:
    """Script and style, which show nothing of anybody."""
    if name not in _ASSETS:
        raise HTTPException(404, "There is no such file")
    headers = {"X-Content-Type-Options": "nosniff", "Cache-Control": "no-cache"}
    return FileResponse(STATIC / name, media_type=_ASSETS[name], headers=headers)


@router.get("/dags/{dag_id}/task", dependencies=[SEES_RUNS, SEES_TASKS])
async def task_page(dag_id: str) -> Response:  # noqa: ARG001 - the rights are asked for it
    """The page of a task or a run; it is the same for all, and asks `task.json` for what it shows."""
    return FileResponse(STATIC / "task.html", media_type="text/html", headers=_HEADERS)


@router.get("/dags/{dag_id}/task.json", dependencies=[SEES_RUNS, SEES_TASKS])
async def task_json(
    request: Request,
    user: GetUserDep,
    dag_id: str,
    run_id: RunId,
    task_id: TaskId = None,
    map_index: MapIndex = -1,
    replica: Replica = None,
) -> Response:
    """Everything on the tab, in one answer of bounded size."""
    looks: Looks = request.app.state.looks
    if dag_id != FINETUNE_DAG:
        raise HTTPException(404, "Dropforge shows the runs of its fine-tune DAG here")
    place = (dag_id, run_id, task_id, map_index)
    seen = await looks.look("Airflow's database", place, lambda: task.see(*place), fresh=1.0)
    if isinstance(seen, Unseen):
        raise HTTPException(503, f"{seen.what}: {seen.why}")
    if seen is None:
        raise HTTPException(404, "This DAG has no such run or task")
    logs = await asyncio.to_thread(sees_logs, dag_id, user)
    (found, unheard), tracked, files = await asyncio.gather(
        _gang(looks, seen, replica, logs=logs), _course(looks, seen), _folder(looks, seen)
    )
    settings = _settings()
    uri = settings.tracking_uri if isinstance(settings, Settings) else ""
    page = shown.task_page(seen, found, tracked, files, uri)
    page["log"] = await _log(looks, seen, found) if logs else None
    page["unseen"] += [part.as_dict() for part in unheard[:1]]
    return JSONResponse(page, headers=_HEADERS)


@router.get("/dags/{dag_id}/families", dependencies=[SEES_RUNS])
async def family_page(dag_id: str) -> Response:  # noqa: ARG001 - the rights are asked for it
    """The page of the families, which asks `family.json` for what it shows."""
    return FileResponse(STATIC / "family.html", media_type="text/html", headers=_HEADERS)


@router.get("/dags/{dag_id}/family.json", dependencies=[SEES_RUNS])
async def family_json(request: Request, dag_id: str, family: Family = None) -> Response:
    """The families, and what there is of one of them, for whoever may read the runs of the fine-tune DAG."""
    looks: Looks = request.app.state.looks
    if dag_id != FINETUNE_DAG:
        raise HTTPException(404, "Dropforge shows the families of its fine-tune DAG here")
    settings = _settings()
    if isinstance(settings, Unseen):
        raise HTTPException(503, f"{settings.what}: {settings.why}")
    bucket, uri = settings.bucket, settings.tracking_uri
    names = await looks.look("S3", (bucket, "families"), lambda: ledgers.families(open_store(bucket)), fresh=10.0)
    chosen = family or (names[0] if isinstance(names, list) and names else None)
    if chosen is None:
        page = family_view.family_page(dag_id, "", None, None, {}, uri)
    else:
        ledger, registry = await asyncio.gather(
            looks.look("S3", (bucket, "family", chosen), lambda: ledgers.read(open_store(bucket), chosen), fresh=5.0),
            looks.look("MLflow", (uri, "family", chosen), lambda: versions.read(uri, chosen), fresh=5.0),
        )
        entered = () if isinstance(ledger, Unseen) else ledger.entered
        takers = tuple(sorted({taker for item in entered for taker in item.takers}))
        states = await looks.look("Airflow's database", (dag_id, takers), lambda: task.states(dag_id, takers))
        page = family_view.family_page(dag_id, chosen, ledger, registry, states, uri)
    if isinstance(names, Unseen):
        page["unseen"] = [names.as_dict(), *(item for item in page["unseen"] if item != names.as_dict())]
    page["families"] = [] if isinstance(names, Unseen) else names
    return JSONResponse(page, headers=_HEADERS)


@router.get("/dags/{dag_id}/card", dependencies=[SEES_RUNS])
async def card(request: Request, user: GetUserDep, dag_id: str, family: Name, digest: Digest) -> Response:
    """The card of a dataset version. It shows rows, so it takes the right to read logs, as these may too."""
    looks: Looks = request.app.state.looks
    if dag_id != FINETUNE_DAG:
        raise HTTPException(404, "Dropforge shows the cards of its fine-tune DAG here")
    if not await asyncio.to_thread(sees_logs, dag_id, user):
        raise HTTPException(403, "You may not read the logs of this DAG")
    settings = _settings()
    if isinstance(settings, Unseen):
        raise HTTPException(503, f"{settings.what}: {settings.why}")
    bucket = settings.bucket
    page = await looks.look(
        "S3", (bucket, "card", family, digest), lambda: ledgers.card(open_store(bucket), family, digest), fresh=60.0
    )
    if isinstance(page, Unseen):
        raise HTTPException(503, f"{page.what}: {page.why}")
    if page is None:
        raise HTTPException(404, "There is no such dataset version")
    return Response(page, headers=_CARD_HEADERS, media_type="text/html; charset=utf-8")


async def _gang(
    looks: Looks, seen: task.Seen, replica: str | None, *, logs: bool
) -> tuple[gang.Gang | Unseen | None, list[Unseen]]:
    """The job, and which lines of it could not be read: a node that does not answer hides those of its pods alone."""
    if not seen.job.get("name"):
        return None, []
    key = (seen.dag, seen.dag_run, seen.task, seen.map_index, str(seen.job.get("uid")))
    found = await looks.look("the job", key, lambda: gang.look(seen))
    if not isinstance(found, gang.Gang) or not logs:
        return found, []
    pods = gang.heard(found, replica)
    heard = await asyncio.gather(
        *(looks.look(f"the log of {pod}", key, partial(gang.tail, found, pod), pool="the pods' logs") for pod in pods)
    )
    tails = {pod: lines for pod, lines in zip(pods, heard, strict=True) if not isinstance(lines, Unseen)}
    return gang.with_lines(found, tails), [lines for lines in heard if isinstance(lines, Unseen)]


async def _course(looks: Looks, seen: task.Seen) -> course.Course | Unseen | None:
    run_id, settings = seen.opened.get("mlflow_run"), _settings()
    if not run_id:
        return None
    if isinstance(settings, Unseen):
        return settings
    uri = settings.tracking_uri
    return await looks.look("MLflow", (uri, run_id, seen.dag_run), lambda: course.read(uri, run_id, seen.dag_run))


async def _folder(looks: Looks, seen: task.Seen) -> folder.Folder | Unseen | None:
    run, settings = seen.opened.get("run"), _settings()
    if not run:
        return None
    if isinstance(settings, Unseen):
        return settings
    bucket = settings.bucket
    return await looks.look("S3", (bucket, run), lambda: folder.read(open_store(bucket), run), fresh=4.0)


async def _log(looks: Looks, seen: task.Seen, found: gang.Gang | Unseen | None) -> dict[str, Any]:
    """From the pods while there are any; else what the trainer kept of them."""
    if isinstance(found, gang.Gang) and any(found.tails.values()):
        return shown.log_view("pods", [item.as_dict() for item in lines.by_rank(found.tails)])
    run, settings = seen.opened.get("run"), _settings()
    if not run or seen.task != "train" or isinstance(settings, Unseen):
        return shown.log_view("", [])
    bucket = settings.bucket
    kept = await looks.look("S3", (bucket, run, "log"), lambda: folder.tails(open_store(bucket), run), fresh=10.0)
    if isinstance(kept, Unseen):
        return {**shown.log_view("", []), "unseen": kept.as_dict()}
    return shown.log_view("kept", [item.as_dict() for item in lines.by_rank(kept)])


def _settings() -> Settings | Unseen:
    from dropforge.errors import DropforgeError

    try:
        return from_env()
    except DropforgeError as error:
        return Unseen("Dropforge's settings", str(error))
