"""The question that a person is asked before a run begins whose plan is above its limits, and what the answer does."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from datetime import datetime

from airflow.sdk.exceptions import AirflowFailException

from dropforge import confirmation, costs
from dropforge.confirmation import Word
from dropforge.estimate import estimate
from dropforge.forecast import Forecast, forecast
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from dropforge.settings import from_env
from dropforge.store import MissingObjectError, Store
from dropforge_airflow import connection
from dropforge_airflow.asking import Question
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.foresee import read_forecast
from dropforge_airflow.tasks.opened import Opened, read_spec

log = logging.getLogger(__name__)


def question(opened: Opened) -> Question | str:
    """What to ask about a run; if nobody has to be asked, why not.

    :raises AirflowFailException: if the plan is not known, and the recipe starts no such run.
    """
    store = connection.open_store(from_env().bucket)
    with no_retry():
        spec = read_spec(store, opened)
        plan = planned(store, spec)
        limits = build_recipe(spec.recipe).compute.limits
    judged = costs.judge(plan.hours, limits)
    if judged.word == "start" or limits is None:
        if judged.reasons:
            return f"No approval is asked for, as `compute.limits.unknown` says: {'; '.join(judged.reasons)}"
        what = "the plan is within the recipe's limits" if limits and limits.ask_above else "the recipe limits no plan"
        return f"No approval is asked for: {what}"
    before = confirmation.read(store, spec.run)
    if before is not None and before.start:
        tell_asked(opened, before.told)  # the worker that kept it may have been killed before
        return f"Approved before: {before.told}"
    if judged.word == "stop":
        raise AirflowFailException(
            f"Run {spec.run} does not begin: {'; '.join(judged.reasons)}. `compute.limits.unknown` is `stop`: say "
            "`ask`, or state `compute.gpu_tflops`"
        )
    subject = f"Start {spec.run} of {spec.family}, which would take {plan.hours}?"
    text = body(spec, plan, judged.reasons, opened)
    return Question(subject, text, subject, limits.otherwise == "start", limits.deadline_hours, limits.people)


def planned(store: Store, spec: RunSpec) -> Forecast:
    """What the run would take, as it was opened; of a run that an older version opened, what the recipe says."""
    try:
        return read_forecast(store, spec.run)
    except MissingObjectError:
        recipe = build_recipe(spec.recipe)
        return forecast(recipe, estimate(recipe))


def body(spec: RunSpec, plan: Forecast, reasons: Sequence[str], opened: Opened) -> str:
    """Why it is asked, the plan, and where to look."""
    lines = [
        *(f"- {reason}" for reason in reasons),
        "",
        plan.as_markdown(),
        "",
        f"- [The run in MLflow]({opened['mlflow_url']})",
        f"- Drop `{spec.drop.get('family')}/{spec.drop.get('drop')}`, dataset `{spec.dataset_digest[:12]}`",
    ]
    return "\n".join(lines)


def tell_asked(opened: Opened, text: str) -> None:
    """Show in MLflow that the run waits for a person."""
    from dropforge import tracking

    tracking.note(from_env().tracking_uri, opened["mlflow_run"], tracking.TAG_CONFIRMED, text)


def take_answer(opened: Opened, *, start: bool, by: str | None, at: datetime) -> str:
    """Keep a person's word, and show it in MLflow; in one line."""
    from dropforge import tracking

    settings = from_env()
    store = connection.open_store(settings.bucket)
    word = Word(start, by, f"{at:%FT%TZ}")
    confirmation.write(store, opened["run"], word, planned(store, read_spec(store, opened)).to_dict())
    tracking.note(settings.tracking_uri, opened["mlflow_run"], tracking.TAG_CONFIRMED, word.told)
    return word.told


def require_word(store: Store, spec: RunSpec) -> None:
    """Hold a job of a run to the answer, should its task `confirm` have been marked as a success.

    :raises AirflowFailException: if the run would have to be approved, and is not.
    """
    judged = costs.judge(planned(store, spec).hours, build_recipe(spec.recipe).compute.limits)
    if judged.word != "start":
        _require_yes(store, spec.run)


def require_yes(opened: Opened) -> None:
    """:raises AirflowFailException: if the last word is no."""
    _require_yes(connection.open_store(from_env().bucket), opened["run"])


def _require_yes(store: Store, run: str) -> None:
    word = confirmation.read(store, run)
    if word is None or not word.start:
        told = "awaiting approval" if word is None else word.told
        raise AirflowFailException(
            f"Run {run} does not begin: {told}. No pod was made. Clear the task `confirm` to be asked again"
        )
