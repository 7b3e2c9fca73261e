"""The recipe's sections on data: which rows there are, and how a drop becomes a dataset version."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from dropforge.section import Section


class Data(Section):
    """Which rows there are and how they are split."""

    eval_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    """Share of the rows kept for evaluation, by content hash."""
    split_salt: str = "dropforge"
    """Changes which rows are evaluation rows."""
    text_column: str = "text"
    """Column of plain text in CSV and Parquet files."""
    max_row_bytes: int = Field(default=8_000_000, ge=1_000)
    """A longer row is quarantined."""
    max_left_out: float = Field(default=0.2, ge=0, le=1)
    """A larger share of training rows that teach nothing, or that the chat template refuses, is an error."""
    mix: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(ge=0, le=100)]] | None = Field(
        default=None, min_length=1
    )
    """Passes over the rows of a source in an epoch, as `{chats.jsonl: 2, wiki: 0.5}`; one where it is not named."""


def found(similarity: float, bands: int, rows: int) -> float:
    """Probability that two rows share a bucket: that all minima of a band agree (Leskovec, Rajaraman and Ullman, Mining
    of Massive Datasets, section 3.4.2)."""
    return 1 - (1 - similarity**rows) ** bands


class Dedup(Section):
    """When two rows are nearly the same: by the Jaccard similarity of their shingles, runs of neighbouring words.
    MinHash with banding proposes the pairs, as in Mining of Massive Datasets by Leskovec, Rajaraman and Ullman, section
    3.4."""

    threshold: float = Field(default=0.8, ge=0.5, le=1)
    """Similarity from which on a row goes: shingles that both have, as a share of those that either has."""
    shingle: Literal["word", "character"] = "word"
    """What a shingle is made of. Of scripts without spaces, such as Chinese and Thai, each character is a word."""
    shingle_size: int = Field(default=5, ge=1, le=64)
    """Words or characters in a shingle; a shorter row goes only if another is the same but for case and white space."""
    bands: int = Field(default=14, ge=1, le=256)
    """More bands find more of the pairs, and cost more."""
    rows_per_band: int = Field(default=8, ge=1, le=64)
    """More rows propose fewer pairs that are not similar, and find fewer that are."""


class Curation(Section):
    """How a drop becomes a dataset version."""

    engine: Literal["embedded"] = "embedded"
    """Where curation runs."""
    exact_duplicates: Literal["drop", "keep"] = "drop"
    """What happens to rows with the same normalised content."""
    dedup: Dedup | None = None
    """Removes rows that are nearly the same too; `{}` takes the defaults."""
    prefer: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=1000)] = ()
    """Sources whose rows win among duplicates, the first one first, as in `[reviewed, chats.jsonl]`; all others come
    after them."""
    min_rows: int = Field(default=20, ge=2)
    """Fewer rows after curation are an error."""
    max_quarantined: float = Field(default=0.2, ge=0, le=1)
    """A larger share of unreadable rows is an error."""
    workers: int = Field(default=0, ge=0)
    """Processes; 0 takes what the machine has."""
