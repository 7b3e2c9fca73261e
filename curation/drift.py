"""How far a version's rows lie from those of the version before, over whole numbers that both cards tell.

The measure is the Jensen-Shannon distance: the root of the divergence of Lin ("Divergence measures based on the Shannon
entropy", IEEE Transactions on Information Theory 37, 1991) in bits, which is a metric (Endres and Schindelin, "A new
metric for probability distributions", the same, 49, 2003). It is 0 for the same shares and 1 where nothing is shared,
also where a bin is empty on one side, at which the population stability index has no value.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from math import log, log2, sqrt
from typing import Any, Final

from curation.earlier import Earlier
from curation.lost import lost
from curation.notes import Cause
from curation.statistics import EDGES, TOP
from dropforge.dataset import MOST_LABEL_CHARS, MOST_LABELS, SPLITS, Manifest

#: What the gate judges. Of `ends` it has ceilings by reason.
JUDGED: Final = ("chars", "words", "languages", "labels")
#: Facts of a version that differ with its data, not with what the recipe asks for.
_OF_THE_DATA: Final = frozenset({"exact", "sample", "drop", "parent"})

Rows = Mapping[str, int]


def distance(before: Rows, after: Rows) -> int:
    """Jensen-Shannon distance of two distributions of rows over the same names, in thousandths.

    :raises ZeroDivisionError: if one of them has no row.
    """
    one, two = sum(before.values()), sum(after.values())
    divergence = 0.0
    for name in sorted({*before, *after}):
        p, q = before.get(name, 0) / one, after.get(name, 0) / two
        divergence += sum(share * log2(2 * share / (p + q)) / 2 for share in (p, q) if share)
    return round(1000 * sqrt(min(1.0, max(0.0, divergence))))


def by_chance(before: Rows, after: Rows) -> int:
    """About how far two drops lie apart that were drawn from the same heap, in thousandths.

    The divergence is then close to a chi-squared variable with one degree of freedom fewer than there are names
    (Grosse and others, "Analysis of symbolic sequences using the Jensen-Shannon divergence", Physical Review E 65,
    2002), whose mean for n and m rows is (names - 1)(1/n + 1/m) / (8 ln 2).
    """
    names = sum(1 for name in {*before, *after} if before.get(name) or after.get(name))
    rows = 1 / sum(before.values()) + 1 / sum(after.values())
    return round(1000 * sqrt(min(1.0, (names - 1) * rows / (8 * log(2)))))


def profile(card: Mapping[str, Any]) -> dict[str, dict[str, int]]:
    """What of a card is compared: rows by characters and words (by the lower edge of their bin), language, label, end.

    Labels are left out where the card does not name them all.

    :raises KeyError, TypeError, ValueError, AttributeError: if it is no card.
    """
    statistics = card["statistics"]
    found: dict[str, dict[str, int]] = {}
    if tuple(statistics["edges"]) == EDGES:
        for name in ("chars", "words"):
            sides = statistics["histograms"][name].values()
            bins = [sum(rows) for rows in zip(*sides, strict=True)]
            found[name] = {str(low): rows for low, rows in zip((0, *EDGES), bins, strict=True)}
    touched = statistics["touched"].items()
    found["languages"] = {name.removeprefix("language_"): n for name, n in touched if name.startswith("language_")}
    labels = {str(name): rows for name, rows in statistics["labels"]}
    found["labels"] = labels if len(labels) < TOP else {}
    found["ends"] = {name: rows for name, rows in card["counts"].items() if name != "input"}
    for rows in found.values():
        if not all(type(number) is int and number >= 0 for number in rows.values()):
            raise ValueError("a card counts rows in whole numbers")
    return {name: rows for name, rows in found.items() if sum(rows.values())}


def compare(card: Mapping[str, Any], earlier: Earlier | None) -> dict[str, Any] | None:
    """The card's part on drift: None for the first version of a family.

    :returns: `parent`, the digest of the version before; `rules`, keys of the rules that differ; and by what both tell
        (`chars`, `words`, `languages`, `labels`, `ends`) the distance, what chance alone makes of it, both in
        thousandths, and the rows before and after. Nothing of this, but `parent`, if the card before cannot be read.
    """
    if earlier is None:
        return None
    try:
        old, old_rules = profile(earlier.card or {}), dict((earlier.card or {})["rules"])
    except (KeyError, TypeError, ValueError, AttributeError):
        return {"parent": earlier.digest, "rules": [], "found": {}}
    new, rules = profile(card), card["rules"]
    other = sorted(name for name in {*old_rules, *rules} - _OF_THE_DATA if old_rules.get(name) != rules.get(name))
    found = {
        name: {
            "distance": distance(old[name], new[name]),
            "chance": by_chance(old[name], new[name]),
            "before": old[name],
            "after": new[name],
        }
        for name in new
        if name in old
    }
    return {"parent": earlier.digest, "rules": other, "found": found}


def measured(card: Mapping[str, Any], parent: Manifest | None = None) -> dict[str, Any]:
    """What the gate needs of a card, for the manifest: `words` that were kept; `drift`, `retyped` columns, `lost`
    files, `unknown_keys`, `causes` of faults, labels that may be `truths`, and `known_labels` of a family's drops and
    which of them evaluation rows have, if any; `labels` and their characters, where a classifier would not hold them.

    :param parent: the version that the card's drop is added to, whose words count too.
    :returns: `drift` has `parent`, and `found`: by what the gate judges distance and chance in thousandths; and `rows`,
        which is 0, if the drop has none that could be compared.
    """
    words = sum(total["words"] for total in card["statistics"]["totals"].values())
    held = parent.measured.get("words") if parent else 0
    told: dict[str, Any] = {} if held is None else {"words": held + words}
    if retyped := card["columns"].get("retyped"):
        told["retyped"] = retyped
    if unknown := card.get("unknown_keys"):
        told["unknown_keys"] = unknown
    truths = Counter(parent.measured.get("truths", {}) if parent else {})
    truths.update(card["statistics"].get("truths", {}))
    if truths:
        told["truths"] = dict(sorted(truths.items()))
    if known := card["statistics"].get("known_labels"):
        told["known_labels"] = known
        told["evaluated_labels"] = card["statistics"]["evaluated_labels"]
    for name in ("known_groups", "groups_otherwise", "many_groups"):
        if found := card["statistics"].get(name):
            told[name] = found
    many, chars = card["statistics"].get("classes", (0, 0))
    if many > MOST_LABELS or chars > MOST_LABEL_CHARS:
        told["labels"] = [many, chars]
    if causes := card.get("causes"):
        told["causes"] = [Cause(**cause).text() for cause in causes]
    if (gone := lost([item["key"] for item in card["inputs"]], card["statistics"]["by_file"])) is not None:
        told["lost"] = gone
    if (drift := card.get("drift")) is not None:
        judged = {name: drift["found"][name] for name in JUDGED if name in drift["found"]}
        pairs = {name: [item["distance"], item["chance"]] for name, item in judged.items()}
        told["drift"] = {"parent": drift["parent"], "found": pairs}
        if not any(card["counts"].get(split) for split in SPLITS):
            told["drift"]["rows"] = 0
    return told
