"""Conversations that others continue, as a log has them whose `messages` grow: all fall on one side of the split.

A row is continued by another if its roles and texts, up to its last answer, are the beginning of the other's up to an
earlier one. What many rows go on from in different ways is a greeting, and ties none. Statements in the subset of SQL
of `curation.exchange`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from curation.engines.tables import Tables

#: Next answers of one beginning, up to which it is a conversation and no greeting.
MOST: Final = 16

#: Beginnings of a split's rows by name, up to an answer; `following` is the name up to the next answer, nothing behind
#: the last one. Rows whose only beginning has their content key for a name are not listed.
BEGINNINGS: Final = pa.schema([("name", pa.binary()), ("following", pa.binary()), ("unit", pa.binary())])

#: Where nothing was curated before.
NOTHING: Final = {
    "old_beginnings": "create table old_beginnings as"
    " select key as name, key as following, unit from rows where file < 0",
}
ANY: Final = (
    "select (select count(*) from (select name from beginnings limit 1) a)"
    " + (select count(*) from (select name from old_beginnings limit 1) b)"
)
NEW: Final = """
create table begun_now as
select key as name, cast(null as binary) as following, unit from rows
union all
select name, following, unit from beginnings
"""
#: Those of earlier drops with a name that this one has.
BEFORE: Final = """
create table begun_before as
select o.name, o.following, o.unit
from (select key as name, cast(null as binary) as following, unit from old_winners
      union all
      select name, following, unit from old_beginnings) o
join (select distinct name from begun_now) n on o.name = n.name
"""
#: Names of whole rows that others continue, in few ways.
CONTINUED: Final = """
create table continued as
select f.name
from (select name, following from begun_now where following is not null
      union
      select name, following from begun_before where following is not null) f
join (select name from begun_now where following is null
      union
      select name from begun_before where following is null) w on f.name = w.name
group by f.name having count(*) <= {most}
"""
THREADED: Final = """
create table threaded as
select b.name as key, b.unit
from (select name, unit from begun_now union select name, unit from begun_before) b
join continued c on b.name = c.name
"""
NO_CONTINUED: Final = "create table continued as select key as name from rows where file < 0"
NO_THREADED: Final = "create table threaded as select key, unit from rows where file < 0"
#: See `curation.exchange.REMEMBERED`.
REMEMBERED: Final = {
    "old_beginnings": """
select name, following, unit
from beginnings
group by name, following, unit
order by name, case when following is null then 0 else 1 end, following, unit
""",
}


def settle(tables: Tables) -> None:
    """Make the tables `continued`, names of rows that others continue, and `threaded`, the units that they tie."""
    if not tables.one(ANY)[0]:
        tables.do(NO_CONTINUED)
        tables.do(NO_THREADED)
        return
    for statement in (NEW, BEFORE, CONTINUED, THREADED):
        tables.do(statement.format(most=MOST))
    for table in ("begun_now", "begun_before"):
        tables.do(f"drop table {table}")
