"""The tasks that give a family's alias to an earlier version."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from dropforge import layout, rollback
from dropforge.moves import moving
from dropforge.settings import from_env
from dropforge_airflow import connection, lineage
from dropforge_airflow.alerts import texts
from dropforge_airflow.alerts.callbacks import where
from dropforge_airflow.alerts.telling import tell
from dropforge_airflow.lineage import Lineage
from dropforge_airflow.tasks.failure import no_retry
from dropforge_airflow.tasks.recipe import asked_approval

log = logging.getLogger(__name__)


def choose(families: str, params: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The task: which version gets the alias. Chosen once, so that a second try of the move goes back no further.

    :param families: folder of the families' files.
    """
    assert params is not None
    settings = from_env()
    store, family = connection.open_store(settings.bucket), str(params["family"]).strip()
    with no_retry():
        choice = rollback.choose(
            settings.tracking_uri,
            store,
            family,
            str(params["alias"]),
            (params.get("version") or "").strip() or None,
            approved=asked_approval(store, layout.check_family(family), families) is not None,
        )
    log.info("%s of %s: version %s, after version %s", choice.alias, choice.family, choice.version, choice.current)
    return asdict(choice)


def move(
    chosen: dict[str, Any],
    families: str,
    params: Mapping[str, Any] | None = None,
    dag_run: Any = None,
    outlet_events: Any = None,
    **context: Any,
) -> str:
    """The task: move the alias, and tell who listens to the models. :returns: the version that holds it now.

    :param families: as of `choose`; the family may have reviewers since.
    """
    from dropforge_airflow.assets import MODELS

    assert params is not None
    choice = rollback.Choice(**chosen)
    by = getattr(dag_run, "triggering_user_name", None) or "unknown"
    reason = str(params["reason"])
    settings = from_env()
    store = connection.open_store(settings.bucket)
    with no_retry():
        hold = moving(store, choice.family, f"rollback {getattr(dag_run, 'run_id', '')}")
        approved = asked_approval(store, choice.family, families) is not None
        moved = rollback.move(settings.tracking_uri, choice, reason, by, hold, approved=approved)
    lineage.tell(lambda: _moved(settings.tracking_uri, choice))
    log.info(
        "Version %s of %s is %s %s: %s",
        choice.version,
        choice.family,
        choice.alias,
        "now" if moved else "already",
        reason,
    )
    outlet_events[MODELS].extra = {
        "family": choice.family,
        "version": choice.version,
        "alias": choice.alias,
        "instead_of": choice.current,
        "reason": reason,
        "by": by,
    }
    found = replace(where({**context, "dag_run": dag_run}), family=choice.family)
    tell(texts.rolled_back(found, choice.version, choice.alias, choice.current, reason, by), context)
    return choice.version


def _moved(tracking_uri: str, choice: rollback.Choice) -> Lineage:
    """The alias is made of the version."""
    version = lineage.version(tracking_uri, choice.family, choice.version)
    return Lineage([version], [lineage.alias(tracking_uri, choice.family, choice.alias)])
