"""The card's sections that are rows and tables: what was kept, what went and why, files and rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from html import escape
from typing import Any, Final

from curation.card.facts import filters
from curation.near import HEADS
from curation.page import place_cell, size_text, visible
from curation.plots import Bar, bars
from curation.reasons import filtered, mend, quarantined
from dropforge.recipe_data import found

_SIMILARITIES: Final = (0.5, 0.6, 0.7, 0.75, 0.8, 0.85, 0.9, 0.95)


def samples(card: Mapping[str, Any]) -> str:
    cells = []
    for row in card["statistics"]["samples"]:
        turns = row["messages"] or [{"role": "text", "content": row["text"] or ""}]
        body = "".join(
            f'<p class="turn {escape(turn["role"])}"><b>{escape(turn["role"])}</b>{escape(turn["content"])}</p>'
            for turn in turns
        )
        tag = f'<span class="tag t-{row["split"]}">{row["split"]}</span>'
        cells.append(f"<article>{tag}<small>{escape(visible(row['source']))}</small>{body}</article>")
    return f'<div class="cards">{"".join(cells)}</div>'


def examples(card: Mapping[str, Any], ended: Callable[[Mapping[str, int]], dict[str, int]]) -> str:
    """Rows that ended, by reason. :param ended: takes the reasons from the counts."""
    examples = card["statistics"]["quarantine"]
    parts = []
    for reason, rows in ended(card["counts"]).items():
        found = "".join(
            f"<tr><td>{place_cell(item)}</td>"
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


def copies(card: Mapping[str, Any]) -> str:
    if not card["counts"].get("duplicate"):
        return ""
    rows = "".join(
        f"<tr><td class=n>{item['copies']:,}</td><td>{place_cell(item)}</td>"
        f"<td>{escape(visible(item['excerpt']))}</td></tr>"
        for item in card["statistics"]["clusters"]
    )
    return (
        '<div class="scroll"><table><thead><tr><th class=n>copies</th><th>kept row</th><th>content</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def near(card: Mapping[str, Any]) -> str:
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
    if unmet := card["statistics"].get("unmet", 0):
        rule += (
            f"<p>{unmet:,} rows stayed that share a print with very many others and were compared with the {HEADS} of"
            " lowest rank alone. Text that many rows have in common, such as a template, may hide duplicates there.</p>"
        )
    examples = "".join(
        f"<tr><td class=n>{item['shared'] / item['either']:.2f}</td>"
        + "".join(
            f"<td>{place_cell(row)}<br>{escape(visible(row['excerpt']))}</td>" for row in (item["gone"], item["kept"])
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


def conflicts(card: Mapping[str, Any]) -> str:
    """Rows that ask the same and answer otherwise."""
    told = card["statistics"].get("contested")
    if not told or not told["inputs"]:
        return ""
    rows = "".join(
        f"<tr><td>{escape(visible(item['input']))}</td><td>{escape(visible(item['answer']))}</td>"
        f"<td>{escape(item['end'])}</td><td>{place_cell(item)}</td></tr>"
        for item in told["examples"]
    )
    return (
        f"<p>{told['inputs']:,} inputs have several labels or answers; {told['rows']:,} rows of the drop hold them."
        f" <code>label_conflicts: {escape(card['rules'].get('label_conflicts', 'keep'))}</code></p>"
        '<div class="scroll"><table><thead><tr><th>input</th><th>answer</th><th>end</th><th>row</th></tr></thead>'
        f"<tbody>{rows}</tbody></table></div>"
    )


def evaluation_sets(card: Mapping[str, Any]) -> str:
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


def inputs(card: Mapping[str, Any]) -> str:
    ends = ("train", "eval", "duplicate", *(["near_duplicate"] if "near" in card["rules"] else []))
    rows = []
    for item, counts in list(zip(card["inputs"], card["statistics"]["by_file"], strict=True))[:200]:
        numbers = (item["rows"], *(counts.get(end, 0) for end in ends), sum(quarantined(counts).values()))
        numbers += (sum(filtered(counts).values()),) if filters(card) else ()
        cells = "".join(f"<td class=n>{number:,}</td>" for number in numbers)
        rows.append(
            f"<tr><td><code>{escape(item['key'])}</code></td><td class=n>{size_text(item['size'])}</td>{cells}</tr>"
        )
    names = ("rows", *(end.replace("_", " ") for end in ends), "quarantined", *(["filtered"] if filters(card) else []))
    head = "".join(f"<th class=n>{name}</th>" for name in names)
    more = f"<p>and {len(card['inputs']) - 200:,} more files</p>" if len(card["inputs"]) > 200 else ""
    return (
        f'<div class="scroll"><table><thead><tr><th>file</th><th class=n>size</th>{head}</tr></thead>'
        f"<tbody>{''.join(rows)}</tbody></table></div>{more}"
    )


def identity(card: Mapping[str, Any]) -> str:
    facts = {
        "digest": card["digest"],
        "drop": f"{card['drop']['prefix']} ({card['drop']['id']})",
        **({"licence": card["license"]} if card.get("license") else {}),
        **card["rules"],
        "shards": f"{len(card['shards'])} Parquet files, {size_text(sum(shard['bytes'] for shard in card['shards']))}",
        "Unicode": card["unicode"],
    }
    rows = "".join(
        f"<tr><th>{escape(name.replace('_', ' '))}</th><td><code>{escape(str(value))}</code></td></tr>"
        for name, value in facts.items()
    )
    return f'<div class="scroll"><table class="facts"><tbody>{rows}</tbody></table></div>'
