"""A person's word on a promotion: kept by candidate and champion, for the verdict."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

from dropforge import layout
from dropforge.json_objects import UnreadableError, read_as, typed
from dropforge.promotion import Check, Verdict
from dropforge.store import MissingObjectError, Store
from dropforge.text import read_count

NAME = "approved"
_WITHDRAWN: Final = "withdrawn"
_MEND: Final = "Delete it, and answer again"
_DIGEST: Final = re.compile(r"[0-9a-f]{64}")
_ABOUT: Final = re.compile(rf"({_DIGEST.pattern}) instead of (None|[0-9]+)")
_RESTORE: Final = "Restore the file in the run's folder from the bucket's versions, or clear the task that wrote it"


@dataclass(frozen=True)
class Pair:
    """What a person decides between.

    :param candidate: digest of the candidate's model. :param champion: version of the champion; None if there is none.
    """

    candidate: str
    champion: str | None

    @classmethod
    def of(cls, report: Mapping[str, Any], evaluation: Mapping[str, Any]) -> Pair:
        """:param report: and :param evaluation: the contents of the run's `report.json` and `evaluation.json`.

        :raises UnreadableError: if they name none: pods write them, and what a person is asked is made of these words.
        """
        digest, version = str(report["model"]["digest"]), evaluation.get("champion_version")
        if not _DIGEST.fullmatch(digest):
            raise UnreadableError("key `model.digest` of report.json", f"{digest!r:.80} is no SHA-256", _RESTORE)
        if version is not None and read_count(str(version)) is None:
            thing = "key `champion_version` of evaluation.json"
            raise UnreadableError(thing, f"{version!r:.80} is no number of a version", _RESTORE)
        return cls(digest, None if version is None else str(version))

    @property
    def about(self) -> str:
        """What a question about it is kept by, until its answer comes."""
        return f"{self.candidate} instead of {self.champion}"

    @classmethod
    def asked(cls, about: str) -> Pair | None:
        """The pair that a question was about; None if an older version asked, which did not keep it."""
        found = _ABOUT.fullmatch(about)
        return None if found is None else cls(found[1], None if found[2] == "None" else found[2])


def said(yes: bool, by: str | None, at: str) -> str:
    """A person's word in one line. :param by: the user; None if the deadline passed. :param at: as ISO 8601 in UTC."""
    word = "yes" if yes else "no"
    return f"{by} said {word} at {at}" if by else f"no one answered by {at}, which counts as {word}"


@dataclass(frozen=True)
class Answer:
    """:param by: the user; None if the deadline passed. :param at: when, as ISO 8601 in UTC. :param id: of the user;
    None if the deadline passed, or an older version kept it.
    """

    promote: bool
    by: str | None
    at: str
    id: str | None = None

    @property
    def told(self) -> str:
        return said(self.promote, self.by, self.at)


def read(store: Store, run: str, pair: Pair) -> Answer | None:
    """The last answer for this candidate and champion; None if there is none."""

    def answer(kept: Mapping[str, Any]) -> Answer | None:
        if (kept["candidate"], kept["champion"]) != (pair.candidate, pair.champion):
            return None  # a key holds a part of the digest only
        if _WITHDRAWN in kept:
            return None
        return typed(Answer(kept["promote"], kept["by"], str(kept["at"]), kept.get("id")))

    try:
        return read_as(store, layout.approval_key(run, pair.candidate, pair.champion), answer, _MEND)
    except MissingObjectError:
        return None


def write(store: Store, run: str, pair: Pair, answer: Answer) -> None:
    """Keep an answer; a later one takes its place."""
    body = json.dumps({**asdict(pair), **asdict(answer)}, indent=1, ensure_ascii=False)
    store.put(layout.approval_key(run, pair.candidate, pair.champion), body.encode())


def withdraw(store: Store, run: str, pair: Pair) -> bool:
    """Have the answer for this candidate and champion count no more, since it is asked anew; whether there was one.

    What was said stays beside it, to be read by people.
    """
    answer = read(store, run, pair)
    if answer is None:
        return False
    body = json.dumps({**asdict(pair), _WITHDRAWN: asdict(answer)}, indent=1, ensure_ascii=False)
    store.put(layout.approval_key(run, pair.candidate, pair.champion), body.encode())
    return True


def answered(verdict: Verdict, answer: Answer | None, *, people: Collection[str] = (), silence: bool = True) -> Verdict:
    """The verdict with the person's word as its last check. Of a candidate that failed, nobody is asked.

    :param people: ids of those who may answer, none for all. :param silence: whether no answer may be a yes. Both as
        they are now: a question may be older.
    """
    if not verdict.promote:
        return verdict
    passed = answer is not None and answer.promote
    reason = "awaiting approval" if answer is None else answer.told
    if answer is not None and answer.promote and answer.by is None and not silence:
        passed, reason = False, f"awaiting approval: {answer.told}, and by now it counts as no"
    if answer is not None and answer.by is not None and people and (answer.id or answer.by) not in people:
        passed, reason = False, f"awaiting approval: {answer.told}, and {', '.join(people)} are asked by now"
    return Verdict(passed, (*verdict.checks, Check(NAME, None, None, passed, reason)))
