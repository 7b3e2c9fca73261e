"""A rank's sign of life: what it does, how long that may take, and how far its collectives have come.

A thread writes it into the scratch folder, where `trainer.node.watchdog` in the launcher reads it. So a rank that
stands still is seen even where none of its own code can run.
"""

from __future__ import annotations

import errno
import faulthandler
import json
import os
import signal
import statistics
import sys
import threading
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from trainer.compat import flight_records

if TYPE_CHECKING:
    from trainer.loop.progress import Progress
    from trainer.loop.step import StepResult

DUMP: Final = "dump"  # file that asks the ranks of a node for their flight records
EVERY: Final = 1.0  # seconds between two signs
STACK_SIGNAL: Final = signal.SIGUSR1
_LEAST: Final = 120.0
_START: Final = 5  # the first step allocates
_COMPILING: Final = 600.0  # seconds
_GATHERED: Final = 0.5e9  # bytes a second over a slow network
_FACTOR: Final = 20
_REMEMBERED: Final = 101  # steps
_ROOM: Final = 1024  # bytes of a sign, which the file keeps from the first one on
_READS: Final = 3
_PACKAGE: Final = Path(__file__).parents[1]


@dataclass(frozen=True)
class Bounds:
    """How long a rank may stay in one place: in a step that is one micro-batch, or the collective behind them.

    :param least: seconds that every step has; the first step of a process has five times as many.
    :param beyond: seconds that the first one has besides, see `of`.
    """

    least: float = _LEAST
    beyond: float = 0.0

    def of(self, weight_bytes: int, compiles: bool) -> Bounds:
        """The same for a model: its first pass compiles its blocks, and gathers or copies all of its weights."""
        return replace(self, beyond=weight_bytes / _GATHERED + (_COMPILING if compiles else 0.0))

    def step(self, seconds: deque[float]) -> float:
        """Seconds for the next step: twenty times the median of those before."""
        if not seconds:
            return self.start
        return max(self.least, _FACTOR * statistics.median(seconds))

    @property
    def start(self) -> float:
        return _START * self.least + self.beyond


def bounds_from_env(env: Mapping[str, str]) -> Bounds:
    """`DROPFORGE_HANG_SECONDS` in the place of the least bound. :raises ValueError: if it is no number."""
    return Bounds(float(env.get("DROPFORGE_HANG_SECONDS") or _LEAST))


@dataclass(frozen=True)
class Beat:
    """One sign of life.

    :param pulse: grows as long as the process runs. :param mark: grows as long as the rank gets on.
    :param limit: seconds without a new mark after which it hangs; None where any time is right.
    :param phase: like `step 12`. :param place: where its main thread is.
    :param entered: collectives that the rank has entered since its start; None without a process group.
    """

    rank: int
    pulse: int
    mark: int
    limit: float | None
    phase: str
    place: str
    entered: int | None


class Heart:
    """Marks what a rank does; without `start` nobody hears of it.

    :param looks: a count that grows with each micro-batch and each batch of an evaluation, a sign of life as well.
    """

    def __init__(self, rank: int = 0, bounds: Bounds | None = None, looks: Callable[[], int] = lambda: 0) -> None:
        self.rank, self.bounds, self._looks = rank, bounds or Bounds(), looks
        self._seconds: deque[float] = deque(maxlen=_REMEMBERED)
        self._now: tuple[int, float | None, str] = (0, None, "start")  # replaced as a whole: another thread reads it
        self._ending = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self, phase: str, limit: float | None) -> None:
        """Say what is done next, and how many seconds it may take without a look at the stop signal."""
        self._now = (self._now[0] + 1, limit, phase)

    def warm_up(self) -> None:
        self.begin("the first pass", self.bounds.start)

    def step(self, number: int) -> None:
        self.begin(f"step {number}", self.bounds.step(self._seconds))

    def evaluation(self, step: int) -> None:
        self.begin(f"the evaluation at step {step}", self.bounds.start)

    def rest(self) -> None:
        """What follows may take any time."""
        self.begin("between steps", None)

    def after_step(self, result: StepResult, progress: Progress, log: bool) -> None:
        """See `trainer.loop.observer.Observer`."""
        del progress, log
        self._seconds.append(result.seconds)
        self.rest()

    def beat(self, pulse: int) -> Beat:
        mark, limit, phase = self._now
        return Beat(self.rank, pulse, mark + self._looks(), limit, phase, place(), entered())

    def start(self, folder: Path) -> None:
        """Begin to write signs of life, and stacks at a signal, into the scratch folder of this node."""
        self._stacks = stack_file(folder, self.rank).open("w")  # stays open for the handler
        faulthandler.register(STACK_SIGNAL, file=self._stacks, all_threads=True)
        self._folder = folder
        self._thread = threading.Thread(target=self._run, args=(folder,), name="heart", daemon=True)
        self._thread.start()

    def end(self) -> None:
        """Take the sign of life away: a process that has done its work must not count as one that does not run."""
        if self._thread is not None:
            self._ending.set()
            self._thread.join(EVERY)
            beat_file(self._folder, self.rank).unlink(missing_ok=True)

    def _run(self, folder: Path) -> None:
        pulse, dumped = 0, False
        while not self._ending.is_set():
            pulse += 1
            write_beat(folder, self.beat(pulse))
            with suppress(OSError):  # a full disk is told by others
                if not dumped and (folder / DUMP).exists():
                    dumped = True
                    keep_flight_records(folder, self.rank)
            self._ending.wait(EVERY)


def place() -> str:
    """Where the main thread is: the collective if it is in one, and the line of the trainer."""
    frame: Any = sys._current_frames().get(threading.main_thread().ident or 0)
    operation = ""
    while frame is not None:
        name, file = frame.f_code.co_name, frame.f_code.co_filename
        if file.endswith("distributed_c10d.py"):
            operation = f"{name} "
        with suppress(ValueError):
            where = Path(file).relative_to(_PACKAGE.parent) if file.startswith(str(_PACKAGE)) else None
            if where is not None:
                return f"{operation}in {where}:{frame.f_lineno} ({name})"
        frame = frame.f_back
    return operation.strip() or "unknown code"


def entered() -> int | None:
    """Collectives that this process has entered, those in DDP's and FSDP's own code too."""
    module = sys.modules.get("torch.distributed.distributed_c10d")
    if module is None:
        return None
    try:
        # A group may have a backend for each kind of device, and each counts its own.
        groups = list(module._world.pg_map)
        backends = [group._get_backend(device) for group in groups for device in group._device_types]
        numbers = {id(backend): int(backend._get_sequence_number_for_group()) for backend in backends}
        return sum(numbers.values()) if numbers else None
    except Exception:  # a group that is just being made, or a backend without numbers
        return None


def beat_file(folder: Path, rank: int) -> Path:
    return folder / f"beat-{rank}"


def stack_file(folder: Path, rank: int) -> Path:
    return folder / f"stacks-{rank}.txt"


def write_beat(folder: Path, beat: Beat) -> None:
    """Write a sign of life over the one before, which a full disk allows; one that cannot be written is taken away.

    A stale one would say that this process does not run.
    """
    path = beat_file(folder, beat.rank)
    data = json.dumps(asdict(beat)).encode().ljust(_ROOM)
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
        try:
            if os.pwrite(descriptor, data, 0) != len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            os.ftruncate(descriptor, len(data))
        finally:
            os.close(descriptor)
    except OSError:
        with suppress(OSError):
            path.unlink(missing_ok=True)


def read_beat(folder: Path, rank: int) -> Beat | None:
    """The last sign of a rank; None before the first, or where none can be written."""
    for _ in range(_READS):
        try:
            return Beat(**json.loads(beat_file(folder, rank).read_bytes()))
        except OSError:
            return None
        except (ValueError, TypeError):  # it is just being written
            continue
    return None


def keep_flight_records(folder: Path, rank: int) -> None:
    """Write the last collectives of this process into the scratch folder. :raises OSError: if there is no room."""
    for backend, data in flight_records().items():
        path = folder / f"flight-{backend}-{rank}.json"
        temporary = path.with_name(f".{path.name}")
        temporary.write_bytes(data)
        temporary.replace(path)
