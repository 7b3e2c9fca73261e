"""Personal data and secrets per core: ours beside datatrove's PII formatter, each in its own environment and process.

    python bench/pii.py --peer ENVIRONMENT/bin/python [--megabytes 16] [--rounds 5]

Clean text has no digits and no `@`, dirty text a planted value or something that only looks like one in each of its
passages. Ours looks for all seven kinds and validates, datatrove's replaces e-mail and public IPv4 addresses. Without
`--peer` a plain loop over Python's `re` stands in, with five patterns and no validators. Every round runs in fresh
processes pinned to one core, in the order A B ... B A; CPU seconds without imports, medians. A pass of one RE2 pattern
over the same column, in the same process as ours, tells how fast the machine is. The peer's environment needs
`pip install datatrove`.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

BAR = 150.0  # MB/s on clean text


def texts(megabytes: int, dirty: bool) -> list[str]:
    """Windows of Python's own documentation, of 40 to 400 words; the dirty ones hold what `planted` has made."""
    from pydoc_data.topics import topics

    rng = random.Random(7)
    words = [word for name in sorted(topics) for word in topics[name].split() if word.strip(".,:;()").isalpha()]
    planted = json.loads(Path(os.environ["PLANTED"]).read_bytes())
    made, size = [], 0
    while size < megabytes << 20:
        start = rng.randrange(len(words) - 400)
        text = " ".join(words[start : start + rng.randint(40, 400)])
        made.append(f"{text} {rng.choice(planted)}" if dirty else text)
        size += len(made[-1])
    return made


def ours(rows: list[str]) -> tuple[Callable[[], object], Callable[[], object]]:
    import pyarrow as pa
    import pyarrow.compute as pc

    from curation.columns import integers, strings
    from curation.pii import Pii, make_pii
    from curation.stage import PASSAGES

    stage = make_pii(Pii())
    column = strings(rows)
    batches = []
    for first in range(0, len(rows), 2000):
        part = column.slice(first, 2000)
        columns = [integers(range(len(part))), strings([None] * len(part)), part]
        batches.append(pa.RecordBatch.from_arrays(columns, schema=PASSAGES))
    return lambda: [stage(batch) for batch in batches], lambda: pc.match_substring_regex(column, "[xX]y{3}[0-9]")


def datatrove(rows: list[str]) -> tuple[Callable[[], object], None]:
    from datatrove.data import Document  # type: ignore[import-not-found, unused-ignore]
    from datatrove.pipeline.formatters import PIIFormatter  # type: ignore[import-not-found, unused-ignore]

    documents = [Document(text=text, id=str(number)) for number, text in enumerate(rows)]
    formatter = PIIFormatter()
    return lambda: [formatter.format(document.text) for document in documents], None


def plain(rows: list[str]) -> tuple[Callable[[], object], None]:
    import re

    patterns = [
        re.compile(pattern)
        for pattern in (
            r"\b[A-Za-z0-9._%+-]+@[A-Za-z0-9.-]+\.[A-Za-z]{2,}\b",
            r"\b(?:\d{1,3}\.){3}\d{1,3}\b",
            r"\+?\d[\d .()-]{7,}\d",
            r"\b[A-Z]{2}\d{2}[A-Z0-9]{11,30}\b",
            r"\b(?:sk|ghp|AKIA)[A-Za-z0-9_-]{16,}\b",
        )
    ]

    def run() -> object:
        found = []
        for text in rows:
            for pattern in patterns:
                text = pattern.sub("<PII>", text)
            found.append(text)
        return found

    return run, None


TOOLS: dict[str, Callable[[list[str]], tuple[Callable[[], object], Callable[[], object] | None]]] = {
    "ours": ours,
    "datatrove": datatrove,
    "plain re": plain,
}


def child(tool: str, megabytes: int) -> None:
    """CPU seconds on clean text, on dirty text, and of the plain pass."""
    seconds = []
    for dirty in (False, True):
        run, scan = TOOLS[tool](texts(megabytes, dirty))
        start = time.process_time()
        run()
        seconds.append(time.process_time() - start)
        if scan is not None and not dirty:
            start = time.process_time()
            scan()
            seconds.append(time.process_time() - start)
    print(json.dumps(seconds))


def planted() -> str:
    sys.path[0] = str(Path(__file__).parents[1])  # this folder's names must not hide packages
    from curation.pii.planted import plant

    return json.dumps([item.text for item in plant(40, 5)])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--megabytes", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--peer", type=Path, help="Python of an environment with datatrove.")
    parser.add_argument("--child", choices=list(TOOLS))
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child, arguments.megabytes)
        return
    peers = {"datatrove": str(arguments.peer)} if arguments.peer else {}
    pythons = {"ours": sys.executable, **peers, "plain re": sys.executable}
    times: dict[str, list[list[float]]] = {name: [] for name in pythons}
    core = min(os.sched_getaffinity(0))
    passages = tempfile.NamedTemporaryFile("w", suffix=".json")  # noqa: SIM115 - it goes with the process
    passages.write(planted())
    passages.flush()
    env = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1]), "OMP_NUM_THREADS": "1", "PLANTED": passages.name}
    for number in range(arguments.rounds):
        for name in list(pythons) if number % 2 == 0 else list(reversed(pythons)):
            done = subprocess.run(
                # -P: nor may they in the children.
                [pythons[name], "-P", __file__, "--child", name, "--megabytes", str(arguments.megabytes)],
                capture_output=True,
                check=True,
                text=True,
                env=env,
                preexec_fn=lambda: os.sched_setaffinity(0, {core}),
            )
            times[name].append(json.loads(done.stdout.splitlines()[-1]))
    size = arguments.megabytes * (1 << 20) / 1e6
    speeds = {name: [[size / value for value in round_] for round_ in rounds] for name, rounds in times.items()}
    for name, rounds in speeds.items():
        clean, dirty = ([round_[place] for round_ in rounds] for place in (0, -1))
        print(
            f"{name:10} clean {statistics.median(clean):7.1f} MB/s ({min(clean):.1f} to {max(clean):.1f})"
            f"   dirty {statistics.median(dirty):6.1f} MB/s ({min(dirty):.1f} to {max(dirty):.1f})"
        )
    ratio = statistics.median([round_[1] / round_[0] for round_ in speeds["ours"]])
    print(f"a plain pass of one pattern is {ratio:.1f} times as fast as ours on clean text")
    if not peers:
        print("LEFT OUT: datatrove, because --peer names no Python")
    clean_speed = statistics.median([round_[0] for round_ in speeds["ours"]])
    print(f"ours on clean text {clean_speed:.0f} MB/s, bar {BAR:g}")
    sys.exit(clean_speed < BAR)


if __name__ == "__main__":
    main()
