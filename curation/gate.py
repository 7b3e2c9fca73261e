"""The gate before training: is this dataset version fit to train on?"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Final

from curation.canonical import NO_KEYS
from curation.reasons import MENDS, REST, Filtered, Reason, filtered, mend, quarantined
from curation.spellings import mixed_truths
from dropforge.dataset import MOST_LABEL_CHARS, MOST_LABELS, SPLITS, Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.text import counted


@dataclass(frozen=True)
class Check:
    """One rule and how it went.

    :param found: what was measured. :param wanted: what the rule asks for.
    :param soft: whether a person may overrule it. :param whole: whether it is about all drops of a version together,
        so that the next one may help.
    """

    name: str
    ok: bool
    found: str
    wanted: str
    mend: str = ""
    soft: bool = True
    whole: bool = False


def checks(manifest: Manifest, recipe: Recipe) -> tuple[Check, ...]:
    """All rules, passed or not.

    Of a version of several drops the whole must be enough, and the shares are those of the drop that came last: the
    others passed, and would hide a bad one. Rows that were asked to be forgotten are no part of any share.
    """
    counts, rules = manifest.counts, recipe.curation
    last = dict(manifest.steps[-1].counts if manifest.steps else counts)
    last["input"] = last.get("input", 0) - last.pop(Filtered.FORGOTTEN, 0)
    rows = last.get("input", 0)
    kept = counts.get("train", 0) + counts.get("eval", 0)
    bad = quarantined(last)
    share = sum(bad.values()) / max(1, rows)
    worst = next(iter(bad), None)
    gone = filtered(last)
    gone_share = sum(gone.values()) / max(1, rows)
    most = next(iter(gone), None)
    torn = {name: number for name, number in bad.items() if Reason(name) in REST}
    adds_up = counts.get("input", 0) == sum(number for name, number in counts.items() if name != "input")
    held = {split: manifest.rows(split) for split in SPLITS}
    return (
        Check(
            "enough rows",
            kept >= rules.min_rows,
            f"{kept:,} rows after curation",
            f"at least {rules.min_rows:,}",
            "Drop more data, or lower `curation.min_rows`",
            whole=True,
        ),
        Check(
            "few rows quarantined",
            share <= rules.max_quarantined,
            f"{share:.2%} of {rows:,} rows" + (f", mostly {worst} ({bad[worst]:,}){_cause(manifest)}" if worst else ""),
            f"at most {rules.max_quarantined:.2%}",
            (f"{MENDS[Reason(worst)]}; or" if worst else "Fix the rows, or") + " raise `curation.max_quarantined`",
        ),
        Check(
            "few rows filtered",
            gone_share <= rules.max_filtered,
            f"{gone_share:.2%} of {rows:,} rows" + (f", mostly {most} ({gone[most]:,})" if most else ""),
            f"at most {rules.max_filtered:.2%}",
            (f"{mend(most)}; or" if most else "Drop better rows, or") + " raise `curation.max_filtered`",
        ),
        Check(
            "whole files",
            not torn,
            "of some files only a part can be read: " + ", ".join(f"{name} ({n:,})" for name, n in torn.items())
            if torn
            else "every file was read to its end",
            "every file read to its end",
            f"{MENDS[Reason(next(iter(torn)))]}; the quarantine names the files" if torn else "",
        ),
        _files(manifest),
        Check(
            "both splits have rows",
            all(counts.get(split, 0) > 0 for split in SPLITS),
            f"{counts.get('train', 0):,} train, {counts.get('eval', 0):,} eval",
            "at least one each",
            "Rows with one input, or of one group or conversation, are on one side: give more of them"
            if kept > 1
            else "Drop more data",
            soft=False,
            whole=True,
        ),
        Check(
            "the ledger adds up",
            adds_up and all(held[split] == counts.get(split, 0) for split in SPLITS),
            f"{counts.get('input', 0):,} rows read, shards hold {held['train']:,} + {held['eval']:,}",
            "every row counted once",
            "Curate the drop again; if it stays, report it as a bug",
            soft=False,
        ),
        *([_spellings(manifest), _labels(manifest)] if recipe.task == "classification" else []),
        *(_ceiling(last, reason, most) for reason, most in sorted(rules.gate.max.items())),
        *([] if rules.gate.min_words is None else [_words(manifest, rules.gate.min_words)]),
        *([] if rules.gate.max_drift is None else [_drift(manifest, rules.gate.max_drift)]),
        *([] if rules.gate.type_changes == "report" else [_types(manifest)]),
        *([] if rules.unknown_keys == "tell" else [_unknown(manifest)]),
    )


def _cause(manifest: Manifest) -> str:
    """The most frequent detail of the faults, with its place."""
    causes = manifest.measured.get("causes")
    return f"; {causes[0]}" if causes else ""


def _files(manifest: Manifest) -> Check:
    lost = manifest.measured.get("lost")
    name, wanted = "every file gives rows", "one row of each file that can be used"
    if lost is None:
        return Check(name, True, "no file is lost", wanted)
    told = ", ".join(f"{file} ({rows:,} of {reason})" for file, rows, reason in lost["first"])
    more = f" and {lost['files'] - len(lost['first'])} more" if lost["files"] > len(lost["first"]) else ""
    found = f"no row of {lost['files']:,} of {lost['of']:,} files can be used: {told}{more}{_cause(manifest)}"
    return Check(name, False, found, wanted, f"{MENDS[Reason(lost['first'][0][2])]}, or leave the file out")


def _spellings(manifest: Manifest) -> Check:
    mixed = mixed_truths(manifest.measured.get("truths", {}))
    told = ", ".join(f"{label} ({counted(rows, 'row')})" for label, rows in mixed.items())
    return Check(
        "labels have one spelling",
        not mixed,
        f"truth values are spelled in several ways: {told}" if mixed else "no truth value has two",
        "one spelling of each truth value",
        "Write the labels alike in all rows, for example as 0 and 1",
    )


def _labels(manifest: Manifest) -> Check:
    many, chars = manifest.measured.get("labels", (0, 0))
    return Check(
        "labels that a classifier can hold",
        not many,
        f"{many:,} labels of {chars:,} characters" if many else "no more labels than it can",
        f"at most {MOST_LABELS:,} of {MOST_LABEL_CHARS:,} characters together",
        "Give rows of a kind the same short `label`",
        soft=False,
    )


#: Rules about what a manifest of an earlier Dropforge does not tell.
_MEASURED: Final = ("enough words", "little drift", "columns keep their types")
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


def _words(manifest: Manifest, least: int) -> Check:
    name, wanted, words = "enough words", f"at least {least:,}", manifest.measured.get("words")
    if words is None:
        return Check(name, False, "the manifest does not record them", wanted, _ANEW.format("min_words"), whole=True)
    mend = "Drop more data, or lower `curation.gate.min_words`"
    return Check(name, words >= least, f"{words:,} words after curation", wanted, mend, whole=True)


def _drift(manifest: Manifest, most: float) -> Check:
    name, wanted = "little drift", f"at most {most:g}"
    if "words" not in manifest.measured:
        return Check(name, False, "the manifest does not record it", wanted, _ANEW.format("max_drift"))
    drift = manifest.measured.get("drift")
    if drift is None:
        return Check(name, True, "there was no version of the family before", wanted)
    before = f"version {drift['parent'][:12]}"
    if drift.get("rows") == 0:
        return Check(name, True, f"no row to compare with {before}", wanted)
    if not drift["found"]:
        mend = "Leave `curation.gate.max_drift` out, or give an `override`"
        return Check(name, False, f"the card of {before} cannot be read", wanted, mend)
    furthest = max(drift["found"], key=lambda aspect: (drift["found"][aspect][0], aspect))
    distance, chance = drift["found"][furthest]
    return Check(
        name,
        distance <= round(most * 1000),
        f"{furthest} are {distance / 1000:g} away from {before}, of which chance makes about {chance / 1000:g}",
        wanted,
        "Look at the card, which shows both versions; if the data are meant to change, raise `curation.gate.max_drift`",
    )


def _types(manifest: Manifest) -> Check:
    name, wanted = "columns keep their types", "one type in all files of a format, and that of the version before"
    if "words" not in manifest.measured:
        return Check(name, False, "the manifest does not record it", wanted, _ANEW.format("type_changes"))
    found = manifest.measured.get("retyped", ())
    told = ", ".join(found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
    mend = "Write the column alike everywhere, or set `curation.gate.type_changes` to report"
    return Check(name, not found, told or "no column has another type", wanted, mend)


def _unknown(manifest: Manifest) -> Check:
    # A system message without a word is no key, and says nothing to most templates.
    keys = {name: rows for name, rows in manifest.measured.get("unknown_keys", {}).items() if name not in NO_KEYS}
    first = sorted(keys.items(), key=lambda item: (not item[0].startswith("messages."), -item[1], item[0]))
    found = ", ".join(f"`{name}` ({counted(rows, 'row')})" for name, rows in first[:3])
    more = f" and {len(keys) - 3} more" if len(keys) > 3 else ""
    mend = "Name their meaning in `data.columns`, keep them with `data.keep_columns`, leave them out, or set"
    wanted, mend = "keys that mean something or are kept", f"{mend} `curation.unknown_keys` to `tell`"
    return Check("no unknown keys", not keys, f"{found}{more}" or "every key is known", wanted, mend)


#: For a version that an earlier Dropforge made. A new salt makes another one of the same drop.
_ANEW: Final = "Leave `curation.gate.{}` out, or change `data.split_salt`, which makes a new version"


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


def fit(manifest: Manifest, recipe: Recipe, *, before: bool = False) -> bool:
    """Whether a version may become its family's newest one: its last drop passes.

    Of a version of several drops rules of the whole do not count: a family may begin with drops that are too small
    alone.

    :param before: of a version that another is compared with: leave out what its manifest, of an earlier Dropforge,
        does not tell.
    """
    overrule = recipe.curation.gate.override is not None
    later = bool(manifest.steps)
    untold = _MEASURED if before and "words" not in manifest.measured else ()
    return all(
        item.ok or (item.whole and later) or (overrule and item.soft) or item.name in untold
        for item in checks(manifest, recipe)
    )


def check(manifest: Manifest, recipe: Recipe, *, aside: bool = False) -> tuple[Check, ...]:
    """All rules, if the dataset passes them, or the recipe overrules those that it does not.

    :param aside: whether the version's last drop is not in the family's newest one (`curation.increments.aside`).
    :raises DataError: for the first rule that it fails, or for a name that is no reason.
    """
    check_names(recipe)
    overrule = recipe.curation.gate.override is not None
    result = checks(manifest, recipe)
    for item in result:
        if not item.ok and not (overrule and item.soft):
            raise DataError(
                f"dataset {manifest.family}/{manifest.digest[:12]}, rule `{item.name}`",
                f"{item.found}, wanted: {item.wanted}" + (_ASIDE if aside else ""),
                item.mend,
            )
    return result


_ASIDE: Final = "; the rows of this drop are not in the family's next version"
