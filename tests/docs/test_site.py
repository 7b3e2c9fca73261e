"""The site is built without a warning, loads nothing from elsewhere, and shows what Git servers show."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from markdown_it import MarkdownIt

from tests.docs.markdown_pages import ROOT

PARTS = ("blockquote", "h2", "h3", "img", "li", "pre", "table", "td")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_no_page_loads_anything_from_elsewhere(site: Path) -> None:
    loaded = re.compile(
        r"<(?:script|img|iframe|source)\b[^>]*\bsrc=[\"']?(?:https?:)?//|<link\b[^>]*\bhref=[\"']?https?:"
    )
    assert len(list(site.rglob("*.html"))) > 60
    assert not [page for page in site.rglob("*.html") if loaded.search(page.read_text())]
    styles = [*site.rglob("*.css")]
    assert styles
    assert not [style for style in styles if re.search(r"url\([\"']?(?:https?:)?//|@import", style.read_text())]


def test_search_knows_the_pages(site: Path) -> None:
    index = (site / "search" / "search_index.json").read_text()
    assert "reference/recipe.html#train" in index
    assert "start/quick-start.html" in index


def test_pages_have_the_parts_that_git_servers_show(site: Path) -> None:
    """Python-Markdown takes lists and code for text where they are not indented as it wants them."""
    markdown = MarkdownIt("commonmark").enable("table")
    for page in sorted((ROOT / "docs").rglob("*.md")):
        built = (site / page.relative_to(ROOT / "docs")).with_suffix(".html").read_text()
        article = re.sub(r"<td class=\"(?:linenos|code)\">|<table class=\"highlighttable\">", "", built)
        article = article.partition("<article")[2].partition("</article>")[0]
        counts = [_count(html) for html in (markdown.render(page.read_text()), article)]
        assert counts[0] == counts[1], page.name


def _count(html: str) -> Counter[str]:
    return Counter(part for part in re.findall(r"<(\w+)[ >]", html) if part in PARTS)
