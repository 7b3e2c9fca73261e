"""Near duplicates among all rows: which share a bucket, which are that similar indeed, which go.

A row goes if and only if a row of lower rank survives that is verified to be similar. The rank is the order of drops,
then that of sources, then the content key, so the outcome does not depend on the order of files, rows or workers. Each
row is compared only with rows of lower rank, in each bucket with the lowest `HEADS`: a crowded bucket costs a multiple
of its rows, not their square, and rows of higher rank change nothing for those below them.

Statements over int64 and binary columns, in the subset of SQL of `curation.exchange`. Jaccard similarity is compared
as whole numbers: shared * 1,000,000 >= bar * either.
"""

from __future__ import annotations

from typing import Final

from curation.engines.tables import Tables
from curation.fingerprint import Near

#: Rows of a bucket that its others are compared with; in buckets up to one more all pairs are.
HEADS: Final = 16

#: Where nothing was curated before.
NOTHING: Final = {
    "old_places": "create table old_places as select file as place, key, file, position, unit, file as kind,"
    " file as size, cast(file as int) as gone from rows where file < 0",
    "old_bands": "create table old_bands as select file as bucket, file as place from rows where file < 0",
    "old_shingles": "create table old_shingles as select file as place, file as shingle from rows where file < 0",
}
BASE: Final = "select coalesce(max(place), 0) as base from old_places"
#: Exact winners in the order of their rank, which is a number from here on; those of earlier drops come first.
FRESH: Final = """
create table fresh as
select cast(row_number() over (order by p.priority, w.key) as bigint) + {base} as place,
       w.key, w.file, w.position, w.unit, p.kind, p.size, 0 as gone
from winners w
join prints p on w.file = p.file and w.position = p.position
left join conflicts c on w.key = c.key
where c.key is null
"""
BUCKETS: Final = """
create table buckets as
select b.bucket, p.place from bands b join fresh p on b.file = p.file and b.position = p.position
"""
#: Heads of the same buckets from earlier drops.
KNOWN: Final = """
create table known as
select o.bucket, o.place from old_bands o join (select distinct bucket from buckets) b on o.bucket = b.bucket
"""
PLACES: Final = """
create table places as
select place, key, file, position, unit, kind, size, gone from fresh
union all
select o.place, o.key, o.file, o.position, o.unit, o.kind, o.size, o.gone
from old_places o join (select distinct place from known) k on o.place = k.place
"""
SHARED: Final = """
create table crowds as
select b.bucket, b.place, cast(row_number() over (partition by b.bucket order by b.place) as bigint) as nth
from (select bucket, place from buckets union all select bucket, place from known) b
join (select a.bucket
      from (select bucket from buckets union all select bucket from known) a
      group by a.bucket having count(*) > 1) m on b.bucket = m.bucket
"""
#: Rows that are not compared with each row before them, because a bucket of theirs is too full.
CROWDED: Final = """
create table crowded as select distinct place from crowds where nth > {heads} + 1
"""
PAIRS: Final = """
create table pairs as
select distinct h.place as lo, m.place as hi
from crowds h join crowds m on h.bucket = m.bucket
where h.nth <= {heads} and h.place < m.place and m.place > {base}
"""
#: The rows of these pairs. Tables of all places, twice in one statement, are more than a small memory holds.
PAIRED: Final = """
create table paired as
select p.place, p.key, p.file, p.position, p.unit, p.kind, p.size, p.gone
from places p
join (select lo as place from pairs union select hi as place from pairs) c on p.place = c.place
"""
#: Pairs that may be similar. Sets whose sizes differ too much cannot be.
CANDIDATES: Final = """
create table candidates as
select c.lo, c.hi
from pairs c
join paired l on c.lo = l.place
join paired g on c.hi = g.place
where l.size * 1000000 >= {bar} * g.size and g.size * 1000000 >= {bar} * l.size
"""
#: Where the shingles of new rows among them are.
WANTED: Final = """
create table wanted as
select p.place, p.file, p.position
from paired p
join (select lo as place from candidates union select hi as place from candidates) c on p.place = c.place
where p.place > {base}
"""
SETS: Final = """
create table sets as
select w.place, s.shingle
from shingles s join wanted w on s.file = w.file and s.position = w.position
union all
select o.place, o.shingle
from old_shingles o join (select distinct lo as place from candidates where lo <= {base}) c on o.place = c.place
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
join paired l on t.lo = l.place
join paired g on t.hi = g.place
where t.shared * 1000000 >= {bar} * (l.size + g.size - t.shared)
"""
#: Similar rows with other labels tie each other, but none removes the other; nor does one that is gone itself.
MATCHES: Final = """
create table matches as
select s.lo, s.hi
from verified s join paired l on s.lo = l.place join paired g on s.hi = g.place
where l.kind = g.kind and l.gone = 0
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
#: How many of these stayed, although a row that nobody compared them with may be similar.
UNMET: Final = """
create table unmet as
select count(*) as unmet from crowded c left join gone g on c.place = g.place where g.place is null
"""
#: Each row that goes, with the surviving row of lowest rank that it is similar to.
NEAR: Final = """
create table near as
select g.key, l.file as of_file, l.position as of_position, s.shared, s.either
from (select m.hi, min(m.lo) as lo
      from matches m left join gone x on m.lo = x.place
      where x.place is null
      group by m.hi) n
join verified s on n.lo = s.lo and n.hi = s.hi
join paired l on n.lo = l.place
join paired g on n.hi = g.place
"""
#: What is similar falls on one side of the split, also where the row between two others goes.
LINKED: Final = """
create table linked as
select l.key, l.unit from (select distinct lo from verified) s join paired l on s.lo = l.place
union all
select l.key, g.unit from verified s join paired l on s.lo = l.place join paired g on s.hi = g.place
"""
#: What later drops are compared with: of each bucket the rows of lowest rank.
HEADED: Final = """
create table heads as
select b.bucket, b.place
from buckets b left join crowds c on b.bucket = c.bucket and b.place = c.place
where c.nth is null or c.nth <= {heads}
"""
#: See `curation.exchange.REMEMBERED`. Shingles are kept of heads alone, for nothing else is compared.
REMEMBERED: Final = {
    "old_places": """
select f.place, f.key, -1 - (f.file + {files}) as file, f.position, f.unit, f.kind, f.size,
       case when s.rank is null then 1 else 0 end as gone
from fresh f
join winners w on f.key = w.key
left join sides s on w.key = s.key and w.rank = s.rank
order by f.place
""",
    "old_bands": "select bucket, place from heads order by bucket, place",
    "old_shingles": """
select f.place, s.shingle
from shingles s
join fresh f on s.file = f.file and s.position = f.position
join (select distinct place from heads) h on f.place = h.place
order by f.place, s.shingle
""",
}
#: The same tables where near duplicates are not asked for.
NO_NEAR: Final = """
create table near as
select key, file as of_file, position as of_position, position as shared, position as either from winners where file < 0
"""
NO_LINKED: Final = "create table linked as select key, key as unit from winners where file < 0"
NO_UNMET: Final = "create table unmet as select count(*) as unmet from winners where file < 0"

_PAIRING: Final = (FRESH, BUCKETS, KNOWN, PLACES, SHARED, CROWDED, PAIRS, PAIRED)
_VERIFYING: Final = (CANDIDATES, WANTED, SETS, VERIFIED, MATCHES)


def settle(tables: Tables, near: Near | None, *, remember: bool = False) -> None:
    """Make the tables `near`, `linked` and `unmet` from `winners`, `rows`, `prints`, `bands` and `shingles`.

    :param remember: make `heads` too, which later drops are compared with.
    """
    if near is None:
        for statement in (NO_NEAR, NO_LINKED, NO_UNMET):
            tables.do(statement)
        return
    numbers = {"heads": HEADS, "bar": near.per_million, "base": tables.one(BASE)[0]}
    for statement in (*_PAIRING, *_VERIFYING):
        tables.do(statement.format(**numbers))
    if remember:
        tables.do(HEADED.format(**numbers))
    for table in ("buckets", "known", "places", "crowds", "pairs", "candidates", "wanted", "sets"):
        tables.do(f"drop table {table}")
    rounds = _survive(tables)
    parts = [f"select place from leaving_{now}" for now in range(rounds)]  # noqa: S608
    tables.do(GONE.format(parts=" union all ".join(parts)))
    for statement in (UNMET, NEAR, LINKED):
        tables.do(statement)


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
