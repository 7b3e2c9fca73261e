"""What the names of folders and files say of their rows and no row does: it is not read, and told."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Sequence
from pathlib import PurePosixPath
from typing import Final

from curation.documents import may_be_text
from curation.formats import kind_by_name

_SHOWN: Final = 3
_KEPT: Final = re.compile(
    r"(^|[^a-z])(tests?|testing|valid|validation|validate|val|dev|devel|development|eval|evals|evaluation|benchmark"
    r"|hold[-_ ]?out|held[-_ ]?out|unseen)([^a-z]|$)",
    re.IGNORECASE,
)
_TRAIN: Final = re.compile(r"(^|[^a-z])(train|training|trn)([^a-z]|$)", re.IGNORECASE)
#: What people and programs add to the name of a file that they keep beside a newer one.
_COPY: Final = re.compile(
    r"\.(bak|backup|orig|old|save|copy)\d*$|[ _]\(\d+\)(?=\.|$)|( - |[-_. ])(copy|backup|old)(?=\.|$)"
    r"|^copy (\(\d+\) )?of |\.~\d+~$",
    re.IGNORECASE,
)
#: Programs, settings and lists of packages, by the ends or the whole of their names.
_CODE: Final = re.compile(
    r".*\.(py|pyi|ipynb|sh|bash|bat|ps1|r|js|ts|java|c|cpp|h|go|rs|sql|ya?ml|toml|ini|cfg|conf|lock|xml|css)"
    r"|(make|docker)file|requirements.*\.txt|environment\.ya?ml",
    re.IGNORECASE,
)
_TEXT: Final = re.compile(r"(\.txt)?(\.gz|\.zst)?$", re.IGNORECASE)
#: Ends of files of which each line stands beside one of another file: languages, and the two sides of a task.
_LANGUAGE: Final = re.compile(r"[a-z]{2}([-_][a-z]{2,4})?|[a-z]{3}_(?-i:[A-Z][a-z]{3})", re.IGNORECASE)
_SIDE: Final = re.compile(
    r"(.*[-._/]|)(src|tgt|trg|sources?|targets?|refs?|references?|hyps?|inputs?|outputs?|(?<=\.)(?:in|out)"
    r"|questions?|answers?|prompts?|responses?|completions?|replies|instructions?|quer(?:y|ies)|documents?"
    r"|articles?|summar(?:y|ies)|sentences?|texts?|labels?|tags?|intents?|slots?)",
    re.IGNORECASE,
)


def said(
    names: Sequence[str], columns: Container[str], others: Container[str] = (), *, beside: bool = False
) -> list[str]:
    """Return a line for each column whose values are names of folders, as Spark and Hive partition tables, and one each
    for files that are called as those that nobody trains on, as copies, as programs, and as sides of pairs, for parts
    that are missing, and for folders that may be labels.

    :param names: of the files that are read, with their folders. :param columns: that rows have.
    :param others: of these files, those that are not learned as text, whatever they are called.
    :param beside: there may be other files, in other drops.
    """
    values: dict[str, dict[str, None]] = {}
    for name in names:
        for folder in PurePosixPath(name).parts[:-1]:
            column, equals, value = folder.partition("=")
            if column and equals and column not in columns:
                values.setdefault(column, {})[value] = None
    lines = [
        f"folders hold the values of a column `{column}` ({_first(list(found))}) that no row has: write it there"
        for column, found in values.items()
    ]
    kept = [name for name in names if _KEPT.search(name) and not _TRAIN.search(name)]
    if beside or len(kept) < len(names):
        lines += _line(kept, "named as rows that are kept for tests, and learned as all others are")
    lines += _line(_copies(names), "named as copies of files beside them, and learned as all others are")
    lines += _missing(names)
    texts = [name for name in names if may_be_text(name) and name not in others]
    code = [name for name in texts if _CODE.fullmatch(PurePosixPath(name).name)]
    if len(code) < len(texts):
        lines += _line(code, "named as programs or settings, and learned as texts beside the others")
    sides = _sides([name for name in texts if name not in set(code)])
    lines += _line(
        sides, "named as sides of which each line belongs to one of the other, and read as texts: write pairs"
    )
    if "label" not in columns:
        lines += _line(
            labels([name for name in texts if kind_by_name(name) == "text"], 2),
            "folders of texts, whose names no row has: if they are labels, write them there",
        )
    return lines


def _line(found: Sequence[str], what: str) -> list[str]:
    return [f"{_first(found)}: {what}"] if found else []


#: Of a part, what stands before its number, its number, how many there are, and what stands behind.
_PART: Final = re.compile(r"(.*?)(\d{2,9})-of-(\d{2,9})(?!\d)(.*)", re.DOTALL)


def _missing(names: Sequence[str]) -> list[str]:
    """A line for each set of parts whose names say that there are more, as TensorFlow and `datasets` name them."""
    sets: dict[tuple[str, str, str], set[int]] = {}
    for name in names:
        if "-of-" in name and (part := _PART.fullmatch(name)) is not None:
            sets.setdefault((part[1], part[3], part[4]), set()).add(int(part[2]))
    lines = []
    for (stem, parts, end), there in sets.items():
        first = int(int(parts) in there)  # else the last one is one before
        if (lost := int(parts) - len(there)) > 0:
            number = next(at for at in range(first, first + int(parts)) if at not in there)
            name = f"{stem}{number:0{len(parts)}}-of-{parts}{end}"
            lines.append(f"{name}: missing, {lost:,} of {int(parts):,} parts in total")
    return lines


def _copies(names: Sequence[str]) -> list[str]:
    """Files that are called as copies of others that are there."""
    there = set(names)
    found = []
    for name in names:
        path = PurePosixPath(name)
        bare = _COPY.sub("", path.name)
        if bare not in {path.name, ""} and str(path.with_name(bare)) in there:
            found.append(name)
    return found


def _sides(names: Sequence[str]) -> list[str]:
    """Files of one name that end as two languages or two sides do, also before `.txt`."""
    found: dict[str, list[str]] = {}
    for name in names:
        bare = _TEXT.sub("", name)
        stem, dot, end = bare.rpartition(".")
        side = _SIDE.fullmatch(bare)
        if side and (dot or bare != name):  # `source.txt` beside `target.txt`
            found.setdefault(side[1], []).append(name)
        elif dot and _LANGUAGE.fullmatch(end):
            found.setdefault(f"{stem}{dot}", []).append(name)
    return [name for group in found.values() if len(group) > 1 for name in group]


def labels(names: Sequence[str], least: int) -> list[str]:
    """Folders beside each other that hold files, and whose names say more than a number or a part.

    :param least: how many files each holds.
    """
    inside = Counter(PurePosixPath(name).parent for name in names)
    beside: dict[PurePosixPath, list[str]] = {}
    for folder, held in inside.items():
        said = _KEPT.search(folder.name) or _TRAIN.search(folder.name) or "=" in folder.name
        if held >= least and folder.name and not said and not any(map(str.isdigit, folder.name)):
            beside.setdefault(folder.parent, []).append(folder.name)
    return sorted({name for group in beside.values() if len(group) > 1 for name in group})


def _first(found: Sequence[str]) -> str:
    return ", ".join(found[:_SHOWN]) + (f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else "")
