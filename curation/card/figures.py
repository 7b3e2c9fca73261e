"""The card's sections that are plots first of all."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from typing import Any, Final

from curation.card.facts import filters
from curation.page import legend, share
from curation.plots import Bar, bars, histogram
from curation.reasons import filtered, quarantined

_COLOURS: Final = {"train": "--train", "eval": "--eval"}


def flow(card: Mapping[str, Any]) -> str:
    counts = card["counts"]
    bad = sum(quarantined(counts).values())
    usable = counts["input"] - bad
    gone = sum(filtered(counts).values())
    wanted = usable - gone
    kept = counts["train"] + counts["eval"]
    funnel = [
        Bar("read", [("--ink-2", counts["input"], f"{counts['input']:,} rows")], f"{counts['input']:,}"),
        Bar(
            "usable",
            [("--ink-2", usable, f"{usable:,} usable"), ("--bad", bad, f"{bad:,} quarantined")],
            f"{usable:,}",
        ),
        *(
            [
                Bar(
                    "wanted",
                    [("--ink-2", wanted, f"{wanted:,} wanted"), ("--filtered", gone, f"{gone:,} filtered")],
                    f"{wanted:,}",
                )
            ]
            if filters(card)
            else []
        ),
        Bar(
            "distinct",
            [
                ("--ink-2", kept, f"{kept:,} kept"),
                ("--copy", counts.get("duplicate", 0), f"{counts.get('duplicate', 0):,} duplicates"),
                ("--near", counts.get("near_duplicate", 0), f"{counts.get('near_duplicate', 0):,} near duplicates"),
            ],
            f"{kept:,}",
        ),
        Bar(
            "split",
            [(_COLOURS[name], counts[name], f"{name}: {counts[name]:,}") for name in ("train", "eval")],
            f"{counts['train']:,} + {counts['eval']:,}",
        ),
    ]
    reasons = [
        Bar(reason, [(colour, rows, f"{reason}: {rows:,} rows")], f"{rows:,} · {share(rows, counts['input'])}")
        for colour, ends in (("--bad", quarantined(counts)), ("--filtered", filtered(counts)))
        for reason, rows in ends.items()
    ]
    below = f"<h3>Rows by reason</h3><figure>{bars(reasons, 'rows by reason')}</figure>" if reasons else ""
    ends = {"--train": "train", "--eval": "eval", "--copy": "duplicate"}
    ends |= {"--near": "near duplicate"} if "near" in card["rules"] else {}
    ends |= {"--filtered": "filtered"} if filters(card) else {}
    return f"<figure>{bars(funnel, 'funnel')}</figure>{legend({**ends, '--bad': 'quarantined'})}{below}"


def lengths(card: Mapping[str, Any]) -> str:
    statistics = card["statistics"]
    parts = []
    for name, title in (("chars", "Characters a row"), ("words", "Words a row")):
        sides = {side: statistics["histograms"][name][side] for side in _COLOURS}
        plot = histogram(sides, statistics["edges"], _COLOURS, title)
        parts.append(f"<div><h3>{title}</h3><figure>{plot}</figure><p>median {statistics['medians'][name]:,}</p></div>")
    return f'<div class="two">{"".join(parts)}</div>'


def sources(card: Mapping[str, Any]) -> str:
    statistics = card["statistics"]
    rows = [
        Bar(name, [("--train", train, f"train: {train:,}"), ("--eval", held, f"eval: {held:,}")], f"{train + held:,}")
        for name, train, held in statistics["sources"]
    ]
    text = f"<figure>{bars(rows, 'rows by source')}</figure>"
    if statistics["labels"]:
        labels = [Bar(name, [("--ink-2", rows, f"{rows:,}")], f"{rows:,}") for name, rows in statistics["labels"]]
        text += f"<h3>Labels</h3><figure>{bars(labels, 'rows by label')}</figure>"
    shapes = statistics["shapes"]
    facts = [f"{shapes['messages']:,} conversations", f"{shapes['text']:,} plain texts"]
    facts += [f"{statistics['groups']:,} groups, each whole on one side"] if statistics["groups"] else []
    touched = statistics["touched"]
    facts += (
        [f"{touched['neutralised']:,} rows with control tokens made harmless"] if touched.get("neutralised") else []
    )
    facts += (
        [f"{touched['invisible']:,} rows with invisible or reordering characters"] if touched.get("invisible") else []
    )
    own = {name.removeprefix("own_"): rows for name, rows in touched.items() if name.startswith("own_")}
    facts += [f"{rows:,} rows changed by the kernel {escape(name)}" for name, rows in own.items()]
    facts += [f"{touched['short']:,} rows too short for a shingle, compared whole"] if touched.get("short") else []
    facts += [f"{touched['blank']:,} blank lines skipped"] if touched.get("blank") else []
    return text + f"<p>{' · '.join(facts)}</p>"


def changes(card: Mapping[str, Any]) -> str:
    """How many rows and lines the stages changed."""
    touched = card["statistics"]["touched"]
    rows = [
        Bar(name, [("--ink-2", touched[name], f"{told}: {touched[name]:,}")], f"{touched[name]:,} {told}")
        for name, told in _CHANGES.items()
        if touched.get(name)
    ]
    return f"<figure>{bars(rows, 'texts changed')}</figure>" if rows else ""


_CHANGES: Final = {
    "unicode_repaired": "rows",
    "unicode_mojibake": "rows",
    "unicode_new_lines": "rows",
    "unicode_controls": "rows",
    "unicode_unseen": "rows",
    "unicode_composed": "rows",
    "unicode_not_composed": "rows left",
    "unicode_lost": "rows left",
    "c4_texts_changed": "texts",
    "c4_lines_no_terminal_punctuation": "lines",
    "c4_lines_few_words": "lines",
    "c4_lines_long_word": "lines",
    "c4_lines_javascript": "lines",
    "c4_lines_policies": "lines",
    "c4_citations": "marks",
}


def languages(card: Mapping[str, Any]) -> str:
    """The languages of all rows that were looked at, the twelve most frequent."""
    touched = card["statistics"]["touched"]
    found = {name.removeprefix("language_"): rows for name, rows in touched.items() if name.startswith("language_")}
    most = sorted(found.items(), key=lambda item: (-item[1], item[0]))
    rest = sum(rows for _, rows in most[12:])
    shown = most[:12] + ([(f"{len(most) - 12} others", rest)] if rest else [])
    return "".join(
        [
            "<figure>",
            bars([Bar(n, [("--ink-2", r, f"{n}: {r:,}")], f"{r:,}") for n, r in shown], "languages"),
            "</figure>",
        ]
        if shown
        else []
    )
