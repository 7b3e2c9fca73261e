"""The whole of near duplicates, with reading, verification and writing: ours beside data-juicer and text-dedup.

    python -m bench.fuzzy [--documents 36000] [--rounds 1] [--data-juicer ENVIRONMENT/bin/python]
        [--text-dedup ENVIRONMENT/bin/python] [--limit 600]

The same JSONL file for all, 112 minima in 14 bands of 8, five-word shingles, two workers. Of the documents 72 % are
windows of Python's documentation in an order of their own, the rest copies: exact ones, and with 2, 5 and 15 % of the
words changed, 7 % each. Every run is a fresh process with fresh folders, in the order A B C C B A; CPU seconds (user
and system) and peak memory (shared pages counted once) are those of the process tree. What became of the planted pairs
is told by `Verdict`, by their real Jaccard similarity. text-dedup runs with its check for false positives, because
without it the release 0.4.1 loses whole clusters.

The peers' environments need `pip install py-data-juicer aiohttp` and, on Python 3.12, `pip install text-dedup`.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from bench import tree

#: Share of the words that a copy has changed, in percent; -1 is an original.
EDITS = (0, 2, 5, 15)
SIMILAR = 0.8
BAR, MEMORY = 5.0, 1 / 3  # times a peer's speed, of a peer's memory


def write(path: Path, documents: int) -> Counter[int]:
    """A JSONL file of texts that name their original and edit in their first word. Returns copies by edit."""
    from pydoc_data.topics import topics

    rng, made = random.Random(7), Counter[int]()
    pool = [word for name in sorted(topics) for word in topics[name].split() if word.isalpha()]
    originals: list[list[str]] = []
    with path.open("w", encoding="utf-8") as file:
        for number in range(documents):
            edit = -1 if number < 100 or rng.random() < 0.72 else rng.choice(EDITS)
            if edit < 0:
                # Half of the words are drawn one by one, so that windows that overlap are not alike.
                at = rng.randrange(len(pool) - 200)
                words = [rng.choice(pool) if rng.random() < 0.5 else word for word in pool[at : at + 200]]
                name, words = len(originals), words[: rng.randint(60, 200)]
                originals.append(words)
            else:
                name = rng.randrange(len(originals))
                words = [rng.choice(pool) if rng.randrange(100) < edit else word for word in originals[name]]
                made[edit] += 1
            # No part of the text, so that copies are exact ones.
            file.write(json.dumps({"text": " ".join(words), "original": str(name), "edit": edit}) + "\n")
    return made


@dataclass(frozen=True)
class Verdict:
    """What a tool kept, beside what was planted.

    :param recall: by edit, the share of pairs of copy and original of which one member at most stays.
    :param similar: the same of all pairs that are at least as similar as asked for.
    :param right: of the copies that went, the share to which a row of their original that stayed is that similar.
    :param lost: share of originals of which nothing is left.
    """

    recall: dict[int, float]
    similar: float
    right: float
    lost: float

    def __str__(self) -> str:
        edits = " / ".join(f"{self.recall[edit]:.3f}" for edit in EDITS)
        whole = f"of pairs from {SIMILAR:g} on {self.similar:.4f}"
        return f"recall {whole}, at edits of {EDITS} % {edits}; rightly gone {self.right:.4f}; lost {self.lost:.3%}"


def judge(data: Path, kept: Iterable[str]) -> Verdict:
    left = Counter(kept)
    clusters: dict[str, list[tuple[int, str, bool]]] = {}
    for line in data.open(encoding="utf-8"):
        row = json.loads(line)
        stays = left[row["text"]] > 0
        left[row["text"]] -= stays
        clusters.setdefault(row["original"], []).append((row["edit"], row["text"], stays))
    pairs, met = Counter[int](), Counter[int]()
    similar = similar_met = gone = rightly = 0
    for (_, original, first), *copies in clusters.values():
        whole, staying = shingles(original), [text for _, text, stays in copies if stays] + [original] * first
        survivors = [shingles(text) for text in staying]
        for edit, text, stays in copies:
            own = shingles(text)
            pairs[edit] += 1
            met[edit] += not (stays and first)
            if jaccard(own, whole) >= SIMILAR:
                similar += 1
                similar_met += not (stays and first)
            if not stays:
                gone += 1
                rightly += any(jaccard(own, other) >= SIMILAR for other in survivors)
    lost = sum(not any(stays for *_, stays in rows) for rows in clusters.values()) / len(clusters)
    recall = {edit: met[edit] / pairs[edit] for edit in EDITS}
    return Verdict(recall, similar_met / similar, rightly / max(gone, 1), lost)


def shingles(text: str) -> frozenset[tuple[str, ...]]:
    words = text.lower().split()
    return frozenset(tuple(words[at : at + 5]) for at in range(len(words) - 4))


def jaccard(one: frozenset[tuple[str, ...]], other: frozenset[tuple[str, ...]]) -> float:
    return len(one & other) / len(one | other)


def ours(data: Path, out: Path, python: str, limit: float) -> tuple[tree.Cost, list[str]]:
    drop = out / "bucket/drops/fam/d"
    drop.mkdir(parents=True)
    shutil.copy(data, drop / "data.jsonl")
    (drop / "_SUCCESS").touch()
    env = {"PYTHONPATH": str(Path(__file__).parents[1])}
    cost = tree.run([python, "-m", "bench.fuzzy", "--child", str(out)], env, limit)
    import pyarrow.parquet as pq

    return cost, [
        text
        for path in (out / "work/out").rglob("*.parquet")
        if "text" in pq.read_schema(path).names
        for text in pq.read_table(path, columns=["text"]).column("text").to_pylist()
    ]


def child(root: Path) -> None:
    from curation import curate
    from dropforge.drop import read_drop
    from dropforge.recipes import load_recipe
    from dropforge.store import FolderStore

    recipe = load_recipe("tiny", {"curation": {"engine": "embedded", "workers": 2, "dedup": {}}})
    store = FolderStore(root / "bucket")
    print(curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "work").counts)


def data_juicer(data: Path, out: Path, python: str, limit: float) -> tuple[tree.Cost, list[str]]:
    operator = {
        "tokenization": "space",
        "window_size": 5,
        "lowercase": True,
        "num_permutations": 112,
        "jaccard_threshold": 0.8,
        "num_bands": 14,
        "num_rows_per_band": 8,
    }
    config = {
        "project_name": "fuzzy",
        "dataset_path": str(data),
        "export_path": str(out / "kept.jsonl"),
        "work_dir": str(out),
        "np": 2,
        "use_cache": False,
        "process": [{"document_minhash_deduplicator": operator}],
    }
    (out / "config.yaml").write_text(json.dumps(config))
    command = [str(Path(python).with_name("dj-process")), "--config", str(out / "config.yaml")]
    return tree.run(command, _offline(out), limit), _texts((out / "kept.jsonl").open(encoding="utf-8"))


def text_dedup(data: Path, out: Path, python: str, limit: float) -> tuple[tree.Cost, list[str]]:
    (out / "config.toml").write_text(
        f"""[input]
input_type = "local_files"
file_type = "json"
read_arguments = {{ path = "json", data_files = "{data}", split = "train" }}
[algorithm]
algorithm_name = "minhash"
text_column = "text"
num_perm = 112
bands = 14
rows = 8
ngram_size = 5
threshold = 0.8
check_false_positive = true
num_proc = 2
[output]
output_dir = "{out}/kept"
[debug]
"""
    )
    code = (
        f"import os; os.chdir({str(out)!r}); import runpy; runpy.run_module('text_dedup.minhash', run_name='__main__')"
    )
    cost = tree.run([python, "-c", code], _offline(out), limit)
    read = f"from datasets import load_from_disk as l; l('{out}/kept').to_json('{out}/kept.jsonl')"
    tree.run([python, "-c", read], _offline(out), limit)
    return cost, _texts((out / "kept.jsonl").open(encoding="utf-8"))


def _texts(lines: Iterable[str]) -> list[str]:
    return [json.loads(line)["text"] for line in lines]


def _offline(out: Path) -> dict[str, str]:
    return {"HF_HUB_OFFLINE": "1", "HF_HOME": str(out / "hub"), "DATA_JUICER_CACHE_HOME": str(out / "cache")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--documents", type=int, default=36_000)
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--data-juicer", help="Python of its environment.")
    parser.add_argument("--text-dedup", help="Python of its environment.")
    parser.add_argument("--limit", type=float, default=600, help="Seconds that a run may take.")
    parser.add_argument("--child", type=Path)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    runs: dict[str, tuple[Callable[..., tuple[tree.Cost, list[str]]], str]] = {"ours": (ours, sys.executable)}
    if arguments.data_juicer:
        runs["data-juicer"] = data_juicer, arguments.data_juicer
    if arguments.text_dedup:
        runs["text-dedup"] = text_dedup, arguments.text_dedup
    costs: dict[str, list[tree.Cost]] = {name: [] for name in runs}
    verdicts: dict[str, Verdict] = {}
    with tempfile.TemporaryDirectory(prefix="fuzzy-") as folder:
        data = Path(folder, "data.jsonl")
        made = write(data, arguments.documents)
        print(f"{arguments.documents:,} documents, {data.stat().st_size / 1e6:.0f} MB, copies by edit {dict(made)}")
        for number in range(arguments.rounds):
            for name in list(runs) if number % 2 == 0 else list(reversed(runs)):
                out = Path(folder, f"{name}-{number}")
                out.mkdir()
                run, python = runs[name]
                try:
                    cost, kept = run(data, out, python, arguments.limit)
                except TimeoutError as error:
                    print(f"{name:12} {error}", flush=True)
                    continue
                costs[name].append(cost)
                size = f"{cost.wall:8.1f} s, CPU {cost.cpu:.1f} s, {cost.share / 1e6:.0f} MB; kept {len(kept):,}"
                verdicts[name] = judge(data, kept)
                print(f"{name:12}{size}; {verdicts[name]}", flush=True)
                shutil.rmtree(out)
    missed = False
    for name in [name for name in runs if name != "ours" and costs[name] and costs["ours"]]:
        wall, cpu, peak = (
            statistics.median(getattr(cost, kind) for cost in costs[name])
            / statistics.median(getattr(cost, kind) for cost in costs["ours"])
            for kind in ("wall", "cpu", "share")
        )
        print(f"{name} to ours: {wall:.1f} times the seconds, {cpu:.1f} the CPU, {peak:.1f} the memory")
        missed |= wall < BAR or 1 / peak > MEMORY or verdicts["ours"].similar < verdicts[name].similar
    unjudged = [name for name in ("data-juicer", "text-dedup") if not costs.get(name)]
    print(*[f"NOT JUDGED: {name}, which did not run to its end or is not named" for name in unjudged], sep="\n")
    sys.exit(missed or bool(unjudged))


if __name__ == "__main__":
    main()
