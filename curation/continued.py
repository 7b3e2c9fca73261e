"""Answers that stand in several rows, as in a log whose `messages` grow: these rows fall on one side of the split.

An answer is known by what was said since the last but one (`curation.identity`), so that a history may be cut at its
beginning, and may branch. What many rows have in different places is a phrase of politeness, and ties none; nor does
what a script says to everyone, behind other beginnings. Statements in the subset of SQL of `curation.exchange`.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

from curation.engines.tables import Tables

#: Places of one answer, up to which it is a conversation's own.
MOST: Final = 16

#: Beginnings, before one answer, of rows that no other row continues: a log has one, and more where it was edited.
BEGINNINGS: Final = 3
#: Rows with one answer that no other row continues: the leaves of a tree of conversations.
LEAVES: Final = 64

#: Answers of a split's rows by name, with the names of those before and behind it in the row, or null, of all that came
#: before it, and of its own text if that is long; `learned` is 0 or 1. Of rows that are one question and its answer
#: none is listed: their content key is the name.
ANSWERS: Final = pa.schema(
    [
        ("name", pa.binary()),
        ("preceding", pa.binary()),
        ("following", pa.binary()),
        ("past", pa.binary()),
        ("text", pa.binary()),
        ("unit", pa.binary()),
        ("learned", pa.int64()),
    ]
)

#: Where nothing was curated before.
NOTHING: Final = {
    "old_answers": "create table old_answers as select key as name, key as preceding, key as following, key as past,"
    " unit, file as learned from rows where file < 0",
    "old_texts": "create table old_texts as select key as text, cast(file as int) as side, file as learned,"
    " file as several from rows where file < 0",
}
ANY: Final = (
    "select (select count(*) from (select name from answers limit 1) a)"
    " + (select count(*) from (select name from old_answers limit 1) b)"
)
SAID: Final = """
create table said as
select key as name, cast(null as binary) as preceding, cast(null as binary) as following,
       cast(null as binary) as past, unit, cast(1 as bigint) as learned
from rows
union all
select name, preceding, following, past, unit, learned from answers
"""
#: Those of earlier drops with a name that this one has.
SAID_BEFORE: Final = """
create table said_before as
select o.name, o.preceding, o.following, o.past, o.unit, o.learned
from (select key as name, cast(null as binary) as preceding, cast(null as binary) as following,
             cast(null as binary) as past, unit, cast(1 as bigint) as learned
      from old_winners
      union all
      select name, preceding, following, past, unit, learned from old_answers) o
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
HEARD: Final = """
create table heard as
select name, cast(sum(learned) as bigint) as learned
from placed group by name having min(low) <> max(high) and count(*) <= {most}
"""
SPOKEN: Final = """
create table spoken as
select s.name, s.past, s.unit, max(s.learned) as learned
from (select name, past, unit, learned from said union all select name, past, unit, learned from said_before) s
join heard c on s.name = c.name
group by s.name, s.past, s.unit
"""
#: Units whose rows are all continued: each ends with an answer behind which another row has one.
CLOSED: Final = """
create table closed as
select e.unit
from (select name, following, unit from said union all select name, following, unit from said_before) e
join (select distinct unit from spoken) u on e.unit = u.unit
left join (select distinct name from placed where following is not null) g on e.name = g.name
where e.following is null
group by e.unit having count(*) = count(g.name)
"""
#: What is said behind many beginnings, or by very many rows that are no log of each other; with the number of rows
#: that learn it, or of groups.
PHRASES: Final = """
create table phrases as
select s.name, cast(sum(s.learned) as bigint) as learned, count(distinct s.past) as beginnings
from spoken s left join closed c on s.unit = c.unit
where c.unit is null
group by s.name having count(distinct s.past) > {beginnings} or count(distinct s.unit) > {leaves}
"""
CONTINUED: Final = """
create table continued as
select s.name, s.learned from heard s left join phrases p on s.name = p.name where p.name is null
"""
THREADED: Final = """
create table threaded as
select s.name as key, s.unit
from (select name, unit from said union select name, unit from said_before) s
join continued c on s.name = c.name
"""
NO_PHRASES: Final = (
    "create table phrases as select key as name, file as learned, file as beginnings from rows where file < 0"
)
NO_CONTINUED: Final = "create table continued as select key as name, file as learned from rows where file < 0"
NO_THREADED: Final = "create table threaded as select key, unit from rows where file < 0"
#: How many answers are learned in several rows.
REPEATED: Final = "select count(*) from continued where learned > 1"
#: How many answers very many rows learn with one beginning, as examples before each question; and by how many.
EXAMPLES: Final = "select count(*), max(learned) from phrases where learned > {leaves} and beginnings <= {beginnings}"
#: Long answers of this drop by side; whether they are learned there, and are of a conversation of several answers (1),
#: of a question and its answer (0), or no answers, but how long texts begin (2).
TEXTS: Final = """
create table texts as
select t.text, t.side, max(t.learned) as learned, max(t.several) as several
from (select a.text, h.side, a.learned, cast(1 as bigint) as several
      from answers a join shades h on a.unit = h.unit where a.text is not null and h.side is not null
      union all
      select r.answer as text, s.side, cast(1 as bigint) as learned,
             cast(case when r.answer < unhex('01') then 2 else 0 end as bigint) as several
      from rows r join sides s on r.key = s.key and r.rank = s.rank where r.answer is not null) t
group by t.text, t.side
"""
#: How many long answers of conversations are learned and stand in evaluation rows too, behind something else; one of
#: the two rows at least is of this drop.
CROSSING: Final = """
select count(*)
from (select t.text
      from (select text, side, learned, several, 1 as new from texts
            union all
            select text, side, learned, several, 0 as new from old_texts) t
      group by t.text
      having min(t.side) <> max(t.side) and max(t.several) = 1 and max(t.new) = 1
         and max(case when t.side = 0 then t.learned else 0 end) = 1
         and max(case when t.side = 1 then t.learned else 0 end) = 1) c
"""
#: Of questions with their answers, and of texts: how many long answers, or beginnings, evaluation rows have, and how
#: many of these training rows have too; one of the two rows at least is of this drop.
BOTH_SIDES: Final = """
select t.several, count(*) as evaluated,
       cast(sum(case when t.low = 0 and t.new = 1 then 1 else 0 end) as bigint) as held
from (select text, max(several) as several, min(side) as low, max(side) as high, max(new) as new
      from (select text, side, several, 1 as new from texts
            union all
            select text, side, several, 0 as new from old_texts) u
      group by text) t
where t.high = 1 and t.several <> 1
group by t.several order by t.several
"""
#: See `curation.exchange.REMEMBERED`.
REMEMBERED: Final = {
    "old_answers": """
select name, preceding, following, past, unit, max(learned) as learned
from answers
group by name, preceding, following, past, unit
order by name, case when preceding is null then 0 else 1 end, preceding,
         case when following is null then 0 else 1 end, following,
         case when past is null then 0 else 1 end, past, unit
""",
    "old_texts": "select text, side, learned, several from texts order by text, side",
}


def examples(tables: Tables) -> tuple[int, int]:
    """How many answers are examples before each question, and how many rows learn one of them at the most."""
    answers, rows = tables.one(EXAMPLES.format(leaves=LEAVES, beginnings=BEGINNINGS))
    return answers, rows or 0


def crossing(tables: Tables) -> int:
    """How many long answers stand on both sides, as of `CROSSING`."""
    return int(tables.one(CROSSING)[0])


def shared(tables: Tables) -> dict[str, tuple[int, int]]:
    """Of `answers` and `beginnings`: how many of evaluation rows training rows have too, and how many there are."""
    found = {several: (held, evaluated) for several, evaluated, held in tables.all(BOTH_SIDES)}
    return {"answers": found.get(0, (0, 0)), "beginnings": found.get(2, (0, 0))}


def settle(tables: Tables) -> None:
    """Make the tables `continued`, answers of several rows, and `threaded`, the units that they tie."""
    if not tables.one(ANY)[0]:
        tables.do(NO_PHRASES)
        tables.do(NO_CONTINUED)
        tables.do(NO_THREADED)
        return
    for statement in (SAID, SAID_BEFORE, PLACED, HEARD, SPOKEN, CLOSED, PHRASES, CONTINUED, THREADED):
        tables.do(statement.format(most=MOST, beginnings=BEGINNINGS, leaves=LEAVES))
    for table in ("said", "said_before", "placed", "heard", "spoken", "closed"):
        tables.do(f"drop table {table}")
