"""The exporter: a thread looks at the sources now and then, and a scrape is answered from what it saw last.

So a scrape costs no source anything, however many Prometheus servers there are and however often they ask.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final, TypeAlias, TypeVar

from prometheus_client.core import Metric
from prometheus_client.registry import Collector, CollectorRegistry

from dropforge import layout
from dropforge.json_objects import UNREADABLE
from dropforge.store import Store
from dropforge.watching.airflow_state import Api, Dag, read_dags
from dropforge.watching.drops import Ledger, read_ledger
from dropforge.watching.metrics import metrics
from dropforge.watching.runs import Runs, Seen
from dropforge.watching.snapshot import Names, Snapshot, Source
from dropforge.watching.trainings import Folder, read_folder

log = logging.getLogger(__name__)

KEEP: Final = 300.0
"""Seconds for which a source's last answer is told while it does not answer; then its series end."""
OPEN_RUNS: Final = 200
"""Open runs whose folders are looked at, the newest first: each costs some requests."""
_T = TypeVar("_T")
Stored: TypeAlias = tuple[set[str], dict[str, Folder]]


@dataclass
class Watch:
    """The sources and what was seen of them.

    :param airflow: None where nobody may ask it. :param dags: those that are looked at.
    """

    store: Store
    runs: Runs
    airflow: Api | None = None
    dags: tuple[str, ...] = ()
    now: Callable[[], float] = time.time
    _sources: dict[str, Source] = field(default_factory=dict)
    _last: dict[str, Any] = field(default_factory=dict)
    _unread: set[str] = field(default_factory=set)

    def look(self) -> Snapshot:
        """A new snapshot. Whatever goes wrong with a source is told by its `Source`, and ends nothing."""
        ledger: Ledger | None = self._ask("ledger", lambda: read_ledger(self.store))
        known: list[Seen] | None = self._ask("mlflow", lambda: list(self.runs.read()))
        stored: Stored | None = self._ask("folders", lambda: self._stored(known or []))
        dags: Mapping[str, Dag] | None = None
        if (airflow := self.airflow) is not None:
            dags = self._ask("airflow", lambda: read_dags(airflow, self.dags))
        here, folders = stored or (set(), {})
        # Several installations may share one MLflow: which runs are this one's, its bucket says.
        ours = [run for run in known if run.run in here] if known is not None and stored is not None else None
        return Snapshot(self.now(), dict(self._sources), ledger, ours, folders, dags)

    def _stored(self, known: Sequence[Seen]) -> Stored:
        """The names of all runs that the bucket has, with the folders of open ones."""
        here = {run for run in self.store.folders(layout.RUNS) if layout.is_run(run)}
        going = sorted((run for run in known if run.open and run.run in here), key=lambda run: run.began, reverse=True)
        folders = {run.run: self._folder(run.run) for run in going[:OPEN_RUNS]}
        return here, {run: folder for run, folder in folders.items() if folder is not None}

    def _folder(self, run: str) -> Folder | None:
        """None if somebody else has written in it, which is said once and hides no other run."""
        try:
            found = read_folder(self.store, run, self.now())
        except UNREADABLE as error:
            if run not in self._unread:
                log.warning("the folder of run %s cannot be read: %r", run, error)
            self._unread.add(run)
            return None
        self._unread.discard(run)
        return found

    def _ask(self, name: str, read: Callable[[], _T]) -> _T | None:
        before = self._sources.get(name, Source())
        began = self.now()
        try:
            self._last[name] = read()
        except Exception as error:  # any source may fail in any way, and the others are told all the same
            if before.up or name not in self._sources:
                log.warning("%s cannot be read: %s", name, error)
            self._sources[name] = Source(False, before.succeeded, max(0.0, self.now() - began))
            if self.now() - before.succeeded > KEEP:
                self._last.pop(name, None)
        else:
            if not before.up and name in self._sources:
                log.info("%s is read again", name)
            self._sources[name] = Source(True, self.now(), max(0.0, self.now() - began))
        found: _T | None = self._last.get(name)
        return found


class Exporter(Collector):
    """Answers scrapes from the last look, and looks again every `every` seconds once it is started."""

    def __init__(self, watch: Watch, every: float) -> None:
        self._watch, self._every = watch, every
        self._names = Names()
        self._told: list[Metric] = []
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="watch", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._over.set()
        self._thread.join()

    def collect(self) -> Iterator[Metric]:
        yield from self._told

    def look(self) -> None:
        """Look once, and tell that from now on."""
        self._told = list(metrics(self._watch.look(), self._names))

    def _run(self) -> None:
        while True:
            try:
                self.look()
            except Exception:  # a mistake of ours: what was told would grow old without a word
                log.exception("What was read could not be reported")
                self._told = []
            if self._over.wait(self._every):
                return


def registry(exporter: Exporter) -> CollectorRegistry:
    """With this exporter alone: what the process itself costs is the node's affair."""
    found = CollectorRegistry(auto_describe=False)
    found.register(exporter)
    return found
