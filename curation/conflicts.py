"""Rows that ask the same and answer otherwise: one text with two labels, one conversation with two last answers.

Which ones there are is told on the card; `curation.label_conflicts` says what becomes of them. Like everything here a
new row is judged by those of earlier drops and of its own, and old ones stay as they are. Statements in the subset of
SQL of `curation.exchange`.
"""

from __future__ import annotations

from typing import Final

from curation.engines.tables import Tables

#: Where nothing was curated before.
NOTHING: Final = {
    "old_inputs": "create table old_inputs as select input, key, unit, file as of_file, position as of_position,"
    " cast(file as int) as ended from rows where file < 0",
}
#: Content with an input, once each: what is new, or, where copies stay, all of the drop's.
ASKED: Final = {
    "drop": "create table asked as select key, rank, unit, file, position, input from winners where input is not null",
    "keep": "create table asked as select r.key, r.rank, r.unit, r.file, r.position, r.input"
    " from rows r join (select key, min(rank) as rank from rows group by key) m on r.key = m.key and r.rank = m.rank"
    " where r.input is not null",
}
EARLIER: Final = """
create table earlier as
select o.input, o.key, o.unit, o.of_file, o.of_position, o.ended
from old_inputs o join (select distinct input from asked) a on o.input = a.input
"""
CONTESTED: Final = """
create table contested as
select u.input
from (select input, key from asked union all select input, key from earlier) u
group by u.input having min(u.key) <> max(u.key)
"""
#: The answer that stays: the one that an earlier drop had, or the one of lowest rank.
ELECTED: Final = """
create table elected as
select a.input, a.key, a.file as of_file, a.position as of_position
from asked a
join (select input, min(rank) as rank from asked group by input) m on a.input = m.input and a.rank = m.rank
left join (select distinct input from earlier where ended = 0) e on a.input = e.input
where e.input is null
union all
select e.input, e.key, e.of_file, e.of_position
from earlier e
join (select input, min(key) as key from earlier where ended = 0 group by input) m
  on e.input = m.input and e.key = m.key
"""
CONFLICTS: Final = {
    "keep": "create table conflicts as"
    " select key, file as of_file, position as of_position from winners where file < 0",
    "first": "create table conflicts as select a.key, e.of_file, e.of_position"
    " from asked a join elected e on a.input = e.input where a.key <> e.key",
    "drop": "create table conflicts as select a.key, cast(null as bigint) as of_file, cast(null as bigint) as"
    " of_position from asked a join contested c on a.input = c.input",
}
#: Rows of several groups that ask the same tie these together; see `curation.exchange.TIES`.
ALIKE: Final = """
create table alike as
select a.input as key, k.unit
from kept k join asked a on k.key = a.key join contested c on a.input = c.input
union all
select e.input as key, e.unit from earlier e join contested c on e.input = c.input where e.ended = 0
"""
#: See `curation.exchange.REMEMBERED`.
REMEMBERED: Final = {
    "old_inputs": """
select a.input, a.key, a.unit,
       case when s.rank is not null then -1 - (a.file + {files}) when n.of_file < 0 then n.of_file
            else -1 - (n.of_file + {files}) end as of_file,
       case when s.rank is not null then a.position else n.of_position end as of_position,
       case when c.key is null then 0 else 1 end as ended
from asked a
left join met o on a.key = o.key
left join conflicts c on a.key = c.key
left join near n on a.key = n.key
left join sides s on a.key = s.key and a.rank = s.rank
where o.key is null
order by a.input, a.key
""",
}


def settle(tables: Tables, policy: str, exact_duplicates: str) -> None:
    """Make the tables `contested`, inputs with several answers, and `conflicts`, rows that end for it, from `winners`.

    :param policy: `keep`, `first` or `drop`. :param exact_duplicates: `drop` or `keep`.
    """
    tables.do(ASKED[exact_duplicates])
    tables.do(EARLIER)
    tables.do(CONTESTED)
    if policy == "first":
        tables.do(ELECTED)
    tables.do(CONFLICTS[policy])
