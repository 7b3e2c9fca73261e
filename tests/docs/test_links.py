"""Links between the pages lead somewhere, to headings too."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.docs.markdown_pages import ROOT, anchors, links, pages


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page: Path) -> None:
    for target, anchor in links(page):
        there = (page.parent / target).resolve() if target else page
        assert there.exists(), f"no such file: {target}"
        assert not anchor or anchor in anchors(there), f"no such heading: {target}#{anchor}"


def test_code_has_no_links_and_headings_have_the_anchors_of_git_servers(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "# A `b_c` (d), e\n\n[a](#a-b_c-d-e) `[no](link.md)`\n\n```\n# none\n[no](link.md)\n```\n## A\n## A\n"
    )
    assert list(links(page)) == [("", "a-b_c-d-e")]
    assert anchors(page) == {"a-b_c-d-e", "a", "a-1"}
