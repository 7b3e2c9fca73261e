"""Which files are read, fetched once and pinned to what the drop promised, and cut into byte-bounded splits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

from curation import table_formats
from curation.asked import asked
from curation.documents import documents, kept_by_desktops
from curation.extras import Asked
from curation.fingerprint import Near
from curation.formats import sniff
from curation.mapping import Columns
from curation.parquet import row_groups
from curation.pii import KINDS, Pii, fingerprint, read_key
from curation.records import Split
from curation.sample import Sample
from curation.spellings import value_name
from curation.streams import DEFAULT_LIMITS, STEP, Limits
from curation.task import Rules, Task
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError, DropforgeError
from dropforge.hub import UnreachableError
from dropforge.hub_data import HubFile, is_on_hub
from dropforge.recipe import Recipe
from dropforge.recipe_data import Dedup
from dropforge.recipe_data import Pii as PiiSection
from dropforge.store import Store, written_by_others

#: A killed run repeats what its workers were at: what can be cut has so many splits, unless they were smaller or larger
#: than these bytes.
SPLITS: Final = 64
SMALLEST_SPLIT: Final = 4 << 20
LARGEST_SPLIT: Final = 32 << 20


def make_rules(recipe: Recipe) -> Rules:
    """The part of the recipe that shapes rows and split.

    :raises DropforgeError: if the key of pseudonyms is asked for and not in the environment.
    """
    data = recipe.data
    return Rules(
        # A whole number, because floats have no place under a digest.
        eval_per_million=max(1, round(data.eval_fraction * 1_000_000)),
        split_salt=data.split_salt,
        text_column=data.text_column,
        max_row_bytes=data.max_row_bytes,
        exact_duplicates=recipe.curation.exact_duplicates,
        task=recipe.task,
        near=_near(recipe.curation.dedup),
        prefer=tuple(value_name(source) or source for source in recipe.curation.prefer),
        columns=Columns(tuple(sorted((data.columns or {}).items())), data.prompt_template),
        **asked(recipe.curation),
        pii=_pii(recipe.curation.pii),
        limit_rows=data.limit_rows,
        limit_bytes=data.limit_bytes,
        encoding=data.encoding,
        quotes=data.quotes,
        text_files=data.text_files,
        scope=recipe.curation.scope,
        keep_columns=_kept(data.keep_columns),
        label_conflicts=recipe.curation.label_conflicts,
        max_rows_per_source=tuple(sorted(_caps(recipe.curation.max_rows_per_source).items())),
    )


def _caps(asked: Mapping[str, int]) -> dict[str, int]:
    """The rows of each source, whose name may be spelled otherwise than in rows, or twice: the fewest count."""
    return {value_name(source) or source: rows for source, rows in sorted(asked.items(), key=lambda item: -item[1])}


def _kept(asked: Asked | None) -> Asked | None:
    return tuple(sorted(set(asked))) if isinstance(asked, tuple) else asked


def _near(asked: Dedup | None) -> Near | None:
    if asked is None:
        return None
    bar = round(asked.threshold * 1_000_000)
    return Near(asked.shingle, asked.shingle_size, asked.bands, asked.rows_per_band, bar)


def _pii(asked: PiiSection | None) -> Pii | None:
    """:raises DropforgeError: if a key is asked for that is not there."""
    if asked is None:
        return None
    key = None if asked.key_env is None else fingerprint(read_key(asked.key_env, os.environ))
    return Pii(tuple(kind for kind in KINDS if kind in asked.kinds), asked.action, asked.key_env, key)


def readable(drop: Drop, listed: Callable[[DropFile], bytes]) -> tuple[list[DropFile], dict[str, str]]:
    """(files to read in the order of their names' bytes, names that are passed over, each with the reason).

    Names with a part that begins with `_` or `.` are other programs' markers, as everywhere around S3.

    :param listed: gives the bytes of a file that lists which others count.
    :raises DataError: if they are a table's, whose log says which rows count, or all of them describe a data set.
    """
    thing = f"drop {drop.family}/{drop.drop}"
    files = sorted(drop.data_files, key=lambda file: file.key.encode())
    table_formats.check(thing, (file.key for file in files))
    known = {file.key: file for file in files}
    replaced = table_formats.superseded(thing, known, lambda name: listed(known[name]))
    hidden = [file.key for file in files if any(part[:1] in {"_", "."} for part in file.key.split("/"))]
    passed = dict.fromkeys(hidden, "a name with a leading `_` or `.` is no data")
    passed |= dict.fromkeys(kept_by_desktops(known), "Windows or Office keeps it beside other files")
    described = documents([file.key for file in files if file.key not in passed])
    passed |= dict.fromkeys(described, "its name is that of a data set's documentation, metadata or cache")
    passed |= {name: why for name, why in replaced.items() if name not in passed}
    left = [file for file in files if file.key not in passed]
    if described and not left:
        shown = ", ".join(described[:3]) + (f" and {len(described) - 3} more" if len(described) > 3 else "")
        cause = f"it holds nothing but documentation or metadata of a data set ({shown})"
        raise DataError(thing, cause, "Upload its rows; a file that holds some takes another name")
    return left, passed


def small(store: Store, drop: Drop, file: DropFile, folder: Path) -> bytes:
    """The bytes of a file that lists others, as the drop recorded them.

    :raises DataError: if it is too large, gone, or not what the drop promised.
    """
    if file.size > _LARGEST_LIST:
        cause = f"it lists files in {file.size:,} bytes, more than {_LARGEST_LIST:,}"
        raise DataError(f"file {file.key!r} of the drop {drop.prefix}", cause, "Write the table again, in fewer files")
    return fetch(store, drop, [file], folder, lambda *_: None)[0].read_bytes()


_LARGEST_LIST: Final = 16 << 20  # the state of 100,000 shards has 6 MB


def fetch(
    store: Store, drop: Drop, files: list[DropFile], folder: Path, progress: Callable[[int, int], None]
) -> list[Path]:
    """Copy the files into `folder`, each under the tag that the drop recorded, and check size and checksum.

    :raises DataError: if an object is gone or is not what the drop promised.
    """
    folder.mkdir(parents=True, exist_ok=True)
    total = sum(file.size for file in files)
    done = 0
    paths = []
    with ThreadPoolExecutor(4) as pool:
        for file, path in zip(files, pool.map(lambda file: _fetch(store, drop, file, folder), files), strict=True):
            done += file.size
            progress(done, total)
            paths.append(path)
    return paths


def _fetch(store: Store, drop: Drop, file: DropFile, folder: Path) -> Path:
    name = hashlib.sha256(f"{file.content}\0{file.etag}\0{file.size}".encode()).hexdigest()[:32]
    path = folder / name
    if path.is_file() and _is(path, file):
        return path
    # Two files with the same bytes share a name, and both may be on their way.
    temporary = folder / f"{name}.{hashlib.sha256(file.key.encode()).hexdigest()[:8]}.part"
    kind, state = _hash(file)
    address = drop.prefix + file.key
    try:
        remote = is_on_hub(address)
        with written_by_others(address):
            opened = HubFile(address, file.size) if remote else store.open(address, file.etag, file.version_id)
        with opened as source, temporary.open("wb") as target:
            while piece := source.read(STEP):
                state.update(piece)
                target.write(piece)
    except UnreachableError:
        raise  # another try may find it
    except DropforgeError as error:
        raise DataError(f"file {file.key!r} of the drop {drop.prefix}", error.cause, error.mend) from error
    found, size = f"{kind}:{state.hexdigest()}", temporary.stat().st_size
    if size != file.size or (kind in {"sha256", "git"} and found != file.content):
        raise DataError(
            f"file {file.key!r} of the drop {drop.prefix}",
            f"it has {size} bytes and {found}, the drop recorded {file.size} bytes and {file.content}",
            "Upload changed data as a new drop",
        )
    temporary.replace(path)
    return path


def _hash(file: DropFile) -> tuple[str, Any]:
    """The kind of a file's checksum, and the hash that makes it."""
    kind = file.content.partition(":")[0]
    # Git's name of a file, by which the hub knows small ones: SHA-1 of a header and the bytes.
    return kind, hashlib.sha1(b"blob %d\0" % file.size, usedforsecurity=False) if kind == "git" else hashlib.sha256()


def _is(path: Path, file: DropFile) -> bool:
    """Whether a file of an earlier try is whole."""
    if path.stat().st_size != file.size:
        return False
    kind, state = _hash(file)
    if kind not in {"sha256", "git"}:
        return True
    with path.open("rb") as source:
        hashlib.file_digest(source, lambda: state)
    return f"{kind}:{state.hexdigest()}" == file.content


def tasks(
    drop: Drop,
    files: list[DropFile],
    paths: list[Path],
    rules: Rules,
    folder: Path,
    split_bytes: int | None = None,
    limits: Limits = DEFAULT_LIMITS,
    index: Path | None = None,
    sample: Sample | None = None,
    most: Sequence[int | None] | None = None,
    own: Path | None = None,
    forgotten: Mapping[str, frozenset[int]] | None = None,
) -> Iterator[Task]:
    """The splits of all files. A split's id is a function of what is read and how.

    :param split_bytes: about so many in a split, where a file can be cut; None goes by the size of all files.
    :param index: what evaluation sets hold; the rules name these.
    :param sample: which rows are looked at, if not all.
    :param most: of each file the first rows that are read, or None for all (`curation.limit`).
    :param own: where the user's own kernels are unpacked; the rules name these.
    :param forgotten: places of rows that ended so in versions before, by file.
    """
    folder.mkdir(parents=True, exist_ok=True)
    split_bytes = split_bytes or split_size(sum(file.size for file in files))
    for number, (file, path) in enumerate(zip(files, paths, strict=True)):
        rows = most[number] if most is not None else None
        if rows is None:
            parts = cut(path, file.key, split_bytes, encoding=rules.encoding)
        else:
            parts = [Split(path, sniff(path, file.key, rules.encoding), rows=rows)]
        gone = (forgotten or {}).get(file.key, frozenset())
        for split in parts:
            where = f"{number}\0{file.content}\0{split.start}\0{split.end}\0{split.rows}"
            what = (
                f"{drop.id}\0{where}\0{rules}\0{limits}"
                + (f"\0{sample}" if sample else "")
                + (f"\0{sorted(gone)}" if gone else "")
            )
            name = hashlib.sha256(what.encode()).hexdigest()[:24]
            yield Task(name, split, number, file.key, rules, folder, limits, index, sample, own, gone)


def split_size(planned: int) -> int:
    """Bytes of a split of a drop that has so many bytes in all; a drop as small as one is not shared out."""
    return LARGEST_SPLIT if planned <= LARGEST_SPLIT else min(max(planned // SPLITS, SMALLEST_SPLIT), LARGEST_SPLIT)


def cut(path: Path, name: str, split_bytes: int = LARGEST_SPLIT, *, encoding: str = "utf-8") -> list[Split]:
    """Cut a file where rows can be found again: plain JSONL anywhere, Parquet between row groups, else not at all."""
    format_, size = sniff(path, name, encoding), path.stat().st_size
    whole = Split(path, format_)
    if size == 0 and format_.fault is None:
        return []
    plain = format_.fault is None and format_.compression == "none" and format_.wide is None
    if plain and format_.kind == "jsonl" and size > split_bytes:
        starts = range(0, size, split_bytes)
        return [Split(path, format_, start, min(size, start + split_bytes)) for start in starts]
    if format_.fault is None and format_.kind == "parquet":
        found: list[Split] = []
        first = held = 0
        groups = row_groups(path)
        for index, weight in enumerate(groups):
            held += weight
            if held >= split_bytes or index == len(groups) - 1:
                found.append(Split(path, format_, first, index + 1))
                first, held = index + 1, 0
        return found or [whole]
    return [whole]
