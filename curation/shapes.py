"""Rows that other programs write in another shape: read where it is certain, else named with what writes rows."""

from __future__ import annotations

import re
from base64 import b64decode
from codecs import getincrementaldecoder
from collections.abc import Mapping
from html.entities import html5
from typing import Any, Final

from curation.nesting import parse_text
from curation.reasons import RejectError

_LINES: Final = "write one row per line, with pandas `to_json(path, orient='records', lines=True)`"
_GEMINI: Final = (
    "it is a conversation as Gemini takes it: write `contents` as `messages`, with the text of `parts` as `content`, "
    "and the system instruction as `system`"
)
_TURNS: Final = "write them as the `messages` of a conversation, with `train: false` where they are not to be learned"
_LABELS: Final = "it is a task of Label Studio: export it as JSON_MIN or CSV, and name its columns in `data.columns`"
_SQUAD: Final = "holds answers as SQuAD has them: write one of its texts as `answer`"
_ASK: Final = "to learn the better answer, write it as `completion`, or as the last of `messages`"
#: Keys of an object that is no row, and what to do about it.
_OTHERS: Final = {
    ("chosen", "rejected"): f"it is a preference between two answers: {_ASK}",
    ("preferred_output", "non_preferred_output"): f"it is a preference between two answers: {_ASK}",
    ("columns", "index", "data"): f"it is a table as pandas writes it with orient='split': {_LINES}",
    ("custom_id", "body"): "it is a request of OpenAI's batches: write the `messages` of its body with the answer",
    ("custom_id", "response"): "it is an answer of OpenAI's batches: write it behind the `messages` of its request",
    ("custom_id", "params"): "it is a request of Anthropic's batches: write its `messages` with the answer",
    ("custom_id", "result"): "it is an answer of Anthropic's batches: write it behind the `messages` of its request",
    ("fields", "responses"): "it is a record of Argilla: write what is in its `fields` as columns, with the response",
    ("attributes.llm.input_messages",): "it is a span of Phoenix: write its messages with `role` and `content` as the "
    "list `messages`, the output's as the last one",
    ("data", "annotations"): _LABELS,
    ("data", "completions"): _LABELS,
    ("question", "answers"): f"`answers` {_SQUAD}",
    (
        "query",
        "answers",
        "tools",
    ): "its `answers` are calls of tools, as xLAM has them: write `messages`, with these as "
    "the `tool_calls` of an answer",
    ("input", "ideal"): "it is an item of OpenAI's evals: name `input` in `data.columns` as `prompt`, and `ideal` as "
    "`completion`",
    ("object", "choices"): "it is a response of OpenAI's API: write it behind the `messages` of its request",
    ("name", "type", "mode"): "it is a column of a schema, as BigQuery writes it: leave this file out",
    ("schema", "payload"): "it is a message of Kafka Connect: write its `payload` alone, as with "
    "`schemas.enable=false`",
    (
        "sessionId",
        "message",
    ): "it is a line of a session's log, as of Claude Code: write all messages of a session as the "
    "list `messages` of one row",
    ("type", "payload"): "it is a line of a session's log, as of Codex: write all messages of a session as the list "
    "`messages` of one row",
    ("role", "parts"): "it is one message of Gemini: write all of a conversation as the list `messages` of one row",
    ("role", "content"): "it is one message: write all of a conversation as the list `messages` of one row",
    ("from", "value"): "it is one message: write all of a conversation as the list `conversations` of one row",
}
#: Keys that hold an object in which it is.
_NESTED: Final = {
    "translation": "it is a translation, as `datasets` has them: write its two texts as `prompt` and `completion`",
    **dict.fromkeys(
        ("request", "request_body"), "it is a request of a log: write its `messages`, with the response as the last one"
    ),
    "_airbyte_data": "it is a record of Airbyte: take flattening on, or write its `_airbyte_data` alone",
    "_source": "it is a document of Elasticsearch: write its `_source` alone",
    "inputs": "it is a traced call, as of LangSmith and MLflow: write its `messages` with the answer",
}
_ROLE: Final = re.compile(r"""["'](?:role|from)["']\s*:\s*["'](?:user|human|assistant|gpt|model|system)["']""")
#: Of a content in parts.
_PARTS: Final = re.compile(r"""\s*\[\s*\{\s*["'](?:type|text|image|image_url)["']\s*:""")
_KIND: Final = re.compile(
    r"""["']type["']\s*:\s*["'](?:(?:input_|output_)?(?:text|image|audio)|image_url|video|tool_use|tool_result)["']"""
)
#: A single quote behind the first brackets, which JSON has not; a row of Spark's.
_SHOWN: Final = re.compile(r"(?:array\(\s*)?[\[{]\s*(?:array\(\s*)?(?:[\[{(]\s*)?b?'|Row\(\w+=")
_TUPLE: Final = re.compile(r"""\(b?["']""")
_REPR: Final = re.compile(r"\s*(?:array\(\s*)?\[?\s*\{\s*'")


def objects(value: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """The messages of an object that has a list of each key, as a struct of lists in Parquet; None for any other."""
    columns = {name: values for name, values in value.items() if values is not None}
    if not columns or not all(isinstance(values, list) for values in columns.values()):
        return None
    if len({len(values) for values in columns.values()}) > 1:
        return None
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def listed(value: Any) -> Any:
    """The objects of a list, also where each is JSON text, or an object has a list of each key; else the value."""
    if isinstance(value, list):
        return [parsed(item) if isinstance(item, str) else item for item in value]
    found = objects(value) if isinstance(value, dict) else None
    return value if found is None else found


def parsed(value: Any) -> Any:
    """The object that stands as JSON in a text; any other value as `texts` makes it."""
    value = texts(value)
    if not isinstance(value, str) or value.lstrip()[:1] != "{":
        return value
    try:
        return parse_text(value)
    except ValueError:
        return value


def rows_within(fields: Mapping[Any, Any]) -> str | None:
    """What to do about an object that has the rows under one of its keys, or is no row to learn; None for any other."""
    for keys, what in _OTHERS.items():
        if all(key in fields for key in keys):
            return what
    for key, what in _NESTED.items():
        if isinstance(fields.get(key), dict):
            return what
    if fields and all(str(name).isdecimal() and isinstance(value, dict) for name, value in fields.items()):
        return f"{len(fields):,} objects are under their numbers: {_LINES}"
    for name, value in fields.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            if {"role", "parts"} <= value[0].keys():
                return _GEMINI
            if {"label", "text"} == value[0].keys():
                return f"`{str(name)[:60]}` are segments, as Axolotl has them: {_TURNS}"
            if name == "entries" and "url" in value[0]:
                return "it is a list of files, as Redshift writes it: leave this file out"
            many = f"{len(value):,} objects are under the key `{str(name)[:60]}`"
            return f"{many}: if these are the rows, write each as a line of its own"
    return None


def column(value: Any, name: str) -> str | None:
    """What to do about a field that holds all values of a column, or several answers; None for anything else."""
    if isinstance(value, str):
        return None
    if isinstance(value, dict) and {"text", "answer_start"} <= value.keys():
        return f"`{name[:60]}` {_SQUAD}"
    numbered = isinstance(value, dict) and value and all(str(key).isdecimal() for key in value)
    listed = isinstance(value, list) and value and all(isinstance(item, str) for item in value)
    if not numbered and not listed:
        return None
    if numbered:
        return f"`{name[:60]}` holds {len(value):,} values of a column: {_LINES}"
    return f"`{name[:60]}` is a list of {len(value):,} texts, not one; if they are a column's values, {_LINES}"


def repr_of_python(text: str) -> str | None:
    """What to do about a text that `str` of Python made of a list; None for any other."""
    return "is text as Python shows a list, not JSON: write it with `json.dumps`" if _REPR.match(text) else None


def no_json(text: str) -> str | None:
    """What to do about a list or an object that stands in a text as Python shows it, or in the quotes of a CSV cell;
    None for any other text."""
    cell = text.strip()
    quoted = len(cell) > 2 and cell[0] == cell[-1] == '"' and cell[1] in "[{" and '""' in cell
    return repr_of_python(text) or (_IN_QUOTES if quoted else None)


_IN_QUOTES: Final = (
    "is JSON in the quotes of a cell, which were read as characters: `data.quotes: always` takes them off"
)


def is_repr(text: str) -> bool:
    """Tell whether Python shows bytes, or a list, an object, a tuple or an array of NumPy's with texts, so, and JSON
    writes none so."""
    text = text.strip()
    if text[-1:] in {"'", '"'}:
        return len(text) > 2 and text[:2] == f"b{text[-1]}"
    if text[-1:] == ")" and _TUPLE.match(text):  # others are in brackets where they stand in a sentence
        return text[-2] == "," or (text[-2] in {"'", '"'} and ("', " in text or '", ' in text))
    return text[-1:] in {"]", "}", ")"} and _SHOWN.match(text) is not None


def is_json_text(text: str) -> bool:
    """Tell whether a text is another one as JSON writes it, in quotes."""
    text = text.strip()
    if len(text) <= len('""') or text[0] != '"' or text[-1] != '"':
        return False
    try:
        return isinstance(parse_text(text), str)
    except ValueError:
        return False


def is_address(text: str) -> bool:
    """Tell whether a text is nothing but the address of a file: of a store, or a path that ends as files do that hold a
    text, a picture or a sound."""
    return _ADDRESS.fullmatch(text.strip()) is not None


_ADDRESS: Final = re.compile(
    r"(?:s3[an]?|gs|gcs|abfss?|wasbs?|adl|azureml|hdfs|viewfs|dbfs|oss|cos|hf|file)://\S+"
    r"|(?:[A-Za-z]:)?[\w.@~=+/\\-]*\w\.(?:txt|md|rst|html?|xml|json|jsonl|csv|tsv|parquet|pdf|docx?|rtf|eml|srt|vtt"
    r"|wav|mp3|flac|ogg|mp4|png|jpe?g|webp|gif|tiff?)(?:\.gz)?",
    re.IGNORECASE,
)


def is_encoded(text: str) -> bool:
    """Tell whether a text is another one in base64, in hexadecimal as PostgreSQL and SQL Server write bytes, or with
    `%20` for its spaces."""
    text = text.strip()[:_HEAD]
    if len(text) < _SHORTEST or " " in text:
        return False
    if text[:2] in {"\\x", "0x"}:
        data, kind = text[2:].encode(), _HEX
    else:
        data, kind = text.encode("utf-8", "replace"), _BASE64
    if kind.fullmatch(data) is None:
        return "%20" in text and "://" not in text
    try:
        held = bytes.fromhex(data.decode()) if kind is _HEX else b64decode(data)
        return _utf_8().decode(held).replace("\n", " ").isprintable()  # the head may end within a character
    except ValueError:
        return False


#: Characters by which an encoded text shows itself; a multiple of four, in which base64 stands for three bytes.
_HEAD: Final = 400
#: Of hexadecimal, with what stands before it.
_SHORTEST: Final = 14
#: At least so many that no word and no key looks so by chance.
_HEX: Final = re.compile(rb"(?:[0-9a-fA-F]{2}){6,}")
_BASE64: Final = re.compile(rb"(?:[A-Za-z0-9+/]{4}){5,}(?:[A-Za-z0-9+/]{2}==|[A-Za-z0-9+/]{3}=)?")
_utf_8: Final = getincrementaldecoder("utf-8")


def has_entities(text: str) -> bool:
    """Tell whether a text has characters as HTML writes them, and no tags among which they may belong."""
    named = any(found[1] is None or f"{found[1]};" in html5 for found in _ENTITY.finditer(text))
    return named and _TAG.search(text) is None


_ENTITY: Final = re.compile(r"&(?:#\d{2,5}|#x[0-9a-fA-F]{2,5}|([A-Za-z][A-Za-z0-9]{1,30}));")
_TAG: Final = re.compile(r"</?[A-Za-z][^<>]{0,400}>")


def has_picture(text: str) -> bool:
    """Tell whether a picture, a sound or a video is in a text by its bytes, as in pages and notebooks, or has its place
    at an end of it."""
    if ";base64," in text and _DATA.search(text) is not None:
        return True
    return text.startswith(PLACES) or text.endswith(PLACES)


#: What programs write where a picture, a video or a sound belongs.
PLACES: Final = ("<image>", "<video>", "<audio>")
_DATA: Final = re.compile(r"data:(?:image|audio|video)/[\w.+-]{1,40};base64,[A-Za-z0-9+/]{40}")


def several(text: str) -> str | None:
    """What a text holds that is a list of several values or an object, as JSON, Python, NumPy and PostgreSQL write one;
    None for any other."""
    text = text.strip()
    if text[-1:] not in {"]", "}", ")"}:
        return None
    try:
        found = parse_text(text)
    except (ValueError, RejectError):
        return "several values" if _SEVERAL.fullmatch(text) else None
    if isinstance(found, dict):
        return "an object"
    return f"a list of {len(found):,}" if isinstance(found, list) and len(found) > 1 else None


#: Quoted values behind each other in brackets, numbers as NumPy has them, or any values in braces with a comma between.
_SEVERAL: Final = re.compile(
    r"""[\[({]\s*b?(["']).*?\1\s*(?:[,:]\s*[^\s)]|["']).*|\{[^,]*,.*|\[\s*-?\d[\d.]*(?:\s+-?\d[\d.]*)+\s*\]""",
    re.DOTALL,
)


def is_chat(text: str) -> bool:
    """Tell whether a text is a message, a list of some, an object with one as a model's response is, or a content in
    parts, in JSON or as Python shows it."""
    if text.lstrip()[:1] not in {"[", "{"} or text.rstrip()[-1:] not in {"]", "}"}:
        return False
    return may_be_chat(text) or (_PARTS.match(text) is not None and _KIND.search(text) is not None)


def may_be_chat(text: str) -> bool:
    """Tell whether a text names a role as messages do, in JSON or as Python shows it."""
    return _ROLE.search(text) is not None


def chat_of(text: str) -> list[Any] | None:
    """The messages that stand as JSON in a text; None for any other, as for an answer that is JSON."""
    try:
        found = parse_text(text)
    except (ValueError, RejectError):
        return None
    return found if isinstance(found, list) and all(map(_is_message, found)) else None


def _is_message(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and not value.keys().isdisjoint({"role", "from"})
        and not value.keys().isdisjoint({"content", "value", "tool_calls"})
    )


def holds_rows(row: Any) -> bool:
    """Whether a row of JSON is a list of several: a whole file of them may stand in one line of another."""
    several = isinstance(row, list) and len(row) > 1 and all(isinstance(item, dict) for item in row)
    return several and not all(map(_is_message, row))


def no_object(row: Any) -> str:
    """What is wrong with a row of JSON that is no object, and what to do about one that holds objects."""
    if isinstance(row, list) and row and all(map(_is_message, row)):
        return "the row is a list of messages: write it as the `messages` of an object"
    if isinstance(row, list) and (holds_rows(row) or (len(row) == 1 and isinstance(row[0], dict))):
        return f"the row is a list of {len(row):,} objects: if these are the rows, write each as a line of its own"
    return f"the row is a {type(row).__name__}"


def texts(value: Any) -> Any:
    """A value with text for its bytes, where they are UTF-8, and objects for its maps."""
    if isinstance(value, str):
        return value
    if isinstance(value, bytes):
        try:
            return value.decode()
        except UnicodeDecodeError:
            return value
    if isinstance(value, dict):
        return {texts(key): texts(item) for key, item in value.items()}
    if isinstance(value, list):  # a map of Arrow's comes as pairs, which nothing else does
        pairs = bool(value) and all(isinstance(item, tuple) and len(item) == 2 for item in value)
        return {texts(key): texts(item) for key, item in value} if pairs else [texts(item) for item in value]
    return value
