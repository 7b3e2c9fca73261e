"""Which runs a person means: by the run's name, or by the model version that it made."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from os.path import commonprefix
from typing import Any, Final
from urllib.parse import urlencode

from dropforge import tracking
from dropforge.errors import DataError
from dropforge.rest import DeniedError, RefusedError, Rest
from dropforge.sweeps import CANDIDATE_RUN
from dropforge.text import counted, escape

log = logging.getLogger("dropforge")

_ONE_BY_ONE: Final = 4  # names; a search takes MLflow 30 ms, and 4 ms more for each run that it finds
_TOLD: Final = 3  # names
_MOST: Final = 50  # runs of a comparison
_NEAREST_OF: Final = 200  # the newest runs, among which a name that is not known is looked for
_MANY: Final[Mapping[str, Any]] = {"max_results": 1000}
_LIST: Final = "List the runs with `dropforge runs`"

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Found:
    """A run in MLflow. :param asked: as the person has named it. :param row: as MLflow gives it."""

    asked: str
    row: Row
    family: str

    @property
    def run_id(self) -> str:
        return str(self.row["info"]["run_id"])

    @property
    def artifacts(self) -> str:
        """Address of the folder of its artifacts."""
        return str(self.row["info"].get("artifact_uri", ""))


def check_number(runs: Sequence[str]) -> None:
    """:raises DataError: if they are too few or too many to compare."""
    if not 2 <= len(runs) <= _MOST:
        raise DataError(
            counted(len(runs), "run"),
            f"a comparison is of 2 to {_MOST} runs",
            "Name them as in `dropforge compare RUN FAMILY@champion`; `dropforge runs` lists them",
        )


def find_runs(rest: Rest, words: Sequence[str], pool: Executor) -> list[Found]:
    """The runs in the order of their names: RUN, FAMILY/VERSION or FAMILY@ALIAS.

    :param pool: for questions that MLflow answers one at a time.
    :raises DataError: if one is not known, was deleted, or is named twice.
    """
    families = {
        str(row["experiment_id"]): str(row["name"]) for row in rest.pages("experiments/search", _MANY, "experiments")
    }
    experiments = list(families)
    of_versions = [word for word in words if "/" in word or "@" in word]
    ids = dict(zip(of_versions, pool.map(lambda word: _of_version(rest, word), of_versions), strict=True))
    listed = ", ".join(f"'{run_id}'" for run_id in ids.values())
    versions = _search(rest, experiments, f"IN ({listed})", of="attributes.run_id") if ids else []
    by_id = {str(row["info"]["run_id"]): row for row in versions}
    named = _by_names(rest, experiments, [word for word in words if word not in ids], pool)
    found: list[Found] = []
    for word in words:
        rows = named[word] if word in named else [by_id[ids[word]]] if ids[word] in by_id else []
        if not rows:
            raise _unknown(rest, experiments, word, word in ids)
        alive = [row for row in rows if is_active(row)]
        if not alive:
            raise DataError(f"run {word}", "it was deleted in MLflow", f"Restore it there, or leave it out. {_LIST}")
        homes = sorted({families.get(str(row["info"]["experiment_id"]), "") for row in alive})
        if len(homes) > 1:
            mend = "Name it by the version that it made, as FAMILY/VERSION"
            raise DataError(f"run {word}", f"there is one in each of the families {', '.join(homes)}", mend)
        # The oldest, as everywhere, if several were made by accident.
        item = Found(word, min(alive, key=lambda row: int(row["info"].get("start_time", 0))), homes[0])
        if twin := next((other for other in found if other.run_id == item.run_id), None):
            also = "twice" if twin.asked == word else f"as {twin.asked} too"
            raise DataError(f"run {word}", f"it is named {also}", f"Name runs that are different. {_LIST}")
        found.append(item)
    return found


def _by_names(rest: Rest, experiments: Sequence[str], names: Sequence[str], pool: Executor) -> dict[str, list[Row]]:
    """Runs by their names, or by what only one of them begins with.

    MLflow takes lists for ids alone: many names are looked for by what they begin with.
    """
    found: dict[str, list[Row]] = {name: [] for name in names}
    if len(found) > _ONE_BY_ONE:
        test = f"LIKE {_quoted(commonprefix(list(found)) + '%')}"  # noqa: RUF071 - names, and no paths
        for row in _search(rest, experiments, test, newest=2 * len(found)):
            if (name := _name(row)) in found:
                found[name].append(row)
    left = [name for name, rows in found.items() if not rows]
    for name, rows in zip(
        left, pool.map(lambda name: _search(rest, experiments, f"= {_quoted(name)}"), left), strict=True
    ):
        found[name] = rows or _beginning(rest, experiments, name)
    return found


def _beginning(rest: Rest, experiments: Sequence[str], begin: str) -> list[Row]:
    """The row of the one run whose name begins so, or of a family's newest. :raises DataError: if there are several."""
    if not begin:
        return []
    rows = _search(rest, experiments, f"LIKE {_quoted(begin + '%')}", newest=_NEAREST_OF)
    rows = [row for row in rows if _name(row).startswith(begin)]  # to LIKE `_` is any letter
    if any(tags_of(row).get(tracking.TAG_FAMILY) == begin for row in rows):
        own = [row for row in rows if is_active(row) and tags_of(row).get(tracking.TAG_FAMILY) == begin]
        newest = next((row for row in own if not _is_trial(row)), None)
        if newest is None:
            return []  # a family, of which the error tells what to write
        log_newest(begin, _name(newest))
        return [newest]
    names = list(dict.fromkeys(_name(row) for row in rows))
    if len(names) > 1:
        some = ", ".join(names[:_TOLD]) + (", ..." if len(names) > _TOLD else "")
        raise DataError(f"run {begin}", f"{len(names)} runs begin so: {some}", "Write more of its name")
    return rows


def of_dag_run(rest: Rest, dag_run: str) -> Row | None:
    """The run in MLflow that a DAG run opened; None if it has not, or has deleted it."""
    experiments = [str(row["experiment_id"]) for row in rest.pages("experiments/search", _MANY, "experiments")]
    found = _search(rest, experiments, f"= {_quoted(dag_run)}", of=f"tags.`{tracking.TAG_DAG_RUN}`")
    alive = [row for row in found if is_active(row)]
    return max(alive, key=lambda row: int(row["info"].get("start_time", 0)), default=None)


def newest_rows(rest: Rest, count: int) -> list[Row]:
    """The newest runs of all families, deleted ones too."""
    experiments = [str(row["experiment_id"]) for row in rest.pages("experiments/search", _MANY, "experiments")]
    return _search(rest, experiments, "LIKE '%'", newest=count)


def names_like(rest: Rest, begin: str) -> list[str]:
    """Names of the newest runs that begin like this."""
    experiments = [str(row["experiment_id"]) for row in rest.pages("experiments/search", _MANY, "experiments")]
    return [_name(row) for row in _search(rest, experiments, f"LIKE {_quoted(begin + '%')}", newest=50)]


def is_active(row: Row) -> bool:
    """Whether a run was not deleted."""
    return bool(row["info"].get("lifecycle_stage", "active") == "active")


def tags_of(row: Row) -> dict[str, str]:
    """The tags of a run as MLflow gives it."""
    return {str(tag["key"]): str(tag["value"]) for tag in row["data"].get("tags", [])}


def log_newest(family: str, run: str) -> None:
    """Say which run is taken where a family was named."""
    log.warning("%s is a family: its newest run is %s", family, escape(run))


def _is_trial(row: Row) -> bool:
    tags = tags_of(row)
    return tracking.TAG_TRIAL in tags and not tags.get(tracking.TAG_DAG_RUN, "").startswith(CANDIDATE_RUN)


def _name(row: Row) -> str:
    return tags_of(row).get(tracking.TAG_RUN, "")


def _of_version(rest: Rest, word: str) -> str:
    """Id of the run that made a version, by `FAMILY/VERSION` or `FAMILY@ALIAS`."""
    by_alias = "@" in word
    family, _, which = word.rpartition("@" if by_alias else "/")
    path, key = ("registered-models/alias", "alias") if by_alias else ("model-versions/get", "version")
    if not by_alias and not which.isdecimal():
        mend = f"Write FAMILY/NUMBER, FAMILY@ALIAS or the name of a run. {_LIST}"
        raise DataError(f"run {word}", f"{which!r} is not the number of a version; a drop has nothing to compare", mend)
    try:
        version = rest.call("GET", f"{path}?{urlencode({'name': family, key: which})}")["model_version"]
    except (DeniedError, RefusedError):  # MLflow denies what is not there
        raise _no_version(rest, family, word) from None
    if not version.get("run_id"):
        raise DataError(f"run {word}", "no run is noted for this version", _LIST)
    return str(version["run_id"])


def _no_version(rest: Rest, family: str, word: str) -> DataError:
    models = list(rest.pages("registered-models/search", _MANY, "registered_models", method="GET"))
    model = next((item for item in models if item["name"] == family), None)
    if model is None:
        near = difflib.get_close_matches(family, [str(item["name"]) for item in models], 1)
        hint = f"Did you mean {near[0]}{word[len(family) :]}? " if near else ""
        return DataError(f"run {word}", f"there is no registered model {family!r}", f"{hint}{_LIST}")
    aliases = [f"{family}@{item['alias']}" for item in model.get("aliases", [])]
    newest = max((int(item["version"]) for item in model.get("latest_versions", [])), default=None)
    there = [*([f"{family}/{newest} (the newest)"] if newest is not None else []), *aliases]
    mend = f"There is {', '.join(there)}. " if there else ""
    return DataError(f"run {word}", f"the registered model {family!r} has none of this name", f"{mend}{_LIST}")


def _unknown(rest: Rest, experiments: Sequence[str], word: str, of_version: bool) -> DataError:
    if of_version:
        return DataError(f"run {word}", "the run that made this version was deleted for good", _LIST)
    rows = _search(rest, experiments, "LIKE '%'", newest=_NEAREST_OF)
    names = [_name(row) for row in rows]
    if word in {tags_of(row).get(tracking.TAG_FAMILY) for row in rows}:
        mend = f"Write {word}@champion, {word}/VERSION or a run of `dropforge runs --family {word}`"
        return DataError(f"run {word}", "it is a family, and no run", mend)
    near = difflib.get_close_matches(word, names, 1)
    hint = f"Did you mean {near[0]}? " if near else ""
    return DataError(f"run {word}", "MLflow knows no such run", f"{hint}{_LIST}")


def _search(
    rest: Rest, experiments: Sequence[str], test: str, *, of: str = f"tags.`{tracking.TAG_RUN}`", newest: int = 0
) -> list[Row]:
    """Runs, deleted ones too.

    :param test: as MLflow's filters are written; one without a value finds nothing. :param of: what is tested.
    :param newest: how many, if not all.
    """
    if not experiments or test.endswith(" "):
        return []
    body: dict[str, Any] = {"experiment_ids": list(experiments), "filter": f"{of} {test}", "run_view_type": "ALL"}
    if newest:
        body |= {"order_by": ["attributes.start_time DESC"], "max_results": newest}
        return _runs(rest.call("POST", "runs/search", body).get("runs", []))
    return _runs(rest.pages("runs/search", {**_MANY, **body}, "runs"))


def _runs(rows: Iterable[Row]) -> list[Row]:
    """Rows with what every run has. :raises LookupError, TypeError, ValueError, AttributeError: for any without."""
    found = list(rows)
    for row in found:
        info = row["info"]
        tags_of(row), str(info["run_id"]), str(info["experiment_id"]), int(info.get("start_time", 0))
        [(str(item["key"]), item.get("value")) for name in ("params", "metrics") for item in row["data"].get(name, [])]
    return found


def _quoted(text: str) -> str:
    """As a string in a filter; empty if there is no way to write it, so that no run can be found by it."""
    return next((f"{mark}{text}{mark}" for mark in "'\"" if mark not in text and "\\" not in text), "")
