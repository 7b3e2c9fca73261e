"""Stages that the rules ask for, in order: repair, own kernels, personal data, decontamination, language, quality.

What C4's rules changed goes through the masks and then through decontamination once more, in the order of before.
"""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from curation.columns import integers
from curation.decontaminate import make_decontaminate
from curation.language import make_language
from curation.own import make_own
from curation.pii import make_pii
from curation.pii.masks import MASK
from curation.quality import make_quality
from curation.repair import make_repair
from curation.stage import Stage, Staged, refusals
from curation.task import Rules


def make_stages(rules: Rules, index: Path | None = None, own: Path | None = None) -> tuple[Stage, ...]:
    """The stages between the canonical row and its keys; none, if the recipe asks for none.

    :param index: what evaluation sets hold, where the rules name some.
    :param own: where the user's own kernels are unpacked, where the rules name some.
    """
    stages: list[Stage] = []
    if rules.repair is not None:
        stages.append(make_repair(rules.repair))
    if rules.own is not None and own is not None:
        stages += make_own(rules.own, own)  # before the masks, so that they cover what a kernel writes
    if rules.pii is not None:
        stages.append(make_pii(rules.pii))
    if rules.decontamination is not None and index is not None:
        stages.append(make_decontaminate(rules.decontamination, index))
    if rules.language is not None:
        stages.append(make_language(rules.language))
    if rules.quality is not None:
        quality = make_quality(rules.quality)
        if rules.pii is not None and rules.quality.c4 is not None:
            quality = masked_again(quality, make_pii(rules.pii))
        if rules.decontamination is not None and index is not None and rules.quality.c4 is not None:
            quality = sought_again(quality, make_decontaminate(rules.decontamination, index))
        stages.append(quality)
    return tuple(stages)


def masked_again(quality: Stage, pii: Stage) -> Stage:
    """Quality, and personal data once more in the texts that it changed: what C4 takes out, such as a citation's mark,
    may have stood within a value, which was none before. A row that holds a mask already is not counted again."""

    def stage(passages: pa.RecordBatch) -> Staged:
        done, ended, counts = quality(passages)
        changed = pc.not_equal(passages.column("content"), done.column("content"))
        if not pc.any(changed).as_py():
            return Staged(done, ended, counts)
        left = done.filter(changed)
        masked, more, found = pii(left)
        texts = masked.column("content")
        hit = _rows(left, pc.not_equal(left.column("content"), texts))
        known = _rows(passages, pc.match_substring_regex(passages.column("content"), MASK)) if hit else set()
        contents = pc.replace_with_mask(done.column("content"), changed, texts)
        told = +Counter({**counts, **found, "pii_rows": len(hit - known)})
        return Staged(done.set_column(2, "content", contents), _both(ended, more), told)

    return stage


def sought_again(quality: Stage, decontaminate: Stage) -> Stage:
    """Quality, and evaluation items once more in the rows that it changed and kept: what C4 takes out may have stood
    within an item. Rows in which one was found before are gone by now, so that none is counted twice."""

    def stage(passages: pa.RecordBatch) -> Staged:
        done, ended, counts = quality(passages)
        changed = _rows(done, pc.not_equal(passages.column("content"), done.column("content")))
        left = changed.difference(ended.column("row").to_pylist())
        if not left:
            return Staged(done, ended, counts)
        # All that these rows say: an item may be split over a message that changed and one that did not.
        whole = done.filter(pc.is_in(done.column("row"), value_set=integers(sorted(left))))
        _, more, found = decontaminate(whole)
        return Staged(done, _both(ended, more), {**counts, **found})

    return stage


def _both(ended: pa.RecordBatch, more: pa.RecordBatch) -> pa.RecordBatch:
    every = sorted([*ended.to_pylist(), *more.to_pylist()], key=lambda item: int(item["row"]))
    return refusals(*([item[name] for item in every] for name in ("row", "reason", "detail")))


def _rows(passages: pa.RecordBatch, which: pa.Array) -> set[int]:
    return set(passages.column("row").filter(which).to_pylist())
