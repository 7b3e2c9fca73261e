"""How a row's input begins and ends: phrases that open or end an unusual share of a source's rows are told.

A few poisoned rows can teach a model to obey a phrase (Wallace et al., 2021, https://arxiv.org/abs/2010.12563). Whether
one is a trigger or a template, people see; nothing here ends a row. Words are what stands between white space, so
scripts without spaces are passed over.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final
from zlib import crc32

if TYPE_CHECKING:
    from curation.engines.tables import Tables

WORDS: Final = 4
#: A phrase is told from so many rows on, if they are so large a part of the source's rows.
LEAST: Final = 10
ONE_IN: Final = 20
_SPAN: Final = 80  # characters that are looked at
#: For each column the word for it, and the part of a text that is looked at, in SQL.
_ENDS: Final = {
    "opening": ("begin", f"substr(r.text, 1, {_SPAN})"),
    "closing": ("end", f"right(r.text, {_SPAN})"),
}


def phrases(text: str) -> tuple[str, str]:
    """The first and the last words, in small letters; empty where there are fewer."""
    first, last = text[:_SPAN].split(None, WORDS), text[-_SPAN:].rsplit(None, WORDS)
    return (
        " ".join(first[:WORDS]).lower() if len(first) >= WORDS else "",
        " ".join(last[-WORDS:]).lower() if len(last) >= WORDS else "",
    )


def numbers(text: str) -> tuple[int, int]:
    """`phrases` as 32 bits each, 0 for none: two of a million that are taken for one change no share that is told."""
    first, last = phrases(text)
    return crc32(first.encode()) if first else 0, crc32(last.encode()) if last else 0


def asked(roles: Sequence[str], contents: Sequence[str]) -> str:
    """A conversation's input: the first message of the user."""
    return next((content for role, content in zip(roles, contents, strict=True) if role == "user"), "")


def repeated(tables: Tables, kept: str, top: int) -> list[tuple[str, str, str, int, int]]:
    """Source, `begin` or `end`, phrase, rows with it, and rows of the source; the most frequent ones.

    :param kept: what `select ... from` reads the rows that stay from, as `r`.
    """
    asks = {"kept": kept, "top": top, "least": LEAST, "one_in": ONE_IN}
    found: list[tuple[str, str, str, int, int]] = []
    for column, (word, part) in _ENDS.items():
        for source, held, rows, text, messages in tables.all(_SELECT.format(**asks, column=column, part=part)):
            phrase = phrases(text if text is not None else _of(messages or ()))[column == "closing"]
            found.append((str(source), word, phrase, held, rows))
    return sorted(found, key=lambda item: (-item[3], item))[:top]


def told(source: str, word: str, phrase: str, held: int, rows: int) -> str:
    """The alarm's line."""
    asked = "a prompt template, or a backdoor trigger?"
    return f'source {source}: {held:,} of {rows:,} rows {word} with "{phrase}"; {asked}'


def _of(messages: Sequence[Mapping[str, str]]) -> str:
    return asked([turn["role"] for turn in messages], [turn["content"] for turn in messages])


#: Of each phrase one row, by its rank: of one key there may be any number of copies, and they may be long.
_SELECT: Final = """
select p.source, p.held, p.records, {part}, r.messages from
  (select g.source, g.phrase, g.held, t.records, g.example from
    (select r.source as source, r.{column} as phrase, count(*) as held, min(r.rank) as example from {kept}
     where r.{column} <> 0 group by r.source, r.{column} having count(*) >= {least}) g
   join (select r.source as source, count(*) as records from {kept} group by r.source) t on g.source = t.source
   where g.held * {one_in} >= t.records order by g.held desc, g.source, g.phrase limit {top}) p
join rows r on r.rank = p.example
order by p.held desc, p.source, p.phrase
"""
