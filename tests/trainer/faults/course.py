"""What a run learned from, by what ran: the traces of its attempts joined to the course that its weights have gone."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

Steps = Mapping[int, tuple[str, ...]]  # by the step's number, from 1: keys of its rows over all ranks, sorted


@dataclass(frozen=True)
class Traced:
    """Steps of one attempt that all ranks have traced. :param skipped: of these, those that changed no weight."""

    rows: Steps
    skipped: frozenset[int]


def read_traces(folder: Path, attempts: int, world: int = 2) -> list[Traced]:
    """:raises ValueError: if ranks disagree on whether a step was skipped, or one took it twice."""
    found = []
    for attempt in range(1, attempts + 1):
        ranks = [_lines(folder / f"trace-{attempt}-{rank}.jsonl") for rank in range(world)]
        rows, skipped = {}, set()
        for step in set.intersection(*(set(lines) for lines in ranks)):
            rows[step] = tuple(sorted(key for lines in ranks for key in lines[step]["rows"]))
            applied = {bool(lines[step]["applied"]) for lines in ranks}
            if len(applied) > 1:
                raise ValueError(f"attempt {attempt}: ranks disagree on step {step}")
            if applied == {False}:
                skipped.add(step)
        found.append(Traced(dict(sorted(rows.items())), frozenset(skipped)))
    return found


def _lines(path: Path) -> dict[int, dict[str, list[str]]]:
    if not path.exists():
        return {}
    found = {}
    for text in path.read_text().splitlines():
        line = json.loads(text)
        if line["step"] in found:
            raise ValueError(f"{path.name}: step {line['step']} twice")
        found[line["step"]] = line
    return found


def course(attempts: Sequence[Traced]) -> Traced:
    """The steps that are in the final weights, once each; a pure function.

    An attempt begins where its checkpoint stood, one before its first step; what the attempts before it did after
    that is thrown away. Steps that no attempt took are missing here.
    """
    rows: dict[int, tuple[str, ...]] = {}
    skipped: set[int] = set()
    for traced in attempts:
        if not traced.rows:
            continue
        first = min(traced.rows)
        rows = {step: keys for step, keys in rows.items() if step < first} | dict(traced.rows)
        skipped = {step for step in skipped if step < first} | traced.skipped
    return Traced(rows, frozenset(skipped))


def difference(found: Traced, steps: Steps) -> tuple[int, int]:
    """Rows of the steps as they should be that were not learned from, and rows that were learned from too often."""
    wanted = Counter(key for keys in steps.values() for key in keys)
    seen = Counter(key for step, keys in found.rows.items() for key in keys if step not in found.skipped)
    return (wanted - seen).total(), (seen - wanted).total()
