"""The calendar's tasks: look whether a family is to be retrained, and note that a retrain came to its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any, Final, TypedDict

from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from dropforge import ledger, retrains
from dropforge.families import Family, build_family
from dropforge.hub import pin_base
from dropforge.readable import check_reads, readable
from dropforge.recipes.load import build_recipe
from dropforge.retraining import Arrival, Ended, Retrain, There, decide, limit
from dropforge.settings import from_env
from dropforge.start import FindChampion
from dropforge.store import Store
from dropforge_airflow import connection
from dropforge_airflow.dag_runs import state_of
from dropforge_airflow.starting import GOING
from dropforge_airflow.tasks.failure import no_retry

log = logging.getLogger(__name__)

_PAST: Final = timedelta(days=1)


class Looked(TypedDict):
    """What the later tasks need to know of a retrain.

    :param run: of the fine-tune DAG, with its `conf` and `note`. :param began: Unix time of the decision.
    :param limit: seconds after which it counts as late; None with too few to compare. :param told: why so long.
    :param work: digest of what is trained.
    """

    reason: str
    run: str
    conf: dict[str, Any]
    note: str
    began: float
    limit: float | None
    told: str
    work: str


def look(
    name: str,
    family: Mapping[str, Any],
    params: Mapping[str, Any] | None = None,
    dag_run: Any = None,
    ti: Any = None,
    run_id: str | None = None,
) -> Looked:
    """The task: decide, and say why. A skip's reason is in the log and in the XCom `reason`.

    :param family: plain values of its file, as they were when the DAG was read.
    """
    from functools import partial

    from dropforge import tracking
    from dropforge_airflow.assets import FINETUNE_DAG

    assert params is not None
    assert run_id is not None
    refuse_past(dag_run.run_type, dag_run.logical_date, datetime.now(UTC))
    settings = from_env()
    store = connection.open_store(settings.bucket)
    run = retrains.run_id(name, run_id)
    with no_retry():
        asked = build_family(family)
        before = retrains.begun(store, name)
        going = before if before not in {None, run} and state_of(ti, FINETUNE_DAG, str(before)) in GOING else None
        check_reads(store, settings.bucket, name, asked.whole(), readable())  # before the hub is asked for its base
        there = what_is_there(store, name, asked, partial(tracking.champion, settings.tracking_uri), going)
        decided = decide(asked, there, force=bool(params.get("force")))
        ti.xcom_push(key="reason", value=decided.reason)
        if not isinstance(decided, Retrain):
            told = f"Family {name} is not retrained: {decided.reason}"
            log.info("%s", told)  # of the exception's text Airflow's log says nothing
            raise AirflowSkipException(told)
        longest, told = limit(asked.alert, there.ended)
        conf = finetune_conf(store, name, asked, decided, f"{ti.dag_id}/{run_id}")
        retrains.begin(store, name, run)
    drops = ", ".join(f"{drop.drop} ({drop.id})" for drop in decided.drops)
    log.info("Family %s is retrained: %s. Drops: %s. Start: %s", name, decided.reason, drops, asked.start)
    return Looked(
        reason=decided.reason,
        run=run,
        conf=conf,
        note=f"Retrain of {name} by the calendar: {decided.reason}",
        began=time.time(),
        limit=longest,
        told=told,
        work=decided.work,
    )


def refuse_past(run_type: str, logical_date: datetime | None, now: datetime) -> None:
    """:raises AirflowFailException: for a backfill, and for a run by hand whose date has passed.

    The drops of a past date could be told by their arrival, but not who was champion, and against today's champion the
    model would be judged and perhaps promoted.
    """
    past = run_type == "manual" and logical_date is not None and now - logical_date > _PAST
    if run_type == "backfill" or past:
        raise AirflowFailException(
            f"A {'run for a past date' if past else 'backfill'}: a retrain looks at the drops and the champion of now,"
            " and would be compared with today's champion. Trigger a run without a date, and `force` it if it must be"
        )


def what_is_there(
    store: Store, name: str, family: Family, find_champion: FindChampion, running: str | None = None
) -> There:
    """What the decision is made of. :param running: the family's retrain that has not ended.

    :raises RecipeError, UnreachableError: if the base's revision cannot be found.
    """
    plain, line = pin_base(family.whole().plain())
    if line:
        log.info("%s", line)
    champion = find_champion(name, build_recipe(plain).promote.alias)
    return There(
        drops=[Arrival(drop.drop, drop.id) for drop in ledger.arrived(store, name)],
        champion=None if champion is None else retrains.trained(store, name, champion),
        base={key: plain["base"].get(key) for key in ("model", "revision", "scratch")},
        recipe=plain,
        running=running,
        ended=retrains.ended(store, name),
    )


def finetune_conf(store: Store, name: str, family: Family, decided: Retrain, by: str) -> dict[str, Any]:
    """What the form would say for this retrain. :param by: the calendar's own DAG and run."""
    ids = [drop.id for drop in decided.drops]
    one: str | None = None
    if family.whole().curation.scope == "family":
        ids, one = _added(store, name, ids)
    why = {"reason": decided.reason, "data": family.data, "start": family.start, "by": by}
    conf = {"preset": family.preset, "family": name, "again": True, "retrain": why}
    if one is not None:
        return {**conf, "drop": one, "overrides": family.overrides()}
    return {**conf, "overrides": family.overrides({"data": {"source": {"drops": ids}}})}


def _added(store: Store, name: str, ids: list[str]) -> tuple[list[str], str | None]:
    """With `curation.scope: family`, the drops that the family's newest version has not yet, and the only one of them,
    or the last one that it has."""
    from curation.increments import read_head

    head = read_head(store, name)
    steps = head.manifest.steps if head is not None else ()
    held = {one for step in steps for one in retrains.uploads(store, name, step.drop)}
    new = [one for one in ids if one not in held]
    if not new:
        return [], steps[-1].drop
    return new, new[0] if len(new) == 1 else None


def close(name: str, looked: Looked | None = None, ti: Any = None, run_id: str | None = None) -> str:
    """The task: note how long a retrain took, for the average; end as the fine-tuning did. :returns: its run."""
    states = ti.get_task_states(dag_id=ti.dag_id, run_ids=[run_id]).get(run_id, {})
    if states.get("look") == "skipped":
        raise AirflowSkipException("There was no retrain; the task `look` says why")
    if looked is None or states.get("finetune") != "success":
        raise AirflowFailException(f"The retrain of {name} did not end well: see the tasks before this one")
    now = datetime.now(UTC)
    seconds = max(0.0, now.timestamp() - looked["began"])
    store = connection.open_store(from_env().bucket)
    retrains.end(store, name, Ended(looked["run"], looked["work"], seconds, now.isoformat(timespec="seconds")))
    log.info("The retrain took %.0f s", seconds)
    return looked["run"]
