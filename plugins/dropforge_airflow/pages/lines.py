"""The last lines of each rank, from the mixed log of a pod. Pure."""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Final

EACH: Final = 15  # lines of a rank
WIDTH: Final = 400  # characters of a line
MOST_RANKS: Final = 64
_LINE: Final = re.compile(
    r"(?:(?:\d{4}-\d\d-\d\dT)?[\d:.]{8,15}Z )?(?:\[(?:rank (?P<rank>\d{1,6})|pod [^\]]{1,200})\] ?)?(?P<text>.*)", re.S
)
_UNSEEN: Final = re.compile(
    r"\x1b\[[0-9;?]*[A-Za-z]|[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


@dataclass(frozen=True)
class RankLines:
    """:param rank: None for what the launcher of the pod printed."""

    pod: str
    rank: int | None
    lines: tuple[str, ...]

    def as_dict(self) -> dict[str, Any]:
        return {"pod": self.pod, "rank": self.rank, "lines": list(self.lines)}


def by_rank(tails: Mapping[str, Iterable[str]]) -> list[RankLines]:
    """The last lines of each rank and launcher, ranks first; progress marks are left out: the page draws them."""
    found: dict[tuple[str, int | None], deque[str]] = {}
    for pod, lines in tails.items():
        for line in lines:
            match = _LINE.fullmatch(line.rstrip("\r\n"))
            if match is None or match["text"].startswith("@progress "):
                continue
            rank = int(match["rank"]) if match["rank"] else None
            found.setdefault((pod, rank), deque(maxlen=EACH)).append(clean(match["text"]))
    order = sorted(found, key=lambda place: (place[1] is None, place[1] or 0, place[0]))
    return [RankLines(pod, rank, tuple(found[pod, rank])) for pod, rank in order[:MOST_RANKS]]


def clean(text: str, most: int = WIDTH) -> str:
    """A text without colours and what a terminal or a browser would obey; a long one is cut."""
    text = _UNSEEN.sub("", text[: 4 * most])
    return text if len(text) <= most else f"{text[: most - 2]} …"
