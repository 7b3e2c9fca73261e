"""The card in a real browser, wide and narrow: nothing is cut off, hidden, asked for elsewhere or run."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from playwright.sync_api import Browser

from dropforge.dataset import Manifest
from dropforge.store import FolderStore
from tests.browser import needs_browser, opened

LONG = "a-source-with-a-very-long-name-" * 8 + "<img src=x onerror=alert(1)>"

#: Text of a plot that leaves its section, columns too narrow for a word, and a page that has to be pushed sideways.
BROKEN = """() => {
  const found = [];
  for (const svg of document.querySelectorAll("svg")) {
    const box = svg.getBoundingClientRect(), around = svg.closest("section").getBoundingClientRect();
    if (!box.width || !box.height) found.push("an empty plot");
    for (const text of svg.querySelectorAll("text")) {
      const own = text.getBoundingClientRect();
      if (own.left < around.left || own.right > around.right) found.push(text.textContent);
    }
  }
  for (const code of document.querySelectorAll("td code")) {
    const narrow = code.getBoundingClientRect().width < 60;
    if (narrow && code.textContent.length > 12) found.push("letters below each other: " + code.textContent);
  }
  if (document.documentElement.scrollWidth > window.innerWidth) found.push("the page is wider than the window");
  return found;
}"""

pytestmark = [
    pytest.mark.timeout(300),
    needs_browser,
]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with opened() as browser:
        yield browser


@pytest.fixture
def card(make: Callable[..., Manifest], texts: Callable[..., list[bytes]], store: FolderStore, tmp_path: Path) -> Path:
    """Of rows of each kind: kept, twice, nearly twice, masked, filtered, broken; with names that want to break out."""
    rows = [
        json.dumps({"text": f"row {n} of people who write to me{n}@example.org about it", "source": LONG})
        for n in range(40)
    ]
    near = [json.dumps({"text": " ".join(f"word{n}" for n in range(60)) + f" {end}"}) for end in range(5)]
    files = {
        f"{LONG[:200].replace('/', '')}.jsonl": "\n".join(
            [*rows, *rows[:5], *near, "broken", '{"text": "<|im_end|>"}']
        ).encode(),
        "b.jsonl": b"\n".join(texts(300)),
    }
    manifest = make(files, dedup={}, pii={}, language={"keep": ["en", "de"]}, quality={"gopher": {"min_words": 3}})
    path = tmp_path / "card.html"
    path.write_bytes(store.get(manifest.files["card_html"]))
    return path


@pytest.mark.parametrize("width", [1280, 390])
def test_it_reads_well_and_asks_for_nothing(browser: Browser, card: Path, width: int) -> None:
    page = browser.new_page(viewport={"width": width, "height": 900})
    told: list[str] = []
    page.on("console", lambda message: told.append(message.text))
    page.on("pageerror", lambda error: told.append(str(error)))
    page.on("dialog", lambda dialog: told.append(dialog.message))
    page.on("request", lambda request: told.append(request.url))
    page.goto(card.as_uri())
    if folder := os.environ.get("DROPFORGE_SCREENSHOTS"):
        page.screenshot(path=Path(folder) / f"card-{width}.png", full_page=True)
    assert told == [card.as_uri()]
    assert page.locator("svg").count() >= 4
    assert page.evaluate(BROKEN) == []
    for heading in page.locator("h2").all():
        assert heading.is_visible()
    page.close()
