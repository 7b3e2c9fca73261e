"""Checkpoints that a person has set aside: they stay where they are, and no resume goes on from them.

`checkpoints/aside.json` beside the checkpoints names them by the check sums of their manifests, so that a checkpoint
that is made later at the same step is another one and counts. It is written only while nothing trains the run, and
read when a training begins. Standard library only: the trainer reads it.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Final

from dropforge.errors import DataError
from dropforge.json_objects import MOST_MANIFEST, UNREADABLE, read_object
from dropforge.store import MissingObjectError, Store

KEY: Final = "checkpoints/aside.json"
_FOLDER, _MANIFEST = "checkpoints/", "/manifest.json"
_MOST: Final = 8  # that are named


@dataclass(frozen=True)
class Sealed:
    """A complete checkpoint, as far as its manifest says. :param check: the manifest's own check sum."""

    step: int
    check: str
    eval_loss: float | None = None


def sealed(store: Store) -> list[Sealed]:
    """The complete checkpoints of a run, oldest first. :param store: of the place of its checkpoints."""
    found = []
    for key in store.sizes(_FOLDER):
        name, dash, number = key.removeprefix(_FOLDER).removesuffix(_MANIFEST).partition("step-")
        if name or not dash or not key.endswith(_MANIFEST) or not number.isdecimal():
            continue
        try:
            values = read_object(store, key, most=MOST_MANIFEST)
            loss = values.get("eval_loss")
            found.append(Sealed(int(number), str(values["check"]), None if loss is None else float(loss)))
        except UNREADABLE:
            continue  # deleted meanwhile, or broken: the trainer passes over it, too
    return sorted(found, key=lambda item: item.step)


def set_aside(store: Store, there: Sequence[Sealed], step: int) -> list[Sealed]:
    """From now on a resume goes on from a step: what is newer is set aside, and nothing else is; what that is.

    :param there: the complete checkpoints. :raises DataError: if there is none of that step, or somebody else writes.
    """
    if step not in {item.step for item in there}:
        cause = "the run has no complete checkpoint of it"
        raise DataError(f"checkpoint step-{step}", cause, f"There is: {listed(there)}")
    newer = [item for item in there if item.step > step]
    before = store.stat(KEY)
    if before is None and not newer:
        return newer
    body = json.dumps(
        {
            "from": step,
            "at": datetime.now(UTC).isoformat(timespec="seconds"),
            "aside": {item.check: item.step for item in newer},
        },
        indent=1,
    ).encode()
    written = store.put_if_absent(KEY, body) if before is None else store.put_if_match(KEY, body, before.etag)
    if not written:
        cause = "another process has just written it"
        raise DataError(f"{store.uri}/{KEY}", cause, "Check whether someone else is resuming this run")
    return newer


def known(store: Store) -> frozenset[str]:
    """Check sums of the manifests that are set aside; none where nothing is.

    :raises DataError: if it cannot be understood.
    """
    try:
        found = read_object(store, KEY)["aside"]
        if not isinstance(found, dict):
            raise ValueError("`aside` is no object")
        return frozenset(str(check) for check in found)
    except MissingObjectError:
        return frozenset()
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"{store.uri}/{KEY}",
            f"it does not say which checkpoints are set aside ({error!r})",
            "Write it again with `dropforge resume RUN --from step-N`, or remove it to resume from the newest one",
        ) from error


def listed(items: Sequence[Sealed]) -> str:
    """Their steps in words; of many, the first and the last ones."""
    names = [f"step-{item.step}" for item in items]
    if len(names) > _MOST:
        names = [*names[: _MOST // 2], "...", *names[-_MOST // 2 :]]
    return ", ".join(names) or "none"


def newest(there: Sequence[Sealed], aside: frozenset[str]) -> Sealed | None:
    """The checkpoint that a resume will look at first."""
    return next((item for item in reversed(there) if item.check not in aside), None)
