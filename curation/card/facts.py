"""What the card says, as plain values: the file beside the page, and all that the page is made of."""

from __future__ import annotations

import unicodedata
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from curation.card.alarms import alarms
from curation.pii import report
from curation.reasons import Filtered, filtered
from curation.statistics import Statistics
from dropforge.dataset import Manifest
from dropforge.drop import Drop


def summary(
    drop: Drop, manifest: Manifest, statistics: Statistics, first: Sequence[str], of_files: Sequence[str]
) -> dict[str, Any]:
    """All facts of the card as plain values.

    :param first: what is told before all else. :param of_files: what is odd about files.
    """
    asked = manifest.rules.get("pii")
    classes = manifest.rules.get("task") == "classification"
    settled = Filtered.LABEL_CONFLICT in manifest.counts
    alarming = alarms(statistics, classes, settled, manifest.rules["eval_per_million"])
    return {
        **({"pii": report.facts(asked, statistics.touched)} if asked else {}),
        "schema": 1,
        "family": drop.family,
        "drop": {
            "name": drop.drop,
            "id": drop.id,
            "prefix": drop.prefix,
            "bytes": drop.total_bytes,
        },
        "digest": manifest.digest,
        "counts": dict(manifest.counts),
        "rules": dict(manifest.rules),
        "inputs": [dict(item) for item in manifest.inputs],
        "shards": [asdict(shard) for shard in manifest.shards],
        "columns": {"seen": {name: dict(found) for name, found in manifest.columns.items()}, "changed": []},
        # A terminal shows the first ones: what is lost, then what rows hold, then files, which may be many.
        "warnings": [*first, *alarming, *of_files],
        "statistics": asdict(statistics),
        "unicode": unicodedata.unidata_version,
    }


def filters(card: Mapping[str, Any]) -> bool:
    """Whether the recipe asks for rules that rows may break, or drops rows."""
    return bool(filtered(card["counts"])) or any(
        name in card["rules"] for name in ("quality", "language", "decontamination")
    )
