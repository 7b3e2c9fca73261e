"""Which stages the rules ask for, in their order: repair, personal data, quality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curation.pii import make_pii

if TYPE_CHECKING:
    from curation.kernel import Rules
    from curation.stage import Stage


def make_stages(rules: Rules) -> tuple[Stage, ...]:
    """The stages between the canonical row and its keys; none, if the recipe asks for none."""
    return (make_pii(rules.pii),) if rules.pii else ()
