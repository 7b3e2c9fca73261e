"""The page: which sections there are, in which order, and what stands above them."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from importlib.resources import files
from typing import Any

from curation.card import columns, drift, drops, figures, tables
from curation.card.facts import filters
from curation.page import first_of, section, share, size_text, visible
from curation.pii import report
from curation.plots import short
from curation.reasons import filtered, quarantined
from dropforge.text import counted


def render(card: Mapping[str, Any]) -> str:
    """The page."""
    sections = [
        _head(card),
        _tiles(card),
        section("Drops of the version", drops.section(card), "The rest of this page is about the last one only."),
        section(
            "Where every row went", figures.flow(card), "Each input row has exactly one end; the ledger lists them all."
        ),
        section("Lengths", figures.lengths(card)),
        section("Drift", drift.section(card)),
        section("Sources", figures.sources(card)),
        section("Rows as the model sees them", tables.samples(card)),
        section(
            "Quarantine",
            tables.examples(card, quarantined),
            "Rows that could not be used, with their place in the file.",
        ),
        section(
            "Filtered",
            tables.examples(card, filtered),
            "Rows that can be used, and that the recipe's rules do not want.",
        ),
        section("Texts changed", figures.changes(card)),
        section("Languages", figures.languages(card)),
        section(
            "Copies",
            tables.copies(card),
            "The content that came most often; one row of each was kept, or one that is nearly the same.",
        ),
        section("Near duplicates", tables.near(card), "Rows that are nearly the same as one that was kept."),
        section("Label conflicts", tables.conflicts(card), "Rows that ask the same and answer otherwise."),
        section("Personal data and secrets", report.section(card)),
        section("Evaluation sets", tables.evaluation_sets(card), "Rows that held an item of one are filtered."),
        section("Columns", columns.section(card), "What the rows have that were read. No row goes for a change."),
        section("Files", tables.inputs(card)),
        section("Rules and identity", tables.identity(card)),
    ]
    style = files("curation.card").joinpath("card.css").read_text(encoding="utf-8")
    title = f"{escape(card['family'])} · {card['digest'][:12]}"
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
        f"<title>Dataset {title}</title><style>{style}</style></head><body><main>{''.join(sections)}"
        "<footer>Written by Dropforge's curation. The machine-readable card is beside this page.</footer>"
        "</main></body></html>\n"
    )


def _head(card: Mapping[str, Any]) -> str:
    told = first_of(card["warnings"], 50, "in card.json")
    warnings = "".join(f"<li>{escape(visible(text))}</li>" for text in told)
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
        (
            "rows in",
            f"{counts['input']:,}",
            f"{counted(len(card['inputs']), 'file')}, {size_text(card['drop']['bytes'])}",
        ),
        ("train", f"{counts['train']:,}", share(counts["train"], counts["input"])),
        ("eval", f"{counts['eval']:,}", share(counts["eval"], counts["input"])),
        (
            "duplicates",
            f"{same + near:,}",
            share(same + near, counts["input"]) + (f", {near:,} of them near" if "near" in card["rules"] else ""),
        ),
        ("quarantined", f"{bad:,}", share(bad, counts["input"])),
        *([("filtered", f"{gone:,}", share(gone, counts["input"]))] if filters(card) else []),
        ("words", short(sum(total["words"] for total in totals)), f"median {statistics['medians']['words']:,} a row"),
    ]
    cells = "".join(
        f'<div class="tile t-{name.split()[0]}"><span>{name}</span><b>{value}</b><small>{note}</small></div>'
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'
