"""Which files are read, fetched once and pinned to what the drop promised, and cut into byte-bounded splits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Final

from curation.asked import asked
from curation.fingerprint import Near
from curation.formats import sniff
from curation.kernel import Rules, Task
from curation.mapping import Columns
from curation.parquet import row_groups
from curation.pii import KINDS, Pii, fingerprint, read_key
from curation.records import Split
from curation.sample import Sample
from curation.streams import DEFAULT_LIMITS, STEP, Limits
from dropforge.drop import Drop, DropFile
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe import Recipe
from dropforge.recipe_data import Dedup
from dropforge.recipe_data import Pii as PiiSection
from dropforge.store import Store

SPLIT_BYTES: Final = 32 << 20


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
        prefer=tuple(recipe.curation.prefer),
        columns=Columns(tuple(sorted((data.columns or {}).items())), data.prompt_template),
        **asked(recipe.curation),
        pii=_pii(recipe.curation.pii),
        limit_rows=data.limit_rows,
        limit_bytes=data.limit_bytes,
        encoding=data.encoding,
    )


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


def readable(drop: Drop) -> tuple[list[DropFile], list[str]]:
    """(files to read in the order of their names' bytes, names that are passed over).

    Names with a part that begins with `_` or `.` are other programs' markers, as everywhere around S3.
    """
    files = sorted(drop.data_files, key=lambda file: file.key.encode())
    hidden = [file.key for file in files if any(part[:1] in {"_", "."} for part in file.key.split("/"))]
    return [file for file in files if file.key not in set(hidden)], hidden


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
    if path.is_file() and path.stat().st_size == file.size:
        return path
    # Two files with the same bytes share a name, and both may be on their way.
    temporary = folder / f"{name}.{hashlib.sha256(file.key.encode()).hexdigest()[:8]}.part"
    state = hashlib.sha256()
    try:
        with store.open(drop.prefix + file.key, file.etag) as source, temporary.open("wb") as target:
            while piece := source.read(STEP):
                state.update(piece)
                target.write(piece)
    except DropforgeError as error:
        raise DataError(f"file {file.key!r} of the drop", error.cause, error.mend) from error
    found, size = f"sha256:{state.hexdigest()}", temporary.stat().st_size
    if size != file.size or (file.content.startswith("sha256:") and found != file.content):
        raise DataError(
            f"file {file.key!r} of the drop",
            f"it has {size} bytes and {found}, the drop recorded {file.size} bytes and {file.content}",
            "Upload changed data as a new drop",
        )
    temporary.replace(path)
    return path


def tasks(
    drop: Drop,
    files: list[DropFile],
    paths: list[Path],
    rules: Rules,
    folder: Path,
    split_bytes: int = SPLIT_BYTES,
    limits: Limits = DEFAULT_LIMITS,
    index: Path | None = None,
    sample: Sample | None = None,
    most: Sequence[int | None] | None = None,
    own: Path | None = None,
) -> Iterator[Task]:
    """The splits of all files. A split's id is a function of what is read and how.

    :param index: what evaluation sets hold; the rules name these.
    :param sample: which rows are looked at, if not all.
    :param most: of each file the first rows that are read, or None for all (`curation.limit`).
    :param own: where the user's own kernels are unpacked; the rules name these.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for number, (file, path) in enumerate(zip(files, paths, strict=True)):
        rows = most[number] if most is not None else None
        if rows is None:
            parts = cut(path, file.key, split_bytes, encoding=rules.encoding)
        else:
            parts = [Split(path, sniff(path, file.key, rules.encoding), rows=rows)]
        for split in parts:
            where = f"{number}\0{file.content}\0{split.start}\0{split.end}\0{split.rows}"
            what = f"{drop.id}\0{where}\0{rules}\0{limits}" + (f"\0{sample}" if sample else "")
            name = hashlib.sha256(what.encode()).hexdigest()[:24]
            yield Task(name, split, number, file.key, rules, folder, limits, index, sample, own)


def cut(path: Path, name: str, split_bytes: int = SPLIT_BYTES, *, encoding: str = "utf-8") -> list[Split]:
    """Cut a file where rows can be found again: plain JSONL anywhere, Parquet between row groups, else not at all."""
    format_, size = sniff(path, name, encoding), path.stat().st_size
    whole = Split(path, format_)
    if size == 0:
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
