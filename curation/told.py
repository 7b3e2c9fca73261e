"""A card's facts and the gate's rules as lines of text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

from curation.gate import Check
from curation.notes import Cause
from curation.pace import duration
from curation.page import first_of, visible
from curation.pii.report import NAMES
from curation.reasons import filtered, mend, quarantined
from curation.sample import Told
from dropforge.recipe_data import found

#: Warnings, and changes of columns: names of files and columns come from outside.
_LINES: Final = 20
#: Files that are named with what went of each.
_FILES: Final = 5


def card_lines(card: Mapping[str, Any]) -> list[str]:
    """Where the rows went, why with the mends, personal data, which near duplicates are found, and how far the
    rows lie from those of the version before."""
    # Warnings name files and columns, whose names are whatever somebody made them.
    told = first_of(card["warnings"], _LINES, "warnings (the card has them)")
    told += first_of(card["columns"]["changed"], _LINES, "changes of columns (the card has them)")
    rows = [*_funnel(card), *_copies(card), *_reasons(card)]
    return [*map(visible, told), *rows, *_pii(card), *_near(card), *_drift(card)]


def gate_lines(rules: Sequence[Check]) -> list[str]:
    """Each rule with what was found, and the mend where it is broken."""
    lines = ["Checks"]
    for rule in rules:
        lines.append(f"  {'ok    ' if rule.ok else 'BROKEN'}  {rule.name}: {visible(rule.found)}; wanted {rule.wanted}")
        lines += [] if rule.ok else [f"          {rule.mend}."]
    return lines


def time_line(seconds: tuple[float, float]) -> str:
    """How long all rows would take."""
    least, most = map(duration, seconds)
    return f"All rows would take about {least if least == most else f'{least} to {most}'} on this machine."


def _funnel(card: Mapping[str, Any]) -> list[str]:
    counts = card["counts"]
    usable = counts["input"] - sum(quarantined(counts).values())
    wanted = usable - sum(filtered(counts).values())
    steps = [("read", counts["input"]), ("usable", usable), ("wanted", wanted)]
    steps += [("not a duplicate", wanted - counts.get("duplicate", 0))]
    near = counts.get("near_duplicate", 0)
    steps += [("nor a near one", wanted - counts.get("duplicate", 0) - near)] if "near" in card["rules"] else []
    steps += [(split, counts[split]) for split in ("train", "eval")]
    lines = [_row(name, rows, counts["input"]) for name, rows in steps]
    if "sample" in card and not Told(**card["sample"]).whole:
        lines.append("  Of copies a sample shows only those that are both in it: in the whole more rows go.")
    return ["Rows", *lines]


def _copies(card: Mapping[str, Any]) -> list[str]:
    """How many copies went, by file, the most first."""
    lines = []
    for end, name in (("duplicate", "duplicates"), ("near_duplicate", "near duplicates")):
        files = [
            (counts[end], visible(item["key"]))
            for item, counts in zip(card["inputs"], card["statistics"]["by_file"], strict=True)
            if counts.get(end)
        ]
        worst = [f"{rows:,} in {file}" for rows, file in sorted(files, key=lambda one: -one[0])[:_FILES]]
        more = [f"and {len(files) - _FILES:,} more files"] if len(files) > _FILES else []
        if files:
            lines.append(f"  {name:26}{sum(rows for rows, _ in files):>12,}: {', '.join([*worst, *more])}")
    return ["Copies", *lines] if lines else []


def _reasons(card: Mapping[str, Any]) -> list[str]:
    counts = card["counts"]
    gone = {**quarantined(counts), **filtered(counts)}
    lines = [f"{_row(reason, rows, counts['input'])}  {mend(reason)}." for reason, rows in gone.items()]
    lines += [f"  {Cause(**cause).text()}" for cause in card.get("causes", ())]
    return ["Reasons", *lines] if lines else []


def _pii(card: Mapping[str, Any]) -> list[str]:
    if "pii" not in card:
        return []
    values = card["pii"]["found"]
    return [
        f"Personal data and secrets: {sum(values.values()):,} values in {card['pii']['rows']:,} rows",
        *(f"  {NAMES[kind]:26}{number:>12,}" for kind, number in values.items()),
    ]


def _near(card: Mapping[str, Any]) -> list[str]:
    near = card["rules"].get("near")
    if near is None:
        return []
    shares = [f"{at:g}: {found(at, near['bands'], near['rows']):.1%}" for at in (0.6, 0.7, 0.8, 0.9, 0.95)]
    return [f"Near duplicates found, by similarity: {', '.join(shares)}"]


def _drift(card: Mapping[str, Any]) -> list[str]:
    drift = card.get("drift")
    if drift is None:
        return []
    told = [f"{name} {item['distance'] / 1000:g} ({item['chance'] / 1000:g})" for name, item in drift["found"].items()]
    return [f"Drift from {drift['parent'][:12]} (by chance): {', '.join(told) or 'its card cannot be read'}"]


def _row(name: str, rows: int, whole: int) -> str:
    return f"  {name:26}{rows:>12,}{rows / max(1, whole):>8.1%}"
