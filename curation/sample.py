"""Some rows of a drop, chosen before any rule sees them: the same ones for any engine, workers and cut into splits."""

from __future__ import annotations

import math
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import Final

from curation.formats import sniff
from curation.memory import bounded
from curation.parquet_footer import UNREADABLE, open_parquet
from curation.readers import read
from curation.reasons import REST
from curation.records import Blank, Fault, Record, Split

#: Of a file that is no Parquet, this much is looked at to guess how many rows it holds (bytes, as the file lies there).
_HEAD: Final = 1 << 20
_ALL: Final = 1 << 64
#: Counters of a split of which some rows are taken; times in microseconds.
SEEN, TAKEN, READING, WORKING = "sample_seen", "sample_taken", "sample_reading", "sample_all"


@dataclass(frozen=True)
class Sample:
    """A row is taken if the 64-bit hash of its file's name and its position is below `bound`."""

    bound: int

    def takes(self, name: str, position: int) -> bool:
        state = blake2b(f"{position}\0{name}".encode(), digest_size=8)
        return int.from_bytes(state.digest(), "big") < self.bound


def choose_sample(rows: int, files: Sequence[tuple[str, Path]], max_row_bytes: int, encoding: str = "utf-8") -> Sample:
    """The sample that takes about so many rows of all files.

    :param rows: how many are wanted. :param files: names in the drop, and where the files lie.
    """
    held = sum(guess_rows(path, name, max_row_bytes, encoding) for name, path in files)
    return Sample(_ALL if held <= rows else math.ceil(_ALL * rows / held))


def guess_rows(path: Path, name: str, max_row_bytes: int, encoding: str = "utf-8") -> int:
    """Rows of a file: as Parquet says, else as its first MiB goes on; exact for a smaller file."""
    size = path.stat().st_size
    if not size:
        return 0
    if sniff(path, name).kind == "parquet":
        try:
            with bounded(0), open_parquet(path) as file:
                return int(file.metadata.num_rows)
        except (*UNREADABLE, MemoryError):
            return 1
    with path.open("rb") as stream, tempfile.NamedTemporaryFile(prefix="head-") as head:
        head.write(stream.read(_HEAD))
        head.flush()
        part = Split(Path(head.name), sniff(Path(head.name), name, encoding))
        rows = sum(not isinstance(record, Blank) for record in read(part, max_row_bytes=max_row_bytes))
    return max(1, rows * size // min(size, _HEAD))


def chosen(records: Iterator[Record], name: str, sample: Sample, counts: dict[str, int]) -> Iterator[Record]:
    """The records that are taken, and blank lines.

    :param counts: gets the rows that were seen and taken, and the microseconds that went into reading.
    """
    clock = time.perf_counter
    reading, seen, taken = 0.0, 0, 0
    while True:
        before = clock()
        record = next(records, None)
        reading += clock() - before
        if record is None:
            break
        if not isinstance(record, Blank):
            seen += 1
            # What stands for the rest of a file is told whatever the hash says.
            whole = isinstance(record, Fault) and record.reason in REST
            if not (whole or sample.takes(name, record.position)):
                continue
            taken += 1
        yield record
    counts |= {SEEN: seen, TAKEN: taken, READING: round(reading * 1e6)}


@dataclass(frozen=True)
class Told:
    """What a sample was. :param reading: seconds of reading, over all processes. :param working: all their seconds."""

    taken: int
    seen: int
    reading: float
    working: float

    @classmethod
    def of(cls, counts: Mapping[str, int]) -> Told:
        return cls(counts[TAKEN], counts[SEEN], counts[READING] / 1e6, counts[WORKING] / 1e6)

    @property
    def whole(self) -> bool:
        """Whether all rows were taken."""
        return self.taken == self.seen

    def line(self) -> str:
        return f"A sample of {self.taken:,} of {self.seen:,} rows; nothing of it is published"


def whole_seconds(told: Told, stages: Mapping[str, float]) -> tuple[float, float]:
    """How long all rows would take, from a sample: (at least, at most) seconds.

    Fetching and reading are done in full already, the rules only for the sample. Sorting and writing have a part that
    does not grow with the rows: left out at least, taken to grow with them at most.

    :param stages: seconds of each stage by the clock.
    """
    more = told.seen / max(1, told.taken) - 1
    read = stages.get("read", 0.0)
    # What the processes did at the same time, they will do at the same time.
    rules = read * (1 - told.reading / told.working) if told.working else 0.0
    rest = sum(stages.get(name, 0.0) for name in ("deduplicate", "write"))
    least = stages.get("fetch", 0.0) + read + rest + rules * more
    return least, least + rest * more
