"""Whose job is it? The pure decision between starting a gang, going on with one, and replacing one.

A try chain is what Airflow counts as one attempt to do the task: its retries belong to it, a clear starts a new one.
Within a chain a running job is found again and its end is told once; across chains nothing old is ever replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.manifest import (
    CHAIN_ANNOTATION,
    FINGERPRINT_ANNOTATION,
    GANG_ANNOTATION,
    OWNER_ANNOTATION,
    fingerprint,
)
from kubeflow_training.jobs.observation import Observation, Phase, observe


@dataclass(frozen=True)
class Identity:
    """What tells one gang from every other; stored before the job is created, and written on the job.

    :param uid: the job's, once it is known.
    :param gang: number of the gang within the task, from 1; `attempt` is its number within the try chain.
    :param owner: dag, run, task and map index.
    :param chain: the try chain.
    """

    name: str
    namespace: str
    fingerprint: str
    owner: str
    chain: str
    gang: int = 1
    attempt: int = 1
    uid: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return {key: value for key, value in asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, data: Any) -> Identity | None:
        """A stored identity, or None if this is none."""
        try:
            return cls(**data)
        except TypeError:
            return None

    def same_work(self, other: Identity) -> bool:
        """Whether both are the same job of the same try chain, whatever gang."""
        return replace(self, gang=1, attempt=1, uid=None) == replace(other, gang=1, attempt=1, uid=None)

    def written_on(self, manifest: Mapping[str, Any]) -> dict[str, Any]:
        """The manifest with this identity as annotations."""
        metadata = dict(manifest.get("metadata") or {})
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            FINGERPRINT_ANNOTATION: self.fingerprint,
            OWNER_ANNOTATION: self.owner,
            CHAIN_ANNOTATION: self.chain,
            GANG_ANNOTATION: str(self.gang),
        }
        return {**manifest, "metadata": metadata}


def identity(manifest: Mapping[str, Any], owner: str, chain: str) -> Identity:
    """The identity of the manifest's first gang."""
    metadata = manifest["metadata"]
    return Identity(metadata["name"], metadata["namespace"], fingerprint(manifest), owner, chain)


class Action(StrEnum):
    """What to do about a job of the wanted name."""

    CREATE = "create"
    ADOPT = "adopt"
    REPLACE = "replace"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """
    :param identity: of the gang to create or to go on with.
    :param why: one line for the log.
    """

    action: Action
    identity: Identity
    why: str


def decide(
    stored: Identity | None,
    wanted: Identity,
    snapshot: Snapshot | None,
    replaced: Callable[[Identity, Observation], bool] = lambda _, seen: seen.retryable,
) -> Decision:
    """What to do, given what was stored by an earlier try, what is wanted now, and the job of that name, if any.

    :param replaced: whether a gang that failed like this is followed by another.
    """
    if snapshot is None:
        if stored is None:
            return Decision(Action.CREATE, wanted, "no job exists")
        if stored.same_work(wanted) and stored.uid is None:
            return Decision(Action.CREATE, stored, "an earlier try did not get to create it")
        following = replace(wanted, gang=stored.gang + 1, attempt=_next_attempt(stored, wanted))
        return Decision(Action.CREATE, following, f"gang {stored.gang} is gone")

    notes = snapshot.annotations
    ours = notes.get(OWNER_ANNOTATION) == wanted.owner
    number = _whole(notes.get(GANG_ANNOTATION))
    newest = max(stored.gang if stored else 0, number if ours else 0)
    following = replace(wanted, gang=newest + 1, attempt=_next_attempt(stored, wanted))
    observation = observe(snapshot.job, snapshot.pods, snapshot.events)
    same = (
        ours
        and notes.get(CHAIN_ANNOTATION) == wanted.chain
        and notes.get(FINGERPRINT_ANNOTATION) == wanted.fingerprint
        and not (stored and stored.same_work(wanted) and stored.uid not in (None, snapshot.uid))
    )
    if same:
        attempt = stored.attempt if stored and stored.chain == wanted.chain else 1
        found = replace(wanted, gang=number or 1, attempt=attempt, uid=snapshot.uid)
        if observation.phase is Phase.CANCELLED:
            return Decision(Action.REPLACE, following, f"gang {number} is being deleted")
        if not observation.ended or observation.phase is Phase.SUCCEEDED:
            return Decision(Action.ADOPT, found, f"gang {number} is {observation.phase}: {observation.message}")
        if replaced(found, observation):
            return Decision(Action.REPLACE, following, f"gang {number} has failed: {observation.message}")
        return Decision(Action.ADOPT, found, f"gang {number} has failed for good: {observation.message}")
    if ours:
        return Decision(Action.REPLACE, following, "the task was cleared or the job's spec has changed")
    if observation.ended and OWNER_ANNOTATION in notes:
        return Decision(Action.REPLACE, following, f"an ended job of {notes[OWNER_ANNOTATION]} has this name")
    owner = notes.get(OWNER_ANNOTATION) or "somebody else"
    return Decision(Action.REFUSE, wanted, f"a job of this name belongs to {owner} and is {observation.phase}")


def _next_attempt(stored: Identity | None, wanted: Identity) -> int:
    return stored.attempt + 1 if stored and stored.chain == wanted.chain else 1


def _whole(value: Any) -> int:
    return int(value) if str(value).isdigit() else 0
