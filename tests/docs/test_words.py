"""The pages that users read are in the field's words."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.docs.markdown_pages import ROOT, pages, prose
from tests.usual_words import SHARED

#: In texts of the code these three have other forms as well.
USUAL = {
    **dict(SHARED),
    r"\bgangs?\b": "job, attempt, pods",
    r"\bstands\b": "is",
    r"\bnobody\b": "no user, or no part of the system",
}
#: Parts that are still to be rewritten.
NOT_YET = ("docs/reference/security.md",)
READ = [
    page
    for page in pages()
    if (name := str(page.relative_to(ROOT))).startswith(("README.md", "docs/")) and not name.startswith(NOT_YET)
]


@pytest.mark.parametrize("page", READ, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_page_has_the_usual_words(page: Path) -> None:
    text = prose(page).replace("| **Gang** |", "")
    found = {match[0]: usual for word, usual in USUAL.items() for match in re.finditer(word, text, re.IGNORECASE)}
    assert found == {}


LONG = (
    "docs/how-to/alert-runbooks.md",  # one alert on each part, and links from the alerts to all of them
    "docs/reference/commands.md",  # generated: a part for each command, which are looked up
    "docs/reference/recipe.md",  # generated: a table for each section, which are looked up
)


@pytest.mark.parametrize(
    "page",
    [page for page in READ if (name := str(page.relative_to(ROOT))).startswith("docs/") and name not in LONG],
    ids=lambda page: str(page.relative_to(ROOT)),
)
def test_a_page_has_one_subject_and_so_not_too_many_words(page: Path) -> None:
    """Tables and code are not counted, which are looked up and not read."""
    words = [word for line in prose(page).splitlines() if not line.startswith("|") for word in line.split()]
    assert len(words) <= 600
