"""At most so many rows of a source: `curation.max_rows_per_source`.

Rows of earlier drops count, and stay. Of the new ones those with the lowest content keys stay, which are hashes, so the
choice is as good as random and the same for any order of files. Statements in the subset of SQL of `curation.exchange`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

import pyarrow as pa
import pyarrow.parquet as pq

from curation.engines.tables import Tables

#: Where nothing was curated before.
NOTHING: Final = {
    "old_sources": "create table old_sources as select source, file as held from rows where file < 0",
}
#: Rows that stay, by source; their names are text, and no text of a user stands in a statement.
BEYOND: Final = """
create table beyond as
select t.key, t.rank
from (select k.key, k.rank, r.source,
             cast(row_number() over (partition by r.source order by k.key, k.rank) as bigint) as nth
      from kept k join rows r on k.key = r.key and k.rank = r.rank join caps c on r.source = c.source) t
join caps c on t.source = c.source
left join (select source, cast(sum(held) as bigint) as held from old_sources group by source) o on t.source = o.source
where t.nth > c.most - coalesce(o.held, 0)
"""
NONE_BEYOND: Final = "create table beyond as select key, rank from winners where file < 0"
WITHIN: Final = """
create table within_caps as
select k.key, k.rank, k.unit from kept k left join beyond b on k.key = b.key and k.rank = b.rank where b.key is null
"""
#: See `curation.exchange.REMEMBERED`.
REMEMBERED: Final = {
    "old_sources": """
select r.source, count(*) as held
from sides s join rows r on s.key = r.key and s.rank = r.rank join caps c on r.source = c.source
group by r.source order by r.source
""",
}


def write(caps: tuple[tuple[str, int], ...], path: Path) -> Path:
    """The table `caps` as a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({"source": [name for name, _ in caps], "most": [most for _, most in caps]}), path)
    return path


def settle(tables: Tables, *, asked: bool) -> None:
    """Make the table `beyond`, rows over a cap, of `kept`, and take them out of it."""
    if not asked:
        tables.do(NONE_BEYOND)
        return
    tables.do(BEYOND)
    tables.do(WITHIN)
    tables.do("drop table kept")
    tables.do("alter table within_caps rename to kept")
