"""A drop of broken files of all formats: every planted row is accounted for, beside `datasets` on the same files.

    python -m bench.mixed [--megabytes 200] [--rounds 1]

Nine files share the size: JSONL plain, as gzip of several members, torn gzip, zstd and Parquet under a name of JSONL,
CSV, a JSON array and plain text, with one row in a hundred broken in one of nine ways; and small ones that are wrong as
a whole. Each right row has a number of its own. Accounted for is a right row that is kept once, a broken one with the
reason that it was planted with, and one reason for the rest of a file that cannot be read on. `datasets` reads file by
file with the builder of the name; a file that fails brings nothing. Fresh processes that take turns; CPU seconds and
peak memory are those of the process tree.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import io
import json
import random
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from bench import tree

#: One line of JSONL each, with the reason of its quarantine.
BROKEN = (
    ("bad_json", b'{"text": "cut off'),
    ("bad_encoding", b'{"text": "bad \xff byte"}'),
    ("bad_number", b'{"text": "a", "score": NaN}'),
    ("duplicate_field", b'{"text": "a", "text": "b"}'),
    ("not_an_object", b"[1, 2, 3]"),
    ("lone_surrogate", b'{"text": "half \\ud800 pair"}'),
    ("nul", b'{"text": "a \\u0000 b"}'),
    ("empty", b'{"text": "   "}'),
    ("too_deep", b'{"text": "a", "more": ' + b"[" * 200 + b"]" * 200 + b"}"),
)


#: Rows without a number that are kept: what the bomb and the torn member hold before they break.
BEFORE_THE_BREAK = 2


@dataclass
class Planted:
    """What a folder of files holds.

    :param right: numbers of right rows.
    :param broken: rows, or rests of files, by reason.
    """

    right: set[int] = field(default_factory=set)
    broken: Counter[str] = field(default_factory=Counter)
    rows: int = 0


class Writer:
    """Makes rows of Python's own documentation, each with the next number."""

    def __init__(self) -> None:
        from pydoc_data.topics import topics

        self.rng = random.Random(7)
        self.words = " ".join(topics[name] for name in sorted(topics)).split()
        self.planted = Planted()

    def text(self) -> str:
        start = self.rng.randrange(len(self.words) - 200)
        self.planted.rows += 1
        self.planted.right.add(self.planted.rows)
        return f"row {self.planted.rows} " + " ".join(self.words[start : start + self.rng.randint(20, 200)])

    def lines(self, size: int) -> Iterator[bytes]:
        made = 0
        while made < size:
            if self.rng.random() < 0.01:
                reason, line = self.rng.choice(BROKEN)
                self.planted.broken[reason] += 1
                self.planted.rows += 1
            else:
                line = json.dumps({"text": self.text()}).encode()
            made += len(line) + 1
            yield line + (b"\r\n" if self.rng.random() < 0.01 else b"\n")

    def texts(self, size: int) -> Iterator[str]:
        made = 0
        while made < size:
            text = self.text()
            made += len(text)
            yield text


def write(folder: Path, megabytes: int) -> Planted:
    import pyarrow as pa
    import pyarrow.parquet as pq
    import zstandard

    folder.mkdir(parents=True)
    writer, size = Writer(), (megabytes << 20) // 8
    (folder / "plain.jsonl").write_bytes(b"".join(writer.lines(size)))
    members = (b"".join(writer.lines(size // 4)) for _ in range(4))
    (folder / "members.jsonl.gz").write_bytes(b"".join(map(gzip.compress, members)))
    (folder / "packed.jsonl.zst").write_bytes(zstandard.compress(b"".join(writer.lines(size))))
    _torn(folder / "torn.jsonl.gz", writer, size)
    pq.write_table(pa.table({"text": list(writer.texts(size))}), folder / "parquet.jsonl")
    (folder / "array.json").write_text(json.dumps([{"text": text} for text in writer.texts(size)]))
    _csv(folder / "cells.csv", writer, size)
    (folder / "paragraphs.txt").write_text("\n\n".join(writer.texts(size)) + "\n")

    (folder / "huge.jsonl").write_bytes(b'{"text": "' + b"word " * 2_000_000 + b'"}\n')
    (folder / "bomb.jsonl.gz").write_bytes(gzip.compress(b'{"text": "a"}\n' + b" " * (300 << 20)))
    whole = io.BytesIO()
    pq.write_table(pa.table({"text": ["cut"] * 1000}), whole)
    (folder / "cut.parquet").write_bytes(whole.getvalue()[:-20])
    (folder / "wide.jsonl").write_bytes(json.dumps({"text": "sixteen bits"}).encode("utf-16"))
    (folder / "half.jsonl.tmp").write_bytes(b'{"text": "not done"}\n')
    (folder / "nothing.jsonl").touch()
    whole_files = ("too_large", "compression_bomb", "bad_parquet", "file_encoding", "partial_file")
    writer.planted.broken.update(whole_files)
    (folder / "_SUCCESS").touch()
    return writer.planted


def _torn(path: Path, writer: Writer, size: int) -> None:
    """Two members, the second cut in its middle: what stood in the first is whole."""
    path.write_bytes(gzip.compress(b"".join(writer.lines(size))) + gzip.compress(b'{"text": "lost"}\n' * 999)[:-30])
    writer.planted.broken["torn_file"] += 1


def _csv(path: Path, writer: Writer, size: int) -> None:
    with path.open("w", newline="") as file:
        cells = csv.writer(file)
        cells.writerow(["text", "note"])
        for text in writer.texts(size):
            cells.writerow([text, 'a "note",\nof two lines'])
            if writer.rng.random() < 0.01:
                cells.writerow(["one cell too many", "b", "c"])
                writer.planted.broken["ragged"] += 1


def ours(root: Path) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    recipe = load_recipe("tiny", {"curation": {"engine": "embedded", "workers": 2}})
    store = FolderStore(root / "bucket")
    work = root / "work"
    curate(store, read_drop(store, "fam", "d"), recipe, workdir=work)
    import pyarrow.parquet as pq

    kept: list[int] = []
    for path in (work / "out").rglob("*.parquet"):
        if "text" in pq.read_schema(path).names:
            kept += map(_number, pq.read_table(path, columns=["text"]).column("text").to_pylist())
    reasons = Counter(json.loads(line)["reason"] for line in (work / "out/quarantine.jsonl").open(encoding="utf-8"))
    (root / "found.json").write_text(json.dumps([kept, reasons]))


def datasets(root: Path) -> None:
    from datasets import load_dataset

    kept: list[int] = []
    for path in sorted((root / "bucket/drops/fam/d").iterdir()):
        kind = next((kind for kind in ("jsonl", "json", "csv", "parquet", "txt") if f".{kind}" in path.name), None)
        if kind is None:
            continue
        builder = {"jsonl": "json", "txt": "text"}.get(kind, kind)
        more = {"sample_by": "paragraph"} if builder == "text" else {}
        try:
            rows = load_dataset(builder, data_files=str(path), split="train", cache_dir=str(root / "cache"), **more)
            kept += [_number(text or "") for text in rows["text"]]
        except Exception as error:  # whatever it is, the file brought nothing
            print(path.name, type(error).__name__)
    (root / "found.json").write_text(json.dumps([kept, {}]))


def _number(text: str) -> int:
    first, _, rest = text.partition(" ")
    number = rest.partition(" ")[0]
    return int(number) if first == "row" and number.isdecimal() else 0


WHO = {"ours": ours, "datasets": datasets}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--child", choices=WHO)
    parser.add_argument("--root", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        WHO[arguments.child](arguments.root)
        return
    costs: dict[str, list[tree.Cost]] = {name: [] for name in WHO}
    shares: dict[str, float] = {}
    unplanted = False
    with tempfile.TemporaryDirectory(prefix="mixed-") as name:
        root = Path(name)
        planted = write(root / "bucket/drops/fam/d", arguments.megabytes)
        broken = planted.broken.total()
        print(f"{len(planted.right):,} right rows, {broken:,} broken ones and rests of files: {dict(planted.broken)}")
        for number in range(arguments.rounds):
            for who in list(WHO) if number % 2 == 0 else list(reversed(WHO)):
                out = root / f"{who}-{number}"
                out.mkdir()
                (out / "bucket").symlink_to(root / "bucket")
                command = [sys.executable, "-m", "bench.mixed", "--child", who, "--root", str(out)]
                costs[who].append(
                    tree.run(command, {"PYTHONPATH": str(Path(__file__).parents[1]), "HF_HUB_OFFLINE": "1"})
                )
                kept, reasons = json.loads((out / "found.json").read_text())
                times = Counter(kept)
                right = sum(times[number] == 1 for number in planted.right)
                told = (Counter(reasons) & planted.broken).total()
                shares[who] = min(shares.get(who, 1), (right + told) / (len(planted.right) + broken))
                extra = {reason: count - planted.broken[reason] for reason, count in reasons.items()}
                wrong = {reason: count for reason, count in extra.items() if count}
                others = sum(number not in planted.right for number in kept)
                unplanted |= who == "ours" and (bool(wrong) or others > BEFORE_THE_BREAK)
                print(f"{who}: right rows kept once {right:,}, others {others}, reasons told {told:,},", end=" ")
                print(f"too many or few {wrong}", flush=True)
    for who, runs in costs.items():
        wall, cpu, peak = (statistics.median(getattr(run, kind) for run in runs) for kind in ("wall", "cpu", "peak"))
        print(f"{who:10}{wall:7.1f} s, CPU {cpu:.1f} s, {peak / 1e6:.0f} MB; accounted for {shares[who]:.3%}")
    sys.exit(shares["ours"] < 1 or unplanted)


if __name__ == "__main__":
    main()
