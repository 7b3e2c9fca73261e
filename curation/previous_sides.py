"""On which side of the split rows of a drop stood in versions before, by their places in its files.

Sides are remembered by unit (`colours` in `curation.exchange`). Rules that change what a row says, as masks, templates
and own kernels do, change its unit too, and then the row's place is what is known of it. Statements in the subset of
SQL of `curation.exchange`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from curation.engines.tables import Tables
from curation.stored_rows import stored_file
from dropforge.dataset import Step
from dropforge.errors import DataError
from dropforge.store import MissingObjectError, Store

#: Where no rules changed. `mark` is twice the version's age, and one more where the row was evaluated with.
NOTHING: Final = {
    "old_sides": "create table old_sides as"
    " select file, position, cast(file as bigint) as mark from rows where file < 0",
}
#: Rows that stood on a side: the newest version that had them on one counts.
BY_PLACE: Final = """
create table by_place as
select r.key, r.rank, min(o.mark) % 2 as side
from rows r join old_sides o on r.file = o.file and r.position = o.position
group by r.key, r.rank
"""
#: Units of kept rows that all stood on one side, themselves or by a copy that goes.
UNITS_PLACED: Final = """
create table units_placed as
select u.unit, min(u.side) as side
from (select k.unit, coalesce(b.side, c.side) as side
      from kept k
      left join by_place b on k.key = b.key and k.rank = b.rank
      left join (select key, min(side) as side from by_place group by key having min(side) = max(side)) c
        on k.key = c.key) u
where u.side is not null
group by u.unit having min(u.side) = max(u.side)
"""
NO_UNITS_PLACED: Final = (
    "create table units_placed as select unit, cast(file as bigint) as side from rows where file < 0"
)
CHANGED: Final = """
select count(*) from sides s join by_place b on s.key = b.key and s.rank = b.rank where s.side <> b.side
"""
_SIDES: Final = {"train": 0, "eval": 1}


def write(store: Store, steps: Iterable[Step], files: Sequence[str], path: Path) -> Path:
    """The table `old_sides` as a file.

    :param steps: of the drop, in versions before, the newest first. :param files: the drop's, by number.
    :raises DataError: if the ledger of the newest one is gone; what the others say is of rows that it has on no side.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    schema = pa.schema([(name, pa.int64()) for name in ("file", "position", "mark")])
    with pq.ParquetWriter(path, schema, compression="zstd") as writer:
        for age, step in enumerate(steps):
            try:
                with stored_file(store, step.files["ledger"]) as ledger:
                    for batch in pq.ParquetFile(ledger).iter_batches(columns=["file", "position", "end"]):
                        writer.write_batch(_marked(batch, files, age, schema))
            except MissingObjectError as error:
                if age:
                    continue
                cause = "it is missing, and says on which side of the split the rows of its drop were"
                mend = "Restore it from the bucket's versions"
                raise DataError(f"ledger {step.files['ledger']}", cause, mend) from error
    return path


def _marked(batch: pa.RecordBatch, files: Sequence[str], age: int, schema: pa.Schema) -> pa.RecordBatch:
    """Rows of a ledger that were on a side, and are in one of the files."""
    numbers = pc.index_in(batch.column("file").cast(pa.string()), pa.array(files, pa.string()))
    sides = pc.index_in(batch.column("end").cast(pa.string()), pa.array(list(_SIDES), pa.string()))
    mark = pc.add(sides.cast(pa.int64()), 2 * age)
    columns = [numbers.cast(pa.int64()), batch.column("position").cast(pa.int64()), mark]
    return pa.record_batch(columns, schema=schema).drop_null()


def settle(tables: Tables, *, asked: bool) -> None:
    """Make the table `units_placed`: units, and the side on which all their rows stood before."""
    if not asked:
        tables.do(NO_UNITS_PLACED)
        return
    tables.do(BY_PLACE)
    tables.do(UNITS_PLACED)


def changed(tables: Tables, *, asked: bool) -> int:
    """How many rows are on another side than before."""
    return int(tables.one(CHANGED)[0]) if asked else 0


def warning(rows: int) -> list[str]:
    """What is told of rows that changed sides, if any did."""
    if not rows:
        return []
    what = "row is" if rows == 1 else "rows are"
    return [
        f"{rows:,} {what} on another side of the split than in the version before: the rules of now put rows of both "
        "sides together, by a group or as the same text. Compare models by this version alone; a champion may have "
        "been trained on what this one evaluates with"
    ]
