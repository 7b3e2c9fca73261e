"""What is different in a fine-tune run that is a trial of a sweep: it ends with its training, or when the sweep says.

It takes no turn, asks nobody and registers nothing. The best trial's model is judged by another run, of the same name.
"""

from __future__ import annotations

from collections.abc import Mapping

from airflow.sdk.exceptions import AirflowSkipException

from dropforge import sweeps
from dropforge.store import Store
from dropforge.tracking import TAG_STOPPED, Status
from dropforge_airflow.tasks.opened import Opened


def end_trial(opened: Opened) -> None:
    """:raises AirflowSkipException: in a trial, whose tasks end here."""
    sweep = opened.get("sweep")
    if sweeps.is_trial(sweep):
        raise AirflowSkipException(f"A trial of sweep {sweep['by']} ends here; the best one becomes the candidate")


def trial_ending(
    store: Store, opened: Opened, states: Mapping[str, str | None], otherwise: tuple[Status, str]
) -> tuple[Status, str, dict[str, str]]:
    """How a run ended, as `run.ending`, and tags about it: a trial is whole once it is trained.

    :param otherwise: what the states of the tasks say of a run that is no trial.
    """
    sweep = opened.get("sweep")
    if not sweeps.is_trial(sweep) or otherwise[0] == "FINISHED":
        return *otherwise, {}
    if states.get("train") == "success":
        return "FINISHED", "", {}
    why = sweeps.ended(store, opened["family"], sweep)
    return (*otherwise, {}) if why is None else ("KILLED", "sweep", {TAG_STOPPED: why.told[:4900]})
