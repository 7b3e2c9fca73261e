"""The installation's limits of a run: how much any of them may ask for, whoever started it.

They stand in `DROPFORGE_LIMITS` where Airflow runs, as `nodes=4 gpus=32 gpu_hours=200 retries=3 minutes=1440
executors=20 rows=10000000 bytes=50GB`, and hold for drops, the form, the calendar and sweeps. The task that plans holds
the recipe to them before anything is read or started. Pure.
"""

from __future__ import annotations

import difflib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Final

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.recipe import Recipe
from dropforge.settings import split

VARIABLE: Final = "DROPFORGE_LIMITS"
_THING: Final = f"environment variable {VARIABLE}"
_NUMBER: Final = re.compile(r"([0-9]{1,15}(?:\.[0-9]{1,6})?) ?(kB|MB|GB|TB)?")
_UNITS: Final = {None: 1, "kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
_EXAMPLE: Final = "nodes=4 gpus=32 bytes=50GB"


@dataclass(frozen=True)
class RunLimits:
    """Most of each that a run may have; None for no limit.

    :param nodes: pods of its gang. :param gpus: of all its pods together.
    :param gpu_hours: of all its attempts, if each takes as long as its deadline lets it.
    :param retries: gangs after the first. :param minutes: deadline of a job. :param executors: Spark's pods that work.
    :param rows: of a dataset version. :param bytes: of a drop, or of what the recipe names in its place.
    """

    nodes: float | None = None
    gpus: float | None = None
    gpu_hours: float | None = None
    retries: float | None = None
    minutes: float | None = None
    executors: float | None = None
    rows: float | None = None
    bytes: float | None = None

    def check_recipe(self, recipe: Recipe) -> None:
        """:raises RecipeError: naming the keys, what they come to, and the limit."""
        compute = recipe.compute
        gpus = compute.nodes * compute.gpus
        hours = gpus * compute.deadline_minutes / 60 * (1 + compute.retries)
        stop = compute.limits.stop_above if compute.limits is not None else None
        if stop is not None and stop.gpu_hours is not None:
            hours = min(hours, stop.gpu_hours)
        self._check("nodes", "recipe key `compute.nodes`", compute.nodes)
        self._check("gpus", "recipe keys `compute.nodes` and `compute.gpus`", gpus)
        self._check("retries", "recipe key `compute.retries`", compute.retries)
        self._check("minutes", "recipe key `compute.deadline_minutes`", compute.deadline_minutes)
        if recipe.curation.engine != "embedded" and (spark := recipe.curation.spark.cluster) is not None:
            self._check("executors", "recipe key `curation.spark.cluster.executors`", spark.executors)
        self._check(
            "gpu_hours",
            "recipe keys `compute.nodes`, `gpus`, `deadline_minutes` and `retries`",
            hours,
            "have the run ended in time by `compute.limits.stop_above.gpu_hours`, ",
        )

    def check_bytes(self, what: str, size: int) -> None:
        """:param what: the drop, by name. :raises DataError: if it is too large."""
        self._check("bytes", what, size, error=DataError)

    def check_rows(self, what: str, rows: int) -> None:
        """:param what: the dataset version, by name. :raises DataError: if it has too many."""
        self._check("rows", what, rows, error=DataError)

    def _check(
        self, name: str, thing: str, found: float, mend: str = "", error: type[DropforgeError] = RecipeError
    ) -> None:
        most = getattr(self, name)
        if most is not None and found > most:
            raise error(
                thing,
                f"{name} come to {found:,g}, and this installation lets a run have {most:,g} ({VARIABLE}: {name})",
                f"Ask for less, {mend}or have the limit raised by the administrator of the installation",
            )


def run_limits(env: Mapping[str, str] = os.environ) -> RunLimits:
    """Read the limits of the environment. :raises DropforgeError: naming the word that is none."""
    found: dict[str, float] = {}
    known = [field.name for field in fields(RunLimits)]
    for word in split(env.get(VARIABLE, "")):
        name, _, value = word.partition("=")
        number = _NUMBER.fullmatch(value)
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            mend = f"Did you mean {near[0]}?" if near else f"Known: {', '.join(known)}"
            raise DropforgeError(_THING, f"{name!r:.60} is no limit", mend)
        if number is None or (number[2] and name != "bytes"):
            raise DropforgeError(_THING, f"{word!r:.60} gives no number", f"Write it as {_EXAMPLE}")
        if name in found:
            raise DropforgeError(_THING, f"{name} is listed twice", "Leave one out")
        found[name] = float(number[1]) * _UNITS[number[2]]
    return RunLimits(**found)
