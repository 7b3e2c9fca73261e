"""What a file is: its first bytes decide, its name only breaks ties."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final, Literal

from curation import dialect
from curation.canonical import FIELDS
from curation.reasons import Reason
from curation.streams import Compression, Limits, TornError, chunks
from curation.text_kinds import text_kind

Kind = Literal["jsonl", "array", "values", "csv", "parquet", "arrow", "text"]

_COMPRESSED: Final[dict[str, Compression]] = {".gz": "gzip", ".gzip": "gzip", ".zst": "zstd", ".zstd": "zstd"}
_KINDS: Final[dict[str, Kind]] = {
    ".jsonl": "jsonl",
    ".ndjson": "jsonl",
    ".json": "array",
    ".csv": "csv",
    ".tsv": "csv",
    ".parquet": "parquet",
    ".pq": "parquet",
    ".arrow": "arrow",
    ".txt": "text",
    ".text": "text",
    ".md": "text",
}
_PICKLE: Final = "pickled by Python, which is never read, as it could run code: save the rows as JSON lines or Parquet"
_FOREIGN: Final = {
    b"version https://git-lfs.github.com/": "a pointer of Git LFS, not the file: fetch it with `git lfs pull`",
    b"outs:\n- md5:": "a pointer of DVC, not the file: fetch it with `dvc pull`",
    b"/annex/objects/": "a pointer of git-annex, not the file: fetch it with `git annex get`",
    b"../.git/annex/objects/": "a link of git-annex, not the file: fetch it with `git annex get`",
    b".git/annex/objects/": "a link of git-annex, not the file: fetch it with `git annex get`",
    b"[InternetShortcut]": "a shortcut to another place, not what is there",
    b"FEA1": "Feather of its first version: write Parquet",
    b"%PDF": "PDF",
    b"%!PS": "PostScript",
    b"{\\rtf": "RTF",
    b"PK\x03\x04": "a ZIP archive (or an office document)",
    b"BZh": "bzip2",
    b"\xfd7zXZ": "xz",
    b"7z\xbc\xaf": "7z",
    b"\x7fELF": "a program",
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"ARROW1": "an Arrow file, which is no Arrow stream",
    b"Obj\x01": "Avro",
    b"ORC": "ORC",
    b"SQLite format": "an SQLite database",
    b"\x04\x22\x4d\x18": "lz4",
    b"\xff\x06\x00\x00sNaPpY": "snappy",
    b"\x89HDF": "HDF5",
    b"\x93NUMPY": "a NumPy array",
    b"\xd0\xcf\x11\xe0": "an old office document",
}
#: Byte order marks, longest first (The Unicode Standard 16.0, section 23.8, table 23-3).
_MARKS: Final = (
    (b"\xff\xfe\x00\x00", "utf-32-le"),
    (b"\x00\x00\xfe\xff", "utf-32-be"),
    (b"\xff\xfe", "utf-16-le"),
    (b"\xfe\xff", "utf-16-be"),
)
_FAMILIES: Final[dict[Kind, str]] = {
    "jsonl": "JSON",
    "array": "JSON",
    "values": "JSON",
    "csv": "CSV",
    "parquet": "Parquet",
    "arrow": "Arrow",
    "text": "text",
}
#: Ends of names that programs give to files while they write, fetch or copy them.
_UNFINISHED: Final = (
    ".tmp", ".temp", ".part", ".partial", ".filepart", ".incomplete", ".inprogress", ".crdownload", ".download",
    "._copying_", ".swp", "~",
)  # fmt: skip
HEAD_BYTES: Final = 1 << 16
#: Columns by which a table shows itself, whatever its name is.
_NAMES: Final = FIELDS | {"text"}
#: How an array of rows begins, and neither a section of settings nor a time in a log does.
_OPEN: Final = re.compile(rb'\[\s*[\[{"\]]|\[[ \t\r]*(?:\n|$)')
_TWICE: Final = "compressed twice"
#: A list or an object, in any protocol.
_PICKLED: Final = re.compile(rb"\([ld]p0\n|[\]}]q\x00|\x80[\x02-\x05](?:\x95.{7}\x00|[\]}(cX\x8c])", re.DOTALL)
#: A list of objects, or one: the first key, whose length is that of its name.
_PACKED: Final = re.compile(
    rb"(?:[\x91-\x9f]|\xdc..|\xdd....)?(?:[\x81-\x8f]|\xde..|\xdf....)([\xa1-\xbf])([A-Za-z_][\w.-]*)", re.DOTALL
)
_PARQUET: Final = b"PAR1"
_ARROW: Final = b"\xff\xff\xff\xff"  # of each message of a stream; Arrow's files begin otherwise
BOM: Final = b"\xef\xbb\xbf"


@dataclass(frozen=True)
class Format:
    """How to read a file.

    :param fault: set when it cannot be read at all: reason and detail.
    :param warnings: what a person should know although the file is readable.
    :param wide: the codec, if it is read as UTF-16 or UTF-32.
    :param looks: of a text, what it looks like (`curation.text_kinds`).
    """

    kind: Kind
    compression: Compression = "none"
    fault: tuple[Reason, str] | None = None
    warnings: tuple[str, ...] = ()
    wide: str | None = None
    looks: str | None = None

    @property
    def is_table(self) -> bool:
        """Whether its rows have numbers and types, and no lines."""
        return self.kind in {"parquet", "arrow"}


def sniff(path: Path, name: str, encoding: str = "utf-8") -> Format:
    """Look at a local file.

    :param name: its name in the drop, for the extension.
    :param encoding: `data.encoding` of the recipe; with `utf-8` nothing else is read.
    """
    with path.open("rb") as stream:
        magic = stream.read(8)
        stream.seek(0)
        compression = _compression(magic)
        try:
            head = b""
            for piece in chunks(stream, compression, path.stat().st_size, Limits()):
                head += piece
                if len(head) >= HEAD_BYTES:
                    break
        except TornError:
            pass  # The reader will meet the tear again and give it a record.
    return decide(head, name, compression, encoding)


def decide(head: bytes, name: str, compression: Compression = "none", encoding: str = "utf-8") -> Format:
    """The format of a file whose first decompressed bytes are `head`. :param encoding: see `sniff`."""
    claimed, expected = _claims(name)
    warnings = [] if claimed == compression else [f"the name says {_word(claimed)}, the bytes are {_word(compression)}"]
    if mark := _unfinished(name):
        cause = (Reason.PARTIAL_FILE, f"its name ends with {mark}, as of a file that is still being written")
        return Format(expected or "text", compression, cause)
    if head.startswith((_ARROW, _PARQUET)):
        kind: Kind = "arrow" if head.startswith(_ARROW) else "parquet"
        warnings += _lie(expected, _FAMILIES[kind])
        if compression == "none":
            return Format(kind, warnings=tuple(warnings))
        cause = (Reason.BAD_FORMAT, f"it is {_FAMILIES[kind]} within {compression}: unpack it, it is packed inside")
        return Format(kind, compression, cause, tuple(warnings))
    codec = _wide(head)
    if codec is not None and encoding != "utf-8":
        warnings.append(f"it is {codec.upper()}, and was read as such; places are those in UTF-8")
        head = head[: len(head) & ~3].decode(codec, "replace").encode()  # only to be looked at
    foreign = _foreign(head, compression)
    if foreign:
        warnings += _lie(expected, foreign) if foreign != _TWICE else []
        return Format(expected or "text", compression, (Reason.BAD_FORMAT, f"it is {foreign}"), tuple(warnings))
    if codec is not None and encoding == "utf-8":
        cause = (Reason.FILE_ENCODING, "it is UTF-16 or UTF-32")
        return Format(expected or "text", compression, cause, tuple(warnings))
    kind = _kind(head, expected)
    if kind in {"jsonl", "csv", "text"} and _is_one_line(head):
        cause = (Reason.BAD_FORMAT, "its lines end with a carriage return alone: end them with line feeds")
        return Format(kind, compression, cause, tuple(warnings), codec)
    if kind == "csv":
        warnings += dialect.told(head.removeprefix(BOM))
    warnings += _lie(expected, _FAMILIES[kind])
    looks = text_kind(head.removeprefix(BOM), name) if kind == "text" else None
    return Format(kind, compression, None, tuple(warnings), codec, looks)


def _claims(name: str) -> tuple[Compression, Kind | None]:
    """The compression and the kind that a name says."""
    suffixes = [suffix.lower() for suffix in PurePosixPath(name).suffixes]
    claimed: Compression = _COMPRESSED.get(suffixes[-1], "none") if suffixes else "none"
    if claimed != "none":
        suffixes.pop()
    return claimed, _KINDS.get(suffixes[-1]) if suffixes else None


def kind_by_name(name: str) -> Kind | None:
    """The kind of a file that its name says, also in front of that of a compression."""
    return _claims(name)[1]


def _is_one_line(head: bytes) -> bool:
    """Whether lines end as in files of old Macs: to all else they are one."""
    ends = b"\r" in head and b"\n" not in head and _json(head) is None
    return ends and sum(bool(line.strip()) for line in head.split(b"\r")) > 1


def _unfinished(name: str) -> str | None:
    """The end of the name, in front of that of a compression, if it says that the file is not whole."""
    bare = name.lower()
    for end in _COMPRESSED:
        bare = bare.removesuffix(end)
    return next((mark for mark in _UNFINISHED if bare.endswith(mark)), None)


def _lie(expected: Kind | None, found: str) -> list[str]:
    """What a person should know if the name says something else than the bytes."""
    said = _FAMILIES[expected] if expected else found
    return [] if said == found else [f"the name says {said}, the bytes are {found}"]


def _compression(magic: bytes) -> Compression:
    if magic.startswith(b"\x1f\x8b"):
        return "gzip"
    skippable = magic[1:4] == b"\x2a\x4d\x18" and 0x50 <= magic[0] <= 0x5F
    return "zstd" if magic.startswith(b"\x28\xb5\x2f\xfd") or skippable else "none"


def _foreign(head: bytes, compression: Compression) -> str | None:
    if compression != "none" and _compression(head[:8]) != "none":
        return _TWICE
    for magic, what in _FOREIGN.items():
        if head.startswith(magic):
            return what
    if head[257:262] == b"ustar":
        return "a tar archive"
    if _PICKLED.match(head):
        return _PICKLE
    if (packed := _PACKED.match(head)) and len(packed[2]) >= packed[1][0] - 0xA0 > 0:
        return "MessagePack: save the rows as JSON lines or Parquet"
    start = head.removeprefix(BOM).lstrip()[:64].lower()
    if start.startswith((b"<!doctype", b"<html", b"<?xml", b"<svg")):
        return "a web page or XML"
    # Text has hardly any control bytes; a few NULs in otherwise good rows are the rows' own trouble.
    sample = head[:4096]
    if not _wide(head):
        control = sum(sample.count(bytes([code])) for code in (0, 1, 2, 3, 4, 5, 6, 7, 14, 15, 16, 17, 18, 19, 20))
        if control * 20 > len(sample) and (len(sample) >= 256 or not _is_utf8(sample)):
            return "binary data of an unknown kind"
    return None


def _is_utf8(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


def _wide(head: bytes) -> str | None:
    """The codec of UTF-16 or UTF-32, if a file that begins with `head` is one of them."""
    for mark, codec in _MARKS:
        if head.startswith(mark):
            return codec
    sample = head[:4096]
    even, odd = sample[0::2], sample[1::2]
    zeros = sorted((even.count(0) * 10, odd.count(0) * 10))
    # Without a mark: nearly every second byte of ASCII text is zero, and the others are not.
    if len(sample) >= 16 and zeros[1] > 7 * len(odd) and zeros[0] < len(odd):
        return "utf-16-be" if even.count(0) > odd.count(0) else "utf-16-le"
    return None


def _kind(head: bytes, expected: Kind | None) -> Kind:
    body = head.removeprefix(BOM).lstrip()
    first, _, rest = body.partition(b"\n")
    first = first.strip()
    value = _json(first)
    if isinstance(value, list) and rest.lstrip().startswith((b"[", b"{")) and expected not in {"csv", "text"}:
        return "jsonl"  # of lists, which are no rows: nothing follows one array of rows
    if (
        body.startswith(b"[")
        and expected not in {"csv", "text"}
        and (expected or value is not None or _OPEN.match(body))
    ):
        # Lines that are whole arrays of scalars are (bad) JSON lines, all else is one array of rows.
        rows = not isinstance(value, list) or not value or any(isinstance(item, dict) for item in value)
        return "array" if rows or (expected == "array" and not rest.strip()) else "jsonl"
    if body.startswith(b"[") and isinstance(value, list) and any(isinstance(item, dict) for item in value):
        return "array"
    if body.startswith(b"{"):
        if (first == b"{" and expected != "jsonl") or (expected == "array" and _is_open(first)):
            return "values"
        if isinstance(value, dict) or expected in {"jsonl", "array"}:
            return "jsonl"
        if expected is None and b'"' in first[:200] and len(first) >= HEAD_BYTES - 3:
            return "jsonl"
    if expected in {"jsonl", "array"}:
        return "jsonl"
    return "csv" if expected == "csv" or dialect.is_table(body, _NAMES) else "text"


def _is_open(line: bytes) -> bool:
    """Whether a first line is the begin of an object over several, as no line that holds an object is."""
    return line.endswith((b"{", b"[", b":")) or (line.endswith(b",") and _json(line[:-1]) is None)


def _json(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _word(compression: str) -> str:
    return "not compressed" if compression == "none" else compression
