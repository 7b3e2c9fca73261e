"""What MLflow has of runs that are compared: few questions, each for as many runs as it may be for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Final

from dropforge import tracking
from dropforge.answers import AnswerTable
from dropforge.client.comparing.files import read_files, was_champion
from dropforge.client.comparing.find import Found, Row, find_runs, tags_of
from dropforge.client.comparing.histories import with_histories
from dropforge.comparison import ComparedRun
from dropforge.recipe_params import with_defaults
from dropforge.rest import Rest, real

_AT_ONCE: Final = 8


@dataclass(frozen=True)
class Collected:
    """Runs, and for each the tables with its answers: its own, then those of runs that it was the champion of."""

    runs: list[ComparedRun]
    answers: list[list[AnswerTable]]


def collect(uri: str, words: Sequence[str], *, verdicts: bool, answers: bool) -> Collected:
    """Find the runs and read them.

    :param verdicts, answers: whether their files are read too.
    :raises DataError: as `find_runs`; what else goes wrong is raised as `Rest` does, but for files, which are noted.
    """
    rest = Rest(uri)
    with ThreadPoolExecutor(_AT_ONCE) as pool:
        found = find_runs(rest, words, pool)
        runs = _filled([_run(item) for item in found])
        tables: list[list[AnswerTable]] = [[] for _ in runs]
        files = [
            pool.submit(read_files, rest, item.artifacts, run, runs, verdicts, answers)
            for item, run in zip(found, runs, strict=True)
        ]
        runs = with_histories(rest, runs, _last_steps(found), pool)
        for place, file in enumerate(files):
            checks, notes, own, champions = file.result()
            runs[place] = replace(runs[place], checks=checks, notes=notes)
            tables[place][:0] = [own] if own else []
            for beside, other in enumerate(runs):
                if champions and was_champion(runs[place], other):
                    tables[beside].append(champions)
    return Collected(runs, tables)


def _run(found: Found) -> ComparedRun:
    info, tags = found.row["info"], tags_of(found.row)
    return ComparedRun(
        name=tags.get(tracking.TAG_RUN) or str(info.get("run_name", "")) or found.run_id,
        family=tags.get(tracking.TAG_FAMILY) or found.family,
        run_id=found.run_id,
        experiment=str(info["experiment_id"]),
        status=str(info.get("status", "")),
        asked=found.asked,
        began=int(info.get("start_time", 0)) / 1000,
        version=tags.get(tracking.TAG_VERSION, ""),
        verdict=tags.get(tracking.TAG_VERDICT, ""),
        champion=tags.get(tracking.TAG_CHAMPION, ""),
        params={str(item["key"]): str(item.get("value", "")) for item in _data(found.row, "params")},
        tags=tags,
        metrics={str(item["key"]): real(item.get("value", 0)) for item in _data(found.row, "metrics")},
    )


def _filled(runs: Sequence[ComparedRun]) -> list[ComparedRun]:
    """The runs with the defaults of those params that another of them has; a run that is none of ours has its own."""
    named = {key for run in runs for key in run.params}
    return [
        replace(run, params={key: text for key, text in with_defaults(run.params).items() if key in named})
        if tracking.TAG_RUN in run.tags
        else run
        for run in runs
    ]


def _last_steps(found: Sequence[Found]) -> dict[str, int]:
    """The last step of each metric in any run."""
    steps: dict[str, int] = {}
    for metric in (metric for item in found for metric in _data(item.row, "metrics")):
        key = str(metric["key"])
        steps[key] = max(int(metric.get("step", 0)), steps.get(key, 0))
    return steps


def _data(row: Row, name: str) -> Sequence[Mapping[str, Any]]:
    return list(row["data"].get(name, []))
