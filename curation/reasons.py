"""Why a row ends in quarantine: one code per cause, each with what a person can do about it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class Reason(StrEnum):
    """Codes of the ledger and of the manifest's counts; a code never changes its meaning."""

    BAD_JSON = "bad_json"
    BAD_NUMBER = "bad_number"
    DUPLICATE_FIELD = "duplicate_field"
    TOO_DEEP = "too_deep"
    NOT_AN_OBJECT = "not_an_object"
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


class Filtered(StrEnum):
    """Codes of readable rows that the recipe asks to drop; they are no part of the quarantine."""

    PERSONAL_DATA = "personal_data"


MENDS: Mapping[Reason, str] = {
    Reason.BAD_JSON: "Write one JSON object per line, for example with `json.dumps`",
    Reason.BAD_NUMBER: "Write null instead of NaN and Infinity",
    Reason.DUPLICATE_FIELD: "Give each field of a row once",
    Reason.TOO_DEEP: "Flatten the row",
    Reason.NOT_AN_OBJECT: 'Write each row as an object, for example {"text": "..."}',
    Reason.BAD_ENCODING: "Save the file as UTF-8",
    Reason.LONE_SURROGATE: "Write characters beyond the basic plane as UTF-8 or as whole surrogate pairs",
    Reason.NUL: "Remove the NUL characters",
    Reason.TOO_LARGE: "Split the row, or raise `data.max_row_bytes`",
    Reason.RAGGED: "Give every CSV row as many cells as the header",
    Reason.BAD_QUOTES: 'Close every quoted CSV cell, and write a quote inside one as ""',
    Reason.BAD_HEADER: "Begin the CSV file with one line of distinct column names",
    Reason.NO_CONTENT: "Give rows `messages`, `prompt` and `completion`, or `text`, or name them in `data.columns`",
    Reason.BAD_FIELD: "Give text where text is expected",
    Reason.EMPTY: "Remove rows without text",
    Reason.BAD_MESSAGES: "Write messages as objects with `role` and `content`, both text",
    Reason.UNKNOWN_ROLE: "Use the roles system, user, assistant and tool",
    Reason.BAD_ORDER: "Begin with at most one system message, then a user's",
    Reason.NO_ANSWER: "Give every conversation an answer of the assistant",
    Reason.NO_LABEL: "Give every row a `label`, as `task: classification` learns nothing from others",
    Reason.TORN_FILE: "Compress and upload the file again",
    Reason.BOMB: "Compress the file with an ordinary ratio, or split it",
    Reason.BAD_FORMAT: "Upload JSONL, JSON, CSV, Parquet or text, plain, gzip or zstd",
    Reason.BAD_PARQUET: "Write the Parquet file again",
}
FILTER_MENDS: Mapping[Filtered, str] = {
    Filtered.PERSONAL_DATA: "Mask it with `curation.pii.action: mask`, or look for fewer `curation.pii.kinds`",
}


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
    """The part of a manifest's counts that the recipe asked to drop, most frequent reason first."""
    found = [(reason.value, counts[reason]) for reason in Filtered if counts.get(reason)]
    return dict(sorted(found, key=lambda item: (-item[1], item[0])))
