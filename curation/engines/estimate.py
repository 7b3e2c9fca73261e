"""How long a drop will take, before it begins: planned bytes at measured rates, by what the recipe asks for.

The rates are CPU seconds of one core for 100 MB of JSONL, measured by `python -m bench.seconds` and, where a stage is
lost in its noise, by the stage's own bench; the tables are in `docs/internals/engine-benchmarks.md`. They are of one
machine and one kind of text: an estimate for people and for `auto`, no promise. Evaluation sets and kernels of the
user's own are not in it, and compressed bytes count as they lie there.
"""

from __future__ import annotations

from typing import Final

from dropforge.recipe_data import Curation

#: What workers share: fetching, reading, keys, and what each stage adds.
READING: Final = 13.0
STAGES: Final = {"near": 7.1, "pii": 0.3, "gopher": 4.2, "repetition": 5.4, "c4": 5.1, "repair": 0.3, "language": 145.0}
#: Settling, writing and publishing, which one process does where Spark does not; with near duplicates more.
SETTLING: Final = 5.4
SETTLING_NEAR: Final = 8.6
_UNIT: Final = 10**8


def seconds(asked: Curation, planned: int, cores: int, *, shared: bool = False) -> float:
    """Seconds by the clock from the first byte to the manifest.

    :param planned: bytes of the drop's files as they lie there. :param cores: that work on rows at the same time.
    :param shared: whether they share settling as well, as Spark's do.
    """
    quality = asked.quality
    wanted = {
        "near": asked.dedup is not None,
        "pii": asked.pii is not None,
        "gopher": quality is not None and quality.gopher is not None,
        "repetition": quality is not None and quality.gopher_repetition is not None,
        "c4": quality is not None and quality.c4 is not None,
        "repair": asked.unicode == "repair",
        "language": asked.language is not None,
    }
    rows = READING + sum(STAGES[name] for name, is_asked in wanted.items() if is_asked)
    rest = SETTLING_NEAR if asked.dedup is not None else SETTLING
    return planned / _UNIT * (rows / cores + rest / (cores if shared else 1))
