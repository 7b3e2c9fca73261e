"""Files of a run that the page shows: its verdict, and what it and its champion answered."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Final
from urllib.parse import urlencode

from dropforge.answers import FOLDER, AnswerTable, read_answers
from dropforge.comparison import Check, ComparedRun, read_checks
from dropforge.rest import STRANGE, UNANSWERED, MissingError, Rest

VERDICT: Final = "verdict.md"
CANDIDATE: Final = f"{FOLDER}candidate.json"
CHAMPION: Final = f"{FOLDER}champion.json"
_STEP: Final = re.compile(rf"{FOLDER}step-(\d+)\.json")
_LARGEST: Final = 32 * 2**20  # bytes of a table of answers
_LARGEST_VERDICT: Final = 2**20

Files = tuple[tuple[Check, ...], tuple[str, ...], AnswerTable, AnswerTable]


def read_files(
    rest: Rest, root: str, run: ComparedRun, runs: Sequence[ComparedRun], verdict: bool, answers: bool
) -> Files:
    """Its checks, what could not be read, its answers, and those of its champion if that is compared too.

    :param root: address of the folder of its artifacts.
    """
    checks: tuple[Check, ...] = ()
    tables: dict[str, AnswerTable] = {}
    notes: list[str] = []
    if verdict and run.verdict:
        with _noted(notes, VERDICT):
            checks = read_checks(rest.artifact(run.run_id, root, VERDICT, _LARGEST_VERDICT).decode())
    with _noted(notes, FOLDER):
        for name, source in _tables(rest, run, runs) if answers else ():
            with _noted(notes, name):
                tables[name] = read_answers(rest.artifact(run.run_id, root, name, _LARGEST), source)
    champions = tables.pop(CHAMPION, {})
    return checks, tuple(notes), next(iter(tables.values()), {}), champions


def _tables(rest: Rest, run: ComparedRun, runs: Sequence[ComparedRun]) -> list[tuple[str, str]]:
    """Paths of tables with a run's answers, and what they are: at its end, or of its newest evaluation before."""
    champion = any(was_champion(run, other) for other in runs)
    wanted = {CANDIDATE: "candidate/gen/", **({CHAMPION: "champion/gen/"} if champion else {})}
    names = {path for path, group in wanted.items() if any(name.startswith(group) for name in run.metrics)}
    if len(names) < len(wanted):  # its metrics do not say that they are there
        query = urlencode({"run_id": run.run_id, "path": FOLDER.rstrip("/")})
        found = rest.call("GET", f"artifacts/list?{query}").get("files", [])
        names = {str(item["path"]) for item in found if int(item.get("file_size", 0)) <= _LARGEST}
    steps = sorted(int(match[1]) for name in names if (match := _STEP.fullmatch(name)))
    own = [(CANDIDATE, "")] if CANDIDATE in names else [(f"{FOLDER}step-{n}.json", f"step {n}") for n in steps[-1:]]
    return [*own, *([(CHAMPION, f"measured with {run.name}")] if champion and CHAMPION in names else [])]


def was_champion(run: ComparedRun, other: ComparedRun) -> bool:
    """Whether a run was measured against the model of another one."""
    return bool(run.champion) and (run.family, run.champion) == (other.family, other.version)


@contextmanager
def _noted(notes: list[str], name: str) -> Iterator[None]:
    """A file is not worth the whole comparison."""
    try:
        yield
    except MissingError:
        notes.append(f"{name} is not there")
    except (*UNANSWERED, *STRANGE) as error:
        notes.append(f"{name} cannot be read ({' '.join(str(error).split())[:200]})")
