"""How like a generated answer is to the one that was held out: pure functions of two texts, each from 0 to 1.

White space around an answer never counts. Words are found by white space and punctuation, so texts in scripts that put
neither between words have long ones.
"""

from __future__ import annotations

import json
import re
import string
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final

PREFIX: Final = "gen/"  # of the names in MLflow
_ARTICLES: Final = re.compile(r"\b(a|an|the)\b")
_PUNCTUATION: Final = str.maketrans("", "", string.punctuation)
_WORD: Final = re.compile(r"[^\W_]+")


def exact_match(answer: str, reference: str) -> float:
    """Whether both are the same, one run of white space being like another."""
    return float(answer.split() == reference.split())


def token_f1(answer: str, reference: str) -> float:
    """F1 of the words that both have, as often as both have them, without case, punctuation and English articles.

    The measure of SQuAD (https://arxiv.org/abs/1606.05250, section 6.1); where one text has no word left, whether both
    have none, as in https://arxiv.org/abs/1806.03822.
    """
    ours, theirs = _normalised(answer), _normalised(reference)
    if not ours or not theirs:
        return float(ours == theirs)
    common = sum((Counter(ours) & Counter(theirs)).values())
    return 2 * common / (len(ours) + len(theirs))


def rouge_l(answer: str, reference: str) -> float:
    """F1 of the longest common subsequence of words, without case (https://aclanthology.org/W04-1013/, section 3.1).

    Without stemming. In English the words are those of the package rouge-score.
    """
    ours, theirs = _WORD.findall(answer.lower()), _WORD.findall(reference.lower())
    if not ours or not theirs:
        return 0.0
    return 2 * common_subsequence(ours, theirs) / (len(ours) + len(theirs))


def valid_json(answer: str, reference: str = "") -> float:
    """Whether the answer is one JSON value by RFC 8259, which has neither NaN nor Infinity; whatever the reference."""
    del reference
    try:
        json.loads(answer, parse_constant=_refuse)
    except (ValueError, RecursionError):
        return 0.0
    return 1.0


def common_subsequence(left: Sequence[str], right: Sequence[str]) -> int:
    """Length of the longest common subsequence, for all places of `left` at once in the bits of a number.

    https://doi.org/10.1016/S0020-0190(00)00143-8: a bit that is 0 says that the length grows at its place.
    """
    places: dict[str, int] = {}
    for place, word in enumerate(left):
        places[word] = places.get(word, 0) | 1 << place
    full = (1 << len(left)) - 1
    row = full
    for word in right:
        matches = row & places.get(word, 0)
        row = (row + matches | row - matches) & full
    return len(left) - row.bit_count()


SCORES: Final[Mapping[str, Callable[[str, str], float]]] = {
    "exact-match": exact_match,
    "token-f1": token_f1,
    "rouge-l": rouge_l,
    "valid-json": valid_json,
}


def _normalised(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _refuse(constant: str) -> Any:
    raise ValueError(f"{constant} is no JSON")
