"""Nothing of a dataset hangs on the order of sets and hashes in a process, nor on its locale, time zone and umask."""

from __future__ import annotations

import hashlib
import io
import json
import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dropforge.drop import Drop
from dropforge.store import FolderStore

CHILD = """
import sys
from pathlib import Path
from curation import curate
from dropforge.drop import read_drop
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

root = Path(sys.argv[1])
asked = {
    "dedup": {"threshold": 0.7}, "pii": {"key_env": "PSEUDONYMS"}, "quality": {"gopher_repetition": {}},
    "decontaminate": {"sets": {"one": "sets/one.jsonl", "two": "sets/two.jsonl"}},
}
asked = {"curation": {"workers": 1, **asked}, "data": {"keep_columns": ["url", "tags", "id", "page", "topic", "x"]}}
recipe = load_recipe("tiny", asked)
store = FolderStore(root / "bucket")
print(curate(store, read_drop(store, "fam", "d1"), recipe, workdir=root / sys.argv[2]).digest)
"""


def row(number: int) -> str:
    words = " ".join(f"word{number * 7 + step}" for step in range(24))
    return f"Row {number // 2} of many: {words}. Ask jo{number}@example.com or 10.{number}.0.9."


def test_another_seed_of_hashes_gives_the_same_bytes(
    store: FolderStore, upload: Callable[..., Drop], tmp_path: Path
) -> None:
    texts = [row(number) for number in range(60)]
    texts += [text.replace("word", "Word", 3) for text in texts[::5]] + [texts[3] + " And more."]
    more = {"tags": {"b": 1, "a": [2]}, "url": "http://jo@example.com/", "id": 3}
    rows = [json.dumps({"text": text, "source": f"s{at % 7}", **more}) for at, text in enumerate(texts)]
    times = pa.array(
        [datetime(2026, 3, 29, hour % 24, tzinfo=UTC) for hour in range(40)], pa.timestamp("us", "Europe/Berlin")
    )
    table = io.BytesIO()
    pq.write_table(pa.table({"text": [f"Die Lampe läuft, Größe {at}." for at in range(40)], "label": times}), table)
    broken = [*rows, "no row", '{"x": 1, "y": 2, "z": 3}']
    upload({"a.jsonl": "\n".join(broken).encode(), "zeit 世.parquet": table.getvalue()})
    store.put("sets/one.jsonl", f"{rows[8]}\n{rows[20]}".encode())
    store.put("sets/two.jsonl", rows[31].encode())
    made: list[dict[str, str]] = []
    digests = []
    counts: dict[str, int] = {}
    for seed, locale, zone, umask in (("1", "C.UTF-8", "UTC", 0o022), ("4242", "C", "Pacific/Kiritimati", 0o077)):
        env = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": locale, "TZ": zone, "PSEUDONYMS": "k" * 40}
        child = [sys.executable, "-c", CHILD, str(tmp_path), f"work-{seed}"]
        done = subprocess.run(child, env=env, umask=umask, check=True, capture_output=True, text=True)
        digests.append(done.stdout)
        (manifest,) = (store.root / "datasets").rglob("manifest.json")
        counts = json.loads(manifest.read_bytes())["counts"]
        files = [path for path in (store.root / "datasets").rglob("*") if path.is_file()]
        made.append({str(path): hashlib.sha256(path.read_bytes()).hexdigest() for path in files})
        for path in files:  # so that the second one makes everything itself
            path.unlink()
    assert {"near_duplicate", "contaminated", "bad_json", "no_content"} <= counts.keys()
    assert len(made[0]) >= 6
    assert made[0] == made[1]
    assert digests[0] == digests[1]
