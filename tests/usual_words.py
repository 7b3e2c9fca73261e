"""Words that were coined for the project, and the usual ones, for all that users read: pages and texts of the code."""

from __future__ import annotations

from typing import Final

SHARED: Final = (
    (r"\bmend(s|ed|ing)?\b", "fix"),
    (r"\b(tells?|told|telling)\b", "shows, reports, notifies, detects"),
    (r"\banew\b", "again"),
    (r"\b(passed|passing) over\b", "skipped"),
    (r"\bfor want of\b", "without, missing, because there is no"),
    (r"\b(goes|go|went|going) on\b", "continues, resumes"),
    (r"\bmoments\b", "optimizer state"),
    (r"\bat hand\b", "available"),
)
