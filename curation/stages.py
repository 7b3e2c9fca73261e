"""Which stages the rules ask for, in their order: repair, personal data, decontamination, language and quality."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from curation.decontaminate import make_decontaminate
from curation.language import make_language
from curation.pii import make_pii
from curation.quality import make_quality
from curation.repair import make_repair

if TYPE_CHECKING:
    from curation.kernel import Rules
    from curation.stage import Stage


def make_stages(rules: Rules, index: Path | None = None) -> tuple[Stage, ...]:
    """The stages between the canonical row and its keys; none, if the recipe asks for none.

    :param index: what evaluation sets hold, where the rules name some.
    """
    stages: list[Stage] = []
    if rules.repair is not None:
        stages.append(make_repair(rules.repair))
    if rules.pii is not None:
        stages.append(make_pii(rules.pii))
    if rules.decontamination is not None and index is not None:
        stages.append(make_decontaminate(rules.decontamination, index))
    if rules.language is not None:
        stages.append(make_language(rules.language))
    if rules.quality is not None:
        stages.append(make_quality(rules.quality))
    return tuple(stages)
