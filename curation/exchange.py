"""What needs all rows at once: winners among duplicates, the split, the ledger, the order of the shards.

A drop is settled against what earlier drops of its family left behind: old rows stay as they are, and new ones are
joined with them. Near duplicates have a module of their own, `curation.near`. Each step is one statement over int64,
binary and text columns, in the subset of SQL that DuckDB and Spark share and in which both mean the same: no floats, no
functions on text, `cast(sum(x) as bigint)`. Keys travel, text does not.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

import pyarrow as pa

from curation import caps, conflicts, continued, near, previous_sides
from curation.engines.tables import Tables
from curation.task import PRINTED, Rules, Task

#: Where nothing was curated before: what earlier drops left, without a row. See `curation.state`.
NOTHING: Final = {
    "old_winners": "create table old_winners as"
    " select key, unit, file as of_file, position as of_position, layout from rows where file < 0",
    "colours": "create table colours as select unit, cast(file as int) as side from rows where file < 0",
}
#: Content of this drop that an earlier one had, kept or not.
MET: Final = """
create table met as
select o.key, o.unit, o.of_file, o.of_position, o.layout
from old_winners o join (select distinct key from rows) r on o.key = r.key
"""
#: Its copies in this drop that name another group.
COPIED: Final = """
create table copied as
select distinct r.key, r.unit from rows r join met o on r.key = o.key where r.unit <> o.unit
"""
#: Rows with one key that is new: the smallest rank survives, whatever the order of files and workers.
WINNERS: Final = """
create table winners as
select r.key, r.rank, r.file, r.position, r.unit, r.input, r.layout
from rows r join (select key, min(rank) as rank from rows group by key) m on r.key = m.key and r.rank = m.rank
left join met o on r.key = o.key
where o.key is null
"""
KEPT: Final = {
    "drop": "create table kept as select w.key, w.rank, w.unit"
    " from winners w left join near n on w.key = n.key left join conflicts c on w.key = c.key"
    " where n.key is null and c.key is null",
    "keep": "create table kept as select r.key, r.rank, r.unit"
    " from rows r left join conflicts c on r.key = c.key where c.key is null",
}
#: Content that occurs in several groups ties them together, and so do near duplicates: they fall on the same side.
TIES: Final = """
create table ties as
select distinct k.key, k.unit
from (select key, unit from kept union all select key, unit from met union all select key, unit from copied) k
join (select a.key
      from (select key, unit from kept union all select key, unit from met union all select key, unit from copied) a
      group by a.key having min(a.unit) <> max(a.unit)) m on k.key = m.key
union all
select key, unit from linked
union all
select key, unit from alike
union all
select key, unit from threaded
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
#: Each unit of this drop, and each earlier one that it is tied to, which has the side that it was given then, or that
#: its rows had under other rules. `coin` is uniform: the smallest of several units is not, so that its halves change
#: places.
COMPONENTS: Final = """
create table components as
select u.unit, coalesce(l.label, u.unit) as label,
       case when m.label is null then hex(u.unit)
            else substr(hex(m.label), 17, 16) || substr(hex(m.label), 1, 16) end as coin,
       c.side as before, coalesce(c.side, p.side) as side
from (select unit from kept union select unit from ties) u
left join labels_{now} l on u.unit = l.unit
left join (select label from labels_{now} group by label having count(*) > 1) m on l.label = m.label
left join (select o.unit, o.side
           from colours o join (select unit from kept union select unit from ties) n on o.unit = n.unit) c
  on u.unit = c.unit
left join units_placed p on u.unit = p.unit
"""
COLOURED: Final = """
create table coloured as
select label, min(side) as low, max(side) as high from components where side is not null group by label
"""
#: Of kept rows: the smallest and the largest component without a side, whether some are trained on, or evaluated with.
UNITS: Final = """
select min(case when h.label is null then c.coin end) as low, max(case when h.label is null then c.coin end) as high,
       coalesce(min(case when h.low = h.high then h.low end), 1) as trained,
       coalesce(max(case when h.low = h.high then h.low end), 0) as evaluated
from kept k join components c on k.unit = c.unit left join coloured h on c.label = h.label
"""
#: A component keeps the side that one of its units has. One that ties both sides has none, and its new rows go.
SHADES: Final = """
create table shades as
select c.unit, c.before,
       case when h.label is null then case when c.coin < '{cut}' then 1 else 0 end
            when h.low = h.high then h.low end as side
from components c left join coloured h on c.label = h.label
"""
SIDES: Final = """
create table sides as
select k.key, k.rank, s.side from kept k join shades s on k.unit = s.unit where s.side is not null
"""
#: Content that goes without another row that stays for it.
OUSTED: Final = """
create table ousted as
select k.key, k.rank, 'crosses_split' as ending from kept k join shades s on k.unit = s.unit where s.side is null
union all
select key, rank, 'over_cap' as ending from beyond
"""
#: What went names a row that stayed: a copy of a near duplicate the one that the near duplicate went for. `relaid` is
#: whether a row and the first one with its key have their lines otherwise.
ENDS: Final = """
create table ends as
select r.file, r.position, r.key,
       case when s.side = 1 then 'eval' when s.side = 0 then 'train' when c.rank is not null then c.ending
            when l.key is not null and (r.rank = w.rank or {all_copies}) then 'label_conflict'
            when r.rank = w.rank then 'near_duplicate' else 'duplicate' end as ending,
       case when s.rank is not null or x.rank is not null or c.rank is not null then null
            when l.key is not null then l.of_file
            when r.rank = w.rank then n.of_file
            else coalesce(o.of_file, n.of_file, w.file) end as of_file,
       case when s.rank is not null or x.rank is not null or c.rank is not null then null
            when l.key is not null then l.of_position
            when r.rank = w.rank then n.of_position
            else coalesce(o.of_position, n.of_position, w.position) end as of_position,
       case when s.rank is null and r.rank = w.rank then n.shared end as shared,
       case when s.rank is null and r.rank = w.rank then n.either end as either,
       case when r.layout <> coalesce(o.layout, w.layout) then 1 else 0 end as relaid
from rows r
left join met o on r.key = o.key
left join winners w on r.key = w.key
left join near n on r.key = n.key
left join sides s on r.key = s.key and r.rank = s.rank
left join conflicts l on r.key = l.key
left join ousted c on r.key = c.key and r.rank = c.rank
left join ousted x on w.key = x.key and w.rank = x.rank
union all
select file, position, cast(null as binary) as key, reason as ending, cast(null as bigint), cast(null as bigint),
       cast(null as bigint), cast(null as bigint), 0 as relaid
from faults
"""
#: What later drops are settled against; files are numbered over all drops, from -1 downwards.
REMEMBERED: Final = {
    "old_winners": """
select w.key, w.unit,
       case when s.rank is not null then -1 - (w.file + {files}) when n.of_file < 0 then n.of_file
            else -1 - (n.of_file + {files}) end as of_file,
       case when s.rank is not null then w.position else n.of_position end as of_position, w.layout
from winners w
left join near n on w.key = n.key
left join sides s on w.key = s.key and w.rank = s.rank
order by w.key
""",
    "colours": "select unit, side from shades where before is null and side is not null order by unit",
}
COUNTS: Final = "select ending, count(*) as rows from ends group by ending"
#: Files of earlier drops have negative numbers, -1 the first one; the ledger has their names behind those of this drop.
LEDGER: Final = """
select file, position, ending, key, case when of_file < 0 then {files} - 1 - of_file else of_file end as of_file,
       of_position, shared, either
from ends order by file, position
"""
KEYS: Final = "select key, rank from sides where side = {side} order by key, rank"
SHARDS: Final = """
select r.chars as weight, r.key, r.messages, r.chat, r.text, r.label, r.source, r."group", r.extras
from rows r join sides s on r.key = s.key and r.rank = s.rank
where s.side = {side}{within}
order by r.key, r.rank
"""
#: Rows that an engine cannot put aside while it joins and sorts: of both sides, and those that went.
LONG: Final = """
select r.key, r.rank, r.chars + {beside} as weight from rows r where r.chars + {beside} > {most} order by r.key, r.rank
"""
#: Characters of a row that is sorted like any other, and of those beyond it that are sorted at once.
_ORDINARY: Final = 1 << 17
_AT_ONCE: Final = 32 << 20
QUARANTINE: Final = "select file, position, reason, detail, head from faults order by file, position"


def eval_cut(per_million: int, low: bytes, high: bytes, *, trained: bool = False, evaluated: bool = False) -> bytes:
    """Coins below the cut are evaluation.

    The cut depends on the recipe alone, so a row stays on its side when data is added; only where a side would be
    empty does it move: the smallest coin is then the evaluation, or the largest the training.

    :param low: smallest coin. :param high: largest coin (both 16 bytes, salted, uniform).
    :param trained: and :param evaluated: sides that hold other rows already.
    """
    cut = (per_million * (1 << 128) // 1_000_000).to_bytes(16, "big")
    if low == high and not trained and not evaluated:
        return low  # One unit cannot be on both sides: it is trained on, and the check before training says so.
    if low >= cut and not evaluated:
        return low + b"\0"
    return high if high < cut and not trained else cut


def load(
    tables: Tables,
    tasks: Sequence[Task],
    rules: Rules,
    before: Mapping[str, Sequence[Path]] | None = None,
    caps_file: Path | None = None,
) -> None:
    """Name what the workers wrote: `rows`, `faults` and, where near duplicates are asked for, their fingerprints.

    :param before: what earlier drops left, files by table (`curation.state`).
    :param caps_file: of `curation.caps.write`, if the rules have any.
    """
    tables.view("rows", [task.rows for task in tasks])
    tables.view("faults", [task.faults for task in tasks])
    tables.view("answers", [task.answers for task in tasks])
    for name in PRINTED if rules.near else ():
        tables.view(name, [task.printed(name) for task in tasks])
    nothing = NOTHING | conflicts.NOTHING | continued.NOTHING | (near.NOTHING if rules.near else {})
    nothing |= previous_sides.NOTHING if rules.sides_of else {}
    if caps_file is not None:
        tables.view("caps", [caps_file])
        nothing |= caps.NOTHING
    for name, statement in nothing.items():
        if paths := (before or {}).get(name):
            tables.view(name, paths)
        else:
            tables.do(statement)


def settle(tables: Tables, rules: Rules, *, trained: bool = False, evaluated: bool = False) -> None:
    """Find winners, put every kept row on a side and give every input row its end.

    :param trained: and :param evaluated: whether earlier drops left rows on that side.
    """
    tables.do(MET)
    tables.do(COPIED)
    tables.do(WINNERS)
    conflicts.settle(tables, rules.label_conflicts, rules.exact_duplicates)
    near.settle(tables, rules.near, remember=rules.scope == "family")
    tables.do(KEPT[rules.exact_duplicates])
    caps.settle(tables, asked=bool(rules.max_rows_per_source))
    tables.do(conflicts.ALIKE)
    continued.settle(tables)
    tables.do(TIES)
    previous_sides.settle(tables, asked=bool(rules.sides_of))
    tables.do(COMPONENTS.format(now=_tie(tables)))
    tables.do(COLOURED)
    low, high, train, evaluation = tables.one(UNITS)
    held = {"trained": trained or train == 0, "evaluated": evaluated or evaluation == 1}
    cut = eval_cut(rules.eval_per_million, bytes.fromhex(low or ""), bytes.fromhex(high or ""), **held)
    tables.do(SHADES.format(cut=cut.hex().upper()))
    tables.do(SIDES)
    tables.do(continued.TEXTS)
    tables.do(OUSTED)
    tables.do(ENDS.format(all_copies="1 = 1" if rules.exact_duplicates == "keep" else "1 = 0"))


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


def shard_rows(tables: Tables, side: int, *, extras: bool) -> Iterator[pa.RecordBatch]:
    """The rows of a side in their order. Very long ones are held in memory while they are sorted, so where a
    drop has many of them the rows come in several parts.

    :param extras: whether the recipe keeps columns.
    """
    beside = "coalesce(length(r.extras), 0)" if extras else "0"
    cuts, held = [], 0
    for batch in tables.batches(LONG.format(beside=beside, most=_ORDINARY)):
        for key, rank, weight in zip(*(batch.column(at).to_pylist() for at in range(3)), strict=True):
            held += weight
            if held > _AT_ONCE:
                cuts.append((key.hex(), rank.hex()))
                held = weight
    for first, end in zip([None, *cuts], [*cuts, None], strict=True):
        within = f" and not {_before(*first)}" if first else ""
        within += f" and {_before(*end)}" if end else ""
        yield from tables.batches(SHARDS.format(side=side, within=within), 1024)


def _before(key: str, rank: str) -> str:
    return f"(r.key < unhex('{key}') or (r.key = unhex('{key}') and r.rank < unhex('{rank}')))"


def counts(tables: Tables) -> dict[str, int]:
    """The ledger's totals: `input`, `train`, `eval` and the other ends that occur."""
    ends = {"train": 0, "eval": 0, **{str(end): int(rows) for end, rows in tables.all(COUNTS)}}
    return {"input": sum(ends.values()), **dict(sorted(ends.items()))}
