"""What the tab shows, as plain JSON values of bounded size. Pure: from what the readers found to what is drawn."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, Final

from kubeflow_training.jobs.observation.replicas import moments, replicas

from dropforge import mlflow_pages, tracking
from dropforge.comparison import better
from dropforge.stages import JOBS
from dropforge.text import read_count
from dropforge_airflow.pages.course import CURVES, Course
from dropforge_airflow.pages.folder import Folder
from dropforge_airflow.pages.gang import Gang
from dropforge_airflow.pages.lines import clean
from dropforge_airflow.pages.look import Unseen
from dropforge_airflow.pages.task import Seen

_REPLICAS: Final = 256
_MOMENTS: Final = 40
_CHECKS: Final = 20
_FIGURES: Final = 40
_TEXT: Final = 1000  # characters


def task_page(
    seen: Seen,
    gang: Gang | Unseen | None,
    course: Course | Unseen | None,
    folder: Folder | Unseen | None,
    mlflow_uri: str,
) -> dict[str, Any]:
    """Everything on the tab but the log lines."""
    parts = (gang, course, folder)
    tracked = course if isinstance(course, Course) else None
    files = folder if isinstance(folder, Folder) else None
    page: dict[str, Any] = plain(
        {
            "dag": seen.dag,
            "dag_run": seen.dag_run,
            "state": seen.state,
            "task": seen.task,
            "live": not seen.ended,
            "run": seen.opened.get("run", ""),
            "family": seen.opened.get("family", ""),
            "stages": [
                {"name": item.name, "state": item.state, "tries": item.tries, **_span(item.began, item.ended)}
                for item in seen.stages
            ],
            "failures": [{"stage": name, "text": cut(text)} for name, text in seen.failures.items()],
            "tries": [
                {"number": item.number, "state": item.state, "why": cut(item.why), **_span(item.began, item.ended)}
                for item in seen.tries
            ],
            "has_job": bool(seen.job) or seen.task in JOBS,
            "job": _job(seen, gang if isinstance(gang, Gang) else None),
            "training": None if tracked is None else _training(tracked, mlflow_uri),
            "checkpoints": None if files is None else _checkpoints(files, tracked),
            "attempts": [] if files is None else [_attempt(item) for item in reversed(files.attempts)],
            "champion": None if files is None else _champion(files, tracked, mlflow_uri),
            "unseen": [part.as_dict() for part in parts if isinstance(part, Unseen)],
        }
    )
    return page


def _job(seen: Seen, gang: Gang | None) -> dict[str, Any] | None:
    """The job now; of one that is gone, what the task remembers of its end."""
    if not seen.job:
        return None
    named = {"name": str(seen.job.get("name", "")), "gang": seen.job.get("gang"), "kind": seen.job.get("kind")}
    if gang is None:
        told = {key: seen.result.get(key) for key in ("phase", "reason", "message", "exit_code", "node", "replica")}
        return {**named, "gone": True, **told, "message": cut(str(told["message"] or ""))}
    found, what = gang.snapshot, gang.observation
    pods = replicas(found.job, found.pods)
    if len(pods) > _REPLICAS:  # what went wrong is shown, whatever its rank
        pods = tuple(sorted(pods, key=lambda item: (item.pod != what.pod, not item.exit_code)))
    told_moments = moments(found.job, found.events)
    return {
        **named,
        "gone": False,
        "phase": str(what.phase),
        "reason": str(what.reason) if what.reason else None,
        "message": cut(what.message),
        "mend": what.mend if what.reason else "",
        "queue": what.queue,
        "position": what.position,
        "failing_rank": what.failing_rank,
        "progress": what.progress.to_dict() if what.progress else None,
        "pods_running": what.pods_running,
        "pods_wanted": what.pods_wanted,
        **_span(what.started, what.finished),
        "more_replicas": max(0, len(pods) - _REPLICAS),
        "replicas": [
            {
                "replica": item.replica,
                "pod": item.pod,
                "node": item.node,
                "phase": item.phase,
                "exit_code": item.exit_code,
                "restarts": item.restarts,
                "failed_first": what.pod is not None and item.pod == what.pod,
                "message": cut(item.message, 300),
                **_span(item.started, item.finished),
            }
            for item in pods[:_REPLICAS]
        ],
        "moments": [
            {"at": _time(item.when), "what": cut(item.what, 80), "message": cut(item.message, 300), "holds": item.holds}
            for item in told_moments[-_MOMENTS:]
        ],
    }


def _training(course: Course, uri: str) -> dict[str, Any]:
    tags, metrics = course.tags, course.metrics
    steps = read_count(tags.get(tracking.TAG_STEPS, "")) or read_count(course.params.get("train.max_steps", ""))
    losses = course.points.get(CURVES[0], ())
    return {
        "status": course.status,
        "url": run_url(uri, course.experiment, course.run_id),
        "step": losses[-1][0] if losses else None,
        "steps": steps,
        "loss": metrics.get("train/loss"),
        "eval_loss": metrics.get("eval/loss"),
        "tokens_per_second": metrics.get("train/tokens_per_second"),
        "mfu": metrics.get("train/mfu"),
        "resumed_from": tags.get(tracking.TAG_RESUMED),
        "attempt": tags.get(tracking.TAG_ATTEMPT),
        "verdict": cut(tags.get(tracking.TAG_VERDICT, "")),
        "approval": cut(tags.get(tracking.TAG_APPROVAL, "")),
        "version": tags.get(tracking.TAG_VERSION, ""),
        "curves": [{"name": name, "points": [list(item) for item in course.points.get(name, ())]} for name in CURVES],
    }


def _checkpoints(folder: Folder, course: Course | None) -> dict[str, Any]:
    """Where the next attempt would go on: the newest checkpoint that is complete and not set aside."""
    shown = {item.step: item for item in (course.kept if course else ())}
    rows: list[dict[str, Any]]
    if folder.saved is None:
        kept = [item for item in shown.values() if not item.deleted]
        rows = [{"step": item.step, "bytes": item.bytes, "complete": True, "aside": False} for item in kept]
    else:
        rows = [{**vars(item)} for item in folder.saved]
    for row in rows:
        known = shown.get(int(row["step"]))
        row["eval_loss"] = known.eval_loss if known else None
        row["best"] = known.best if known else False
    steps = [int(row["step"]) for row in rows if row["complete"] and not row["aside"]]
    done = bool(folder.report.get("model"))
    return {
        "resumes": max(steps, default=None),
        "done": done,
        "start": folder.start,
        "elsewhere": folder.saved is None,
        "rows": rows[::-1][:20],
    }


def _attempt(told: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _short(told.get(key)) for key in ("attempt", "resumed_from", "ranks", "host", "at")}


def _champion(folder: Folder, course: Course | None, uri: str) -> dict[str, Any] | None:
    """Candidate against champion, with the checks of the verdict; None before they were measured."""
    measured = folder.evaluation
    candidate, champion = _figures(measured.get("candidate")), _figures(measured.get("champion"))
    if not candidate and not folder.verdict:
        return None
    names = sorted(candidate | champion, key=lambda name: (not name.startswith("eval/"), name))
    problem = (measured.get("champion") or {}).get("problem") if isinstance(measured.get("champion"), dict) else None
    checks = folder.verdict.get("checks")
    return {
        "version": _short(measured.get("champion_version")),
        "problem": cut(str(problem or "")),
        "rows": _short(measured.get("rows")),
        "note": cut(str(measured.get("metric_note") or "")),
        "figures": [
            {
                "name": name,
                "candidate": candidate.get(name),
                "champion": champion.get(name),
                "better": better(name),
            }
            for name in names[:_FIGURES]
        ],
        "decided": bool(folder.verdict),
        "promote": folder.verdict.get("promote") is True,
        "reason": cut(str(folder.verdict.get("reason") or "")),
        "checks": [
            {
                **{key: _short(item.get(key)) for key in ("candidate", "reference")},
                "name": cut(str(item.get("name")), 100),
                "passed": item.get("passed") is True,
                "reason": cut(str(item.get("reason") or "")),
            }
            for item in (checks if isinstance(checks, list) else [])[:_CHECKS]
            if isinstance(item, dict)
        ],
        "compare": _compare_url(course, uri),
    }


def _compare_url(course: Course | None, uri: str) -> str:
    if course is None or not course.champion_run or course.champion_run == course.run_id:
        return ""
    # A family's runs share one experiment.
    experiments = [course.experiment]
    return web(mlflow_pages.compare_view(uri, (course.run_id, course.champion_run), experiments))


def run_url(uri: str, experiment: str, run_id: str) -> str:
    """MLflow's page of a run; empty if MLflow is no web address."""
    return web(mlflow_pages.run_page(uri, experiment, run_id))


def web(url: str) -> str:
    """The address, if a browser may be sent there."""
    return url if url.startswith(("http://", "https://")) else ""


def cut(text: str, most: int = _TEXT) -> str:
    return clean(text, most)


def _short(value: Any) -> Any:
    """A number, or a short text; None for what is neither, for a pod may have written anything."""
    if isinstance(value, str):
        return cut(value, 100)
    return value if isinstance(value, int | float) else None


def plain(value: Any) -> Any:
    """JSON knows neither NaN nor infinity, which are shown as text, nor half characters; no text is endless."""
    if isinstance(value, Mapping):
        return {cut(str(key), 100): plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain(item) for item in value]
    if isinstance(value, str):
        return cut(value, 4 * _TEXT)
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def _figures(measured: Any) -> dict[str, float]:
    if not isinstance(measured, dict):
        return {}
    return {
        str(name)[:100]: float(value)
        for name, value in measured.items()
        if isinstance(value, int | float)
        and not isinstance(value, bool)
        and str(name).startswith(("eval/", "gen/", "holdout/"))
    }


def _span(began: datetime | None, ended: datetime | None) -> dict[str, str | None]:
    return {"began": _time(began), "ended": _time(ended)}


def _time(when: datetime | None) -> str | None:
    return when.isoformat() if when is not None and when.year > 1970 else None


def log_view(source: str, found: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Lines by rank. :param source: where they were read, for the person."""
    return {"source": source, "ranks": list(found)}
