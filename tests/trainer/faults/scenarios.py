"""Thirty faults as data, drawn from a seed: what strikes, where, and how a run should end."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final

from .inside import Point

EVERY: Final = 10  # steps between two checkpoints, and between two evaluations
KINDS: Final = ("SIGTERM", "SIGKILL", "corrupt", "missing", "full disk", "NaN", "hung rank", "MLflow away")


@dataclass(frozen=True)
class Damage:
    """What is done to the newest checkpoint between two attempts.

    :param role: which file: `weights`, `state` (optimizer), `progress` or `seal` (what tells that it is complete).
    :param where: part of the file's length at which a bit is flipped, or that is left.
    """

    role: str
    how: str  # flip, cut, remove
    where: float = 0.5


@dataclass(frozen=True)
class Scenario:
    """One fault of the first attempt.

    :param point: where the first attempt stops for the driver, or harms itself; None without one.
    :param signal: sent there to `target`: a rank's number, `launcher` or `all` (as a process group gets it).
    :param room: the folder that is full from there on, `run` or `scratch`. :param mlflow: what becomes of the server.
    :param codes: exit codes of ours, attempt by attempt. :param words: what ours says of it.
    :param same: whether the final weights must be those of the undisturbed run.
    :param skipped: steps that are left out, so that the reference is a run that leaves out the same.
    :param impatient: hangs are looked for sooner than they are unless told.
    :param by_hand: the last attempt is started by a person, after a code that nobody retries.
    """

    kind: str
    name: str
    point: Point | None = None
    signal: str = ""
    target: str = ""
    damage: Damage | None = None
    room: str = ""
    mlflow: str = ""
    codes: tuple[int, ...] = (0,)
    words: str = ""
    same: bool = True
    skipped: tuple[int, ...] = field(default=())
    by_hand: bool = False
    impatient: bool = False


def scenarios(steps: int, seed: int = 5) -> list[Scenario]:
    """All of them for a training of so many steps. :param seed: chooses steps, ranks and bytes."""
    draw = random.Random(seed)

    def at() -> int:
        """A step after the first checkpoint, and not the last one."""
        return draw.randrange(EVERY + 2, steps - 2)

    def due() -> int:
        """A step with a checkpoint, not the first or last."""
        return EVERY * draw.randrange(2, (steps - 1) // EVERY + 1)

    def rank() -> int:
        return draw.randrange(2)

    found: list[Scenario] = []

    def add(kind: str, name: str, point: Point | None = None, **more: object) -> None:
        found.append(Scenario(kind, name, point, **more))  # type: ignore[arg-type]

    add("SIGTERM", "to the launcher, while rank 0 tokenises", Point("prepare", rank=0), signal="SIGTERM",
        target="launcher", codes=(20, 0), words="asked to stop before")  # fmt: skip
    step, whom = at(), rank()
    add("SIGTERM", f"to rank {whom}, in step {step + 1}", Point("step", step, whom), signal="SIGTERM",
        target=str(whom), codes=(20, 0), words=f"asked to stop at step {step + 1}")  # fmt: skip
    step, whom = due(), rank()
    add("SIGTERM", f"to rank {whom}, in the evaluation at step {step}", Point("evaluation", step, whom),
        signal="SIGTERM", target=str(whom), codes=(20, 0), words=f"asked to stop at step {step}")  # fmt: skip
    step, whom = due(), rank()
    add("SIGTERM", f"to all processes, while rank {whom} writes step {step}", Point("save", step, whom),
        signal="SIGTERM", target="all", codes=(20, 0), words="asked to stop at step")  # fmt: skip
    add("SIGTERM", "to the launcher, while the model is written", Point("export", rank=0), signal="SIGTERM",
        target="launcher")  # fmt: skip

    for whom in (0, 1):
        step = at()
        add("SIGKILL", f"of rank {whom}, in step {step + 1}", Point("step", step, whom), signal="SIGKILL",
            target=str(whom), codes=(21, 0), words=f"rank {whom} was ended by SIGKILL")  # fmt: skip
    step, whom = at(), rank()
    add("SIGKILL", f"of the launcher, in step {step + 1}", Point("step", step, whom), signal="SIGKILL",
        target="launcher", codes=(-9, 0))  # fmt: skip
    step, whom = due(), rank()
    add("SIGKILL", f"of rank {whom}, half its file of step {step} written", Point("save", step, whom),
        signal="SIGKILL", target=str(whom), codes=(21, 0), words=f"rank {whom} was ended by SIGKILL")  # fmt: skip
    step = due()
    add("SIGKILL", f"of rank 0, files of step {step} written, before they count", Point("seal", step, 0),
        signal="SIGKILL", target="0", codes=(21, 0), words="rank 0 was ended by SIGKILL")  # fmt: skip
    step, whom = due(), rank()
    add("SIGKILL", f"of all processes, while rank {whom} writes step {step}", Point("save", step, whom),
        signal="SIGKILL", target="all", codes=(-9, 0))  # fmt: skip

    for kind, name, damage in (
        ("corrupt", "a bit of the newest weights flipped", Damage("weights", "flip", draw.random())),
        ("corrupt", "a bit of the newest optimizer state flipped", Damage("state", "flip", draw.random())),
        ("corrupt", "the newest weights cut short", Damage("weights", "cut", draw.random())),
        ("corrupt", "the newest counters cut short", Damage("progress", "cut", draw.random())),
        ("missing", "the newest optimizer state", Damage("state", "remove")),
        ("missing", "what tells that the newest is complete", Damage("seal", "remove")),
    ):
        words = "was never finished" if damage.role == "seal" else "is broken"
        add(kind, name, killed(steps), signal="SIGKILL", target="0", damage=damage, codes=(21, 0), words=words)

    step = due()
    add("full disk", f"at the checkpoint of step {step}, mended meanwhile", Point("save", step, 0), room="run",
        words="could not be written")  # fmt: skip
    add("full disk", "while the model is written, mended after", Point("export", rank=0), room="run", codes=(1, 0),
        words="Make room and try again")  # fmt: skip
    add("full disk", "of the node, while rank 0 tokenises, mended after", Point("prepare", rank=0), room="scratch",
        codes=(1, 0), words="No space left on device")  # fmt: skip

    step = at()
    for name, point in (
        ("loss of rank 0", Point("loss", step, 0, "nan-loss")),
        ("gradient of rank 1, its loss finite", Point("loss", step, 1, "nan-gradient")),
        ("loss of all ranks", Point("loss", step, -1, "nan-loss")),
    ):
        add("NaN", f"{name}, in step {step + 1}", point, words=f"step {step + 1}: loss", skipped=(step,))
    step = due() + 1
    add("NaN", f"loss of rank 1, in every step from {step + 1} on", Point("loss", step, 1, "nan-loss", 6),
        codes=(12, 0), words="6 steps in a row", by_hand=True)  # fmt: skip

    step, whom = at(), rank()
    add("hung rank", f"rank {whom} stopped in step {step + 1}", Point("step", step, whom), signal="SIGSTOP",
        target=str(whom), codes=(21, 0), words=f"rank {whom} hangs: its process does not", impatient=True)  # fmt: skip
    step, whom = at(), rank()
    add("hung rank", f"rank {whom} sleeps in step {step + 1}", Point("step", step, whom, "sleep"), codes=(21, 0),
        words=f"rank {whom} hangs in step {step + 1}", impatient=True)  # fmt: skip

    for mode, name in (
        ("refuse", "refuses connections"),
        ("hang", "takes requests and does not answer"),
        ("fail", "answers 500"),
        ("back", "refuses connections, and comes back"),
    ):
        step = at()
        add("MLflow away", f"{name}, from step {step + 1} on", Point("step", step, 0), mlflow=mode,
            words="MLflow is back" if mode == "back" else "MLflow is away", impatient=True)  # fmt: skip
    return found


def killed(steps: int) -> Point:
    """Where the run stops whose newest checkpoint is harmed afterwards: soon after the last but one of all."""
    return Point("step", min(last_saved(steps) + 4, steps - 1), 0)


def last_saved(steps: int) -> int:
    """The last step with a checkpoint before the end."""
    return EVERY * ((steps - 1) // EVERY)
