"""What a worker is told of a split, and what it tells of it: rules, task and report."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from curation.decontaminate import Decontamination
from curation.extras import Asked
from curation.fingerprint import BANDS, PRINTS, SHINGLES, Near
from curation.language import Language
from curation.mapping import Columns
from curation.own import Own
from curation.pii import Pii
from curation.quality import Quality
from curation.records import Split
from curation.repair import Repair
from curation.sample import Sample
from curation.schema import Columns as Counted
from curation.streams import DEFAULT_LIMITS, Limits

#: Raised when the meaning of a row, key or split changes: part of the rules, so of the digest.
VERSION: Final = 11

#: What is written of each row besides, where near duplicates are asked for.
PRINTED: Final = {"prints": PRINTS, "bands": BANDS, "shingles": SHINGLES}


@dataclass(frozen=True)
class Rules:
    """What shapes rows and split. Integers and text only: it is part of the digest.

    :param near: what counts as nearly the same, or None if such rows stay.
    :param prefer: sources whose rows win among duplicates, the first one first.
    :param columns: the recipe's own names of columns.
    :param pii: what personal data and secrets become, or None if nothing is looked for.
    :param task: with `classification` a row needs a label and no answer, and rows of other labels are no duplicates;
        with `sequence-to-sequence` it needs an answer, which a text has not.
    :param repair: and :param quality: and :param language: what the stages of these names do, or None.
    :param decontamination: evaluation sets whose items may not be trained on, or None.
    :param limit_rows: and :param limit_bytes: how much is read at most (`curation.limit`), or None.
    :param own: the user's own kernels, or None.
    :param keep_columns: which columns are kept although they mean nothing here, or None.
    :param encoding: what lines that are not UTF-8 are read as, `auto` for UTF-16 and UTF-32 alone, or `utf-8`.
    :param quotes: whether cells of CSV and TSV may stand in quotes (`curation.dialect`).
    :param text_files: whether plain text beside tables is read (`curation.documents`).
    :param scope: `family` where a dataset version holds the rows of all drops so far.
    :param forgotten: content keys and names of groups (`curation.forgotten`, hexadecimal) whose rows end so.
    :param sides_of: digest of a version whose units keep their sides.
    :param label_conflicts: what becomes of rows with the same input and other answers (`curation.conflicts`).
    :param max_rows_per_source: (source, most rows), in the order of the names.
    """

    eval_per_million: int
    split_salt: str
    text_column: str
    max_row_bytes: int
    exact_duplicates: str
    task: str = "causal-lm"
    version: int = VERSION
    near: Near | None = None
    prefer: tuple[str, ...] = ()
    columns: Columns = field(default_factory=Columns)
    repair: Repair | None = None
    quality: Quality | None = None
    language: Language | None = None
    decontamination: Decontamination | None = None
    pii: Pii | None = None
    limit_rows: int | None = None
    limit_bytes: int | None = None
    own: Own | None = None
    encoding: str = "utf-8"
    scope: str = "drop"
    forgotten: tuple[str, ...] = ()
    sides_of: str = ""
    keep_columns: Asked | None = None
    quotes: str = "auto"
    text_files: str = "auto"
    label_conflicts: str = "keep"
    max_rows_per_source: tuple[tuple[str, int], ...] = ()

    def facts(self) -> dict[str, Any]:
        """JSON values for the digest; what came later and is not asked for is not named."""
        own = {"columns": dict(self.columns.names), "prompt_template": self.columns.template}
        pii = self.pii.facts() if self.pii else None
        values = {**_listed(asdict(self)), **own, "pii": pii}
        if self.decontamination:
            values["decontamination"]["sets"] = dict(self.decontamination.sets)
        plain: dict[str, Any] = {
            "task": "causal-lm",
            "near": None,
            "prefer": [],
            "scope": "drop",
            "forgotten": [],
            "sides_of": "",
            "label_conflicts": "keep",
            "max_rows_per_source": [],
            "columns": {},
            "prompt_template": None,
            "encoding": "utf-8",
            "quotes": "auto",
            "text_files": "auto",
            **dict.fromkeys(("repair", "pii", "quality", "language", "decontamination", "own")),
            **dict.fromkeys(("limit_rows", "limit_bytes", "keep_columns")),
        }
        return {key: value for key, value in values.items() if key not in plain or value != plain[key]}

    def priority(self, source: str) -> int:
        """Where rows of a source stand among duplicates; the lowest wins."""
        return self.prefer.index(source) if source in self.prefer else len(self.prefer)


def _listed(value: Any) -> Any:
    """Tuples as lists, as JSON gives them back."""
    if isinstance(value, dict):
        return {name: _listed(part) for name, part in value.items()}
    return [_listed(part) for part in value] if isinstance(value, (list, tuple)) else value


@dataclass(frozen=True)
class Task:
    """A split with all that its worker must know. `file` is the file's number, `name` its name in the drop, `index`
    what evaluation sets hold, `sample` which rows are looked at, if not all, `own` where the user's own kernels are
    unpacked, `forgotten` the places of rows that ended so in versions before."""

    id: str
    split: Split
    file: int
    name: str
    rules: Rules
    folder: Path
    limits: Limits = DEFAULT_LIMITS
    index: Path | None = None
    sample: Sample | None = None
    own: Path | None = None
    forgotten: frozenset[int] = frozenset()

    @property
    def rows(self) -> Path:
        return self.folder / f"{self.id}.rows.parquet"

    @property
    def faults(self) -> Path:
        return self.folder / f"{self.id}.faults.parquet"

    def printed(self, name: str) -> Path:
        """Where fingerprints lie. :param name: one of `PRINTED`."""
        return self.folder / f"{self.id}.{name}.parquet"

    @property
    def answers(self) -> Path:
        return self.folder / f"{self.id}.answers.parquet"

    @property
    def report(self) -> Path:
        return self.folder / f"{self.id}.json"


@dataclass
class Report:
    """Counters of one split. `records` counts input rows, `neutralised` and `invisible` rows that were touched, `short`
    rows that were too short for a shingle, `masked` those whose label, source, group, tools or extras have a mask,
    `recoded` lines that are not UTF-8 and were read as the recipe says, `dialect` what was seen of how CSV is written
    (`curation.dialect`); `counts` is what the stages counted, `columns`
    what columns the input has, `unlisted` how many values are in columns beyond these, and `unknown` in how many rows
    which field means nothing beside the others, or a message has a key (`messages.NAME`) that means nothing here;
    `unset` in how many rows a text, or its end, is what programs write for a missing value, by its spelling, and
    `shown` in how many one is a list, object, tuple or bytes as Python shows it, and `chats` in how many one is a
    conversation, a message or its parts; `quoted` in how many one is a text as JSON writes it, `escaped` in how many of
    these it has escapes, `rounded` in how many a label, source or group is a number that a program has rounded,
    `addresses` in how many one is the address of a file, `encoded` in how many one is encoded, and `lined` and
    `letters` in how many one has a line end, or none but `\\n` in letters, `replaced` in how many one has U+FFFD for
    what nobody could read, `lost` in how many one has `?` for what could not be written, `misread` in how many one was
    read in another encoding than it was written in, `styled` in how many one is RTF, `entities` in how many
    one has characters as HTML or Excel's XML writes them, `pictured` in how many a picture
    stands, `cut` in how many one is as long as a `VARCHAR(255)` may be, `cell` as a cell of Excel, Google Sheets or
    MySQL, `guarded` and `formula` in how many one begins as exports or sheets write formulas, `codes` in how many one
    has characters as JSON writes them in ASCII, `leaked` how many begin or end with their label, `several` how many
    have several answers of which one is learned, and `apart` how many have an answer directly behind another one;
    `floats`, `decimals` and `rounded_answers` in how many the answer is a number with `.0`, with other parts, or as
    Excel rounds it; `total` whether the last one is a total of the others."""

    file: int
    records: int = 0
    rows: int = 0
    faults: int = 0
    blank: int = 0
    neutralised: int = 0
    invisible: int = 0
    short: int = 0
    masked: int = 0
    recoded: int = 0
    counts: dict[str, int] = field(default_factory=dict)
    columns: Counted = field(default_factory=dict)
    unlisted: int = 0
    unknown: dict[str, int] = field(default_factory=dict)
    dialect: dict[str, int] = field(default_factory=dict)
    unset: dict[str, int] = field(default_factory=dict)
    shown: int = 0
    chats: int = 0
    quoted: int = 0
    escaped: int = 0
    rounded: int = 0
    addresses: int = 0
    encoded: int = 0
    lined: int = 0
    letters: int = 0
    replaced: int = 0
    lost: int = 0
    terminal: int = 0
    misread: int = 0
    entities: int = 0
    pictured: int = 0
    cut: int = 0
    cell: int = 0
    guarded: int = 0
    styled: int = 0
    formula: int = 0
    codes: int = 0
    leaked: int = 0
    floats: int = 0
    decimals: int = 0
    rounded_answers: int = 0
    several: int = 0
    apart: int = 0
    total: int = 0
