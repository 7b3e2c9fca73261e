"""The recipe's sections on data: which rows there are, and how a drop becomes a dataset version."""

from __future__ import annotations

from collections.abc import Mapping
from string import Formatter
from typing import Annotated, Any, Final, Literal

from pydantic import Field, model_validator

from dropforge.recipe_quality import Language, Quality
from dropforge.recipe_spark import Spark
from dropforge.section import Section

#: What a column can hold; the first five are content.
Role = Literal["messages", "text", "prompt", "completion", "system", "label", "source", "group"]
#: First parts of the keys that `dropforge.layout` spells.
OWN: Final = frozenset({"drops", "ledger", "datasets", "runs", "mlflow"})
CONTENT: Final = frozenset({"messages", "text", "prompt", "completion", "system"})


class Source(Section):
    """Data for a run without an upload: exactly one of `prefix`, `dataset` and `drops`, which are in the bucket, and
    `hub`."""

    prefix: str | None = Field(default=None, min_length=1, max_length=900)
    """Key prefix of files in the bucket, such as `lake/chats/`; everything below it is read."""
    dataset: str | None = Field(default=None, pattern=r"^[a-z0-9][a-z0-9-]{0,39}/[0-9a-f]{64}$")
    """An existing dataset version, in the form `FAMILY/DIGEST`. Its rows are split again by `split_salt` and
    `eval_fraction`."""
    drops: (
        Annotated[
            tuple[Annotated[str, Field(pattern="^[0-9a-f]{32}$")], ...],
            Field(strict=False, min_length=1, max_length=1000),
        ]
        | None
    ) = None
    """Several drops of the family, by their ids in the ledger, read as one. A `recipe.yaml` in them is ignored."""
    hub: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$", max_length=96)
    """A data set of the Hugging Face hub, in the form `OWNER/NAME`; its files are read as they are, and none of its
    code runs."""
    config: str | None = Field(default=None, min_length=1, max_length=200)
    """Its configuration (subset); null is the only one, or the default one."""
    split: str = Field(default="train", pattern=r"^\w+([.-]\w+)*$", max_length=100)
    """Its split. The rows are split again into training and evaluation."""
    revision: str | None = Field(default=None, min_length=1, max_length=200)
    """Its branch, tag or commit; a branch is pinned to its commit when the run is planned."""
    id: str | None = Field(default=None, pattern="^[0-9a-f]{32}$")
    """The id that the files had in the ledger; other files under the same name are then refused."""

    @model_validator(mode="after")
    def _one(self) -> Source:
        if sum(item is not None for item in (self.prefix, self.dataset, self.drops, self.hub)) != 1:
            raise ValueError("give exactly one of `prefix`, `dataset`, `drops` and `hub`")
        if self.hub is None and (self.config, self.split, self.revision) != (None, "train", None):
            raise ValueError("`config`, `split` and `revision` are of `hub`: leave them out")
        if self.prefix is not None:
            parts = self.prefix.rstrip("/").split("/")
            if any(part in {"", ".", ".."} for part in parts) or any(ord(sign) < 32 for sign in self.prefix):
                raise ValueError(
                    "`prefix` is a key prefix in the bucket, such as `lake/chats/`: no address, `..` or `//`"
                )
            if parts[0] in OWN:
                raise ValueError(f"`{parts[0]}/` belongs to Dropforge: name a drop in the form, or use `dataset`")
        return self


class Data(Section):
    """Which rows are used and how they are split."""

    source: Source | None = None
    """Data in the bucket that a run started by hand trains on, instead of a drop."""
    license: str | None = Field(
        default=None, pattern=r"^([A-Za-z0-9][A-Za-z0-9.+-]{0,60}|https?://[A-Za-z0-9._~/#%+-]{1,300})$"
    )
    """The rows' licence, for card and metadata: its SPDX identifier, such as `CC-BY-4.0`, or its address."""
    eval_fraction: float = Field(default=0.05, gt=0, lt=0.5)
    """Share of the rows kept for evaluation, by content hash."""
    split_salt: str = "dropforge"
    """Changes which rows are evaluation rows."""
    text_column: str = "text"
    """Column of plain text; short for `columns: {text: ...}`."""
    columns: dict[Role, Annotated[str, Field(min_length=1, max_length=200)]] | None = Field(default=None, min_length=1)
    """Which column holds what, for example `{prompt: question, completion: best_answer, label: stars}`; a column then
    has no other meaning. If messages, text, prompt or completion are named, only named content is read; everything else
    is found by its usual names."""
    prompt_template: str | None = Field(default=None, min_length=1, max_length=20_000)
    """The prompt made of columns, such as `Answer from this text:\\n{passage}\\n\\n{question}`; a brace is written
    twice. Its answer is the column that `columns` names as `completion`; without one it is the whole text."""
    keep_columns: (
        Literal["all"]
        | Annotated[
            tuple[Annotated[str, Field(min_length=1, max_length=200)], ...],
            Field(strict=False, min_length=1, max_length=200),
        ]
        | None
    ) = None
    """Columns without a meaning here that stay with their rows, as JSON in the shards' column `extras`: `[id, url]`, or
    `all` that have no meaning."""
    encoding: Literal[
        "utf-8", "auto", "windows-1250", "windows-1251", "windows-1252", "windows-1254", "windows-1257", "iso-8859-1",
        "iso-8859-2", "iso-8859-15",
    ] = "utf-8"  # fmt: skip
    """What is read besides UTF-8: with `auto` UTF-16 and UTF-32, which are detected, and with a name also each line
    that is not UTF-8, in that encoding. Anything else is quarantined."""
    text_files: Literal["auto", "read"] = "auto"
    """With `auto` plain text beside tables (JSONL, CSV, Parquet...) is skipped, and read if there is nothing else;
    `read` reads it beside them too. Documentation such as README.md is never read."""
    quotes: Literal["auto", "always", "never"] = "auto"
    """Whether a cell of CSV or TSV that begins with a quotation mark continues to the next one, over tabs and lines;
    else the mark is a character. With `auto` CSV has quotes, and TSV has them if its column names have."""
    max_row_bytes: int = Field(default=8_000_000, ge=1_000, le=1_000_000_000)
    """A longer row is quarantined."""
    limit_rows: int | None = Field(default=None, ge=1, le=1_000_000_000_000)
    """For smoke runs: only the first rows are read, in the order of file names and of positions in the files."""
    limit_bytes: int | None = Field(default=None, ge=1, le=1_000_000_000_000_000)
    """As `limit_rows`: rows are read until their text is more than this many bytes of UTF-8."""
    max_left_out: float = Field(default=0.2, ge=0, le=1)
    """A larger share of training rows without a target, or that the chat template refuses, is an error."""
    mix: dict[Annotated[str, Field(min_length=1)], Annotated[float, Field(ge=0, le=100)]] | None = Field(
        default=None, min_length=1
    )
    """Passes over the rows of a source in an epoch, for example `{chats.jsonl: 2, wiki: 0.5}`; one for a source that is
    not named."""

    @model_validator(mode="after")
    def _columns_agree(self) -> Data:
        named = set(self.columns or ())
        if self.text_column != "text" and named & CONTENT:
            raise ValueError("give `text_column` or the columns of content in `columns`, not both")
        if len({name.strip().lower() for name in (self.columns or {}).values()}) < len(self.columns or {}):
            raise ValueError("`columns` names a column twice")
        made = {"prompt"} if self.prompt_template is not None else set()
        if made:
            fields = placeholders(self.prompt_template or "")
            if not fields:
                raise ValueError("`prompt_template` names no column: write one as {question}")
            if self.text_column != "text" or named & {"messages", "text", "prompt"}:
                raise ValueError("`prompt_template` makes the prompt: name no `messages`, `text` or `prompt` beside it")
        shapes = [shape for shape in ({"messages"}, {"text"}, {"prompt", "completion"}) if (named | made) & shape]
        if len(shapes) > 1:
            raise ValueError("`columns` names two of: `messages`, `text`, and `prompt` with `completion`")
        if shapes == [{"prompt", "completion"}] and not made and not {"prompt", "completion"} <= named:
            raise ValueError("`columns` names one of `prompt` and `completion`: name both")
        return self


def placeholders(template: str) -> tuple[str, ...]:
    """The columns that a template names, in its order.

    :raises ValueError: if it asks for more than columns: formats, conversions, attributes or items.
    """
    return tuple(name for _, name in parts(template) if name is not None)


def parts(template: str) -> list[tuple[str, str | None]]:
    """A template as pairs of a text and the column that follows it, if one does.

    :raises ValueError: see `placeholders`.
    """
    made: list[tuple[str, str | None]] = []
    for text, name, how, conversion in Formatter().parse(template):
        if name is not None and (how or conversion or not name.strip() or set(name) & set("[].!:{}")):
            raise ValueError(f"`prompt_template` may hold columns as {{name}} and nothing else, not {name!r} in it")
        made.append((text, name))
    return made


def found(similarity: float, bands: int, rows: int) -> float:
    """Probability that two rows share a bucket: that all minima of a band agree (Leskovec, Rajaraman and Ullman, Mining
    of Massive Datasets, section 3.4.2)."""
    return 1 - (1 - similarity**rows) ** bands


class Dedup(Section):
    """When two rows are nearly the same: by the Jaccard similarity of their shingles, runs of neighbouring words.
    MinHash with banding proposes the pairs, as in Mining of Massive Datasets by Leskovec, Rajaraman and Ullman, section
    3.4."""

    threshold: float = Field(default=0.8, ge=0.5, le=1)
    """Similarity from which on a row is removed: shingles that both have, as a share of those that either has."""
    shingle: Literal["word", "character"] = "word"
    """What a shingle is made of. Of scripts without spaces, such as Chinese and Thai, each character is a word."""
    shingle_size: int = Field(default=5, ge=1, le=64)
    """Words or characters in a shingle; a shorter row is removed only if another differs in case and white space
    alone."""
    bands: int = Field(default=14, ge=1, le=256)
    """More bands find more of the pairs, and cost more."""
    rows_per_band: int = Field(default=8, ge=1, le=64)
    """More rows propose fewer pairs that are not similar, and find fewer that are."""


PiiKind = Literal["secret", "iban", "card", "national_id", "email", "ip", "phone"]


class Pii(Section):
    """What happens to personal data and secrets in the text. They are found by their form and check digits; names and
    streets are not."""

    kinds: Annotated[tuple[PiiKind, ...], Field(strict=False, min_length=1)] = (
        "secret",
        "iban",
        "card",
        "national_id",
        "email",
        "ip",
        "phone",
    )
    """What is searched for; `ip` is the address of a public host, `secret` a key, token or password."""
    action: Literal["mask", "drop-row"] = "mask"
    """Put a mask such as `<EMAIL>` in its place, or drop the row."""
    key_env: str | None = Field(default=None, pattern="^[A-Za-z_][A-Za-z0-9_]{0,100}$")
    """Name of the environment variable with a key of at least 32 characters: the same value then has the same pseudonym
    everywhere, as in `<EMAIL:kfmbaeojdcpl>`. `DROPFORGE_PII_KEY` reaches the embedded stack."""


class Decontaminate(Section):
    """Which evaluation sets may not be trained on: a row that contains an item of one is removed, in whatever message
    it is. Items in other words, or with other numbers, are not found."""

    sets: dict[
        Annotated[str, Field(pattern=r"^[\w.-]{1,60}$")], Annotated[str, Field(min_length=1, max_length=1024)]
    ] = Field(min_length=1, max_length=100)
    """The sets' files by name, keys of the bucket: `{gsm8k: eval-sets/gsm8k.jsonl}`. Each row is an item, and each of
    its texts is searched for."""
    words: int = Field(default=8, ge=5, le=32)
    """Words in a run that is compared; a shorter text, of five words or more, is searched for as a whole."""
    threshold: float = Field(default=0.5, gt=0, le=1)
    """Share of a text's runs that a row must contain to be removed."""


class Gate(Section):
    """What a dataset version must meet before it is trained on, besides the limits of `curation` itself. None of it is
    part of the version: a changed limit makes no new one."""

    max: dict[Annotated[str, Field(pattern=r"^[a-z0-9_]{1,60}$")], Annotated[float, Field(ge=0, le=1)]] = Field(
        default={}, max_length=100
    )
    """Largest share of the rows that may be lost for a reason, for example `{near_duplicate: 0.5, contaminated: 0}`."""
    min_words: int | None = Field(default=None, ge=1, le=1_000_000_000_000_000)
    """Fewest words that the rows of both splits may have together; `curation.min_rows` is the same limit in rows."""
    max_drift: float | None = Field(default=None, ge=0, le=1)
    """Largest distance from the previous version of the same family: the largest of those in the rows' characters,
    words, languages and labels (Jensen-Shannon, 0 the same, 1 nothing in common)."""
    type_changes: Literal["report", "refuse"] = "report"
    """Columns with several types (number, text, object...) in files of one format, or with another one than in the
    previous version: the card reports them, or with `refuse` they stop the run too."""
    override: str | None = Field(default=None, min_length=10, max_length=1000)
    """Why the version may pass although a limit is broken; it is shown on the card and in the run. A ledger that does
    not add up, and a split without rows, stop it anyway."""


class Curation(Section):
    """How a drop becomes a dataset version."""

    steps: Literal["all", "none"] = "all"
    """`none`, or `curation: none` for short, takes clean rows unchanged, duplicates too: they are verified and get
    their manifest, and the first row that cannot be used is an error."""
    engine: Literal["embedded", "spark", "auto"] = "embedded"
    """Where curation runs: `embedded` in local processes and DuckDB, `spark` in Spark, which needs Java and
    `dropforge[spark]`; `auto` takes Spark, if it is installed, for drops from 200 GB on, and for smaller ones that
    would exceed `deadline_minutes`. The dataset is the same."""
    deadline_minutes: int | None = Field(default=None, ge=1, le=525_600)
    """How long curation may take by its estimate, for `engine: auto`; curation is not ended when it is over."""
    spark: Spark = Spark()
    scope: Literal["drop", "family"] = "drop"
    """Which rows a dataset version holds: those of its drop, or of all drops of the family that had the same rules."""
    exact_duplicates: Literal["drop", "keep"] = "drop"
    """What happens to rows with the same normalised content."""
    label_conflicts: Literal["keep", "first", "drop"] = "keep"
    """What happens to rows with the same input and another label or last answer, which the card counts: all stay, or
    the first one in rank, or none. All rows with one input are on one side of the split."""
    max_rows_per_source: dict[
        Annotated[str, Field(min_length=1)], Annotated[int, Field(ge=1, le=1_000_000_000_000)]
    ] = Field(default={}, max_length=1000)
    """Largest number of rows of a source, for example `{wiki: 100000}`: those with the lowest hashes stay."""
    dedup: Dedup | None = None
    """Removes near duplicates too; `{}` takes the defaults."""
    pii: Pii | None = None
    """Masks personal data and secrets, or drops their rows; `{}` masks all kinds."""
    prefer: Annotated[tuple[Annotated[str, Field(min_length=1)], ...], Field(strict=False, max_length=1000)] = ()
    """Sources whose rows win among duplicates, the first one first, as in `[reviewed, chats.jsonl]`; all others come
    after them."""
    unicode: Literal["keep", "repair"] = "keep"
    """`repair` fixes misread text, line ends, control and invisible characters, and composes letters (NFC)."""
    quality: Quality | None = None
    """Removes rows that are not good enough, for example `{gopher: {}, gopher_repetition: {}}`."""
    language: Language | None = None
    """Removes rows in other languages than `keep` names."""
    decontaminate: Decontaminate | None = None
    """Removes rows that contain items of evaluation sets, for example `{sets: {gsm8k: eval-sets/gsm8k.jsonl}}`."""
    kernels: Annotated[
        tuple[Annotated[str, Field(pattern=r"^[a-z][a-z0-9_-]{0,40}$")], ...], Field(strict=False, max_length=100)
    ] = ()
    """Functions of the wheel that `code` names that change texts or remove rows, in this order, as `[tidy]`."""
    min_rows: int = Field(default=20, ge=2, le=1_000_000_000_000)
    """Fewer rows after curation are an error."""
    max_quarantined: float = Field(default=0.2, ge=0, le=1)
    """A larger share of unreadable rows is an error."""
    max_filtered: float = Field(default=0.9, ge=0, le=1)
    """A larger share of rows that `quality`, `language`, `decontaminate`, `pii` and `kernels` removed is an error."""
    unknown_keys: Literal["tell", "refuse"] = "tell"
    """Keys of rows and of messages that have no meaning here and that `data.keep_columns` does not keep: card, terminal
    and log list them, or with `refuse` they stop the run too."""
    gate: Gate = Gate()
    memory: str = Field(default="512MB", pattern=r"^[1-9][0-9]{0,5}[MG]B$")
    """What DuckDB holds before it spills to the work folder, such as `512MB` or `4GB`; processes need more besides."""
    workers: int = Field(default=0, ge=0, le=4096)
    """Processes, or Spark's tasks at a time; 0 takes what the machine has."""

    @model_validator(mode="before")
    @classmethod
    def _as_they_are(cls, values: Any) -> Any:
        """`none` for short; rows that are taken as they are keep their copies."""
        values = {"steps": "none"} if values == "none" else values
        bare = isinstance(values, Mapping) and values.get("steps") == "none"
        return {"exact_duplicates": "keep", **values} if bare else values
