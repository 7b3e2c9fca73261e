"""Signatures of near duplicates per core: ours beside four peers, each in its own environment and process.

    python bench/near.py [--megabytes 8] [--rounds 5] [--datatrove ENVIRONMENT/bin/python]
        [--datasketch ENVIRONMENT/bin/python] [--data-juicer ENVIRONMENT/bin/python]
        [--text-dedup ENVIRONMENT/bin/python]

Made of the same texts: five-word shingles and 112 minima of each, in 14 bands. Ours also makes the distinct shingles,
which the verification needs. datatrove runs with its English tokeniser, and with words cut at white space. Every round
runs in fresh processes pinned to one core, in the order A B ... B A; CPU seconds without imports, medians. A peer whose
Python is not named is left out. The environments need `pip install datatrove spacy nltk regex`, `datasketch`,
`py-data-juicer aiohttp` and, on Python 3.12, `text-dedup`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

BAR = 3.0  # times the best peer


def texts(megabytes: int) -> list[str]:
    """Windows of Python's own documentation, of 40 to 400 words."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = " ".join(topics[name] for name in sorted(topics)).split()
    made, size = [], 0
    while size < megabytes << 20:
        start = rng.randrange(len(words) - 400)
        made.append(" ".join(words[start : start + rng.randint(40, 400)]))
        size += len(made[-1])
    return made


def ours(rows: list[str]) -> None:
    import pyarrow as pa

    from curation.columns import integers, strings
    from curation.fingerprint import TEXTS, Near, fingerprints

    near = Near("word", 5, 14, 8, 800_000)
    made = 0
    start = time.process_time()
    for first in range(0, len(rows), 2000):
        part = rows[first : first + 2000]
        zeros = integers([0] * len(part))
        batch = pa.RecordBatch.from_arrays([*[zeros] * 4, strings(part)], schema=TEXTS)
        made += fingerprints(batch, near).bands.num_rows // 14
    print(json.dumps([time.process_time() - start, made]))


def loop(one: Callable[[str], Any], rows: list[str]) -> None:
    one(rows[0])
    start = time.process_time()
    made = sum(one(text) is not None for text in rows)
    print(json.dumps([time.process_time() - start, made]))


def datasketch(rows: list[str]) -> None:
    from datasketch import MinHash  # type: ignore[import-not-found, unused-ignore]

    def one(text: str) -> Any:
        words = re.findall(r"\w+", text.lower())
        signature = MinHash(num_perm=112)
        signature.update_batch({" ".join(words[at : at + 5]).encode() for at in range(len(words) - 4)})
        return signature.hashvalues

    loop(one, rows)


def datatrove(rows: list[str], *, split: bool = False) -> None:
    from datatrove.pipeline.dedup.minhash import (  # type: ignore[import-not-found, unused-ignore]
        MinhashConfig,
        MinhashDedupSignature,
    )

    class Split:
        def word_tokenize(self, text: str) -> list[str]:
            return text.split()

    step = MinhashDedupSignature(tempfile.gettempdir(), MinhashConfig(n_grams=5, num_buckets=14, hashes_per_bucket=8))
    if split:
        step.word_tokenizer = Split()
    loop(lambda text: step.get_signature(step.get_shingles(text)), rows)


def data_juicer(rows: list[str]) -> None:
    from data_juicer.ops.deduplicator.document_minhash_deduplicator import (  # type: ignore[import-not-found, unused-ignore]
        DocumentMinhashDeduplicator,
    )

    operator = DocumentMinhashDeduplicator(
        tokenization="space", window_size=5, num_permutations=112, num_bands=14, num_rows_per_band=8
    )
    loop(lambda text: operator.compute_hash({"text": text}), rows)


def text_dedup(rows: list[str]) -> None:
    from text_dedup.config import MinHashAlgorithmConfig  # type: ignore[import-not-found, unused-ignore]

    algorithm = MinHashAlgorithmConfig(
        algorithm_name="minhash",
        text_column="text",
        num_perm=112,
        bands=14,
        rows=8,
        ngram_size=5,
        threshold=0.8,
        num_proc=1,
    )
    embed = algorithm.get_embed_func()
    loop(lambda text: embed([text], [0]), rows)


WHO: Final[dict[str, Callable[[list[str]], Any]]] = {
    "ours": ours,
    "datatrove": datatrove,
    "datatrove, white space": partial(datatrove, split=True),
    "datasketch": datasketch,
    "data-juicer": data_juicer,
    "text-dedup": text_dedup,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--child", choices=WHO)
    for peer in ("datatrove", "datasketch", "data-juicer", "text-dedup"):
        parser.add_argument(f"--{peer}", help="Python of its environment.")
    arguments = parser.parse_args()
    if arguments.child:
        WHO[arguments.child](texts(arguments.megabytes))
        return
    named = {"ours": sys.executable} | {
        name: python for name in WHO if (python := vars(arguments).get(name.split(",")[0].replace("-", "_")))
    }
    times: dict[str, list[float]] = {name: [] for name in named}
    core = min(os.sched_getaffinity(0))
    for number in range(arguments.rounds):
        for name in list(named) if number % 2 == 0 else list(reversed(named)):
            done = subprocess.run(
                # -P: this folder's names must not hide packages.
                [named[name], "-P", __file__, "--child", name, "--megabytes", str(arguments.megabytes)],
                stdout=subprocess.PIPE,
                check=True,
                text=True,
                env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1"},
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            times[name].append(json.loads(done.stdout.splitlines()[-1])[0])
    size = sum(map(len, texts(arguments.megabytes))) / 1e6
    speeds = {name: [size / value for value in values] for name, values in times.items()}
    for name, values in speeds.items():
        print(f"{name:24}{statistics.median(values):8.2f} MB/s ({min(values):.2f} to {max(values):.2f})")
    left = [name for name in WHO if name not in named]
    if left:
        print("LEFT OUT, because their Python is not named:", "; ".join(left))
    peers = [statistics.median(values) for name, values in speeds.items() if name != "ours"]
    if peers:
        ratio = statistics.median(speeds["ours"]) / max(peers)
        print(f"ours to the best of them {ratio:.1f}, bar {BAR:g}")
        sys.exit(ratio < BAR)


if __name__ == "__main__":
    main()
