"""Chromium, for tests of pages; where there is none they are skipped."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, expect, sync_playwright

_PATH = shutil.which("chromium") or shutil.which("google-chrome")
_QUIET = ("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking")

EXPECTED = 180_000  # milliseconds; Playwright's own five seconds are too few on a busy machine
expect.set_options(timeout=EXPECTED)

needs_browser = pytest.mark.skipif(_PATH is None, reason="needs Chromium (Debian: apt install chromium)")


@contextmanager
def opened() -> Iterator[Browser]:
    """A browser that asks nobody but the pages it is shown."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=_PATH, args=list(_QUIET))
        yield browser
        browser.close()
