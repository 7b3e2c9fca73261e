"""Whether a recipe fits the memory, measured before the first step on the model as it will be trained.

Out of memory on a CPU is a SIGKILL that nobody can catch, so nothing is tried that was not foreseen to fit: forward and
backward passes grow by doubling, first the tokens of one row, then the rows, and what the next one takes is told from
those before it. A row's memory is linear in its tokens or, where attention holds its scores, quadratic; that of several
rows is their sum. The last pass is the whole micro-batch, because seven times what one row took was seen to be a
quarter too little. The passes together cost about two micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

import numpy as np
import torch

from dropforge.errors import RecipeError
from dropforge.text import counted
from trainer.data.batch import Batch
from trainer.data.tokens import Tokens
from trainer.gang import Gang
from trainer.model.shard import Wrapped

_SPARE: Final = 0.8  # of the room: heaps have holes, and steps were seen to take up to 1.06 of what was foreseen
_ADVISED: Final = 0.9  # of that: the next process finds a little more or less of either
_TINY: Final = 16  # tokens of the passes that make gradients and whatever else does not grow with the tokens
_FIRST: Final = 128  # tokens of the first pass that is asked what more tokens take
_UNLIMITED: Final = 1 << 60  # version 1 of control groups has a number for it


@dataclass(frozen=True)
class Load:
    """What a rank needs. Sizes are bytes, more than the rank holds before its first step.

    :param base: whatever does not grow with a micro-batch. :param row: one of its rows.
    :param room: what is left: on the rank's GPU, or on its node for all ranks there.
    """

    base: float
    row: float
    room: float


@dataclass(frozen=True)
class Fit:
    """What was found: bytes that the longest micro-batch of `rows` rows will take on this rank, and what is left."""

    rows: int
    tokens: int
    need: int
    room: int

    def plain(self) -> dict[str, int]:
        return asdict(self)


def foresee(half: float, whole: float) -> float:
    """What twice the tokens take, from what they and half of them take: `a n + b n**2` with neither part negative."""
    return min(4 * whole, max(2 * whole, 6 * whole - 8 * half))


def doubled(first: int, last: int) -> list[int]:
    """Numbers up to the last one, each at most twice the one before, from at most the first one on."""
    found = [last]
    while found[0] > first:
        found.insert(0, -(-found[0] // 2))
    return found


def shortage(loads: Sequence[Load], rows: int, together: int, spare: float = _SPARE) -> tuple[float, float] | None:
    """Need and room of the place that lacks most, if micro-batches have so many rows; None if all fit.

    :param loads: by rank. :param together: ranks that share a place: those of a node, or 1 where each has its GPU.
    :param spare: the part of the room that may be taken.
    """
    places = [loads[first : first + together] for first in range(0, len(loads), together)]
    needs = [
        (sum(load.base + rows * load.row for load in place), min(load.room for load in place) * spare)
        for place in places
    ]
    return max((pair for pair in needs if pair[0] > pair[1]), key=lambda pair: pair[0] - pair[1], default=None)


def check_fit(
    gang: Gang,
    wrapped: Wrapped,
    data: Tokens,
    *,
    rows: int,
    tokens: int,
    share: float,
    extra: int,
    sign: Callable[[], None] = lambda: None,
) -> Fit | None:
    """Find out whether training fits; all ranks take part. Gradients are left in the weights, to be set to zero.

    :param rows, tokens: of the longest micro-batch. :param share: of the tokens, that are targets.
    :param extra: bytes that come later on this rank: the optimizer's moments, a checkpoint's copy.
    :param sign: called before each pass.
    :returns: None where it cannot be told what is held or left.
    :raises RecipeError: on every rank, naming the largest micro-batch that fits.
    """
    meter = Meter(gang.device)
    together = 1 if gang.device.type == "cuda" else gang.local_world
    held = 0

    def measured(length: int, count: int = 1) -> float:
        """Peak of a pass over some rows, above what was held before."""
        sign()
        batch = rehearsal(data, length, share, wrapped.loss.packed, count).to(gang.device)
        meter.begin()
        wrapped.backward(batch, 0.0, True)
        return float(meter.peak() - held)

    measured(_TINY)
    held, room = meter.held(), memory_room(gang.device)
    if not all(gang.gather(meter.works and room is not None)):
        return None
    fixed = max(0.0, measured(_TINY))

    def loads(row: float) -> list[Load]:
        found: list[Load] = gang.gather(Load(fixed + extra, row, float(room or 0)))
        return found

    grown: list[float] = []
    lengths = doubled(_FIRST, tokens)
    for index, length in enumerate(lengths):
        if index > 1:
            lacking = shortage(loads(foresee(*grown[-2:])), 1, together)
            if lacking:
                raise _refusal(f"one row of {length} tokens", lacking, _shorter(lengths[index - 1]))
        grown.append(max(0.0, measured(length) - fixed))
    found = loads(grown[-1])
    for count in doubled(1, rows)[1:]:
        if shortage(found, count, together):
            break
        found = loads(max(0.0, measured(tokens, count) - fixed) / count)
    lacking = shortage(found, rows, together)
    if lacking:
        least = int(rows > 1 and shortage(found, 1, together) is None)
        spare = _ADVISED * _SPARE
        most = next((some for some in range(rows - 1, 1, -1) if shortage(found, some, together, spare) is None), least)
        mend = (
            f"Set `train.micro_batch` to {most}" if most else _shorter(lengths[-2] if len(lengths) > 1 else tokens // 2)
        )
        raise _refusal(f"{counted(rows, 'row')} of {tokens} tokens", lacking, f"{mend}, or give the ranks more memory")
    mine = found[gang.rank]
    return Fit(rows, tokens, int(mine.base + rows * mine.row), int(mine.room))


def _shorter(tokens: int) -> str:
    return f"Set `train.sequence_length` to {tokens} or less"


def _refusal(what: str, lacking: tuple[float, float], mend: str) -> RecipeError:
    need, room = (f"{size / 1e9:.2f} GB" if size > 1e9 else f"{size / 1e6:.1f} MB" for size in lacking)
    return RecipeError(
        "recipe key `train.micro_batch`",
        f"forward and backward pass of {what}, the optimizer's state and a checkpoint's copy take {need} more, "
        f"and {room} are left",
        mend,
    )


def rehearsal(data: Tokens, length: int, share: float, packed: bool, rows: int = 1) -> Batch:
    """Rows of real tokens that take as much memory as real rows of `length` tokens.

    :param share: of its places, that predict a target. :param packed: it has two documents, so that masks are made.
    """
    ids = torch.from_numpy(np.resize(data.ids, length).astype(np.int64))[None]
    if data.labels is not None:
        ends = torch.arange(1, rows + 1) * length - 1
        targets = torch.full((rows,), int(data.labels[0]))
        positions = torch.arange(length).repeat(rows, 1)
        return Batch(
            ids.repeat(rows, 1), positions, ends, targets, torch.zeros_like(ends), rows * length, labelled=True
        )
    if data.paired:
        tail = min(length - 1, max(1, round(share * (length - 1))))
        head = length - tail
        targets = ids[0, head:].repeat(rows)
        places = (torch.arange(rows)[:, None] * length + head - 1 + torch.arange(tail)).reshape(-1)
        positions = torch.arange(head).repeat(rows, 1)
        return Batch(ids.repeat(rows, 1), positions, places, targets, torch.zeros_like(places), rows * length)
    border = length // 2 if packed else length
    positions = torch.cat([torch.arange(border), torch.arange(length - border)])[None]
    count = max(1, round(share * (length - 1)))
    places = torch.unique(torch.linspace(0, length - 2, count).long())
    places = places[(places != border - 1)] if len(places) > 1 else places
    targets = ids[0, places + 1].repeat(rows)
    places = (torch.arange(rows)[:, None] * length + places).reshape(-1)
    ids, positions = ids.repeat(rows, 1), positions.repeat(rows, 1)
    return Batch(ids, positions, places, targets, torch.zeros_like(places), rows * length)


class Meter:
    """The most memory that this process, or its GPU, holds at once.

    :param works: whether that can be told here.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.works = device.type == "cuda" or self._reset()

    def begin(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self.device)
        elif self.works:
            self._reset()

    def peak(self) -> int:
        """Bytes, since `begin`."""
        if self.device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self.device))
        return _status("VmHWM")

    def held(self) -> int:
        """Bytes, now."""
        if self.device.type == "cuda":
            return int(torch.cuda.memory_allocated(self.device))
        return _status("VmRSS")

    def _reset(self) -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5")  # the peak begins anew
        except OSError:
            return False
        return _status("VmHWM") > 0


def _status(key: str) -> int:
    """A size of this process in bytes; 0 if the kernel does not tell."""
    try:
        text = Path("/proc/self/status").read_text()
    except OSError:
        return 0
    return next((int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(f"{key}:")), 0)


def memory_room(device: torch.device, root: Path = Path("/")) -> int | None:
    """Bytes that can still be taken: on the GPU, or on this machine within all limits; None if nobody tells."""
    if device.type == "cuda":
        free = int(torch.cuda.mem_get_info(device)[0])
        return free + int(torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device))
    return min((room for room in (_machine(root), *_groups(root)) if room is not None), default=None)


def _machine(root: Path) -> int | None:
    """What the kernel could give: unused, or used by files that it can forget, or to be swapped out."""
    values = _table(root / "proc/meminfo")
    return (values["MemAvailable:"] + values.get("SwapFree:", 0)) << 10 if "MemAvailable:" in values else None


def _groups(root: Path) -> list[int | None]:
    """What each limit of this process's control groups leaves, from its own group up to the top."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return []
    rooms: list[int | None] = []
    for _, controllers, path in (line.split(":", 2) for line in lines if line.count(":") > 1):
        if controllers not in ("", "memory"):
            continue
        top = root / "sys/fs/cgroup" / controllers
        names = ("memory.max", "memory.current", "") if not controllers else _VERSION_1
        own = top / path.lstrip("/")
        rooms += [_group(folder, *names) for folder in (own, *own.parents) if folder.is_relative_to(top)]
    return rooms


_VERSION_1: Final = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_")


def _group(folder: Path, limit: str, usage: str, prefix: str) -> int | None:
    try:
        most, used = (folder / limit).read_text().strip(), int((folder / usage).read_text())
    except (OSError, ValueError):
        return None  # no limit here, or the group is outside of what the container shows
    if most == "max" or int(most) >= _UNLIMITED:
        return None
    values = _table(folder / "memory.stat")
    files = sum(values.get(f"{prefix}{kind}_file", 0) for kind in ("inactive", "active"))
    return int(most) - used + files


def _table(path: Path) -> dict[str, int]:
    try:
        lines = [line.split() for line in path.read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
