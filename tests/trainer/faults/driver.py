"""Drives a run through one fault: starts it, strikes where it says it is, starts it again as the DAG would, and judges.

Nothing here waits for time to pass: a fault strikes once a rank says that it is at the point, or a line says so.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

import numpy as np
from safetensors.numpy import load_file

from . import inside
from .course import Traced, course, difference, read_traces
from .inside import Point
from .scenarios import Damage, Scenario, last_saved
from .world import Mlflow, Room

REPOSITORY: Final = Path(__file__).parents[3]
RETRIES: Final = 5
_LOOK: Final = 0.02
_ORPHANS: Final = 20.0  # seconds that processes have to end after their launcher
_DISK: Final = 16  # megabytes


class Contender(Protocol):
    """A trainer under test, with one small run.

    :ivar steps: of that run. :ivar bound: seconds in which an attempt must end, whatever happened to it.
    :ivar grace: seconds between a SIGTERM and the end. :ivar impatient: environment in which hangs are found sooner.
    :ivar skips: whether it leaves out a step that is not finite.
    :ivar tells_away, tells_full: what its log says once MLflow, or the disk, is away; empty where it says nothing.
    """

    steps: int
    bound: float
    grace: float
    impatient: Mapping[str, str]
    skips: bool
    tells_away: str
    tells_full: str

    def make(self, case: Path, mlflow: str) -> Path:
        """Make a fresh run below a folder; the run's own folder. :param mlflow: the server's address, or nothing."""

    def command(self, case: Path) -> list[str]: ...

    def env(self, case: Path, mlflow: str) -> Mapping[str, str]: ...

    def retried(self, code: int) -> bool:
        """Whether whoever watches over the run starts it again after this exit code."""

    def done(self, case: Path) -> bool:
        """Whether the run has its final model."""

    def complete(self, case: Path, step: int) -> bool:
        """Whether the checkpoint of this step is there."""

    def newest(self, case: Path) -> Path:
        """Folder of the newest checkpoint."""

    def file(self, damage: Damage) -> str:
        """Name of the file in a checkpoint that has this role."""

    def model(self, case: Path) -> Path:
        """The file of the final weights."""

    def weights(self, case: Path) -> dict[str, str]:
        """Digests of the final weights and of what else must be equal, by name."""


@dataclass
class Verdict:
    """How a run with a fault went.

    :param codes: exit codes, by attempt; None for one that had to be killed.
    :param lost, repeated: rows of all epochs that the final weights lack, or have too often; None without weights.
    :param equal: whether the final weights are the reference's to the bit. :param finite: whether they are numbers.
    :param seconds: more than the undisturbed run took. :param ending: of these, from the blow to the attempt's end.
    :param faults: what was not as designed; empty if all was.
    """

    scenario: Scenario
    codes: list[int | None] = field(default_factory=list)
    log: str = ""
    finished: bool = False
    lost: int | None = None
    repeated: int | None = None
    equal: bool | None = None
    finite: bool | None = None
    seconds: float = 0.0
    ending: float = 0.0
    orphans: list[int] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether every attempt ended by itself, and left no process behind."""
        return None not in self.codes and not self.orphans


@dataclass(frozen=True)
class Reference:
    """What an undisturbed run did. :param seconds: from its start to its end."""

    course: Traced
    weights: Mapping[str, str]
    seconds: float


class BrokenReferenceError(Exception):
    """A run without a fault did not end well, so nothing can be judged."""


class Driver:
    """Runs scenarios of one contender below a folder, one after another."""

    def __init__(self, contender: Contender, folder: Path, say: Callable[[str], None] = lambda _: None) -> None:
        self.contender, self.folder, self.say = contender, folder, say
        self._references: dict[tuple[int, ...], Reference] = {}
        self._killed: tuple[Path, int | None, float] | None = None

    def reference(self, skipped: tuple[int, ...] = ()) -> Reference:
        """The undisturbed run. :param skipped: steps whose update is left out, though nothing is wrong with them."""
        if skipped not in self._references:
            case = self._fresh("reference")
            point = Point("update", skipped[0], -1, "skip", len(skipped)) if skipped else None
            self._start(case, 1, point, "", {})
            try:
                code = self._finish()
            finally:
                self._abandon()
            seconds = time.monotonic() - self._began
            if code != 0 or not self.contender.done(case):
                raise BrokenReferenceError(f"exit code {code}:\n{self._log(case, 1)[-3000:]}")
            found = course(read_traces(case, 1))
            if sorted(found.rows) != list(range(1, self.contender.steps + 1)):
                raise BrokenReferenceError(f"its trace has steps {sorted(found.rows)}")
            self._references[skipped] = Reference(found, self.contender.weights(case), seconds)
        return self._references[skipped]

    def run(self, scenario: Scenario) -> Verdict:
        """Put the run through one fault."""
        plain = self.reference()
        reference = self.reference(scenario.skipped) if self.contender.skips else plain
        verdict = Verdict(scenario)
        with ExitStack() as stack:
            stack.callback(self._abandon)
            mlflow = Mlflow() if scenario.mlflow else None
            if mlflow is not None:
                stack.callback(mlflow.close)
            if scenario.damage is not None:
                case, seconds = self._damaged(scenario, verdict)
            else:
                case = self._fresh("case", mlflow.uri if mlflow else "")
                seconds = self._first(case, scenario, verdict, mlflow, stack)
            while verdict.codes[-1] is not None and not self.contender.done(case):
                code, tries = verdict.codes[-1], len(verdict.codes)
                by_hand = scenario.by_hand and not self.contender.retried(code) and tries == 1
                if tries > RETRIES or not (self.contender.retried(code) or by_hand):
                    break
                seconds += self._again(case, verdict, mlflow.uri if mlflow else "")
            verdict.finished = self.contender.done(case) and verdict.codes[-1] == 0
            verdict.seconds = seconds - plain.seconds
            verdict.log = "".join(self._log(case, attempt + 1) for attempt in range(len(verdict.codes)))
            self._judge(case, verdict, plain, reference)
            if mlflow is not None:
                self._judge_metrics(verdict, mlflow)
        return verdict

    def _abandon(self) -> None:
        """Leave nothing behind where the driver itself is ended."""
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()

    # ---- attempts

    def _first(
        self, case: Path, scenario: Scenario, verdict: Verdict, mlflow: Mlflow | None, stack: ExitStack
    ) -> float:
        began = struck = time.monotonic()
        room = None
        env = dict(self.contender.impatient) if scenario.impatient else {}
        if scenario.room:
            place = self._run_folder if scenario.room == "run" else case / "scratch"
            kept = {path.name: path.read_bytes() for path in place.glob("*") if path.is_file()}
            room = Room(place, _DISK)
            stack.callback(room.close)
            for name, data in kept.items():
                (place / name).write_bytes(data)
            if scenario.room == "scratch":
                env["TMPDIR"] = str(place)
        self._start(case, 1, scenario.point, mlflow.uri if mlflow else "", env)
        if scenario.point is not None and scenario.point.act == "hold":
            reached = self._reached(case, scenario.point)
            if reached:
                self._strike(case, scenario, room, mlflow)
            struck = time.monotonic()
            (case / "released").touch()
            if reached and room is not None and self.contender.tells_full and scenario.codes == (0,):
                self._line(case, self.contender.tells_full)
                room.free(self._processes(case))
            if reached and mlflow is not None and scenario.mlflow == "back":
                if self.contender.tells_away:
                    self._line(case, self.contender.tells_away)
                mlflow.back()
            if not reached:
                verdict.faults.append(f"never came to {scenario.point}")
        verdict.codes.append(self._finish(case, verdict))
        verdict.ending = time.monotonic() - struck
        if room is not None:
            room.free(())
        return time.monotonic() - began

    def _damaged(self, scenario: Scenario, verdict: Verdict) -> tuple[Path, float]:
        """A run that was killed soon after a checkpoint, once for all scenarios, and that checkpoint harmed."""
        assert scenario.damage is not None
        assert scenario.point is not None
        kept = self.folder / "killed"
        case = self.folder / "case"
        if self._killed is None:
            case = self._fresh("case")
            began = time.monotonic()
            self._start(case, 1, scenario.point, "", {})
            self._reached(case, scenario.point)
            last = last_saved(self.contender.steps)
            self._until(lambda: self.contender.complete(case, last))
            self._strike(case, scenario, None, None)
            (case / "released").touch()
            code = self._finish(case, verdict)
            self._killed = (kept, code, time.monotonic() - began)
            shutil.copytree(case, kept, symlinks=True)
        else:
            shutil.rmtree(case, ignore_errors=True)
            shutil.copytree(kept, case, symlinks=True)
        _, code, seconds = self._killed
        verdict.codes.append(code)
        harm(self.contender.newest(case) / self.contender.file(scenario.damage), scenario.damage)
        return case, seconds

    def _again(self, case: Path, verdict: Verdict, mlflow: str) -> float:
        began = time.monotonic()
        self._start(case, len(verdict.codes) + 1, None, mlflow, {})
        verdict.codes.append(self._finish(case, verdict))
        return time.monotonic() - began

    def _fresh(self, name: str, mlflow: str = "") -> Path:
        case = self.folder / name
        shutil.rmtree(case, ignore_errors=True)
        case.mkdir(parents=True)
        self._run_folder = self.contender.make(case, mlflow)
        return case

    def _start(self, case: Path, attempt: int, point: Point | None, mlflow: str, more: Mapping[str, str]) -> None:
        for path in [*case.glob("pid-*"), *case.glob("reached-*"), case / "released"]:
            path.unlink(missing_ok=True)
        clean = {
            key: value
            for key, value in os.environ.items()
            if not key.startswith(("MLFLOW_", "AWS_", "PET_", "FAULT", "PYTEST_", "TMPDIR"))
        }
        env = {**clean, **self.contender.env(case, mlflow), **more, **(point.env() if point else {})}
        (case / "tmp").mkdir(exist_ok=True)
        env = {"TMPDIR": str(case / "tmp"), **env}
        env |= {inside.FOLDER: str(case), inside.ATTEMPT: str(attempt), "PYTHONUNBUFFERED": "1"}
        self._began = time.monotonic()
        with self._log_file(case, attempt).open("wb") as log:
            self._process = subprocess.Popen(
                self.contender.command(case), env=env, cwd=REPOSITORY, stdout=log, stderr=subprocess.STDOUT,
                start_new_session=True,
            )  # fmt: skip
        self._attempt = attempt

    def _finish(self, case: Path | None = None, verdict: Verdict | None = None) -> int | None:
        """Wait for the launcher's end, and for that of its ranks; the code, or None if it had to be killed."""
        left = self.contender.bound - (time.monotonic() - self._began)
        processes = self._processes(case) if case is not None else []
        code: int | None
        try:
            code = self._process.wait(max(1.0, left))
        except subprocess.TimeoutExpired:
            code = None
        if case is not None:
            processes = self._processes(case) or processes
        if code is None:
            self._process.kill()
            self._process.wait()
        orphans = self._wait_gone(processes, _ORPHANS if code is not None else 0.0)
        for process in orphans:
            with suppress(ProcessLookupError):
                os.kill(process, signal.SIGKILL)
        if code is not None and verdict is not None:
            verdict.orphans += orphans
        return code

    @staticmethod
    def _wait_gone(processes: list[int], seconds: float) -> list[int]:
        end = time.monotonic() + seconds
        while (left := [process for process in processes if _runs(process)]) and time.monotonic() < end:
            time.sleep(_LOOK)
        return left

    # ---- what happens to an attempt

    def _strike(self, case: Path, scenario: Scenario, room: Room | None, mlflow: Mlflow | None) -> None:
        if room is not None:
            room.fill(self._processes(case))
        if mlflow is not None:
            mlflow.away(scenario.mlflow)
        if scenario.signal:
            number = getattr(signal, scenario.signal)
            ranks = self._ranks(case)
            targets = {"launcher": [self._process.pid], "all": [self._process.pid, *ranks.values()]}
            for process in targets.get(scenario.target) or [ranks[int(scenario.target)]]:
                with suppress(ProcessLookupError):
                    os.kill(process, number)

    def _reached(self, case: Path, point: Point) -> bool:
        ranks = [point.rank] if point.rank >= 0 else [0, 1]
        return self._until(lambda: all((case / f"reached-{rank}").exists() for rank in ranks))

    def _line(self, case: Path, pattern: str) -> bool:
        return self._until(lambda: re.search(pattern, self._log(case, self._attempt)) is not None)

    def _until(self, condition: Callable[[], bool]) -> bool:
        """Wait for a condition; False if the launcher ends, or its time does, before."""
        while not condition():
            if self._process.poll() is not None or time.monotonic() - self._began > self.contender.bound:
                return condition()
            time.sleep(_LOOK)
        return True

    def _ranks(self, case: Path) -> dict[int, int]:
        """Process ids by rank, of the ranks that have said theirs."""
        return {int(path.name[4:]): int(path.read_text()) for path in case.glob("pid-*") if path.read_text()}

    def _processes(self, case: Path) -> list[int]:
        return list(self._ranks(case).values())

    def _log_file(self, case: Path, attempt: int) -> Path:
        return case / f"log-{attempt}.txt"

    def _log(self, case: Path, attempt: int) -> str:
        return self._log_file(case, attempt).read_text(errors="replace")

    # ---- judging

    def _judge(self, case: Path, verdict: Verdict, plain: Reference, reference: Reference) -> None:
        scenario, faults = verdict.scenario, verdict.faults
        if None in verdict.codes:
            faults.append(
                f"attempt {verdict.codes.index(None) + 1} had to be killed after {self.contender.bound:.0f} s"
            )
        if verdict.orphans:
            faults.append(f"processes outlived their launcher: {verdict.orphans}")
        if tuple(verdict.codes) != scenario.codes:
            faults.append(f"exit codes {verdict.codes}, designed are {list(scenario.codes)}")
        if scenario.kind == "SIGTERM" and verdict.ending > self.contender.grace:
            faults.append(f"it took {verdict.ending:.0f} s of a grace of {self.contender.grace:.0f} to stop")
        if scenario.words not in verdict.log:
            faults.append(f"no line says {scenario.words!r}")
        if not verdict.finished:
            faults.append("there is no model")
            return
        if left := [path.name for path in (case / "tmp").iterdir()]:
            faults.append(f"temporary files were left behind: {', '.join(left)}")
        left_out = scenario.skipped if self.contender.skips else ()
        wanted = {step: rows for step, rows in plain.course.rows.items() if step - 1 not in left_out}
        try:
            found = course(read_traces(case, len(verdict.codes)))
        except ValueError as error:
            faults.append(str(error))
            return
        verdict.lost, verdict.repeated = difference(found, wanted)
        if verdict.lost or verdict.repeated:
            faults.append(f"{verdict.lost} rows lost, {verdict.repeated} repeated")
        if found.rows != plain.course.rows:
            steps = [step for step in plain.course.rows if found.rows.get(step) != plain.course.rows[step]]
            faults.append(f"other rows than planned in steps {steps}")
        verdict.finite = all(np.isfinite(tensor).all() for tensor in load_file(self.contender.model(case)).values())
        if not verdict.finite:
            faults.append("the final weights are not finite")
        weights = self.contender.weights(case)
        verdict.equal = weights == reference.weights
        if scenario.same and not verdict.equal:
            other = [name for name in reference.weights if weights.get(name) != reference.weights[name]]
            faults.append(f"not equal to the undisturbed run: {', '.join(other)}")

    def _judge_metrics(self, verdict: Verdict, mlflow: Mlflow) -> None:
        """What came back to a server that was away for a while must be all there is, once."""
        if verdict.scenario.mlflow != "back":
            return
        steps = sorted(step for key, step, _ in mlflow.metrics if key in ("train/loss", "loss"))
        if steps != list(range(1, self.contender.steps + 1)):
            verdict.faults.append(f"MLflow has the loss of steps {steps}")


def harm(path: Path, damage: Damage) -> None:
    """Do to a file what a broken disk, or a hand, does."""
    if damage.how == "remove":
        path.unlink()
        return
    data = bytearray(path.read_bytes())
    place = min(len(data) - 1, int(damage.where * len(data)))
    if damage.how == "cut":
        del data[place:]
    else:
        data[place] ^= 1
    path.write_bytes(bytes(data))


def digests(paths: Mapping[str, Path]) -> dict[str, str]:
    return {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in sorted(paths.items())}


def _runs(process: int) -> bool:
    """Whether a process runs, or could: one that has ended and waits to be collected does not."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except OSError:
        return False
