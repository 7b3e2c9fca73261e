"""Rows of an Arrow stream, as `save_to_disk` of Hugging Face's datasets writes it: known columns, batch by batch."""

from __future__ import annotations

from collections.abc import Container, Iterator
from pathlib import Path
from typing import Final

import pyarrow as pa

from curation.classes import class_names, named
from curation.memory import bounded, too_much
from curation.parquet import Produced, batch_rows, twice
from curation.parquet_footer import UNREADABLE
from curation.reasons import Reason
from curation.records import HEAD, Fault, Record
from curation.streams import Limits, TornError

_BEGIN: Final = b"\xff\xff\xff\xff"
_END: Final = b"\xff\xff\xff\xff\0\0\0\0"


def read_arrow(path: Path, wanted: Container[str], max_row_bytes: int, limits: Limits) -> Iterator[Record]:
    """All rows; their places are row numbers in the file. A class label (`ClassLabel`) becomes the name of its class.

    :param wanted: columns to read, in small letters.
    """
    row = 0
    size = path.stat().st_size
    produced = Produced(size, limits)
    try:
        with bounded(max_row_bytes):
            schema = _schema(path)
            classes = class_names(schema)
        columns = [at for at, name in enumerate(schema.names) if name.strip().lower() in wanted]
        if double := twice([schema.names[at] for at in columns]):
            yield Fault(0, Reason.BAD_ARROW, double, b"")
            return
        options = pa.ipc.IpcReadOptions(included_fields=columns, use_threads=False)
        with pa.OSFile(str(path)) as file:
            stream = pa.ipc.open_stream(file, options=options)
            while True:
                with bounded(max_row_bytes):
                    batch = next(stream, None)
                    if batch is None:
                        if not _more(file, size):
                            break
                        # Another stream behind it, as `cat` joins files, and programs that write on in one do.
                        stream = pa.ipc.open_stream(file, options=options)
                        if not stream.schema.equals(_some(schema, columns)):
                            yield Fault(row, Reason.BAD_ARROW, "another stream with other columns is behind it", b"")
                            return
                        continue
                    # Arrow trusts what it reads: offsets beyond the end of a buffer are found here, or never. Even
                    # `nbytes` follows them; the bound holds for what the batch takes already.
                    batch.validate(full=True)
                    produced.add(batch.nbytes)
                if columns:
                    for left in produced.take(row, batch.num_rows):
                        for record in batch_rows(batch.slice(0, left), row, max_row_bytes, produced):
                            row += 1
                            yield record if isinstance(record, Fault) else named(record, classes)
                else:
                    names = ", ".join(schema.names)[:100]
                    for left in produced.take(row, batch.num_rows):
                        for _ in range(left):
                            row += 1
                            yield Fault(row - 1, Reason.NO_CONTENT, f"fields: {names}", b"")
                del batch  # It would stay while the next one is read.
        # A stream that is cut between two batches looks whole without it.
        with path.open("rb") as end:
            end.seek(max(0, size - len(_END)))
            if end.read() != _END:
                yield Fault(row, Reason.BAD_ARROW, "the mark of the stream's end is missing", b"")
    except TornError as tear:
        yield Fault(row, tear.reason, tear.detail, b"")
    except MemoryError:
        yield Fault(row, Reason.MEMORY, too_much(f"rows from {row} on", max_row_bytes), b"")
    except UNREADABLE as error:
        cause = " ".join(str(error).split())[:120] or type(error).__name__
        with path.open("rb") as start:
            yield Fault(row, Reason.BAD_ARROW, cause, start.read(HEAD) if not row else b"")


def _more(file: pa.OSFile, size: int) -> bool:
    """Whether another stream begins behind the one that has ended; zeros and the like are no stream."""
    place = file.tell()
    begins = bool(place < size and file.read(len(_BEGIN)) == _BEGIN)
    file.seek(place)
    return begins and bool(size - place > len(_END))


def _some(schema: pa.Schema, columns: list[int]) -> pa.Schema:
    return pa.schema([schema.field(at) for at in columns])


def _schema(path: Path) -> pa.Schema:
    with pa.OSFile(str(path)) as file, pa.ipc.open_stream(file) as stream:
        return stream.schema
