"""Answers that stand in several rows, as in a log whose `messages` grow: these rows fall on one side of the split.

An answer is known by what was said since the last but one (`curation.identity`), so that a history may be cut at its
beginning, and may branch. What many rows have in different places is a phrase of politeness, and ties none. Statements
in the subset of SQL of `curation.exchange`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from curation.engines.tables import Tables

#: Places of one answer, up to which it is a conversation's own.
MOST: Final = 16

#: Answers of a split's rows by name, with the names of those before and behind it in the row, or null; `learned` is 0
#: or 1. Of rows that are one question and its answer none is listed: their content key is the name.
ANSWERS: Final = pa.schema(
    [
        ("name", pa.binary()),
        ("preceding", pa.binary()),
        ("following", pa.binary()),
        ("unit", pa.binary()),
        ("learned", pa.int64()),
    ]
)

#: Where nothing was curated before.
NOTHING: Final = {
    "old_answers": "create table old_answers as select key as name, key as preceding, key as following, unit,"
    " file as learned from rows where file < 0",
}
ANY: Final = (
    "select (select count(*) from (select name from answers limit 1) a)"
    " + (select count(*) from (select name from old_answers limit 1) b)"
)
SAID: Final = """
create table said as
select key as name, cast(null as binary) as preceding, cast(null as binary) as following, unit,
       cast(1 as bigint) as learned
from rows
union all
select name, preceding, following, unit, learned from answers
"""
#: Those of earlier drops with a name that this one has.
SAID_BEFORE: Final = """
create table said_before as
select o.name, o.preceding, o.following, o.unit, o.learned
from (select key as name, cast(null as binary) as preceding, cast(null as binary) as following, unit,
             cast(1 as bigint) as learned
      from old_winners
      union all
      select name, preceding, following, unit, learned from old_answers) o
join (select distinct name from said) n on o.name = n.name
"""
#: Places of each answer.
PLACED: Final = """
create table placed as
select name, preceding, following, min(unit) as low, max(unit) as high, max(learned) as learned
from (select * from said union all select * from said_before) s
group by name, preceding, following
"""
#: Answers of several rows, in few places, and in how many of these they are learned.
CONTINUED: Final = """
create table continued as
select name, cast(sum(learned) as bigint) as learned
from placed group by name having min(low) <> max(high) and count(*) <= {most}
"""
THREADED: Final = """
create table threaded as
select s.name as key, s.unit
from (select name, unit from said union select name, unit from said_before) s
join continued c on s.name = c.name
"""
NO_CONTINUED: Final = "create table continued as select key as name, file as learned from rows where file < 0"
NO_THREADED: Final = "create table threaded as select key, unit from rows where file < 0"
#: How many answers are learned in several rows.
REPEATED: Final = "select count(*) from continued where learned > 1"
#: See `curation.exchange.REMEMBERED`.
REMEMBERED: Final = {
    "old_answers": """
select name, preceding, following, unit, max(learned) as learned
from answers
group by name, preceding, following, unit
order by name, case when preceding is null then 0 else 1 end, preceding,
         case when following is null then 0 else 1 end, following, unit
""",
}


def settle(tables: Tables) -> None:
    """Make the tables `continued`, answers of several rows, and `threaded`, the units that they tie."""
    if not tables.one(ANY)[0]:
        tables.do(NO_CONTINUED)
        tables.do(NO_THREADED)
        return
    for statement in (SAID, SAID_BEFORE, PLACED, CONTINUED, THREADED):
        tables.do(statement.format(most=MOST))
    for table in ("said", "said_before", "placed"):
        tables.do(f"drop table {table}")
