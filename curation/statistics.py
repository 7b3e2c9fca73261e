"""Figures for the card: counted by the engine, integers throughout."""

# ruff: noqa: S608 - the statements are put together from this file's own constants
from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from curation.engines.tables import Tables

EDGES: Final = tuple(lead * 10**power for power in range(1, 8) for lead in (1, 2, 5))
_SIDES: Final = {0: "train", 1: "eval"}
_KEPT: Final = "rows r join sides s on r.key = s.key and r.rank = s.rank"


@dataclass(frozen=True)
class Statistics:
    """What the card shows beyond the ledger's counts.

    :param totals: per split rows, characters and words.
    :param histograms: `chars` and `words`, per split the rows whose value is below each edge and not below the last.
    :param by_file: per file the number of rows of each end.
    :param near: near duplicates that went, least similar first, each with the row that stayed.
    """

    totals: dict[str, dict[str, int]]
    medians: dict[str, int]
    histograms: dict[str, dict[str, list[int]]]
    sources: list[tuple[str, int, int]]
    labels: list[tuple[str, int]]
    shapes: dict[str, int]
    groups: int
    by_file: list[dict[str, int]]
    clusters: list[dict[str, Any]]
    quarantine: list[dict[str, Any]]
    samples: list[dict[str, Any]]
    edges: tuple[int, ...] = EDGES
    touched: dict[str, int] = field(default_factory=dict)
    near: list[dict[str, Any]] = field(default_factory=list)


def measure(tables: Tables, files: Sequence[str], touched: dict[str, int], top: int = 12) -> Statistics:
    """Count. :param files: names by number. :param touched: counters of the kernel."""
    totals = {
        "train": dict.fromkeys(("rows", "chars", "words"), 0),
        "eval": dict.fromkeys(("rows", "chars", "words"), 0),
    }
    for side, rows, chars, words in tables.all(
        "select s.side, count(*), cast(sum(r.chars) as bigint), cast(sum(r.words) as bigint)"
        f" from {_KEPT} group by s.side"
    ):
        totals[_SIDES[side]] = {"rows": rows, "chars": chars, "words": words}
    kept = totals["train"]["rows"] + totals["eval"]["rows"]
    medians = {
        name: tables.one(f"select r.{name} from {_KEPT} order by r.{name} limit 1 offset {kept // 2}")[0]
        for name in ("chars", "words")
    }
    shapes = tables.one(
        "select cast(sum(case when r.text is null then 1 else 0 end) as bigint),"
        f" cast(sum(case when r.text is null then 0 else 1 end) as bigint) from {_KEPT}"
    )
    return Statistics(
        totals=totals,
        medians=medians,
        histograms={name: _histogram(tables, name) for name in ("chars", "words")},
        sources=[
            (str(name), train, held)
            for name, train, held in tables.all(
                "select r.source, count(*) - cast(sum(s.side) as bigint), cast(sum(s.side) as bigint)"
                f" from {_KEPT} group by r.source order by count(*) desc, r.source limit {top}"
            )
        ],
        labels=[
            (str(name), rows)
            for name, rows in tables.all(
                f"select r.label, count(*) from {_KEPT} where r.label is not null"
                f" group by r.label order by count(*) desc, r.label limit {top}"
            )
        ],
        shapes={"messages": shapes[0], "text": shapes[1]},
        groups=tables.one(f'select count(distinct r.unit) from {_KEPT} where r."group" is not null')[0],
        by_file=_by_file(tables, files),
        clusters=_clusters(tables, files),
        quarantine=_examples(tables, files),
        samples=_samples(tables),
        touched=touched,
        near=_near(tables, files),
    )


def _histogram(tables: Tables, name: str) -> dict[str, list[int]]:
    cases = " ".join(f"when r.{name} < {edge} then {index}" for index, edge in enumerate(EDGES))
    bins = {"train": [0] * (len(EDGES) + 1), "eval": [0] * (len(EDGES) + 1)}
    for side, index, rows in tables.all(
        "select side, bin, count(*) from"
        f" (select s.side as side, case {cases} else {len(EDGES)} end as bin from {_KEPT}) t group by side, bin"
    ):
        bins[_SIDES[side]][index] = rows
    return bins


def _by_file(tables: Tables, files: Sequence[str]) -> list[dict[str, int]]:
    table: list[dict[str, int]] = [{} for _ in files]
    for file, end, rows in tables.all(
        "select file, ending, count(*) from ends group by file, ending order by file, ending"
    ):
        table[file][end] = rows
    return table


def _clusters(tables: Tables, files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that came most often."""
    found = tables.all(
        "select c.copies, w.file, w.position, r.text, r.messages from"
        " (select key, count(*) as copies from rows group by key having count(*) > 1"
        " order by count(*) desc, key limit 5) c"
        " join winners w on c.key = w.key join rows r on r.key = w.key and r.rank = w.rank"
        " order by c.copies desc, c.key"
    )
    return [
        {"copies": copies, "file": files[file], "position": position, "excerpt": _excerpt(text, messages)}
        for copies, file, position, text, messages in found
    ]


def _near(tables: Tables, files: Sequence[str]) -> list[dict[str, Any]]:
    """The rows that were removed on the weakest ground."""
    found = tables.all(
        "select n.shared, n.either, w.file, w.position, r.text, r.messages,"
        " n.of_file, n.of_position, o.text, o.messages"
        " from (select *, row_number() over (order by shared * 1.0 / either, key) as place from near) n"
        " join winners w on n.key = w.key"
        " join rows r on w.file = r.file and w.position = r.position"
        " join rows o on n.of_file = o.file and n.of_position = o.position"
        " where n.place <= 6 order by n.place"
    )
    return [
        {
            "shared": shared,
            "either": either,
            "gone": {"file": files[file], "position": position, "excerpt": _excerpt(text, messages)},
            "kept": {"file": files[of_file], "position": of_position, "excerpt": _excerpt(of_text, of_messages)},
        }
        for shared, either, file, position, text, messages, of_file, of_position, of_text, of_messages in found
    ]


def _examples(tables: Tables, files: Sequence[str]) -> list[dict[str, Any]]:
    """Up to three faults of each reason."""
    found = tables.all(
        "select reason, file, position, detail, head from (select *, row_number() over"
        " (partition by reason order by file, position) as place from faults) t where place <= 3"
        " order by reason, file, position"
    )
    return [
        {
            "reason": reason,
            "file": files[file],
            "position": position,
            "detail": detail,
            "head": bytes(head).decode("utf-8", "backslashreplace"),
        }
        for reason, file, position, detail, head in found
    ]


def _samples(tables: Tables) -> list[dict[str, Any]]:
    """The first rows of each split in the order of their keys: as good as random, and always the same."""
    rows: list[dict[str, Any]] = []
    for side, split in _SIDES.items():
        found = tables.all(
            f"select r.source, r.text, r.messages from {_KEPT} where s.side = {side} order by s.key, s.rank limit 3"
        )
        for source, text, messages in found:
            turns = [{"role": turn["role"], "content": turn["content"][:600]} for turn in messages or ()]
            rows.append({"split": split, "source": source, "text": text[:600] if text else None, "messages": turns})
    return rows


def _excerpt(text: str | None, messages: list[dict[str, str]] | None) -> str:
    whole = text if text is not None else " / ".join(turn["content"][:200] for turn in messages or ())
    line = " ".join(whole[:400].split())
    return line if len(line) <= 160 else line[:159] + "…"
