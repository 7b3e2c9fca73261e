"""What needs all rows at once: winners among duplicates, the split, the ledger, the order of the shards.

Near duplicates have a module of their own, `curation.near`. Each step is one statement over int64, binary and text
columns, in the subset of SQL that DuckDB and Spark share and in which both mean the same: no floats, no functions on
text, `cast(sum(x) as bigint)`. Keys travel, text does not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from curation import near
from curation.engines.tables import Tables
from curation.kernel import PRINTED, Rules, Task

#: Rows with one key: the smallest rank survives, whatever the order of files and workers.
WINNERS: Final = """
create table winners as
select r.key, r.rank, r.file, r.position
from rows r join (select key, min(rank) as rank from rows group by key) m on r.key = m.key and r.rank = m.rank
"""
KEPT: Final = {
    "drop": "create table kept as select r.key, r.rank, r.unit"
    " from rows r join winners w on r.key = w.key and r.rank = w.rank"
    " left join near n on r.key = n.key where n.key is null",
    "keep": "create table kept as select key, rank, unit from rows",
}
#: Content that occurs in several groups ties them together, and so do near duplicates: they fall on the same side.
TIES: Final = """
create table ties as
select distinct k.key, k.unit
from kept k join (select key from kept group by key having min(unit) <> max(unit)) m on k.key = m.key
union all
select key, unit from linked
"""
LABELS: Final = "create table labels_0 as select unit, min(unit) as label from ties group by unit"
SPREAD: Final = """
create table labels_{next} as
select t.unit, min(n.label) as label
from ties t
join (select t.key, min(l.label) as label from ties t join labels_{now} l on t.unit = l.unit group by t.key) n
  on t.key = n.key
group by t.unit
"""
JUMP: Final = """
create table jumped as
select a.unit, b.label from labels_{next} a join labels_{next} b on a.label = b.unit
"""
MOVED: Final = """
select count(*) from labels_{now} a join labels_{next} b on a.unit = b.unit where a.label <> b.label
"""
PLACED: Final = """
create table placed as
select k.key, k.rank, coalesce(l.label, k.unit) as unit
from kept k left join labels_{now} l on k.unit = l.unit
"""
UNITS: Final = "select min(unit), max(unit) from placed"
SIDES: Final = """
create table sides as
select key, rank, case when unit < unhex('{cut}') then 1 else 0 end as side from placed
"""
#: What went names a row that stayed: a copy of a near duplicate the one that the near duplicate went for.
ENDS: Final = """
create table ends as
select r.file, r.position, r.key,
       case when s.side = 1 then 'eval' when s.side = 0 then 'train'
            when r.rank = w.rank then 'near_duplicate' else 'duplicate' end as ending,
       case when s.rank is not null then null when r.rank = w.rank then n.of_file
            else coalesce(n.of_file, w.file) end as of_file,
       case when s.rank is not null then null when r.rank = w.rank then n.of_position
            else coalesce(n.of_position, w.position) end as of_position,
       case when s.rank is null and r.rank = w.rank then n.shared end as shared,
       case when s.rank is null and r.rank = w.rank then n.either end as either
from rows r
join winners w on r.key = w.key
left join near n on r.key = n.key
left join sides s on r.key = s.key and r.rank = s.rank
union all
select file, position, cast(null as binary) as key, reason as ending, cast(null as bigint), cast(null as bigint),
       cast(null as bigint), cast(null as bigint)
from faults
"""
COUNTS: Final = "select ending, count(*) as rows from ends group by ending"
LEDGER: Final = """
select file, position, ending, key, of_file, of_position, shared, either from ends order by file, position
"""
KEYS: Final = "select key, rank from sides where side = {side} order by key, rank"
SHARDS: Final = """
select r.chars as weight, r.key, r.messages, r.text, r.label, r.source, r."group"
from rows r join sides s on r.key = s.key and r.rank = s.rank
where s.side = {side}
order by r.key, r.rank
"""
QUARANTINE: Final = "select file, position, reason, detail, head from faults order by file, position"


def eval_cut(per_million: int, low: bytes, high: bytes) -> bytes:
    """Units below the cut are evaluation.

    The cut depends on the recipe alone, so a row stays on its side when data is added; only where a side would be
    empty does it move: the smallest unit is then the evaluation, or the largest the training.

    :param low: smallest unit. :param high: largest unit (both 16 bytes, salted, uniform).
    """
    cut = (per_million * (1 << 128) // 1_000_000).to_bytes(16, "big")
    if low == high:
        return low  # One unit cannot be on both sides: it is trained on, and the check before training says so.
    if low >= cut:
        return low + b"\0"
    return high if high < cut else cut


def load(tables: Tables, tasks: Sequence[Task], rules: Rules) -> None:
    """Name what the workers wrote: `rows`, `faults` and, where near duplicates are asked for, their fingerprints."""
    tables.view("rows", [task.rows for task in tasks])
    tables.view("faults", [task.faults for task in tasks])
    for name in PRINTED if rules.near else ():
        tables.view(name, [task.printed(name) for task in tasks])


def settle(tables: Tables, rules: Rules) -> None:
    """Find winners, put every kept row on a side and give every input row its end."""
    tables.do(WINNERS)
    near.settle(tables, rules.near)
    tables.do(KEPT[rules.exact_duplicates])
    tables.do(TIES)
    tables.do(PLACED.format(now=_tie(tables)))
    low, high = tables.one(UNITS)
    tables.do(SIDES.format(cut=eval_cut(rules.eval_per_million, low, high).hex()))
    tables.do(ENDS)


def _tie(tables: Tables) -> int:
    """Smallest unit of each component, by spreading labels over ties; jumps keep long chains short."""
    now = 0
    tables.do(LABELS)
    while True:
        step = {"now": now, "next": now + 1}
        tables.do(SPREAD.format(**step))
        tables.do(JUMP.format(**step))
        tables.do(f"drop table labels_{now + 1}")
        tables.do(f"alter table jumped rename to labels_{now + 1}")
        moved = tables.one(MOVED.format(**step))[0]
        tables.do(f"drop table labels_{now}")
        now += 1
        if not moved:
            return now


def counts(tables: Tables) -> dict[str, int]:
    """The ledger's totals: `input`, `train`, `eval` and the other ends that occur."""
    ends = {"train": 0, "eval": 0, **{str(end): int(rows) for end, rows in tables.all(COUNTS)}}
    return {"input": sum(ends.values()), **dict(sorted(ends.items()))}
