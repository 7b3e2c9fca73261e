"""The dataset card: one HTML page that needs nothing else, and the same facts as JSON.

Everything that comes from the drop is escaped, and a content policy in the page forbids scripts and addresses.
"""

from __future__ import annotations

import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from importlib.resources import files
from typing import Any, Final

from curation.page import section, share, size_text, visible
from curation.pii import report
from curation.plots import Bar, bars, histogram, short
from curation.reasons import filtered, mend, quarantined
from curation.statistics import Statistics
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.recipe_data import found

_COLOURS: Final = {"train": "--train", "eval": "--eval"}
_SIMILARITIES: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def summary(drop: Drop, manifest: Manifest, statistics: Statistics, warnings: Sequence[str]) -> dict[str, Any]:
    """All facts of the card as plain values."""
    asked = manifest.rules.get("pii")
    return {
        **({"pii": report.facts(asked, statistics.touched)} if asked else {}),
        "schema": 1,
        "family": drop.family,
        "drop": {
            "name": drop.drop,
            "id": drop.id,
            "prefix": drop.prefix,
            "bytes": drop.total_bytes,
        },
        "digest": manifest.digest,
        "counts": dict(manifest.counts),
        "rules": dict(manifest.rules),
        "inputs": [dict(item) for item in manifest.inputs],
        "shards": [asdict(shard) for shard in manifest.shards],
        "warnings": list(warnings),
        "statistics": asdict(statistics),
        "unicode": unicodedata.unidata_version,
    }


def render(card: Mapping[str, Any]) -> str:
    """The page."""
    sections = [
        _head(card),
        _tiles(card),
        section("Where every row went", _flow(card), "Each input row has exactly one end; the ledger lists them all."),
        section("Lengths", _lengths(card)),
        section("Sources", _sources(card)),
        section("Rows as the model sees them", _samples(card)),
        section(
            "Quarantine", _examples(card, quarantined), "Rows that could not be used, with their place in the file."
        ),
        section(
            "Filtered", _examples(card, filtered), "Rows that can be used, and that the recipe's rules do not want."
        ),
        section("Texts changed", _changes(card)),
        section("Languages", _languages(card)),
        section(
            "Copies",
            _clusters(card),
            "The content that came most often; one row of each was kept, or one that is nearly the same.",
        ),
        section("Near duplicates", _near(card), "Rows that are nearly the same as one that was kept."),
        section("Personal data and secrets", report.section(card)),
        section("Evaluation sets", _evaluation_sets(card), "Rows that held an item of one are filtered."),
        section("Files", _files(card)),
        section("Rules and identity", _rules(card)),
    ]
    style = files("curation").joinpath("card.css").read_text(encoding="utf-8")
    title = f"{escape(card['family'])} · {card['digest'][:12]}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Dataset {title}</title><style>{style}</style></head><body><main>{''.join(sections)}"
        "<footer>Written by Dropforge's curation. The machine-readable card lies beside this page.</footer>"
        "</main></body></html>\n"
    )


def _head(card: Mapping[str, Any]) -> str:
    warnings = "".join(f"<li>{escape(text)}</li>" for text in card["warnings"][:50])
    notes = f'<aside class="warn"><strong>Worth a look</strong><ul>{warnings}</ul></aside>' if warnings else ""
    return (
        f'<header><p class="kind">Dataset version</p><h1>{escape(card["family"])}</h1>'
        f'<p class="sub">from drop <strong>{escape(card["drop"]["name"])}</strong>'
        f' · <code title="{card["digest"]}">{card["digest"][:16]}</code></p></header>{notes}'
    )


def _tiles(card: Mapping[str, Any]) -> str:
    counts, statistics = card["counts"], card["statistics"]
    totals = statistics["totals"].values()
    bad, gone = sum(quarantined(counts).values()), sum(filtered(counts).values())
    same, near = counts.get("duplicate", 0), counts.get("near_duplicate", 0)
    tiles = [
        ("rows in", f"{counts['input']:,}", f"{len(card['inputs'])} files, {size_text(card['drop']['bytes'])}"),
        ("train", f"{counts['train']:,}", share(counts["train"], counts["input"])),
        ("eval", f"{counts['eval']:,}", share(counts["eval"], counts["input"])),
        (
            "duplicates",
            f"{same + near:,}",
            share(same + near, counts["input"]) + (f", {near:,} of them near" if "near" in card["rules"] else ""),
        ),
        ("quarantined", f"{bad:,}", share(bad, counts["input"])),
        *([("filtered", f"{gone:,}", share(gone, counts["input"]))] if _filters(card) else []),
        ("words", short(sum(total["words"] for total in totals)), f"median {statistics['medians']['words']:,} a row"),
    ]
    cells = "".join(
        f'<div class="tile t-{name.split()[0]}"><span>{name}</span><b>{value}</b><small>{note}</small></div>'
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _flow(card: Mapping[str, Any]) -> str:
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
            if _filters(card)
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
    near = '<i style="background:var(--near)"></i>near duplicate ' if "near" in card["rules"] else ""
    gone_too = '<i style="background:var(--filtered)"></i>filtered ' if _filters(card) else ""
    return f"<figure>{bars(funnel, 'funnel')}</figure>{_LEGEND.format(near=near, filtered=gone_too)}{below}"


_LEGEND: Final = (
    '<p class="legend"><i style="background:var(--train)"></i>train <i style="background:var(--eval)"></i>eval '
    '<i style="background:var(--copy)"></i>duplicate {near}{filtered}'
    '<i style="background:var(--bad)"></i>quarantined</p>'
)


def _filters(card: Mapping[str, Any]) -> bool:
    """Whether the recipe asks for rules that rows may break, or drops rows."""
    return bool(filtered(card["counts"])) or any(
        name in card["rules"] for name in ("quality", "language", "decontamination")
    )


def _lengths(card: Mapping[str, Any]) -> str:
    statistics = card["statistics"]
    parts = []
    for name, title in (("chars", "Characters a row"), ("words", "Words a row")):
        plot = histogram(statistics["histograms"][name], statistics["edges"], _COLOURS, title)
        parts.append(f"<div><h3>{title}</h3><figure>{plot}</figure><p>median {statistics['medians'][name]:,}</p></div>")
    return f'<div class="two">{"".join(parts)}</div>'


def _sources(card: Mapping[str, Any]) -> str:
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
    facts += [f"{touched['blank']:,} blank lines passed over"] if touched.get("blank") else []
    return text + f"<p>{' · '.join(facts)}</p>"


def _samples(card: Mapping[str, Any]) -> str:
    cells = []
    for row in card["statistics"]["samples"]:
        turns = row["messages"] or [{"role": "text", "content": row["text"] or ""}]
        body = "".join(
            f'<p class="turn {escape(turn["role"])}"><b>{escape(turn["role"])}</b>{escape(turn["content"])}</p>'
            for turn in turns
        )
        tag = f'<span class="tag t-{row["split"]}">{row["split"]}</span>'
        cells.append(f"<article>{tag}<small>{escape(row['source'])}</small>{body}</article>")
    return f'<div class="cards">{"".join(cells)}</div>'


def _examples(card: Mapping[str, Any], ended: Callable[[Mapping[str, int]], dict[str, int]]) -> str:
    """Rows that ended, by reason. :param ended: takes the reasons from the counts."""
    examples = card["statistics"]["quarantine"]
    parts = []
    for reason, rows in ended(card["counts"]).items():
        found = "".join(
            f"<tr><td><code>{escape(item['file'])}</code> @ {item['position']:,}</td>"
            f"<td>{escape(visible(item['detail']))}</td>"
            f"<td><code>{escape(visible(item['head']))}</code></td></tr>"
            for item in examples
            if item["reason"] == reason
        )
        number = f"{rows:,} row{'s' if rows > 1 else ''}"
        parts.append(
            f"<details open><summary><code>{reason}</code> {number}. {escape(mend(reason))}.</summary>"
            '<div class="scroll"><table class="faults"><thead><tr><th>place</th><th>why</th><th>first bytes</th></tr>'
            f"</thead><tbody>{found}</tbody></table></div></details>"
        )
    return "".join(parts)


def _changes(card: Mapping[str, Any]) -> str:
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


def _languages(card: Mapping[str, Any]) -> str:
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


def _clusters(card: Mapping[str, Any]) -> str:
    if not card["counts"].get("duplicate"):
        return ""
    rows = "".join(
        f"<tr><td class=n>{item['copies']:,}</td><td><code>{escape(item['file'])}</code> @ {item['position']:,}</td>"
        f"<td>{escape(visible(item['excerpt']))}</td></tr>"
        for item in card["statistics"]["clusters"]
    )
    return (
        '<div class="scroll"><table><thead><tr><th class=n>copies</th><th>kept row</th><th>content</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def _near(card: Mapping[str, Any]) -> str:
    """How the rows that went are like those that stayed, and which pairs the bands find at all."""
    near = card["rules"].get("near")
    if near is None:
        return ""
    shares = {similarity: found(similarity, near["bands"], near["rows"]) for similarity in _SIMILARITIES}
    curve = [
        Bar(f"similarity {similarity:g}", [("--near", round(share * 1000), f"{share:.1%}")], f"{share:.1%}")
        for similarity, share in shares.items()
    ]
    rule = (
        f"<p>{card['counts'].get('near_duplicate', 0):,} rows went, whose Jaccard similarity to a row that stayed is at"
        f" least {near['per_million'] / 1_000_000:g}, over shingles of {near['size']} {escape(near['shingle'])}s.</p>"
    )
    examples = "".join(
        f"<tr><td class=n>{item['shared'] / item['either']:.2f}</td>"
        + "".join(
            f"<td><code>{escape(row['file'])}</code> @ {row['position']:,}<br>{escape(visible(row['excerpt']))}</td>"
            for row in (item["gone"], item["kept"])
        )
        + "</tr>"
        for item in card["statistics"]["near"]
    )
    table = (
        "<h3>The least similar that went</h3>"
        '<div class="scroll"><table><thead><tr><th class=n>similarity</th><th>gone</th><th>kept</th></tr></thead>'
        f"<tbody>{examples}</tbody></table></div>"
    )
    heading = f"<h3>Pairs found by {near['bands']} bands of {near['rows']} rows</h3>"
    return rule + (table if examples else "") + heading + f"<figure>{bars(curve, 'pairs found')}</figure>"


def _evaluation_sets(card: Mapping[str, Any]) -> str:
    told = card.get("evaluation_sets")
    if not told:
        return ""
    rows = "".join(
        f"<tr><td>{escape(name)}</td>"
        + "".join(f"<td class=n>{numbers[what]:,}</td>" for what in ("items", "not_sought", "found", "rows"))
        + "</tr>"
        for name, numbers in told["sets"].items()
    )
    items = "".join(
        f"<tr><td class=n>{item['rows']:,}</td><td>{escape(item['set'])} @ {item['position']:,}</td>"
        f"<td>{escape(visible(item['text']))}</td></tr>"
        for item in told["found"]
    )
    head = "<th>set</th>" + "".join(f"<th class=n>{name}</th>" for name in ("items", "too short", "found", "rows"))
    table = f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'
    note = "<p>Items are found by their words. The same question in other words, or with other numbers, is not.</p>"
    if not items:
        return table + note
    return (
        f'{table}{note}<h3>Items found most often</h3><div class="scroll"><table><thead><tr><th class=n>rows</th>'
        f"<th>item</th><th>begins</th></tr></thead><tbody>{items}</tbody></table></div>"
    )


def _files(card: Mapping[str, Any]) -> str:
    ends = ("train", "eval", "duplicate", *(["near_duplicate"] if "near" in card["rules"] else []))
    rows = []
    for item, counts in list(zip(card["inputs"], card["statistics"]["by_file"], strict=True))[:200]:
        numbers = (item["rows"], *(counts.get(end, 0) for end in ends), sum(quarantined(counts).values()))
        numbers += (sum(filtered(counts).values()),) if _filters(card) else ()
        cells = "".join(f"<td class=n>{number:,}</td>" for number in numbers)
        rows.append(
            f"<tr><td><code>{escape(item['key'])}</code></td><td class=n>{size_text(item['size'])}</td>{cells}</tr>"
        )
    names = ("rows", *(end.replace("_", " ") for end in ends), "quarantined", *(["filtered"] if _filters(card) else []))
    head = "".join(f"<th class=n>{name}</th>" for name in names)
    more = f"<p>and {len(card['inputs']) - 200:,} more files</p>" if len(card["inputs"]) > 200 else ""
    return (
        f'<div class="scroll"><table><thead><tr><th>file</th><th class=n>size</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{more}"
    )


def _rules(card: Mapping[str, Any]) -> str:
    facts = {
        "digest": card["digest"],
        "drop": f"{card['drop']['prefix']} ({card['drop']['id']})",
        **card["rules"],
        "shards": f"{len(card['shards'])} Parquet files, {size_text(sum(shard['bytes'] for shard in card['shards']))}",
        "Unicode": card["unicode"],
    }
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'
