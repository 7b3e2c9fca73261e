"""The one supervisor of a local cluster: admits, starts, watches, ends and removes jobs.

A service of its own, so that jobs outlive Airflow's worker and triggerer. SIGKILL does not end the jobs: the next
supervisor takes them over. SIGTERM does, with their grace period, as the shutdown of a node would.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import signal
import socket
import time
from pathlib import Path
from typing import Final

from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.local import lock, processes
from kubeflow_training.jobs.local.capacity import NEVER_FITS_MEND, Resources, gang_resources, machine, never_fits
from kubeflow_training.jobs.local.devices import devices
from kubeflow_training.jobs.local.gang import Gang
from kubeflow_training.jobs.local.layout import Layout, timestamp, write_json
from kubeflow_training.jobs.local.standing import HELD
from kubeflow_training.jobs.shapes import moment

_BUSY_SECONDS: Final = 0.1
_IDLE_SECONDS: Final = 0.25
_SCAN_SECONDS: Final = 5.0
_TOUCH_SECONDS: Final = 5.0
_KEEP_REMOVED: Final = 20

log = logging.getLogger(__name__)


class Supervisor:
    """
    :param home: folder of the cluster; made if it does not exist.
    :raises JobError: if another supervisor runs there.
    """

    def __init__(self, home: Path) -> None:
        self.layout = Layout(home)
        self.layout.prepare()
        self.total, self.devices = machine(), devices()
        self._lock = self._take_lock()
        self.layout.supervisor.unlink(missing_ok=True)  # what it says is of one that was killed
        self.gangs: dict[Path, Gang] = {}
        self._unreadable: set[Path] = set()
        self.stopping = False
        self._wake: int | None = None
        self._scanned = 0.0
        self._touched = 0.0
        me = processes.identity(os.getpid())
        write_json(
            self.layout.supervisor,
            {**me, "since": timestamp(), "cpus": self.total.cpus, "memory": self.total.memory, "gpus": self.total.gpus},
        )

    def run(self) -> None:
        """Work until SIGTERM or SIGINT, then end the jobs and return."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        log.info("the local cluster in %s offers %s", self.layout.home, self.total)
        while not (self.stopping and not any(gang.holds for gang in self.gangs.values())):
            busy = self.step()
            self._touch()
            time.sleep(_BUSY_SECONDS if busy else _IDLE_SECONDS)
        log.info("stopped")
        with contextlib.suppress(FileNotFoundError):
            self.layout.supervisor.unlink()

    def _touch(self) -> None:
        """Give a sign of life: who watches over this process sees whether it goes round."""
        if time.monotonic() - self._touched > _TOUCH_SECONDS:
            self._touched = time.monotonic()
            with contextlib.suppress(OSError):
                os.utime(self.layout.supervisor)

    def step(self) -> bool:
        """One round over all jobs; whether anything runs or waits."""
        self._reap()
        try:
            self._scan()
        except OSError as error:
            log.error("the jobs cannot be looked through now: %s", error)
        busy = False
        for path, gang in list(self.gangs.items()):
            if gang.ended and not gang.holds and not gang.deleted:
                continue
            busy = True
            try:
                self._advance(path, gang)
            except OSError as error:
                # A full disk, for example: the job goes on, and so do the others.
                log.error("job %s: %s", gang.key, error)
        if not self.stopping:
            try:
                self._schedule()
            except OSError as error:
                log.error("no job can be started now: %s", error)
        return busy

    def _advance(self, path: Path, gang: Gang) -> None:
        if self.stopping and gang.holds:
            gang.end("shutdown")
        ended = gang.ended
        gang.step()
        if gang.ended and not ended:
            log.info("job %s has ended", gang.key)
        if gang.deleted and not gang.holds:
            self._remove(path, gang)

    def _schedule(self) -> None:
        """First come, first served, unless people say otherwise; a gang starts whole or not at all, an elastic one with
        as much as fits. Who is held back keeps nobody waiting."""
        free, ports, taken = self.total, set(), set()
        for gang in self.gangs.values():
            if gang.holds:
                free -= gang.held
                ports.add(gang.port)
                taken.update(gang.gpus)
        gpus = [name for name in self.devices if name not in taken]
        queued = [(gang, gang.standing) for gang in self.gangs.values() if gang.queued]
        ahead = 0
        for gang, standing in sorted(queued, key=lambda item: item[1].turn(item[0].order, item[0].uid)):
            if why := never_fits(gang.least, self.total):
                gang.refuse("NeverFits", f"{why}. {NEVER_FITS_MEND}")
            elif standing.held:
                gang.wait(HELD)
            elif ahead:
                gang.wait(f"waiting for its turn, {ahead} ahead; needs {gang.least}")
                ahead += 1
            elif not (pods := gang.fits(free)):
                gang.wait(f"waiting for {gang.least.missing(free)}", gang.placeable(free))
                ahead += 1
            else:
                wants = gang_resources(gang.manifest, pods)
                own, port = gpus[: wants.gpus], _free_port(ports)
                log.info("job %s starts with %s", gang.key, wants)
                gang.start(port, own if self.devices else None, pods)
                free -= wants
                ports.add(port)
                gpus = gpus[wants.gpus :]
        if not ahead:
            self._grow(free, gpus)

    def _grow(self, free: Resources, gpus: list[str]) -> None:
        """Give what nobody waits for to the elastic gangs that run with fewer pods than they asked for."""
        for gang in sorted((gang for gang in self.gangs.values() if gang.growing), key=lambda gang: gang.order):
            held = gang.held
            more = gang.fits(free + held) - gang.pods_placed
            if more > 0:
                wants = gang_resources(gang.manifest, gang.pods_placed + more) - held
                log.info("job %s grows by %s", gang.key, wants)
                gang.grow(gpus[: wants.gpus] if self.devices else None, more)
                free -= wants
                gpus = gpus[wants.gpus :]

    def _scan(self) -> None:
        """Find new jobs, after a client's knock and now and then anyway; forget those that are gone."""
        with contextlib.suppress(FileNotFoundError):
            wake = self.layout.wake.stat().st_mtime_ns
            # Two knocks within one tick of the file system's clock look like one: look again for a second.
            fresh = wake != self._wake or abs(time.time() - wake / 1e9) < 1
            if not fresh and time.monotonic() - self._scanned < _SCAN_SECONDS:
                return
            self._wake = wake
        self._scanned = time.monotonic()
        for path in self.layout.job_folders():
            if path in self.gangs or path in self._unreadable:
                continue
            try:
                gang = Gang(path)
            except OSError as error:
                log.error("%s cannot be read or written now: %s", path, error)
                continue
            except Exception as error:  # one job that is none must not end all others
                log.error("%s holds no job that can be run: %r", path, error)
                self._unreadable.add(path)
                continue
            self.gangs[path] = gang
            if not gang.ended or gang.state["plan"]:
                gang.adopt()
                gang.step()
        for path, gang in list(self.gangs.items()):
            ttl = (gang.manifest["spec"].get("runPolicy") or {}).get("ttlSecondsAfterFinished")
            finished = moment(gang.state["status"].get("completionTime"))
            if ttl is not None and finished and not gang.holds and gang.age(finished.timestamp()) > ttl:
                self._remove(path, gang)

    def _remove(self, path: Path, gang: Gang) -> None:
        """Let the job vanish at once, and keep the logs of the last few."""
        target = self.layout.removed / f"{gang.name}-{gang.uid}"
        path.rename(target)
        target.touch()
        del self.gangs[path]
        log.info("job %s is removed", gang.key)
        kept = sorted(self.layout.removed.iterdir(), key=lambda folder: folder.stat().st_mtime, reverse=True)
        for old in kept[_KEEP_REMOVED:]:
            shutil.rmtree(old, ignore_errors=True)

    def _take_lock(self) -> int:
        handle = lock.take(self.layout.lock)
        if handle is None:
            raise JobError(
                f"the local cluster in {self.layout.home}",
                "another supervisor runs there",
                "Stop it first, or use another folder (KUBEFLOW_TRAINING_HOME)",
            )
        return handle

    def _reap(self) -> None:
        """Collect keepers that have ended; those of an earlier supervisor are not ours."""
        for gang in self.gangs.values():
            gang.reap()

    def _on_signal(self, _number: int, _frame: object) -> None:
        self.stopping = True


def _free_port(taken: set[int | None]) -> int:
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port: int = probe.getsockname()[1]
        if port not in taken:
            return port
