"""One run of a family at a time between comparison and promotion.

Two candidates that were measured against the same champion could not both be judged: the first that is promoted
makes the other's verdict void. The turn is an object in the ledger, taken by conditional PUT.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dropforge import layout
from dropforge.json_objects import read_as
from dropforge.settings import from_env
from dropforge.store import MissingObjectError, Store
from dropforge_airflow import connection
from dropforge_airflow.dag_runs import state_of
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.opened import Opened, read_spec
from dropforge_airflow.tasks.trial import end_trial

if TYPE_CHECKING:
    from airflow.sdk.bases.sensor import PokeReturnValue

    from dropforge.tracking import Champion

log = logging.getLogger(__name__)
_MEND: Final = "If no run of the family is compared or promoted now, delete it"


def champion(opened: Opened, ti: Any = None, run_id: str | None = None) -> PokeReturnValue:
    """The sensor's look: take the turn, then note in `evaluate.json` whom the candidate will be compared with."""
    from airflow.sdk.bases.sensor import PokeReturnValue

    from dropforge import tracking

    end_trial(opened)
    assert run_id is not None
    settings = from_env()
    store = connection.open_store(settings.bucket)

    def ended(owner: str) -> bool:
        return state_of(ti, ti.dag_id, owner) in {"success", "failed", None}

    holder = take(store, opened["family"], run_id, ended)
    if holder != run_id:
        log.info("Run %s of family %s is being compared or promoted; waiting", holder, opened["family"])
        return PokeReturnValue(is_done=False)
    with no_retry():
        alias = read_spec(store, opened).recipe["promote"]["alias"]
    current = tracking.rival(settings.tracking_uri, opened["family"], alias, opened["run"])
    request = {
        "run": f"{opened['root']}/run.json",
        "candidate": f"{opened['root']}/model",
        "champion": noted(current, datetime.now(UTC)) if current else None,
    }
    store.put(layout.evaluate_key(opened["run"]), json.dumps(request, indent=1).encode())
    log.info("Compared with %s", f"version {current.version}" if current else "nothing: there is no champion yet")
    return PokeReturnValue(is_done=True, xcom_value=current.version if current else None)


def noted(current: Champion, now: datetime) -> dict[str, Any]:
    """The champion as it is compared. Its age is that of this moment: later tasks, cleared ones too, judge by it."""
    days = None if current.created is None else round((now - current.created).total_seconds() / 86400, 3)
    return {"version": current.version, "model": current.model, "days": days}


def take(store: Store, family: str, owner: str, ended: Callable[[str], bool]) -> str:
    """Take the family's turn if it is free, or its holder has ended; who holds it then."""
    key = layout.turn_key(family)
    body = json.dumps({"owner": owner, "at": datetime.now(UTC).isoformat()}).encode()
    if store.put_if_absent(key, body):
        return owner
    found = store.stat(key)
    holder = _holder(store, key)
    if found is None or holder is None:
        return "another run"  # given up at this moment: the next look will take it
    if holder == owner:
        return owner
    if ended(holder) and store.put_if_match(key, body, found.etag):
        log.warning("The turn of family %s was left behind by run %s", family, holder)
        return owner
    return holder


def give_up(store: Store, family: str, owner: str) -> None:
    """Give the turn up, if `owner` holds it."""
    key = layout.turn_key(family)
    if _holder(store, key) == owner:
        store.delete(key)


def _holder(store: Store, key: str) -> str | None:
    try:
        return read_as(store, key, lambda found: str(found["owner"]), _MEND)
    except MissingObjectError:
        return None
