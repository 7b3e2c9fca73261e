"""Why a row ends in quarantine: one code per cause, each with what a person can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Final


class Reason(StrEnum):
    """Codes of the ledger and of the manifest's counts; a code never changes its meaning."""

    BAD_JSON = "bad_json"
    BAD_NUMBER = "bad_number"
    DUPLICATE_FIELD = "duplicate_field"
    TOO_DEEP = "too_deep"
    NOT_AN_OBJECT = "not_an_object"
    MANY_ROWS = "many_rows"
    BAD_ENCODING = "bad_encoding"
    LONE_SURROGATE = "lone_surrogate"
    NUL = "nul"
    TOO_LARGE = "too_large"
    RAGGED = "ragged"
    BAD_QUOTES = "bad_quotes"
    BAD_HEADER = "bad_header"
    NO_CONTENT = "no_content"
    BAD_FIELD = "bad_field"
    EMPTY = "empty"
    BAD_MESSAGES = "bad_messages"
    UNKNOWN_ROLE = "unknown_role"
    BAD_ORDER = "bad_order"
    NO_ANSWER = "no_answer"
    NO_LABEL = "no_label"
    TORN_FILE = "torn_file"
    BOMB = "compression_bomb"
    BAD_FORMAT = "bad_format"
    BAD_PARQUET = "bad_parquet"
    OWN_KERNEL = "own_kernel_failed"
    BAD_ARROW = "bad_arrow"
    PARTIAL_FILE = "partial_file"
    FILE_ENCODING = "file_encoding"
    MEMORY = "needs_memory"
    BAD_TIME = "bad_time"


#: One of these stands for a whole file, a part or the rest of one, so for nobody knows how many rows.
REST: Final = frozenset(
    {
        Reason.MANY_ROWS,
        Reason.TORN_FILE,
        Reason.BOMB,
        Reason.BAD_FORMAT,
        Reason.BAD_HEADER,
        Reason.BAD_PARQUET,
        Reason.BAD_ARROW,
        Reason.PARTIAL_FILE,
        Reason.FILE_ENCODING,
        Reason.MEMORY,
    }
)

MENDS: Mapping[Reason, str] = {
    Reason.BAD_JSON: "Write one JSON object per line, for example with `json.dumps`",
    Reason.BAD_NUMBER: "Write null instead of NaN and Infinity",
    Reason.DUPLICATE_FIELD: "Give each field of a row once",
    Reason.TOO_DEEP: "Flatten the row",
    Reason.NOT_AN_OBJECT: 'Write each row as an object, for example {"text": "..."}',
    Reason.MANY_ROWS: "Write each row as a line of its own, as `jq -c '.[]'` does with a list",
    Reason.BAD_ENCODING: "Save the file as UTF-8, or say in `data.encoding` what else may be read",
    Reason.LONE_SURROGATE: "Write characters beyond the basic plane as UTF-8 or as whole surrogate pairs",
    Reason.NUL: "Remove the NUL characters",
    Reason.TOO_LARGE: "Split the row, raise `data.max_row_bytes`, or shorten its label, source or group",
    Reason.RAGGED: "Give every CSV row as many cells as the header",
    Reason.BAD_QUOTES: 'Close every quoted CSV cell, and write a quote inside one as ""',
    Reason.BAD_HEADER: "Begin the CSV file with one line of distinct column names",
    Reason.NO_CONTENT: "Give rows `messages`, `prompt` and `completion`, or `text`, or name them in `data.columns`; "
    "for texts with labels `task: classification` and `data: {columns: {text: ..., label: ...}}`",
    Reason.BAD_FIELD: "Give text where text is expected",
    Reason.EMPTY: "Remove rows without text",
    Reason.BAD_MESSAGES: "Write messages as objects with `role` and `content`, both text",
    Reason.UNKNOWN_ROLE: "Use the roles system, user, assistant and tool",
    Reason.BAD_ORDER: "Begin with at most one system message, then a user's",
    Reason.NO_ANSWER: "Give every conversation an answer of the assistant",
    Reason.NO_LABEL: "Give every row a `label`, as `task: classification` learns nothing from others",
    Reason.TORN_FILE: "Write or compress it again, whole, and upload the file again",
    Reason.BOMB: "Compress the file with an ordinary ratio, or split it; or shorten `data.prompt_template`",
    Reason.BAD_FORMAT: "Upload JSONL, JSON, CSV, Parquet, Arrow streams or text, plain, gzip or zstd",
    Reason.BAD_PARQUET: "Write the Parquet file again",
    Reason.OWN_KERNEL: "Fix the kernel, and name the new wheel in `code`",
    Reason.BAD_ARROW: "Save the data set again, and upload the whole folder",
    Reason.PARTIAL_FILE: "Upload the whole file under its final name, in a drop without the other one",
    Reason.FILE_ENCODING: "Save the file as UTF-8, or set `data.encoding` to auto",
    Reason.MEMORY: "Write smaller row groups or record batches, without a long value that many rows share, or JSONL",
    Reason.BAD_TIME: "Write dates and times of the years 1 to 9999, in a zone that is known, or write them as text",
}


class Filtered(StrEnum):
    """Codes of rows that can be read and that the recipe wants to be rid of: no quarantine, and never there unless a
    rule is asked for."""

    FEW_WORDS = "gopher_few_words"
    MANY_WORDS = "gopher_many_words"
    MEAN_WORD_LENGTH = "gopher_mean_word_length"
    HASHES = "gopher_hashes"
    ELLIPSES = "gopher_ellipses"
    BULLET_LINES = "gopher_bullet_lines"
    ELLIPSIS_LINES = "gopher_ellipsis_lines"
    ALPHABETIC_WORDS = "gopher_alphabetic_words"
    STOP_WORDS = "gopher_stop_words"
    DUPLICATE_LINES = "gopher_duplicate_lines"
    DUPLICATE_PARAGRAPHS = "gopher_duplicate_paragraphs"
    DUPLICATE_LINE_CHARACTERS = "gopher_duplicate_line_characters"
    DUPLICATE_PARAGRAPH_CHARACTERS = "gopher_duplicate_paragraph_characters"
    TOP_2_GRAM = "gopher_top_2_gram"
    TOP_3_GRAM = "gopher_top_3_gram"
    TOP_4_GRAM = "gopher_top_4_gram"
    DUPLICATE_5_GRAM = "gopher_duplicate_5_gram"
    DUPLICATE_6_GRAM = "gopher_duplicate_6_gram"
    DUPLICATE_7_GRAM = "gopher_duplicate_7_gram"
    DUPLICATE_8_GRAM = "gopher_duplicate_8_gram"
    DUPLICATE_9_GRAM = "gopher_duplicate_9_gram"
    DUPLICATE_10_GRAM = "gopher_duplicate_10_gram"
    LOREM_IPSUM = "c4_lorem_ipsum"
    CURLY_BRACKET = "c4_curly_bracket"
    FEW_SENTENCES = "c4_few_sentences"
    NO_LINES = "c4_no_lines"
    OTHER_LANGUAGE = "other_language"
    UNKNOWN_LANGUAGE = "unknown_language"
    PERSONAL_DATA = "personal_data"
    CONTAMINATED = "contaminated"
    OWN_KERNEL = "own_kernel"
    CROSSES_SPLIT = "crosses_split"
    LABEL_CONFLICT = "label_conflict"
    OVER_CAP = "over_cap"
    FORGOTTEN = "forgotten"


#: The recipe's key of each rule, below `curation`.
RULES: Mapping[Filtered, str] = {
    Filtered.FEW_WORDS: "quality.gopher.min_words",
    Filtered.MANY_WORDS: "quality.gopher.max_words",
    Filtered.MEAN_WORD_LENGTH: "quality.gopher.min_mean_word_length` and `curation.quality.gopher.max_mean_word_length",
    Filtered.HASHES: "quality.gopher.max_hashes",
    Filtered.ELLIPSES: "quality.gopher.max_ellipses",
    Filtered.BULLET_LINES: "quality.gopher.max_bullet_lines",
    Filtered.ELLIPSIS_LINES: "quality.gopher.max_ellipsis_lines",
    Filtered.ALPHABETIC_WORDS: "quality.gopher.min_alphabetic_words",
    Filtered.STOP_WORDS: "quality.gopher.min_stop_words",
    **{
        filtered: f"quality.gopher_repetition.max_{filtered.value.removeprefix('gopher_')}"
        for filtered in Filtered
        if filtered.value.startswith(("gopher_duplicate", "gopher_top"))
    },
    Filtered.LOREM_IPSUM: "quality.c4.lorem_ipsum",
    Filtered.CURLY_BRACKET: "quality.c4.curly_bracket",
    Filtered.FEW_SENTENCES: "quality.c4.min_sentences",
    Filtered.NO_LINES: "quality.c4",
    Filtered.OTHER_LANGUAGE: "language.keep",
    Filtered.UNKNOWN_LANGUAGE: "language.unknown",
    Filtered.CONTAMINATED: "decontaminate",
    Filtered.CROSSES_SPLIT: "scope",
    Filtered.LABEL_CONFLICT: "label_conflicts",
    Filtered.OVER_CAP: "max_rows_per_source",
}


def mend(code: str) -> str:
    """What a person can do about rows with this code of the quarantine or of a filter."""
    if code in set(Reason):
        return MENDS[Reason(code)]
    if code == Filtered.OWN_KERNEL:
        return "Drop rows that pass, change the kernel in the wheel of `code`, or raise `curation.max_filtered`"
    if code == Filtered.PERSONAL_DATA:
        return "Set `curation.pii.action` to mask, or look for fewer `curation.pii.kinds`"
    if code == Filtered.CROSSES_SPLIT:
        mend = "Give no row that belongs to rows of earlier drops on both sides: other groups or texts"
        return f"{mend}, or change `curation.scope`"
    if code == Filtered.LABEL_CONFLICT:
        return "Give each input one label or answer, or change `curation.label_conflicts`"
    if code == Filtered.OVER_CAP:
        return "Raise the source's number in `curation.max_rows_per_source`, or leave it out"
    if code == Filtered.FORGOTTEN:
        return "It was asked for with `dropforge forget`, and stays so"
    return f"Drop rows that pass, or change or switch off `curation.{RULES[Filtered(code)]}`"


class RejectError(Exception):
    """A row that cannot be used; caught where the row was read, so its neighbours survive."""

    def __init__(self, reason: Reason, detail: str = "") -> None:
        super().__init__(reason, detail)
        self.reason, self.detail = reason, detail


def quarantined(counts: Mapping[str, int]) -> dict[str, int]:
    """The quarantine's part of a manifest's counts, most frequent reason first."""
    found = [(reason.value, counts[reason]) for reason in Reason if counts.get(reason)]
    return dict(sorted(found, key=lambda item: (-item[1], item[0])))


def filtered(counts: Mapping[str, int]) -> dict[str, int]:
    """The part of a manifest's counts that filters took, most frequent first."""
    found = [(code.value, counts[code]) for code in Filtered if counts.get(code)]
    return dict(sorted(found, key=lambda item: (-item[1], item[0])))
