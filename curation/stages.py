"""Which stages the rules ask for, in their order: repair, personal data, quality."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from curation.kernel import Rules
    from curation.stage import Stage


def make_stages(rules: Rules) -> tuple[Stage, ...]:
    """The stages between the canonical row and its keys; none, if the recipe asks for none."""
    _ = rules
    return ()
