"""Figures for the card: counted by the engine, integers throughout."""

# ruff: noqa: S608 - the statements are put together from this file's own constants
from __future__ import annotations

import json
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from curation.continued import REPEATED, crossing, examples, shared
from curation.engines.tables import Tables
from curation.identity import document
from curation.phrases import repeated
from curation.shapes import is_json_text, is_repr
from curation.spellings import (
    TRUTHS,
    alike,
    called_alike,
    dated,
    folded_name,
    made_of_others,
    numbers_and_names,
    truths_among,
    unset,
)
from dropforge.dataset import MOST_LABELS

EDGES: Final = tuple(lead * 10**power for power in range(1, 8) for lead in (1, 2, 5))
#: Sources and labels that are told, the most frequent ones.
TOP: Final = 12
#: A source raises an alarm from so many rows on, if they are so large a part of it.
ALARM_ROWS: Final = 10
ALARM_ONE_IN: Final = 100
_NAME: Final = 200
#: Labels with which those of later drops are compared, and pairs of files; beyond them nobody looks at each.
_KNOWN: Final = 1_000
#: Hexadecimal digits of a group's hash: of 10,000 groups two share one once in five million families.
_HASH: Final = 12
#: Labels that may be one, and such groups.
TOLD: Final = 5
_SIDES: Final = {0: "train", 1: "eval"}
_KEPT: Final = "rows r join sides s on r.key = s.key and r.rank = s.rank"


@dataclass(frozen=True)
class Statistics:
    """What the card shows beyond the ledger's counts.

    :param totals: per split rows, characters and words.
    :param histograms: `chars` and `words`, per split the rows whose value is below each edge and not below the last.
    :param by_file: per file the number of rows of each end.
    :param contested: `inputs` of the drop with several labels or answers, its `rows` of them, and `examples`.
    :param near: near duplicates that went, least similar first, each with the row that stayed.
    :param unmet: rows that stayed in a bucket with so many others that they were compared with its first ones alone.
    :param repeated_answers: answers that are learned in several rows.
    :param crossing: long answers of conversations that are learned and stand in evaluation rows too.
    :param shared: `answers` to single questions, and `beginnings` of texts: of those that evaluation rows have, how
        many training rows have too, and how many there are.
    :param examples: answers that very many rows learn with one beginning, and how many do at most.
    :param suspicious: of sources that raise an alarm the rows, those with control tokens, and those with invisible or
        reordering characters; copies count.
    :param truths: labels that may be truth values, with their rows.
    :param alike: labels that may be one value. :param unset: labels that may be a missing one.
    :param shown: labels that are a list, object, tuple or bytes as Python shows it, or a text as JSON does.
    :param alike_names: `sources` and `groups` that may be one value, where there are no more than labels may be.
    :param more_alike: groups of labels, sources or groups that may be one value, beyond those that are shown.
    :param unset_names: `sources` and `groups` that may be a missing one. :param dated: `labels`, `sources` and `groups`
        that Excel may have made dates of.
    :param misnamed: sources that the recipe names and no row has, with the one that may be meant, or "".
    :param merged: files in which each row with a group has one of its own, and as many or more have none, with both
        numbers, as sheets with merged cells are.
    :param several: labels that are others with a separator between. :param named_twice: labels of which half are the
        numbers from 0.
    :param repeated: phrases that open or end an unusual share of a source's kept rows, as `curation.phrases.repeated`.
    :param classes: labels of kept rows that differ, and the characters of all of them.
    :param revised: pairs of files, None for those of earlier drops, with how many rows of both ask the same and answer
        otherwise, where these are half of one file or more.
    :param relaid: files with their copies that have other line breaks or another indentation than the row that stayed.
    :param known_labels: labels with their rows, those of earlier drops too; empty where there are very many.
    :param evaluated_labels: those of them that evaluation rows have.
    :param known_groups: names of groups, those of earlier drops too, as hashes, by the hash of what counts as the same
        name in `alike`.
    :param groups_otherwise: those, with their rows, that came when earlier drops had them otherwise spelled alone.
    :param many_groups: whether there are more than can be compared so.
    :param unmeasured: labels that only training rows have, the most frequent first; of the drop, or of `known_labels`.
    :param unmeasured_classes: how many such labels there are.
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
    unmet: int = 0
    repeated_answers: int = 0
    examples: tuple[int, int] = (0, 0)
    crossing: int = 0
    shared: dict[str, tuple[int, int]] = field(default_factory=dict)
    contested: dict[str, Any] = field(default_factory=dict)
    truths: dict[str, int] = field(default_factory=dict)
    suspicious: list[tuple[str, int, int, int]] = field(default_factory=list)
    repeated: list[tuple[str, str, str, int, int]] = field(default_factory=list)
    classes: tuple[int, int] = (0, 0)
    unmeasured: dict[str, int] = field(default_factory=dict)
    unmeasured_classes: int = 0
    alike: list[dict[str, int]] = field(default_factory=list)
    unset: dict[str, int] = field(default_factory=dict)
    alike_names: dict[str, list[dict[str, int]]] = field(default_factory=dict)
    more_alike: dict[str, int] = field(default_factory=dict)
    unset_names: dict[str, dict[str, int]] = field(default_factory=dict)
    dated: dict[str, dict[str, int]] = field(default_factory=dict)
    shown: dict[str, int] = field(default_factory=dict)
    misnamed: dict[str, str] = field(default_factory=dict)
    several: dict[str, int] = field(default_factory=dict)
    merged: list[tuple[str, int, int]] = field(default_factory=list)
    named_twice: dict[str, int] = field(default_factory=dict)
    revised: list[tuple[str, str | None, int]] = field(default_factory=list)
    relaid: list[tuple[str, int]] = field(default_factory=list)
    known_labels: dict[str, int] = field(default_factory=dict)
    evaluated_labels: list[str] = field(default_factory=list)
    known_groups: dict[str, list[str]] = field(default_factory=dict)
    groups_otherwise: dict[str, int] = field(default_factory=dict)
    many_groups: bool = False


def measure(
    tables: Tables,
    files: Sequence[str],
    touched: dict[str, int],
    top: int = TOP,
    named: Collection[str] = (),
    before: Mapping[str, Any] | None = None,
) -> Statistics:
    """Count. :param files: names by number. :param touched: counters of the kernel. :param named: sources that the
    recipe names. :param before: what was measured of the version to which the drop is added (`curation.drift`), for one
    that holds all drops; None for a drop's own."""
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
        name: next(
            iter(tables.all(f"select r.{name} from {_KEPT} order by r.{name} limit 1 offset {kept // 2}")), (0,)
        )[0]
        for name in ("chars", "words")
    }
    shapes = tables.one(
        "select cast(coalesce(sum(case when r.text is null then 1 else 0 end), 0) as bigint),"
        f" cast(coalesce(sum(case when r.text is null then 0 else 1 end), 0) as bigint) from {_KEPT}"
    )
    tables.do(
        "create table label_rows as select r.label as label, count(*) as held, cast(sum(s.side) as bigint) as measured"
        f" from {_KEPT} where r.label is not null group by r.label"
    )
    labels = dict(
        tables.all(
            f"select label, held from label_rows where length(label) <= {_NAME} order by label limit {MOST_LABELS}"
        )
    )
    missing = unset(labels)
    known = dict(sorted((Counter(labels) + Counter((before or {}).get("known_labels", {}))).items()))
    names = {f"{name}s": _names(tables, name) for name in ("source", "group")}
    valued = {"labels": known, **names}
    same = {name: alike(found) for name, found in valued.items()}
    classes = tables.one("select count(*), cast(coalesce(sum(length(label)), 0) as bigint) from label_rows")
    spelled = ", ".join(f"'{word}'" for word in sorted(TRUTHS))
    words = dict(
        tables.all(
            f"select label, held from label_rows where label in ('0', '1') or lower(label) in ({spelled})"
            f" order by label limit {MOST_LABELS}"
        )
    )
    measured = {*(before or {}).get("evaluated_labels", ()), *_labels_where(tables, "measured > 0", MOST_LABELS)}
    if whole := before is not None and len(known) <= _KNOWN:
        alone = {label: rows for label, rows in known.items() if label not in measured}
        unmeasured, unmeasured_classes = (
            dict(sorted(alone.items(), key=lambda one: (-one[1], one[0]))[:TOLD]),
            len(alone),
        )
    else:
        unmeasured = _labels_where(tables, "measured = 0", TOLD)
        unmeasured_classes = tables.one("select count(*) from label_rows where measured = 0")[0]
    absent = [
        (name, meant)
        for name, meant in called_alike(named, names["sources"]).items()
        if meant or before is None  # another drop of the family may have it
    ]
    groups = tables.one(f'select count(distinct r.unit) from {_KEPT} where r."group" is not null')[0]
    return Statistics(
        totals=totals,
        medians=medians,
        histograms={name: _histogram(tables, name) for name in ("chars", "words")},
        sources=[
            (shown_name(name), train, held)
            for name, train, held in tables.all(
                "select r.source, count(*) - cast(sum(s.side) as bigint), cast(sum(s.side) as bigint)"
                f" from {_KEPT} group by r.source order by count(*) desc, r.source limit {top}"
            )
        ],
        labels=[
            (shown_name(name), rows)
            for name, rows in tables.all(f"select label, held from label_rows order by held desc, label limit {top}")
        ],
        shapes={"messages": shapes[0], "text": shapes[1]},
        groups=groups,
        by_file=_by_file(tables, files),
        clusters=_clusters(tables, files),
        quarantine=_examples(tables, files),
        samples=_samples(tables),
        touched=touched,
        near=_near(tables, files),
        unmet=tables.one("select unmet from unmet")[0],
        repeated_answers=tables.one(REPEATED)[0],
        examples=examples(tables),
        crossing=crossing(tables),
        shared=shared(tables),
        suspicious=_suspicious(tables, top),
        repeated=[(shown_name(item[0]), *item[1:]) for item in repeated(tables, _KEPT, top)],
        classes=classes,
        unmeasured=unmeasured,
        unmeasured_classes=unmeasured_classes,
        contested=_contested(tables, files),
        truths=truths_among(words, classes[0] - len(words.keys() | missing.keys())),
        alike=same["labels"][:TOLD],
        unset=unset(known),
        several=made_of_others(known),
        merged=[
            (files[file], held, rows - held)
            for file, rows, held in tables.all(
                'select r.file, count(*), count(r."group") from rows r group by r.file'
                ' having count(r."group") > 1 and count(r."group") = count(distinct r."group")'
                f' and count(*) >= 2 * count(r."group") order by r.file limit {TOLD}'
            )
        ],
        named_twice=numbers_and_names(known),
        shown={label: count for label, count in labels.items() if is_repr(label) or is_json_text(label)},
        alike_names={name: same[name][:TOLD] for name in names},
        more_alike={name: len(found) - TOLD for name, found in same.items() if len(found) > TOLD},
        unset_names={name: lost for name, found in names.items() if (lost := unset(found))},
        dated={name: days for name, found in valued.items() if (days := dated(found))},
        misnamed=dict(absent[:TOLD]),
        revised=_revised(tables, files),
        relaid=[
            (files[file], rows)
            for file, rows in tables.all(
                "select file, count(*) as held from ends where relaid = 1 and ending = 'duplicate'"
                " group by file order by held desc, file"
            )
        ],
        known_labels=known if whole else {},
        evaluated_labels=sorted(measured & known.keys()) if whole else [],
        **(_compared_groups(before, names["groups"], groups) if before is not None else {}),
    )


def _compared_groups(before: Mapping[str, Any], names: Mapping[str, int], groups: int) -> dict[str, Any]:
    """`known_groups` and what goes with them, of a family with one more drop.

    :param names: its groups with their rows. :param groups: how many there are.
    """
    otherwise = Counter(before.get("groups_otherwise", {}))
    if before.get("many_groups") or groups > MOST_LABELS:
        return {"many_groups": True, "groups_otherwise": dict(otherwise)}
    known = {same: set(spelled) for same, spelled in before.get("known_groups", {}).items()}
    hashes = {name: (_hashed(folded_name(name)), _hashed(name)) for name in names}
    for name, (same, mine) in hashes.items():
        if same in known and mine not in known[same]:
            otherwise[name] += names[name]
    for same, mine in hashes.values():
        known.setdefault(same, set()).add(mine)
    first = dict(sorted(otherwise.items(), key=lambda one: (-one[1], one[0]))[:_KNOWN])
    if sum(map(len, known.values())) > MOST_LABELS:  # spellings, as one group may have many
        return {"many_groups": True, "groups_otherwise": first}
    return {"known_groups": {same: sorted(known[same]) for same in sorted(known)}, "groups_otherwise": first}


def _hashed(name: str) -> str:
    return document(name).hex()[:_HASH]


def _labels_where(tables: Tables, which: str, most: int) -> dict[str, int]:
    """Labels with their rows, the most frequent first. :param which: a condition on `label_rows`."""
    return dict(
        tables.all(
            f"select label, held from label_rows where {which} and length(label) <= {_NAME}"
            f" order by held desc, label limit {most}"
        )
    )


def _names(tables: Tables, column: str) -> dict[str, int]:
    """Rows of each source or group; none if there are more than can be compared here."""
    found = tables.all(
        f'select r."{column}", count(*) from {_KEPT} where length(r."{column}") <= {_NAME}'
        f' group by r."{column}" order by r."{column}" limit {MOST_LABELS + 1}'
    )
    return dict(found) if len(found) <= MOST_LABELS else {}


def _suspicious(tables: Tables, top: int) -> list[tuple[str, int, int, int]]:
    bar = " or ".join(
        f"({held} >= {ALARM_ROWS} and {held} * {ALARM_ONE_IN} >= records)" for held in ("tokens", "unseen")
    )
    found = tables.all(
        "select source, records, tokens, unseen from (select r.source as source, count(*) as records,"
        " cast(sum(case when r.neutralised > 0 then 1 else 0 end) as bigint) as tokens,"
        " cast(sum(r.invisible) as bigint) as unseen from rows r group by r.source) s"
        f" where {bar} order by tokens + unseen desc, source limit {top}"
    )
    return [(shown_name(source), rows, held, hidden) for source, rows, held, hidden in found]


def shown_name(name: Any) -> str:
    """A source or label as the card has it: one from outside may be as long as its row."""
    text = str(name)
    return text if len(text) <= _NAME else f"{text[:_NAME]}…"


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


def _contested(tables: Tables, files: Sequence[str]) -> dict[str, Any]:
    """Rows that ask the same and answer otherwise, of some inputs up to four."""
    inputs = tables.one("select count(*) from contested")[0]
    if not inputs:
        return {"inputs": 0, "rows": 0, "examples": []}
    rows = tables.one("select count(*) from rows r join contested c on r.input = c.input")[0]
    found = tables.all(
        "select t.file, t.position, r.text, r.messages, r.label, e.ending from"
        " (select r.input, r.file, r.position, row_number() over"
        " (partition by r.input order by r.file, r.position) as place"
        " from rows r join (select input from contested order by input limit 5) c on r.input = c.input) t"
        " join rows r on t.file = r.file and t.position = r.position"
        " join ends e on t.file = e.file and t.position = e.position"
        " where t.place <= 4 order by t.input, t.file, t.position"
    )
    examples = [
        {"file": files[file], "position": position, "end": ending, **_asked(text, messages, label)}
        for file, position, text, messages, label, ending in found
    ]
    return {"inputs": inputs, "rows": rows, "examples": examples}


def _revised(tables: Tables, files: Sequence[str]) -> list[tuple[str, str | None, int]]:
    """Pairs of files of which one may be a version of the other; see `Statistics.revised`."""
    if not tables.one("select count(*) from contested")[0]:
        return []
    pairs = tables.all(
        "select one, other, count(*) as shared from (select input, min(file) as one, max(file) as other from"
        f" (select r.input, cast(r.file as bigint) as file from {_KEPT} join contested c on r.input = c.input"
        " union all select distinct input, cast(-1 as bigint) from earlier where ended = 0) a"
        " group by input having count(*) = count(distinct file) and min(file) <> max(file)) p"
        f" group by one, other having count(*) >= {ALARM_ROWS} order by count(*) desc, one, other"
    )
    kept = dict(tables.all(f"select r.file, count(*) from {_KEPT} group by r.file")) if pairs else {}
    found = [
        (files[other], files[one] if one >= 0 else None, shared)
        for one, other, shared in pairs
        if 2 * shared >= min(kept[file] for file in (one, other) if file >= 0)
    ]
    return found[:_KNOWN]


def _asked(text: str | None, messages: list[dict[str, str]] | None, label: str | None) -> dict[str, str]:
    """A row's input and what it answers."""
    if text is not None or not messages or label is not None:
        return {"input": _excerpt(text, messages), "answer": shown_name(label or "")}
    at = max(at for at, turn in enumerate(messages) if turn["role"] == "assistant")
    return {"input": _excerpt(None, messages[:at]), "answer": _excerpt(messages[at]["content"], None)}


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
            f"select r.source, r.text, r.messages, r.chat from {_KEPT} where s.side = {side}"
            " order by s.key, s.rank limit 3"
        )
        for source, text, messages, chat in found:
            turns = _turns(messages or (), chat)
            rows.append(
                {"split": split, "source": shown_name(source), "text": text[:600] if text else None, "messages": turns}
            )
    return rows


def _turns(messages: Sequence[Mapping[str, str]], chat: str | None) -> list[dict[str, str]]:
    """Messages as the card shows them, with what they say beside their contents."""
    beside = json.loads(chat)["messages"] if chat else [{}] * len(messages)
    told = [[f"{key}: {json.dumps(value, ensure_ascii=False)}" for key, value in more.items()] for more in beside]
    shown = ["\n".join(filter(None, [turn["content"], *more])) for turn, more in zip(messages, told, strict=True)]
    return [{"role": turn["role"], "content": text[:600]} for turn, text in zip(messages, shown, strict=True)]


def _excerpt(text: str | None, messages: list[dict[str, str]] | None) -> str:
    whole = text if text is not None else " / ".join(turn["content"][:200] for turn in messages or ())
    line = " ".join(whole[:400].split())
    return line if len(line) <= 160 else line[:159] + "…"
