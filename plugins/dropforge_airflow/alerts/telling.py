"""Alerts go out through Airflow's notifiers, each once; whatever fails here fails nothing else."""

from __future__ import annotations

import asyncio
import contextvars
import json
import logging
import os
import pkgutil
import threading
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any, Final

from dropforge import layout
from dropforge.text import as_line
from dropforge_airflow.alerts import wanted
from dropforge_airflow.alerts.texts import Alert
from dropforge_airflow.alerts.wanted import Wanted

if TYPE_CHECKING:
    from dropforge.store import Store

log = logging.getLogger(__name__)

_SAID: Final = 500  # characters
_PATIENCE: Final = 30.0  # seconds that a notifier may take; the task that waits for it is done otherwise


def tell(alert: Alert, context: Mapping[str, Any] | None = None) -> None:
    """Tell who wants to know, unless it was told before. Nothing is raised: alerts are no part of the run.

    :param context: of the task, for notifiers that read it.
    """
    try:
        listening = [one for one in configured() if one.wants(alert)]
        if not listening:
            return
        store = _store()
        key = layout.told_key(alert.once)
        if _told(store, key):
            log.info("Sent before: %s", alert.subject)
            return
        sent = [send(one, alert, context) for one in listening]
        # Only now: who dies in between tells it twice, and not never.
        if store is not None and not all(sent):
            _mark(store, key, alert)
    except Exception:
        log.exception("The alert %r could not be sent", alert.subject)


def configured() -> list[Wanted]:
    """:raises DropforgeError: if it cannot be read."""
    text = os.environ.get(wanted.ENVIRONMENT)
    if text is not None:
        return wanted.parse(text, f"environment variable {wanted.ENVIRONMENT}")
    from airflow.sdk import Variable

    return wanted.parse(Variable.get(wanted.VARIABLE, default="") or "", f"Airflow's Variable {wanted.VARIABLE}")


def send(one: Wanted, alert: Alert, context: Mapping[str, Any] | None = None) -> str:
    """What went wrong, in one line; empty if the notifier took it."""
    trouble = ["it did not answer in time"]

    def work() -> None:
        try:
            _notify(one, alert, context or {})
            trouble[0] = ""
        except Exception as error:  # services have many kinds
            trouble[0] = as_line(f"{type(error).__name__}: {error}", _SAID)  # it may quote a service's answer

    thread = threading.Thread(target=contextvars.copy_context().run, args=(work,), name="alert", daemon=True)
    thread.start()
    thread.join(_PATIENCE)
    said = trouble[0]
    if said:
        log.error("Notifier %s did not send %r: %s", one.notifier, alert.subject, said)
    else:
        log.info("Sent through %s: %s", one.notifier, alert.subject)
    return said


def _notify(one: Wanted, alert: Alert, context: Mapping[str, Any]) -> None:
    from airflow.sdk import BaseNotifier

    kind = pkgutil.resolve_name(one.notifier)
    if not (isinstance(kind, type) and issubclass(kind, BaseNotifier)):
        raise TypeError(f"{one.notifier} is no class of Airflow's BaseNotifier")
    notifier = kind(**alert.fill(one.arguments))
    # Its methods, and no call of it: that would render the texts as templates, and who names a drop
    # `{{ conn.x.password }}` would read connections.
    try:
        notifier.notify(context)  # type: ignore[arg-type]
    except NotImplementedError:
        asyncio.run(notifier.async_notify(context))  # type: ignore[arg-type]


def _store() -> Store | None:
    from dropforge.settings import from_env
    from dropforge_airflow import connection

    try:
        return connection.open_store(from_env().bucket)
    except Exception as error:
        log.warning("Which alerts were sent before cannot be looked up: %s", error)
        return None


def _told(store: Store | None, key: str) -> bool:
    try:
        return store is not None and store.stat(key) is not None
    except Exception as error:  # a store that is away may be what is to be told
        log.warning("Which alerts were sent before cannot be looked up: %s", error)
        return False


def _mark(store: Store, key: str, alert: Alert) -> None:
    note = {"what": alert.once, "subject": alert.subject, "at": f"{datetime.now(UTC):%FT%TZ}"}
    try:
        store.put_if_absent(key, json.dumps(note, indent=1).encode())
    except Exception as error:
        log.warning("That %r was sent cannot be recorded: %s", alert.subject, error)
