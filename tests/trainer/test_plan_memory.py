"""Memory of the preparation, measured in a child process that does nothing else."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from dropforge.errors import DataError
from dropforge.store import open_store
from trainer.data.chat import Document
from trainer.data.tokens import Tokens, collect, write_tokens

from .toy import Toy, sample_rows, write_dataset

# The peak of anonymous memory: pages of mapped files are the kernel's, which takes them back as it likes.
CHILD = """
import json, sys, threading, time
from pathlib import Path
from dropforge.run import RunSpec
from trainer.config import read_settings
from trainer.prepare import prepare
from trainer.compat import quiet_libraries
import transformers, tokenizers, pyarrow.parquet, numpy.lib
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer

quiet_libraries()
def anonymous():
    text = Path("/proc/self/status").read_text()
    return int(text.partition("RssAnon:")[2].split()[0]) // 1024

before, peak, done = anonymous(), [0], threading.Event()
def watch():
    while not done.wait(0.005):
        peak[0] = max(peak[0], anonymous())
thread = threading.Thread(target=watch)
thread.start()
spec = RunSpec.from_json(Path(sys.argv[1]).read_bytes())
prepare(spec, read_settings(spec.recipe), Path(sys.argv[2]), lambda: None, lambda _: None)
done.set()
thread.join()
print(peak[0] - before)
"""


def added(folder: Path, rows: int) -> int:
    """MiB that preparing so many rows added."""
    root = str(folder / "bucket")
    some = sample_rows(500, seed=rows)
    for index, row in enumerate(some):
        row["messages"][1]["content"] += f" {index}" + " the red cat" * 10
    train = [some[index % 500] for index in range(rows)]
    digest = write_dataset(open_store(root), {"train": train, "eval": sample_rows(20, 1)})
    toy = Toy(root, digest)
    toy.store.put("runs/run/tokenizer/tokenizer.json", _tokenizer())
    done = subprocess.run(
        [sys.executable, "-c", CHILD, toy.run(), str(folder / "scratch")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return int(done.stdout.split()[-1])


def _tokenizer() -> bytes:
    from trainer.data.tokenizer import train_tokenizer

    return train_tokenizer(iter(["the red cat sees a green bird"] * 40), 320)


def test_eight_times_the_rows_take_no_more_memory(tmp_path: Path) -> None:
    # Ten are the tokenizer's cache and the rows of a batch; held documents would be twenty more.
    once, eight = added(tmp_path / "once", 2_000), added(tmp_path / "eight", 16_000)
    assert eight < once + 18, (once, eight)


def document(row: int, trained: list[int]) -> Document:
    return Document(row, np.arange(len(trained), dtype=np.int32), np.array(trained, dtype=np.bool_))


def test_documents_on_disk_are_those_in_memory(tmp_path: Path) -> None:
    some = [document(0, [0, 1, 1]), document(2, [0, 0, 1, 0]), document(2, [0, 1])]
    write_tokens(iter(some), tmp_path, {"rows": 3})
    there, here = Tokens.load(tmp_path), collect(some, {"rows": 3})
    for name in ("ids", "trained", "offsets", "rows", "lengths", "targets"):
        assert np.array_equal(getattr(there, name), getattr(here, name)), name
        assert getattr(there, name).dtype == getattr(here, name).dtype
    assert there.targets.tolist() == [2, 1, 1]
    assert there.facts == here.facts


@pytest.mark.parametrize("way", ["memory", "disk"])
def test_a_first_token_that_is_a_target_is_refused(tmp_path: Path, way: str) -> None:
    for trained, cause in (([1, 1], "there is no token before it"), ([0, 0], "it has no target")):
        write = {"memory": collect, "disk": lambda some, facts: write_tokens(some, tmp_path, facts)}[way]
        with pytest.raises(DataError, match=f"document of row 7.*{cause}"):
            write([document(7, trained)], {})
    assert not (tmp_path / "facts.json").exists()
