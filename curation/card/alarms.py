"""Lines on what rows and labels hold that somebody is to look at, out of the figures.

`curation.card.facts` puts them on the card; they count nothing, and end no row.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from curation.identity import BEGINNING, LONG
from curation.page import first_of
from curation.phrases import told
from curation.spellings import mixed_truths
from curation.statistics import ALARM_ONE_IN, ALARM_ROWS, TOLD, Statistics, shown_name
from dropforge.dataset import MOST_LABELS
from dropforge.text import counted


def alarms(statistics: Statistics, classes: bool = False, settled: bool = False, asked: int = 0) -> list[str]:
    """Return lines on sources with strikingly many rows that try to be read otherwise than they look, or have a phrase
    in common, and on labels that do not say what they seem to.

    :param classes: whether labels are what is learned. :param settled: whether rows with one input and several labels
        were taken out. :param asked: rows of a million that are to be evaluation rows.
    """
    phrases = first_of([told(*item) for item in statistics.repeated], _PHRASES, "phrases that open or end many rows")
    of_labels = _of_classes(statistics, settled) if classes else _of_unlearned(statistics)
    of_versions = [] if classes or settled else list(_of_versions(statistics))
    of_versions = first_of(of_versions, TOLD, "pairs of files that answer the same questions otherwise")
    of_versions += _of_layouts(statistics)
    of_sides = [*_of_sides(statistics, asked), *_of_both(statistics, classes), *_of_shapes(statistics, classes)]
    return [*_of_sources(statistics), *_of_spellings(statistics), *of_labels, *of_versions, *of_sides, *phrases]


def _of_sources(statistics: Statistics) -> Iterator[str]:
    for source, rows, tokens, unseen in statistics.suspicious:
        for what, held in ((_TOKENS, tokens), (_UNSEEN, unseen)):
            if held >= ALARM_ROWS and held * ALARM_ONE_IN >= rows:
                yield f"source {source}: {held:,} of {rows:,} rows hold {what}"


#: Whoever wrote a conversation with its template's tokens must hear that they are none any more.
_TOKENS: Final = (
    "control tokens of chat templates, learned as plain text (`< |im_end|>`); if they are meant, write conversations "
    "as `messages`, and documents one a row without such tokens"
)
_UNSEEN: Final = "invisible or reordering characters; who put them there?"


def _of_spellings(statistics: Statistics) -> Iterator[str]:
    """Lines on labels, sources and groups that may be one value, several or none."""
    if mixed := mixed_truths(statistics.truths):
        yield f"labels: truth values are spelled in several ways: {_counted(mixed)}"
    for name, values in {"labels": statistics.alike, **statistics.alike_names}.items():
        for group in values:
            yield f"{name}: one value, or several? {_counted(group)}"
        if more := statistics.more_alike.get(name):
            yield f"{name}: one value, or several? {counted(more, 'more such group')}"
    if other := statistics.groups_otherwise:
        several = {shown_name(name): rows for name, rows in list(other.items())[:TOLD]}
        others = f" and {len(other) - TOLD:,} more" if len(other) > TOLD else ""
        yield (
            f"groups: earlier drops spell them otherwise, {_counted(several)}{others}; rows of one group under two "
            "names are not held on one side of the split"
        )
    if statistics.many_groups:
        yield f"groups: the family has more than {MOST_LABELS:,}, and how its drops spell them is not compared"
    for name, meant in statistics.misnamed.items():
        asked = f"; is `{shown_name(meant)}` meant?" if meant else ""
        yield f"sources: the recipe names `{shown_name(name)}`, which no row has{asked}"
    if statistics.unset:
        yield f"labels: programs write so what is missing: {_counted(statistics.unset)}"
    for name, lost in statistics.unset_names.items():
        of_one = ", and the rows of each are on one side of the split" if name == "groups" else ""
        yield f"{name}: programs write so what is missing{of_one}: {_counted(lost)}"
    for name, days in statistics.dated.items():
        yield f"{name}: Excel writes so what it takes for a date; import the column as text: {_counted(days)}"
    if statistics.shown:
        yield f"labels: as Python shows a list, object, tuple or bytes, or JSON a text: {_counted(statistics.shown)}"
    if statistics.several:
        yield f"labels: several in one, and a class of its own? {_counted(statistics.several)}"
    if statistics.named_twice:
        yield f"labels: are the numbers these names' own? {_counted(statistics.named_twice)}"


def _of_versions(statistics: Statistics) -> Iterator[str]:
    """Lines on files of which one may be a newer version of the other, as with corrected answers."""
    for file, other, rows in statistics.revised:
        yield (
            f"{file}: {rows:,} rows ask what rows of {other or 'earlier drops'} ask, and answer otherwise; where one "
            "is a newer version of the other, drop that alone, or set `curation.label_conflicts`"
        )


def _of_layouts(statistics: Statistics) -> Iterator[str]:
    """A line on copies whose lines are not those of the row that stayed, as where an export lost them."""
    rows = sum(held for _, held in statistics.relaid)
    if rows:
        files = ", ".join(first_of([file for file, _ in statistics.relaid], TOLD, "files"))
        yield (
            f"{files}: {counted(rows, 'row')} went as {'a copy' if rows == 1 else 'copies'}, with other line breaks, "
            "indentation or blanks than the row that stayed; where these are the better ones, name their source in "
            "`curation.prefer`, which decides within a drop, or keep both with `curation.exact_duplicates: keep`"
        )


def _of_sides(statistics: Statistics, asked: int) -> Iterator[str]:
    """Lines on groups that do not hold together what they are to, and on such as leave too little to learn."""
    for file, held, others in statistics.merged:
        yield (
            f"{file}: {held:,} rows have each a group of its own, and {others:,} have none; if cells were merged, "
            "write the group in each row"
        )
    kept, measured = sum(statistics.shapes.values()), statistics.totals["eval"]["rows"]
    if kept >= _SPLIT and measured * _PART >= kept and measured * 1_000_000 > 2 * asked * kept:
        yield (
            f"evaluation: {measured:,} of {kept:,} rows, which are not trained on; `data.eval_fraction` asks for "
            f"{asked / 1_000_000:.0%}, but rows of one group or conversation, or with one input, are on one side"
        )


def _of_both(statistics: Statistics, classes: bool) -> Iterator[str]:
    """Lines on evaluation rows that are not as new to a model as they look. :param classes: see `alarms`."""
    held, there = statistics.shared.get("answers", (0, 0))
    if not classes and held >= ALARM_ROWS and held * _ALSO >= there:
        yield (
            f"evaluation: {held:,} of its {there:,} answers of {LONG} words or more are learned in training rows too, "
            "behind other questions, as where a FAQ asks for one thing in several ways; give such rows one `group`"
        )
    held, there = statistics.shared.get("beginnings", (0, 0))
    if held >= _GROWN and held * _ALSO >= there:
        yield (
            f"evaluation: {held:,} of its {there:,} beginnings of texts ({BEGINNING} characters) are in training "
            "rows too, as where a text grows from row to row; give the rows of one text one `group`"
        )


def _of_classes(statistics: Statistics, settled: bool) -> Iterator[str]:
    """Lines on labels that are learned. :param settled: see `alarms`."""
    kept = sum(statistics.shapes.values())
    contested = 0 if settled else statistics.contested.get("rows", 0)
    rows = max(kept, sum(statistics.known_labels.values()))
    if (
        rows >= ALARM_ROWS
        and statistics.unmeasured
        and (statistics.totals["eval"]["rows"] or statistics.evaluated_labels)
    ):
        more = statistics.unmeasured_classes - len(statistics.unmeasured)
        yield (
            f"evaluation: only training rows have {_counted(statistics.unmeasured)}"
            f"{f' and {more:,} more labels' if more else ''}, which are not measured; drop more such rows, or raise "
            "`data.eval_fraction`"
        )
    if kept < ALARM_ROWS:
        return
    if _OF_A_CLASS * statistics.classes[0] > kept:
        yield (
            f"labels: {statistics.classes[0]:,} classes of {kept:,} rows, fewer than {_OF_A_CLASS} of each; are they "
            "scores, ids or answers?"
        )
    if contested * _CONTESTED >= kept:
        yield (
            f"labels: {contested:,} rows have another label than rows with the same input; a row has one class, and "
            "`curation.label_conflicts` takes such rows out"
        )


def _of_unlearned(statistics: Statistics) -> Iterator[str]:
    """Lines on labels that are not learned."""
    if statistics.classes[0]:
        unlearned = counted(statistics.classes[0], "value")
        yield f"labels: {unlearned} that this task does not learn; `task: classification` learns them"
    if not statistics.shapes["messages"]:
        return
    only = statistics.classes[0] == len(statistics.truths)  # else 0 is one number of several
    for no in ("false", "0") if only else ("false",):
        if wrong := sum(rows for label, rows in statistics.truths.items() if label.lower() == no):
            yield f"labels: {wrong:,} rows have `{no}`; an answer that is marked as wrong so is learned all the same"


#: Lines about phrases: they are alike, and would hide the others.
_PHRASES: Final = 3
#: One row in so many is more than the mistakes of who labelled them.
_CONTESTED: Final = 20
#: Rows from which on chance alone hardly makes one in so many an evaluation row where half as many are asked for.
_SPLIT: Final = 50


def _of_shapes(statistics: Statistics, classes: bool) -> Iterator[str]:
    """A line on conversations beside plain texts, of which a model is asked as one. :param classes: see `alarms`."""
    chats, texts = (statistics.shapes.get(shape, 0) for shape in ("messages", "text"))
    if not classes and chats and texts:
        takes = "a user's turn" if chats >= texts else "the beginning of a text"
        yield (
            f"shapes: {counted(chats, 'conversation')} and {counted(texts, 'plain text')}; what is registered takes a "
            f"prompt as {takes}, as most rows are"
        )


#: One of so many answers or beginnings is more than chance, and so many beginnings are no licence above many texts.
_ALSO: Final = 20
_GROWN: Final = 3
_PART: Final = 5
#: Rows of a class, on average, with fewer of which nothing can be learned of it.
_OF_A_CLASS: Final = 2


def _counted(labels: dict[str, int]) -> str:
    shown = [
        shown_name(label if label.isprintable() and label == label.strip() else repr(label))
        + f" ({counted(rows, 'row')})"
        for label, rows in labels.items()
    ]
    return ", ".join(shown[:TOLD]) + (f" and {len(shown) - TOLD} more" if len(shown) > TOLD else "")
