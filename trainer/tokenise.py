"""Rows of a dataset become tokens: the slow part of a run's preparation, which runs of the same dataset share."""

from __future__ import annotations

import json
from bisect import insort
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from itertools import islice
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import numpy as np

from dropforge.dataset import SPLITS, Manifest
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.config import Settings
from trainer.data.chat import Document, documents, make_encoder
from trainer.data.labels import labelled_documents
from trainer.data.prompts import Prompt, make_prompts, prompted, write_prompts
from trainer.data.rows import Row, check_keys, highest_key, read_rows
from trainer.data.seq2seq import Sources, pairs
from trainer.data.tokens import Column, Tokens, collect, write_tokens
from trainer.data.user_code import UserCode

KEYS: Final = "row_keys.npy"
SOURCES: Final = "sources.json"
PROMPTS: Final = "prompts.json"


def tokenise(
    spec: RunSpec,
    settings: Settings,
    manifest: Manifest,
    tokenizer: Any,
    labels: tuple[str, ...] | None,
    code: UserCode,
    folder: Path,
    check: Callable[[], None],
    say: Callable[[str], None],
) -> None:
    """Tokens of both splits, keys and sources of the training rows, and prompts if asked for, written row by row.

    :param folder: is made. :param check: called now and then; it may raise to stop.
    :raises DataError: if the rows are not those of the dataset's digest.
    """
    data = open_store(spec.data_root)
    keys = {split: folder / f"{split}_keys.npy" for split in SPLITS}
    sources: dict[str, int] = {}
    folder.mkdir(parents=True)
    say(f"tokenising {manifest.rows('train')} rows")
    length = settings.train.sequence_length
    with ExitStack() as stack:
        columns = {split: Column(path, "V16") for split, path in keys.items()}
        of_row, row_keys = Column(folder / "row_sources.npy", np.int32), Column(folder / KEYS, "V16")
        for column in (*columns.values(), of_row, row_keys):
            stack.callback(column.close)

        def seen(split: str) -> Iterator[Row]:
            for row in read_rows(data, manifest, split, code.rows):
                columns[split].append(row.key)
                if split == "train":
                    sources.setdefault(row.source, len(sources))
                if columns[split].length % 512 == 0:
                    check()
                yield row

        def noted(rows: Iterator[Row]) -> Iterator[Row]:
            for row in rows:
                of_row.append(sources[row.source])
                row_keys.append(row.key)
                yield row

        for split, most in (("train", settings.train.max_rows), ("eval", settings.eval_rows)):
            highest = highest_key(data, manifest, split, most, check)
            rows = seen(split)
            facts: dict[str, Any] = {}
            taken: Iterator[Row] = islice((row for row in rows if highest is None or row.key <= highest), most)
            if split == "train":
                taken = noted(taken)
            elif settings.generation is not None:
                taken = _asking(settings, tokenizer, taken, settings.generation.rows, folder / PROMPTS)
            found = _documents(settings, tokenizer, labels, taken, length, facts)
            write_tokens(found, folder / split, facts, labelled=labels is not None)
            for _ in rows:  # the rest is read for its keys
                pass
    (folder / SOURCES).write_text(json.dumps(list(sources)))
    check_keys(manifest, {split: np.load(path, mmap_mode="r") for split, path in keys.items()})
    for path in keys.values():
        path.unlink()


def _asking(settings: Settings, tokenizer: Any, rows: Iterator[Row], count: int, path: Path) -> Iterator[Row]:
    """The rows as they come; once they are through, the prompts of the first ones by content key are written."""
    kept: list[Row] = []
    for row in rows:
        if (len(kept) < count or row.key < kept[-1].key) and prompted(row) is not None:
            insort(kept, row, key=attrgetter("key"))
            del kept[count:]
        yield row
    write_prompts(prompts_of(settings, tokenizer, kept, count), path)


def prompts_of(settings: Settings, tokenizer: Any, rows: Iterable[Row], count: int) -> list[Prompt]:
    """The prompts of the first rows that have one, as the task has the model read them; see `make_prompts`."""
    ask = Sources(tokenizer).ask if settings.task == "sequence-to-sequence" else None
    return make_prompts(tokenizer, rows, count, ask)


def _documents(
    settings: Settings,
    tokenizer: Any,
    labels: tuple[str, ...] | None,
    rows: Iterable[Row],
    length: int,
    facts: dict[str, Any],
) -> Iterator[Document]:
    """Rows as the task has the model read them."""
    if labels is not None:
        return labelled_documents(tokenizer, labels, rows, length, facts)
    if settings.task == "sequence-to-sequence":
        return pairs(tokenizer, rows, length, facts)
    return documents(make_encoder(tokenizer, settings.train.loss_on), rows, length, facts)


def encode_eval(tokenizer: Any, rows: list[Row], settings: Settings, labels: tuple[str, ...] | None = None) -> Tokens:
    """Evaluation rows as documents. :param labels: of a classifier, in the order of their numbers."""
    facts: dict[str, Any] = {}
    found = _documents(settings, tokenizer, labels, rows, settings.train.sequence_length, facts)
    return collect(found, facts, labelled=labels is not None)
