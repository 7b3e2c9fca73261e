"""Near duplicates among all rows: which share a bucket, which are that similar indeed, which go.

A row goes if and only if a row of lower rank survives that is verified to be similar. The rank is the order of
sources, then the content key, so the outcome does not depend on the order of files, rows or workers. Each row is
compared only with rows of lower rank, in each bucket with the lowest `HEADS`: a crowded bucket costs a multiple of its
rows, not their square, and rows of higher rank change nothing for those below them.

Statements over int64 and binary columns, in the subset of SQL of `curation.exchange`. Jaccard similarity is compared
as whole numbers: shared * 1,000,000 >= bar * either.
"""

from __future__ import annotations

from typing import Final

from curation.engines.tables import Tables
from curation.fingerprint import Near

#: Rows of a bucket that its others are compared with; in buckets up to one more all pairs are.
HEADS: Final = 16

#: Exact winners in the order of their rank, which is a number from here on.
PLACES: Final = """
create table places as
select cast(row_number() over (order by p.priority, w.key) as bigint) as place,
       w.key, w.file, w.position, r.unit, p.kind, p.size
from winners w
join prints p on w.file = p.file and w.position = p.position
join rows r on w.file = r.file and w.position = r.position
"""
BUCKETS: Final = """
create table buckets as
select b.bucket, p.place from bands b join places p on b.file = p.file and b.position = p.position
"""
SHARED: Final = """
create table crowds as
select b.bucket, b.place, cast(row_number() over (partition by b.bucket order by b.place) as bigint) as nth
from buckets b join (select bucket from buckets group by bucket having count(*) > 1) m on b.bucket = m.bucket
"""
#: Pairs that may be similar. Sets whose sizes differ too much cannot be.
CANDIDATES: Final = """
create table candidates as
select c.lo, c.hi
from (select distinct h.place as lo, m.place as hi
      from crowds h join crowds m on h.bucket = m.bucket
      where h.nth <= {heads} and h.place < m.place) c
join places l on c.lo = l.place
join places g on c.hi = g.place
where l.size * 1000000 >= {bar} * g.size and g.size * 1000000 >= {bar} * l.size
"""
SETS: Final = """
create table sets as
select p.place, s.shingle
from shingles s
join places p on s.file = p.file and s.position = p.position
join (select lo as place from candidates union select hi as place from candidates) c on p.place = c.place
"""
#: Pairs that are: `shared` shingles of `either` in all.
VERIFIED: Final = """
create table verified as
select t.lo, t.hi, t.shared, l.size + g.size - t.shared as either
from (select c.lo, c.hi, count(*) as shared
      from candidates c
      join sets a on c.lo = a.place
      join sets b on c.hi = b.place and a.shingle = b.shingle
      group by c.lo, c.hi) t
join places l on t.lo = l.place
join places g on t.hi = g.place
where t.shared * 1000000 >= {bar} * (l.size + g.size - t.shared)
"""
#: Similar rows with other labels tie each other, but none removes the other.
MATCHES: Final = """
create table matches as
select s.lo, s.hi from verified s join places l on s.lo = l.place join places g on s.hi = g.place where l.kind = g.kind
"""
OPEN: Final = "create table open_0 as select lo, hi from matches"
#: Rows that nothing undecided stands before survive; what is similar to one of them goes.
LEAVING: Final = """
create table leaving_{now} as
select distinct o.hi as place
from open_{now} o left join (select distinct hi from open_{now}) f on o.lo = f.hi
where f.hi is null
"""
REST: Final = """
create table open_{next} as
select o.lo, o.hi
from open_{now} o
left join leaving_{now} l on o.lo = l.place
left join leaving_{now} g on o.hi = g.place
where l.place is null and g.place is null
"""
GONE: Final = "create table gone as {parts}"
#: Each row that goes, with the surviving row of lowest rank that it is similar to.
NEAR: Final = """
create table near as
select g.key, l.file as of_file, l.position as of_position, s.shared, s.either
from (select m.hi, min(m.lo) as lo
      from matches m left join gone x on m.lo = x.place
      where x.place is null
      group by m.hi) n
join verified s on n.lo = s.lo and n.hi = s.hi
join places l on n.lo = l.place
join places g on n.hi = g.place
"""
#: What is similar falls on one side of the split, also where the row between two others goes.
LINKED: Final = """
create table linked as
select distinct t.key, t.unit
from (select l.key, l.unit from verified s join places l on s.lo = l.place
      union all
      select l.key, g.unit from verified s join places l on s.lo = l.place join places g on s.hi = g.place) t
"""
#: The same tables where near duplicates are not asked for.
NO_NEAR: Final = """
create table near as
select key, file as of_file, position as of_position, position as shared, position as either from winners where file < 0
"""
NO_LINKED: Final = "create table linked as select key, key as unit from winners where file < 0"


def settle(tables: Tables, near: Near | None) -> None:
    """Make the tables `near` and `linked` from `winners`, `rows`, `prints`, `bands` and `shingles`."""
    if near is None:
        tables.do(NO_NEAR)
        tables.do(NO_LINKED)
        return
    numbers = {"heads": HEADS, "bar": near.per_million}
    for statement in (PLACES, BUCKETS, SHARED, CANDIDATES, SETS, VERIFIED, MATCHES):
        tables.do(statement.format(**numbers))
    for table in ("buckets", "crowds", "candidates", "sets"):
        tables.do(f"drop table {table}")
    rounds = _survive(tables)
    parts = [f"select place from leaving_{now}" for now in range(rounds)]  # noqa: S608
    tables.do(GONE.format(parts=" union all ".join(parts)))
    tables.do(NEAR)
    tables.do(LINKED)


def _survive(tables: Tables) -> int:
    """Decide rows in the order of rank, as many at a time as do not depend on each other. Returns the rounds taken.

    Ranks are as good as random, so chains that must be decided one by one are short: a few rounds for millions of rows.
    """
    now = 0
    tables.do(OPEN)
    while True:
        tables.do(LEAVING.format(now=now))
        tables.do(REST.format(now=now, next=now + 1))
        tables.do(f"drop table open_{now}")
        now += 1
        if not tables.one(f"select count(*) from open_{now}")[0]:  # noqa: S608
            return now
