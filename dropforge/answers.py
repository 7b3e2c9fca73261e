"""What models answered when they were evaluated, and the answers of several models to the same prompts.

The trainer writes these tables (`trainer.generate`): columns `prompt`, `reference`, `answer`, `ended` and the scores.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

AnswerTable = Mapping[str, tuple[str, "Answer"]]  # by prompt: what was held out, and what was answered

FOLDER: Final = "answers/"  # among a run's artifacts
_OTHER: Final = frozenset({"step", "row", "prompt", "reference", "answer", "ended"})


@dataclass(frozen=True)
class Answer:
    """What a model wrote. :param ended: by itself. :param source: the table that it is from."""

    text: str
    ended: bool = True
    scores: Mapping[str, float] = field(default_factory=dict)
    source: str = ""


@dataclass(frozen=True)
class Sample:
    """A prompt, what was held out, and what each run answered; None where it was not asked."""

    prompt: str
    reference: str
    answers: tuple[Answer | None, ...]


def read_answers(data: bytes, source: str) -> AnswerTable:
    """A table as `mlflow.log_table` writes it. :raises ValueError: if it is none, or not one of answers."""
    try:
        table = json.loads(data)
        columns = [str(name) for name in table["columns"]]
        rows = [dict(zip(columns, row, strict=True)) for row in table["data"]]
        found: dict[str, tuple[str, Answer]] = {}
        for row in rows:
            scores = {name: float(row[name]) for name in columns if name not in _OTHER and _is_number(row[name])}
            answer = Answer(str(row["answer"]), bool(row.get("ended", True)), scores, source)
            found.setdefault(str(row["prompt"]), (str(row.get("reference", "")), answer))
        return found
    except (KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise ValueError(f"it is no table of answers ({type(error).__name__}: {error})") from error


def match(tables: Sequence[Sequence[AnswerTable]], most: int = 20) -> tuple[list[Sample], int]:
    """Answers to the same prompts: first those that all runs were asked, then those that most of them were.

    :param tables: for each run those with its answers; an earlier one wins.
    :returns: the samples, and how many prompts there are in all.
    """
    merged: list[dict[str, tuple[str, Answer]]] = []
    for own in tables:
        merged.append({})
        for table in own:
            for prompt, found in table.items():
                merged[-1].setdefault(prompt, found)
    prompts = dict.fromkeys(prompt for rows in merged for prompt in rows)
    asked = {prompt: sum(prompt in rows for rows in merged) for prompt in prompts}
    samples = []
    for prompt in sorted(prompts, key=lambda prompt: -asked[prompt])[:most]:  # a stable sort
        pairs = [rows.get(prompt) for rows in merged]
        reference = next(pair[0] for pair in pairs if pair is not None)
        samples.append(Sample(prompt, reference, tuple(pair and pair[1] for pair in pairs)))
    return samples, len(prompts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
