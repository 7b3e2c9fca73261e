"""What a run would take, once its dataset version is known and before anything expensive begins."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import TYPE_CHECKING

from dropforge import layout
from dropforge.costs import limits_told
from dropforge.dataset import Manifest, read_card
from dropforge.estimate import estimate
from dropforge.forecast import Forecast, forecast
from dropforge.json_objects import read_as
from dropforge.recipe import Recipe
from dropforge.small_data import too_small
from dropforge.store import Store

if TYPE_CHECKING:
    from dropforge.forecast import Speed

log = logging.getLogger(__name__)


def foresee(store: Store, tracking_uri: str, manifest: Manifest, recipe: Recipe) -> Forecast:
    """The plan, from the rows of the dataset version and the speed of the family's earlier runs."""
    rows = min(manifest.rows("train"), recipe.train.max_rows or manifest.rows("train"))
    figures = estimate(recipe, training_bytes(store, manifest, recipe), data_rows=rows, curated=True)
    speed, silent = _measured(tracking_uri, manifest.family, recipe)
    found = forecast(recipe, figures, speed)
    if silent and found.seconds is None:
        found = replace(found, source=f"{found.source}; {silent}")
    for name, value in found.rows():
        log.info("%s: %s", name, value)
    held_out = min(manifest.rows("eval"), recipe.evaluate.max_rows)
    for line in too_small(found.steps, held_out, estimated=found.estimated):
        log.warning("%s", line)
    for line in limits_told(found.hours, recipe.compute.limits):
        log.info("limits: %s", line)
    return found


def training_bytes(store: Store, manifest: Manifest, recipe: Recipe) -> int | None:
    """About how much text the training reads in an epoch; None where the dataset's card does not tell."""
    try:
        train = read_card(store, manifest)["statistics"]["totals"]["train"]
        rows, chars = int(train["rows"]), int(train["chars"])
    except (KeyError, TypeError, ValueError) as error:
        log.info("How long its rows are is not known: %r", error)
        return None
    most = recipe.train.max_rows
    return chars * most // rows if most is not None and most < rows else chars


def read_forecast(store: Store, run: str) -> Forecast:
    """As it was planned. :raises MissingObjectError: of a run that an older version opened."""
    return read_as(store, layout.forecast_key(run), Forecast.from_dict)


def _measured(tracking_uri: str, family: str, recipe: Recipe) -> tuple[Speed | None, str]:
    """The speed of earlier runs; without an answer of MLflow none, and that it is so: no plan waits for it."""
    from dropforge import speeds, tracking

    try:
        with tracking.short_patience():
            return speeds.measured(tracking_uri, family, recipe), ""
    except Exception as error:  # MLflow and the ways to it raise many kinds
        log.warning("MLflow does not report how fast earlier runs were: %r", error)
        return None, "MLflow does not answer"
