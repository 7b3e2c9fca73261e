"""Files of a drop that hold no rows: documentation and metadata of a data set and what desktops keep in folders, by
their names, and plain text that lies beside tables by its bytes. What is passed over is told; other files of unknown
kinds are not passed over but refused.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from pathlib import PurePosixPath
from typing import Final

from curation.formats import Format, kind_by_name

_NAMES: Final = re.compile(
    r"(readme|liesmich|lisez[-_]?moi|l[ée]eme|leggimi|lizenz|(un)?licen[sc]e|copying|copyright|notice"
    r"|terms[_-]of[_-](use|service)|(md5|b2|sha\d+|check)sums?"
    r"|changelog|citation|authors|contributors|contributing|code[_-]of[_-]conduct"
    r"|data(set)?[_-]?(card|sheet))([._-].*)?",
    re.IGNORECASE,
)
#: Names that are those of documentation in capitals alone: `history.txt` may be a text on history.
_CAPITALS: Final = re.compile(
    r"(HISTORY|CHANGES|NEWS|RELEASES?|RELEASE[_-]NOTES|TERMS|DISCLAIMER|PATENTS|SECURITY|CREDITS|THANKS|ACKNOWLEDGE?MENTS"
    r"|INSTALL|TODO|VERSION|MANIFEST|MAINTAINERS|CODEOWNERS)(\.(?i:md|rst|txt|in))?"
)
#: Sums and signatures of the file that such a name begins with.
_SIGNED: Final = re.compile(r".+\.(md5|sha1|sha256|sha512|md5sum|sha256sum|asc|sig)", re.IGNORECASE)
#: What Hugging Face's datasets, Croissant, Frictionless and Kaggle write about the files beside it.
_METADATA: Final = frozenset(
    {"dataset_infos.json", "dataset_info.json", "dataset_dict.json", "croissant.json", "datapackage.json"}
    | {"croissant_metadata.json", "dataset-metadata.json", "dataset_card.json"}
)
#: Of `save_to_disk`, beside its Arrow files; elsewhere a name like any other.
_STATE: Final = "state.json"
#: Of SageMaker JumpStart, beside its JSON lines: how a prompt is made of their keys.
_TEMPLATE: Final = "template.json"


#: What `datasets` keeps of `map` and `filter` in the folder of a saved data set: other rows, or the same once more.
_CACHE: Final = re.compile(r"(cache-|tmp).*\.arrow")


def documents(names: Collection[str]) -> list[str]:
    """Return the names of files that describe a data set, or are a cache or pointers beside it.

    :param names: of all files, with their folders.
    """
    saved = {PurePosixPath(name).parent for name in names if name.endswith(".arrow")}
    stated = saved & {PurePosixPath(name).parent for name in names if PurePosixPath(name).name == _STATE}
    lined = {PurePosixPath(name).parent for name in names if name.endswith(".jsonl")}
    there = {place for name in names for place in (PurePosixPath(name), PurePosixPath(name).parent)}
    found = []
    for name in names:
        path = PurePosixPath(name)
        says = path.name.lower()
        named = _NAMES.fullmatch(says) or _CAPITALS.fullmatch(path.name) or _SIGNED.fullmatch(says)
        described = may_be_text(name) and named
        cached = path.parent in stated and _CACHE.fullmatch(path.name)
        # A pointer of DVC beside the file or folder that it is to; others are refused by their bytes.
        pointer = path.suffix == ".dvc" and path.with_suffix("") in there
        beside = (says == _STATE and path.parent in saved) or (says == _TEMPLATE and path.parent in lined)
        if described or says in _METADATA or beside or cached or pointer:
            found.append(name)
    return found


#: What Windows keeps in a folder that somebody looked at, and Office beside a file that is open.
_KEPT: Final = re.compile(r"desktop\.ini|(eh)?thumbs\.db|~\$.*", re.IGNORECASE)


def kept_by_desktops(names: Collection[str]) -> list[str]:
    """Return the names of files that a desktop keeps beside others."""
    return [name for name in names if _KEPT.fullmatch(PurePosixPath(name).name)]


def may_be_text(name: str) -> bool:
    """Tell whether the bytes of a file may be plain text, which its name does not call a table."""
    return kind_by_name(name) in {None, "text"}


def plain_texts(formats: Mapping[str, Format], tables: bool) -> list[str]:
    """Return the names of files that are plain text, where others are tables.

    :param formats: of files that may be. :param tables: whether there are others, which are not.
    """
    sound = {name: found for name, found in formats.items() if found.fault is None}
    if not tables and all(found.kind == "text" for found in sound.values()):
        return []
    return [name for name, found in sound.items() if found.kind == "text"]
