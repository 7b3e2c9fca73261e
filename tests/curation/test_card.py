"""The card: complete, self-contained, and deaf to what the data wants it to say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from curation.card import render
from curation.plots import Bar, bars, histogram, outline, pairs, short
from curation.told import card_lines
from dropforge.dataset import Manifest
from dropforge.store import FolderStore

EVIL = '<script>alert("x")</script><img src=x onerror=alert(1)>"\'>\u202e'
VOID = {"meta", "br", "img"}


class Page(HTMLParser):
    """Collects tags and checks that they close."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


@pytest.fixture
def card(
    make: Callable[..., Manifest], texts: Callable[..., list[bytes]], store: FolderStore
) -> tuple[Manifest, str, Any]:
    evil = [json.dumps({"text": f"{EVIL} {n}", "source": EVIL, "label": EVIL, "group": EVIL}) for n in range(3)]
    rows = [*texts(80), *(row.encode() for row in evil), texts(1)[0], EVIL.encode(), json.dumps({EVIL: 1}).encode()]
    manifest = make({"a<b>.jsonl": b"\n".join(rows), "fake.parquet": b"\n".join(texts(10, 100)), "none.csv": b""})
    page, data = store.get(manifest.files["card_html"]).decode(), json.loads(store.get(manifest.files["card_json"]))
    return manifest, page, data


def test_page_is_whole_and_needs_nothing_else(card: tuple[Manifest, str, Any]) -> None:
    _, text, _ = card
    page = Page()
    page.feed(text)
    assert page.open == []
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "img", "link", "iframe", "object", "form", "base"}
    assert not [attrs for _, attrs in page.tags if {"src", "href", "onerror", "style_src"} & attrs.keys()]
    assert not re.search(r"url\(|@import|https?://(?!www\.w3\.org/2000/svg)", text)
    assert "default-src 'none'" in text
    assert names >= {"svg", "rect", "table", "details"}


def test_what_steers_a_reader_is_spelled_out_in_plots() -> None:
    odd = "\x1b]0;title\x07\u202eexe"
    made = bars([Bar(odd, [("--train", 3, f"{odd}: 3")], odd)], "rows") + pairs([(odd, 0.5, 0.2)], "shares")
    assert not {"\x1b", "\x07", "\u202e"} & set(made)
    assert "\\u202e" in made


def test_page_shows_the_figures_and_the_faults(card: tuple[Manifest, str, Any]) -> None:
    manifest, text, data = card
    for number in (manifest.counts["input"], manifest.counts["train"], manifest.counts["eval"]):
        assert f"<b>{number:,}</b>" in text
    assert "bad_json" in text
    assert "&lt;script&gt;alert" in text
    assert "a&lt;b&gt;.jsonl" in text
    assert "\u202e" not in re.sub(r"<article>.*?</article>", "", text.split("Quarantine</h2>")[1])
    assert data["counts"] == dict(manifest.counts)
    assert data["digest"] == manifest.digest
    keys, unlearned, fake, empty = data["warnings"]
    assert unlearned == "labels: 1 value that this task does not learn; `task: classification` learns them"
    assert fake == "fake.parquet: the name says Parquet, the bytes are JSON"
    assert empty == "none.csv: the file is empty"
    assert keys.startswith("Keys that mean nothing here and are not learned: `<script>")
    statistics = data["statistics"]
    for name in ("chars", "words"):
        for split in ("train", "eval"):
            assert sum(statistics["histograms"][name][split]) == manifest.counts[split]
    assert (
        sum(train + held for _, train, held in statistics["sources"])
        == manifest.counts["train"] + manifest.counts["eval"]
    )
    assert statistics["touched"] == {"blank": 0, "invisible": 3, "neutralised": 0}


def test_every_question_has_its_section(
    make: Callable[..., Manifest], texts: Callable[..., list[bytes]], store: FolderStore
) -> None:
    rows = [*texts(60), texts(1)[0], b"broken", b'{"text": "Please write to ada@example.com about the bill"}']
    asked: dict[str, Any] = {"dedup": {}, "pii": {}, "language": {"keep": ["en"]}, "max_filtered": 1.0}
    make({"a.jsonl": b"\n".join(texts(50, 200))}, **asked)
    made = make({"a.jsonl": b"\n".join(rows)}, name="d2", **asked)
    page = store.get(made.files["card_html"]).decode()
    wanted = [
        *("Where every row went", "Lengths", "Drift", "Sources", "Rows as the model sees them", "Quarantine"),
        *("Languages", "Copies", "Near duplicates", "Personal data and secrets", "Files", "Rules and identity"),
    ]
    assert [title for title in re.findall("<h2>(.*?)</h2>", page) if title in wanted] == wanted
    whole = Page()
    whole.feed(page)
    assert whole.open == []
    assert "ada@example.com" not in page
    # The JSON, whose keys are sorted, makes the same columns: train at the foot.
    lengths = page.split("<h2>Lengths")[1].split("<h2>")[0]
    assert lengths.index("<title>train: ") < lengths.index("<title>eval: ")
    assert lengths in render(json.loads(store.get(made.files["card_json"])))


def test_plots_of_extremes() -> None:
    assert bars([], "none") == ""
    assert histogram({"train": [0, 0]}, [10], {"train": "--train"}, "none") == ""
    assert pairs([], "none") == outline([0, 0], [0, 0], [10], "none") == ""
    assert pairs([("<a>", 0.0, 0.0)], "t").count("0.0%") == 2
    assert 'width="1.5"' in pairs([("a", 1e-6, 0.5), ("b", 0.0, 0.5)], "t")
    assert "<b>" not in pairs([("<b>", 0.5, 0.5)], '"<b>"')
    assert "100.0% before, 0.0% now" in outline([5, 0], [0, 0], [10], "t")
    assert "1.5" in bars([Bar("a", [("--x", 1_000_000, "")]), Bar("b", [("--x", 1, "")])], "t")
    assert [short(n) for n in (7, 1_000, 1_250, 2_000_000, 3_100_000_000)] == ["7", "1k", "1.2k", "2M", "3.1G"]


def test_the_terminal_counts_copies_by_file(
    make: Callable[..., Manifest], texts: Callable[..., list[bytes]], store: FolderStore
) -> None:
    every = texts(60)
    manifest = make({"a.jsonl": b"\n".join([*every, every[0]]), "dup.jsonl": b"\n".join(every[:40])})
    lines = card_lines(json.loads(store.get(manifest.files["card_json"])))
    [copies] = [" ".join(line.split()) for line in lines if line.startswith("  duplicates")]
    assert sorted(copies.partition(": ")[2].split(", ")) == ["1 in a.jsonl", "40 in dup.jsonl"]
    assert copies.startswith("duplicates 41: 40 in dup.jsonl")
