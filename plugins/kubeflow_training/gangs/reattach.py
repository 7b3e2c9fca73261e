"""Whose job is it? The pure decision between starting a gang, going on with one, and replacing one.

A generation is what Airflow counts as one attempt to do the task: its retries belong to it, a clear starts a new one.
Within a generation a running job is found again and its end is told once; across generations nothing is replayed.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from typing import Any

from kubeflow_training.jobs.backend import Snapshot
from kubeflow_training.jobs.manifest.canonical import fingerprint
from kubeflow_training.jobs.manifest.naming import gang_name, renamed
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.manifest.words import (
    FINGERPRINT_ANNOTATION,
    GANG_ANNOTATION,
    GENERATION_ANNOTATION,
    KIND,
    OWNER_ANNOTATION,
    TOKEN_ANNOTATION,
)
from kubeflow_training.jobs.observation import Observation, Phase, observe
from kubeflow_training.jobs.shapes import moment, whole


@dataclass(frozen=True)
class Identity:
    """What tells one gang from every other; stored before the job is created, and written on the job.

    :param name: of this gang's job; `base` is the manifest's own, which the first gang has.
    :param uid: the job's, once it is known.
    :param gang: number of the gang within the task, from 1.
    :param created: Unix time at which the job was created, once it is known.
    :param owner: dag, run, task and map index.
    :param generation: the same in all retries, another after a clear.
    :param token: random, new for each gang: what carries it was created for this identity.
    :param backend: where its job is, like `kubernetes:CONN` (`ClusterArguments.place`); what is not said counts as the
        same: earlier versions stored none, or the backend alone.
    """

    name: str
    namespace: str
    base: str
    fingerprint: str
    owner: str
    generation: str
    token: str
    kind: str = KIND
    gang: int = 1
    uid: str | None = None
    created: float | None = None
    backend: str | None = None

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
        """Whether both are the same job of the same generation, whatever gang."""
        mine = (self.base, self.namespace, self.fingerprint, self.owner, self.generation)
        same = mine == (other.base, other.namespace, other.fingerprint, other.owner, other.generation)
        return same and self.same_place(other)

    def same_place(self, other: Identity) -> bool:
        """Whether the job of the one is found where that of the other is looked for."""
        mine, its = (self.backend or "").partition(":"), (other.backend or "").partition(":")
        return self.kind == other.kind and all(
            one == two or not (one and two) for one, two in zip(mine, its, strict=True)
        )

    def numbered(self, gang: int, longest: int | None) -> Identity:
        """The identity of another gang of the same work.

        :param longest: how long its name may be; None keeps the name.
        """
        name = self.base if longest is None else gang_name(self.base, gang, longest)
        return replace(self, name=name, gang=gang, uid=None, created=None, token=new_token())

    def of(self, snapshot: Snapshot) -> Identity:
        """The identity, now that its job exists."""
        born = moment((snapshot.job.get("metadata") or {}).get("creationTimestamp"))
        return replace(self, uid=snapshot.uid, created=born.timestamp() if born else None)

    def written_on(self, manifest: Mapping[str, Any], owner: Owner) -> dict[str, Any]:
        """The manifest with this gang's name, and with its identity as labels and annotations."""
        found = renamed(manifest, self.name)
        metadata = found["metadata"]
        metadata["labels"] = {**(metadata.get("labels") or {}), **owner.labels(self.generation, self.gang)}
        metadata["annotations"] = {
            **(metadata.get("annotations") or {}),
            **owner.annotations(self.generation, self.gang),
            FINGERPRINT_ANNOTATION: self.fingerprint,
            TOKEN_ANNOTATION: self.token,
        }
        return found


def new_token() -> str:
    return secrets.token_hex(16)


def identity(manifest: Mapping[str, Any], owner: Owner, generation: str) -> Identity:
    """The identity of the manifest's first gang."""
    name, namespace = manifest["metadata"]["name"], manifest["metadata"]["namespace"]
    kind = str(manifest.get("kind") or KIND)
    return Identity(name, namespace, name, fingerprint(manifest), str(owner), generation, new_token(), kind)


class Action(StrEnum):
    """What to do about the task's newest job."""

    CREATE = "create"
    ADOPT = "adopt"
    REPLACE = "replace"
    TELL = "tell"
    REFUSE = "refuse"


@dataclass(frozen=True)
class Decision:
    """
    :param identity: of the gang to create, to go on with, or whose end is to be told.
    :param why: one line for the log.
    :param over: whether the gang to go on with has ended already.
    """

    action: Action
    identity: Identity
    why: str
    over: bool = False


def decide(
    stored: Identity | None,
    wanted: Identity,
    snapshot: Snapshot | None,
    replaced: Callable[[Identity, Observation], bool] = lambda _, seen: seen.retryable,
    *,
    longest: int | None = None,
    succeeded: bool = False,
) -> Decision:
    """What to do, given what was stored by an earlier try, what is wanted now, and the task's newest job, if any.

    :param replaced: whether a gang that failed like this is followed by another.
    :param longest: how long a gang's name may be; None if all gangs share the manifest's name.
    :param succeeded: whether the stored gang is known to have succeeded, should its job be gone.
    """
    mine = stored is not None and stored.same_work(wanted)
    if snapshot is None:
        if stored is None:
            return Decision(Action.CREATE, wanted, "no job exists")
        if mine and stored.uid is None:
            return Decision(Action.CREATE, stored, "an earlier try did not get to create it")
        if mine and succeeded:
            return Decision(Action.TELL, stored, f"attempt {stored.gang} has succeeded, and its job is removed since")
        following = wanted.numbered(stored.gang + 1, longest)
        return Decision(Action.CREATE, following, f"attempt {stored.gang} is gone")

    notes = snapshot.annotations
    ours = notes.get(OWNER_ANNOTATION) == wanted.owner
    number = _whole(notes.get(GANG_ANNOTATION))
    newest = max(stored.gang if stored else 0, number if ours else 0)
    following = wanted.numbered(newest + 1, longest)
    observation = observe(snapshot.job, snapshot.pods, snapshot.events)
    another = stored is not None and mine and stored.uid not in (None, snapshot.uid)
    if ours and not another and _same(notes, wanted):
        token = str(notes.get(TOKEN_ANNOTATION) or "")
        name = str((snapshot.job.get("metadata") or {}).get("name"))
        found = replace(wanted, name=name, gang=number or 1, token=token).of(snapshot)
        if observation.phase is Phase.CANCELLED:
            return Decision(Action.REPLACE, following, f"attempt {number} is being deleted")
        if not observation.ended:
            return Decision(Action.ADOPT, found, f"attempt {number} is {observation.phase}: {observation.message}")
        if stored is None or not mine or (stored.uid is None and stored.token != token):
            # An end that this task does not know it waited for: of a DAG run of the same name, long ago, for example.
            return Decision(Action.REPLACE, following, f"attempt {number} has ended, and this task did not wait for it")
        if observation.phase is Phase.SUCCEEDED:
            return Decision(
                Action.ADOPT, found, f"attempt {number} is {observation.phase}: {observation.message}", over=True
            )
        if replaced(found, observation):
            return Decision(Action.REPLACE, following, f"attempt {number} has failed: {observation.message}")
        return Decision(Action.ADOPT, found, f"attempt {number} has failed for good: {observation.message}", over=True)
    if ours:
        return Decision(Action.REPLACE, following, "the task was cleared or the job's spec has changed")
    if observation.phase is Phase.CANCELLED:
        return Decision(Action.REPLACE, following, "a job of this name is being deleted")
    if observation.ended and OWNER_ANNOTATION in notes:
        return Decision(Action.REPLACE, following, f"an ended job of {notes[OWNER_ANNOTATION]} has this name")
    owner = notes.get(OWNER_ANNOTATION) or "another owner"
    return Decision(Action.REFUSE, wanted, f"a job of this name belongs to {owner} and is {observation.phase}")


def created_for(identity: Identity, snapshot: Snapshot | None) -> bool:
    """Whether the job that is in the way is the very one that was to be created: its answer was lost, no more."""
    if snapshot is None or (snapshot.job.get("metadata") or {}).get("deletionTimestamp"):
        return False
    return bool(identity.token) and snapshot.annotations.get(TOKEN_ANNOTATION) == identity.token


def _same(notes: Mapping[str, str], wanted: Identity) -> bool:
    found = (notes.get(GENERATION_ANNOTATION), notes.get(FINGERPRINT_ANNOTATION))
    return found == (wanted.generation, wanted.fingerprint)


def _whole(value: Any) -> int:
    return max(0, whole(value) or 0)
