"""Which stages the rules ask for, in their order: repair, personal data, language and quality."""

from __future__ import annotations

from typing import TYPE_CHECKING

from curation.language import make_language
from curation.pii import make_pii
from curation.quality import make_quality
from curation.repair import make_repair

if TYPE_CHECKING:
    from curation.kernel import Rules
    from curation.stage import Stage


def make_stages(rules: Rules) -> tuple[Stage, ...]:
    """The stages between the canonical row and its keys; none, if the recipe asks for none."""
    stages: list[Stage] = []
    if rules.repair is not None:
        stages.append(make_repair(rules.repair))
    if rules.pii is not None:
        stages.append(make_pii(rules.pii))
    if rules.language is not None:
        stages.append(make_language(rules.language))
    if rules.quality is not None:
        stages.append(make_quality(rules.quality))
    return tuple(stages)
