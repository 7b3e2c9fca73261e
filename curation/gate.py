"""The gate before training: is this dataset version fit to train on?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from curation.reasons import MENDS, Filtered, Reason, filtered, mend, quarantined
from dropforge.dataset import SPLITS, Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe


@dataclass(frozen=True)
class Check:
    """One rule and how it went.

    :param found: what was measured. :param wanted: what the rule asks for.
    :param soft: whether a person may overrule it.
    """

    name: str
    ok: bool
    found: str
    wanted: str
    mend: str = ""
    soft: bool = True


# One of these stands for unknown many rows.
_PARTS = frozenset({Reason.TORN_FILE, Reason.BOMB, Reason.BAD_PARQUET, Reason.BAD_ARROW})


def checks(manifest: Manifest, recipe: Recipe) -> tuple[Check, ...]:
    """All rules, passed or not."""
    counts, rules = manifest.counts, recipe.curation
    kept = counts.get("train", 0) + counts.get("eval", 0)
    bad = quarantined(counts)
    share = sum(bad.values()) / max(1, counts.get("input", 0))
    worst = next(iter(bad), None)
    gone = filtered(counts)
    gone_share = sum(gone.values()) / max(1, counts.get("input", 0))
    most = next(iter(gone), None)
    torn = {name: number for name, number in bad.items() if Reason(name) in _PARTS}
    adds_up = counts.get("input", 0) == sum(number for name, number in counts.items() if name != "input")
    held = {split: manifest.rows(split) for split in SPLITS}
    return (
        Check(
            "enough rows",
            kept >= rules.min_rows,
            f"{kept:,} rows after curation",
            f"at least {rules.min_rows:,}",
            "Drop more data, or lower `curation.min_rows`",
        ),
        Check(
            "few rows quarantined",
            share <= rules.max_quarantined,
            f"{share:.2%} of {counts.get('input', 0):,} rows" + (f", mostly {worst} ({bad[worst]:,})" if worst else ""),
            f"at most {rules.max_quarantined:.2%}",
            (f"{MENDS[Reason(worst)]}; or" if worst else "Mend the rows, or") + " raise `curation.max_quarantined`",
        ),
        Check(
            "few rows filtered",
            gone_share <= rules.max_filtered,
            f"{gone_share:.2%} of {counts.get('input', 0):,} rows"
            + (f", mostly {most} ({gone[most]:,})" if most else ""),
            f"at most {rules.max_filtered:.2%}",
            (f"{mend(most)}; or" if most else "Drop better rows, or") + " raise `curation.max_filtered`",
        ),
        Check(
            "whole files",
            not torn,
            "of some files only a part can be read: " + ", ".join(f"{name} ({n:,})" for name, n in torn.items())
            if torn
            else "every file was read to its end",
            "all of every file, for nobody knows how many rows the rest holds",
            f"{MENDS[Reason(next(iter(torn)))]}; the quarantine names the files" if torn else "",
        ),
        Check(
            "both splits have rows",
            all(counts.get(split, 0) > 0 for split in SPLITS),
            f"{counts.get('train', 0):,} train, {counts.get('eval', 0):,} eval",
            "at least one each",
            "Give rows of more than one group, or no `group` at all" if kept > 1 else "Drop more data",
            soft=False,
        ),
        Check(
            "the ledger adds up",
            adds_up and all(held[split] == counts.get(split, 0) for split in SPLITS),
            f"{counts.get('input', 0):,} rows read, shards hold {held['train']:,} + {held['eval']:,}",
            "every row has exactly one end",
            "Curate the drop again; if it stays, report it as a bug",
            soft=False,
        ),
        *(_ceiling(counts, reason, most) for reason, most in sorted(rules.gate.max.items())),
    )


#: Ends of the ledger that are neither quarantined nor filtered, and what a person can do about many.
_COPIES: Final = {
    "duplicate": "Drop fewer copies, or set `curation.exact_duplicates` to keep",
    "near_duplicate": "Drop fewer copies, or raise `curation.dedup.threshold`",
}


def _ceiling(counts: Mapping[str, int], reason: str, most: float) -> Check:
    rows, whole = counts.get(reason, 0), counts.get("input", 0)
    share = rows / max(1, whole)
    told = _COPIES[reason] if reason in _COPIES else mend(reason)
    return Check(
        f"few rows {reason}",
        share <= most,
        f"{share:.2%} of {whole:,} rows ({rows:,})",
        f"at most {most:.2%}",
        f"{told}; or raise `curation.gate.max.{reason}`",
    )


def check_names(recipe: Recipe) -> None:
    """Refuse a ceiling that could never be reached.

    :raises DataError: if `curation.gate.max` names what is no end of the ledger.
    """
    known = {*_COPIES, *(reason.value for reason in Reason), *(code.value for code in Filtered)}
    if wrong := sorted(set(recipe.curation.gate.max) - known):
        near = get_close_matches(wrong[0], known, 1)
        told = f"Write `{near[0]}`" if near else "Take a reason as the card names it"
        raise DataError("recipe, `curation.gate.max`", f"{wrong[0]!r} is no reason of the ledger", told)


def overruled(result: Sequence[Check]) -> tuple[str, ...]:
    """Names of the rules that were not passed, of a version that passed the gate by `curation.gate.override`."""
    return tuple(item.name for item in result if not item.ok)


def check(manifest: Manifest, recipe: Recipe) -> tuple[Check, ...]:
    """All rules, if the dataset passes them, or the recipe overrules those that it does not.

    :raises DataError: for the first rule that it fails, or for a name that is no reason.
    """
    check_names(recipe)
    overrule = recipe.curation.gate.override is not None
    result = checks(manifest, recipe)
    for item in result:
        if not item.ok and not (overrule and item.soft):
            raise DataError(
                f"dataset {manifest.family}/{manifest.digest[:12]}, rule `{item.name}`",
                f"{item.found}, wanted: {item.wanted}",
                item.mend,
            )
    return result
