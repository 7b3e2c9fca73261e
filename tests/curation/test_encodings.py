"""Files that are not UTF-8: read as what they are, or refused, and never as something else."""

from __future__ import annotations

import gzip
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from curation.encodings import Fallback
from curation.plan import cut
from curation.readers import read
from curation.reasons import Reason
from curation.records import Blank, Found
from dropforge.dataset import Manifest
from dropforge.errors import RecipeError
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

TEXTS = ["Grüße aus Köln", "“Ça va?” – naïve café", "plain words", "10 € the piece"]
KINDS = {
    "a.jsonl": "\n".join(json.dumps({"text": text}, ensure_ascii=False) for text in TEXTS),
    "a.json": json.dumps([{"text": text} for text in TEXTS], ensure_ascii=False, indent=1),
    "a.csv": "text\r\n" + "\r\n".join(f'"{text}"' for text in TEXTS),
    "a.txt": "\n\n".join(TEXTS),
}
WIDE = ["utf-16", "utf-16-le", "utf-16-be", "utf-32"]


def found(folder: Path, name: str, data: bytes, encoding: str, split_bytes: int = 1 << 20) -> list[tuple[int, str]]:
    """(place, text or reason) of every record of a file."""
    path = folder / "file"
    path.write_bytes(data)
    fallback = None if encoding in {"utf-8", "auto"} else Fallback(encoding)
    result: list[tuple[int, str]] = []
    for split in cut(path, name, split_bytes, encoding=encoding):
        for record in read(split, max_row_bytes=10_000, fallback=fallback):
            if not isinstance(record, Blank):
                result.append((record.position, record.fields["text"] if isinstance(record, Found) else record.reason))
    return result


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("codec", [*WIDE, "utf-8-sig"])
def test_utf_16_and_utf_32_show_themselves(tmp_path: Path, name: str, codec: str) -> None:
    data = KINDS[name].encode(codec)
    records = found(tmp_path, name, data, "auto")
    assert [text for _, text in records] == TEXTS
    # Places are those of the text in UTF-8, whose mark counts.
    text = KINDS[name].encode()
    behind = len(b"\xef\xbb\xbf") if codec in {"utf-16", "utf-32", "utf-8-sig"} else 0
    for place, row in records:
        assert row.encode() in text[place - behind :].splitlines()[0] + text[place - behind :][:200]
    assert found(tmp_path, f"{name}.gz", gzip.compress(data), "auto") == records
    if codec != "utf-8-sig":
        assert [reason for _, reason in found(tmp_path, name, data, "utf-8")] == [Reason.FILE_ENCODING]


@pytest.mark.parametrize("codec", WIDE)
def test_half_a_pair_costs_its_row_and_a_torn_end_is_told(tmp_path: Path, codec: str) -> None:
    text = '{"text": "many plain words are before it"}\n{"text": "\ud83d"}\n{"text": "behind it"}\n'
    data = text.encode(codec, "surrogatepass")
    kinds = [text for _, text in found(tmp_path, "a.jsonl", data, "auto")]
    assert kinds == ["many plain words are before it", Reason.BAD_ENCODING, "behind it"]
    torn = (text.replace("\ud83d", "x") + '{"text": "torn"}').encode(codec)[:-1]
    assert found(tmp_path, "a.jsonl", torn, "auto")[-1][1] == Reason.TORN_FILE


@pytest.mark.parametrize("name", KINDS)
def test_windows_1252_is_read_where_the_recipe_says_so(tmp_path: Path, name: str) -> None:
    data = KINDS[name].encode("windows-1252")
    assert [text for _, text in found(tmp_path, name, data, "windows-1252")] == TEXTS
    for encoding in ("utf-8", "auto"):
        ends = [text for _, text in found(tmp_path, name, data, encoding)]
        assert ends == [Reason.BAD_ENCODING, Reason.BAD_ENCODING, TEXTS[2], Reason.BAD_ENCODING]


def test_latin_1_is_no_windows_1252(tmp_path: Path) -> None:
    data = b'{"text": "caf\xe9"}\n{"text": "\x93quoted\x94"}\n'
    assert [text for _, text in found(tmp_path, "a.jsonl", data, "iso-8859-1")] == ["café", Reason.BAD_ENCODING]
    assert [text for _, text in found(tmp_path, "a.jsonl", data, "windows-1252")] == ["café", "“quoted”"]
    nothing = b'{"text": "\x81 stands for nothing there"}\n'
    assert [text for _, text in found(tmp_path, "a.jsonl", nothing, "windows-1252")] == [Reason.BAD_ENCODING]


def test_a_mixed_file_is_read_line_by_line_whatever_the_cut(tmp_path: Path) -> None:
    rows = [f'{{"text": "{number} Größe"}}'.encode("utf-8" if number % 2 else "windows-1252") for number in range(40)]
    rows[7] = '{"text": "7 Größe, '.encode() + b'Gr\xf6\xdfe"}'  # both in one line
    data = b"\n".join(rows)
    whole = found(tmp_path, "a.jsonl", data, "windows-1252")
    assert [text for _, text in whole] == [
        Reason.BAD_ENCODING if number == 7 else f"{number} Größe" for number in range(40)
    ]
    assert [data[place : place + 9] for place, _ in whole] == [b'{"text": '] * 40
    for size in (17, 64, 500):
        assert found(tmp_path, "a.jsonl", data, "windows-1252", size) == whole


Make = Callable[..., Manifest]


def test_what_was_read_as_something_else_is_told_and_part_of_the_version(
    make: Make, store: FolderStore, rows: Any
) -> None:
    files: Mapping[str, bytes] = {
        "old.jsonl": "\n".join(f'{{"text": "{number} Größe"}}' for number in range(30)).encode("windows-1252"),
        "wide.csv": ("text\n" + "\n".join(f"{number} Maß" for number in range(30))).encode("utf-16"),
    }
    manifest = make(files, data={"encoding": "windows-1252"})
    texts = {row["text"] for row in rows(manifest)}
    assert texts == {f"{number} {word}" for number in range(30) for word in ("Größe", "Maß")}
    assert not any("\ufffd" in text for text in texts)
    assert manifest.rules["encoding"] == "windows-1252"
    warnings = json.loads(store.get(manifest.files["card_json"]))["warnings"]
    assert "old.jsonl: 30 lines are not UTF-8, and were read as windows-1252" in warnings
    assert "wide.csv: it is UTF-16-LE, and was read as such; places are those in UTF-8" in warnings
    plain = make({"a.jsonl": KINDS["a.jsonl"].encode() * 1 + b"\n" + b'{"text": "x"}'}, "d2", min_rows=2)
    assert "encoding" not in plain.rules


def test_an_encoding_that_would_have_to_be_guessed_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"`data.encoding`: .*'windows-1252'.*not 'latin1'"):
        load_recipe("tiny", {"data": {"encoding": "latin1"}})
