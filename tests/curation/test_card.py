"""The card: complete, self-contained, and deaf to what the data wants it to say."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from html.parser import HTMLParser
from typing import Any

import pytest

from curation.plots import Bar, bars, histogram, short
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
    assert data["warnings"] == [
        "fake.parquet: the name says Parquet, the bytes are JSON",
        "none.csv: the file is empty",
    ]
    statistics = data["statistics"]
    for name in ("chars", "words"):
        for split in ("train", "eval"):
            assert sum(statistics["histograms"][name][split]) == manifest.counts[split]
    assert (
        sum(train + held for _, train, held in statistics["sources"])
        == manifest.counts["train"] + manifest.counts["eval"]
    )
    assert statistics["touched"] == {"blank": 0, "invisible": 3, "neutralised": 0}


def test_plots_of_extremes() -> None:
    assert bars([], "none") == ""
    assert histogram({"train": [0, 0]}, [10], {"train": "--train"}, "none") == ""
    assert "1.5" in bars([Bar("a", [("--x", 1_000_000, "")]), Bar("b", [("--x", 1, "")])], "t")
    assert [short(n) for n in (7, 1_000, 1_250, 2_000_000, 3_100_000_000)] == ["7", "1k", "1.2k", "2M", "3.1G"]
