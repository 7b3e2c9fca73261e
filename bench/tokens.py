"""From rows to packs for a core: ours, its second run from the cache, and a peer, each in a process of its own.

    python -m bench.tokens [--peer ENVIRONMENT/bin/python] [--megabytes 4] [--rounds 3]

Chats of one to three turns of Python's own documentation, in the Parquet shards of a dataset version, a byte-level BPE
of 8,192 tokens and a chat template that is not ours, as a published model has it. `ours` is all that a run does before
its model is built: shards held to their SHA-256, rows to the dataset's digest, tokens, targets, packs, all stored in
the run's folder and beside the dataset. The second run is another one of the same dataset. `datasets` reads the same
shards and maps the tokenizer's own `apply_chat_template` with its mask of answers over them, in batches; with TRL in
the peer's environment its best-fit packing follows, else rows are padded. `tokenizers` is the encoder alone on texts
that are rendered already: nobody can be faster. Fresh processes pinned to one core, in the order A B ... B A; CPU
seconds without imports, medians.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, Final

LENGTH: Final = 512
VOCABULARY: Final = 8192
BAR: Final = 2.0  # ours to the peer


def rows(megabytes: int) -> list[dict[str, Any]]:
    """Chats of windows of Python's documentation, of 10 to 200 words a message."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = [word for name in sorted(topics) for word in topics[name].split()]
    made, size = [], 0
    while size < megabytes << 20:
        messages = []
        for role in ["user", "assistant"] * rng.randint(1, 3):
            start = rng.randrange(len(words) - 200)
            messages.append({"role": role, "content": " ".join(words[start : start + rng.randint(10, 200)])})
            size += len(messages[-1]["content"])
        made.append({"messages": messages})
    return made


def make(folder: Path, megabytes: int) -> None:
    """A dataset version, and a base model whose weights nobody looks at."""
    from transformers import AutoConfig

    from dropforge.store import open_store
    from tests.trainer.toy import write_dataset
    from trainer.data.tokenizer import CHAT_TEMPLATE, train_tokenizer, wrap_tokenizer

    found = rows(megabytes)
    texts = [message["content"] for row in found[:2000] for message in row["messages"]]
    tokenizer = wrap_tokenizer(train_tokenizer(iter(texts), VOCABULARY), 2048)
    tokenizer.chat_template = CHAT_TEMPLATE + "{# a published model's #}"
    tokenizer.save_pretrained(folder / "base")
    AutoConfig.for_model("llama", vocab_size=VOCABULARY).save_pretrained(folder / "base")
    digest = write_dataset(open_store(str(folder / "bucket")), {"train": found, "eval": found[:50]})
    (folder / "digest").write_text(digest)


def ours(folder: Path) -> dict[str, float]:
    """The first run and the second."""
    import shutil

    from dropforge.run import RunSpec
    from tests.trainer.toy import Toy
    from trainer.assembly import make_plan
    from trainer.config import read_settings
    from trainer.prepare import await_prepared, prepare

    toy = Toy(str(folder / "bucket"), (folder / "digest").read_text())
    found: dict[str, float] = {}
    for name in ("first", "second"):
        uri = toy.run(name, base={"model": str(folder / "base"), "scratch": None}, train={"sequence_length": LENGTH})
        spec = RunSpec.from_json(Path(uri).read_bytes())
        settings = read_settings(spec.recipe)
        start = time.process_time()
        prepare(spec, settings, folder / name, lambda: None, lambda text: None, weights=False)
        found[name] = time.process_time() - start
        prepared = await_prepared(settings, spec, folder / name, lambda: None)
        found |= {"tokens": float(prepared.train.facts["tokens"]), "fill": make_plan(settings, prepared, True).filled()}
    for old in (*(folder / name for name in ("first", "second", "bucket/runs")),):
        shutil.rmtree(old)
    for old in (folder / "bucket").glob("datasets/*/*/tokens"):
        shutil.rmtree(old)
    return found


def datasets(folder: Path) -> dict[str, float]:
    """`datasets.map` over the same shards, and TRL's packing if it is there."""
    import datasets as library
    from transformers import AutoTokenizer

    packing = importlib.util.find_spec("trl") is not None
    if packing:
        from trl.data_utils import pack_dataset  # type: ignore[import-not-found, unused-ignore]
    tokenizer = AutoTokenizer.from_pretrained(folder / "base")
    manifest = json.loads(next((folder / "bucket").glob("datasets/toy/*/manifest.json")).read_bytes())
    shards = [str(folder / "bucket" / shard["key"]) for shard in manifest["shards"] if shard["split"] == "train"]
    library.disable_progress_bars()

    def encode(batch: dict[str, Any]) -> dict[str, Any]:
        made: Any = tokenizer.apply_chat_template(
            batch["messages"],
            tokenize=True,
            return_dict=True,
            return_assistant_tokens_mask=True,
            truncation=True,
            max_length=LENGTH,
        )
        return {"input_ids": made["input_ids"], "assistant_masks": made["assistant_masks"]}

    with tempfile.TemporaryDirectory() as cache:
        start = time.process_time()
        table = library.load_dataset("parquet", data_files=shards, split="train", cache_dir=cache)
        table = table.map(encode, batched=True, remove_columns=table.column_names)
        tokens = sum(map(len, table["input_ids"]))
        if packing:
            table = pack_dataset(table, LENGTH, strategy="bfd")
        seconds = time.process_time() - start
    return {"first": seconds, "tokens": float(tokens), "fill": tokens / (len(table) * LENGTH)}


def tokenizers(folder: Path) -> dict[str, float]:
    """The encoder alone."""
    import pyarrow.parquet as pq
    from tokenizers import Tokenizer

    encoder = Tokenizer.from_file(str(folder / "base" / "tokenizer.json"))
    manifest = json.loads(next((folder / "bucket").glob("datasets/toy/*/manifest.json")).read_bytes())
    texts = []
    for shard in manifest["shards"]:
        if shard["split"] == "train":
            for messages in pq.read_table(folder / "bucket" / shard["key"])["messages"].to_pylist():
                turns = [f"<|im_start|>{item['role']}\n{item['content']}<|im_end|>\n" for item in messages]
                texts.append("".join(turns))
    start = time.process_time()
    parts = [encoder.encode_batch_fast(texts[at : at + 1000]) for at in range(0, len(texts), 1000)]
    tokens = sum(len(found.ids) for part in parts for found in part)
    return {"first": time.process_time() - start, "tokens": float(tokens), "fill": 0.0}


TOOLS: Final = {"ours": ours, "datasets": datasets, "tokenizers": tokenizers}


def child(python: str, tool: str, folder: Path, megabytes: int) -> dict[str, float]:
    """What a tool prints, in a process of its own on one core."""
    core = min(os.sched_getaffinity(0))
    quiet = {"TOKENIZERS_PARALLELISM": "false", "RAYON_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    done = subprocess.run(
        [python, "-m", "bench.tokens", "--child", tool, "--folder", str(folder), "--megabytes", str(megabytes)],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
        env={**os.environ, **quiet},
        preexec_fn=lambda: os.sched_setaffinity(0, {core}),
    )
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="Python of an environment with datasets, transformers and TRL.")
    parser.add_argument("--child", choices=["make", *TOOLS])
    parser.add_argument("--folder", type=Path)
    arguments = parser.parse_args()
    if arguments.child == "make":
        make(arguments.folder, arguments.megabytes)
        print("{}")
        return
    if arguments.child:
        print(json.dumps(TOOLS[arguments.child](arguments.folder)))
        return
    pythons = dict.fromkeys(TOOLS, sys.executable) | ({"datasets": str(arguments.peer)} if arguments.peer else {})
    found: dict[str, list[dict[str, float]]] = {name: [] for name in pythons}
    with tempfile.TemporaryDirectory(prefix="bench-tokens-") as name:
        child(sys.executable, "make", Path(name), arguments.megabytes)
        for number in range(arguments.rounds):
            for tool in list(pythons) if number % 2 == 0 else list(reversed(pythons)):
                found[tool].append(child(pythons[tool], tool, Path(name), arguments.megabytes))
    rates = {tool: [item["tokens"] / item["first"] / 1e6 for item in items] for tool, items in found.items()}
    for tool, values in rates.items():
        fill = f", {found[tool][0]['fill']:.1%} of the places filled" if found[tool][0]["fill"] else ""
        print(f"{tool:12}{statistics.median(values):6.3f} Mtok/s ({min(values):.3f} to {max(values):.3f}){fill}")
    first = statistics.median(item["first"] for item in found["ours"])
    second = statistics.median(item["second"] for item in found["ours"])
    print(f"first run {first:.2f} s of CPU, second run from the cache {second:.2f} s: {first / second:.1f} times")
    ratio = statistics.median(rates["ours"]) / statistics.median(rates["datasets"])
    print(f"ours to datasets {ratio:.2f}, bar {BAR:g}")
    sys.exit(ratio < BAR)


if __name__ == "__main__":
    main()
