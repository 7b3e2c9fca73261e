"""The fast tier: a folder of each node's own that takes checkpoints often, beside the durable place for all nodes.

It holds what this node's ranks wrote, under `FOLDER/dropforge-UID/RUN/checkpoints/`, where others may not write: in
`/dev/shm`, which all users share, one could lead the trainer to other files. Nothing relies on it: a copy that is gone
or broken is read from the durable place, and a save that it cannot take goes there at once.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Collection
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Final

from dropforge.errors import RecipeError
from dropforge.store import FolderStore
from trainer.gang import Gang
from trainer.state.checkpoint import Checkpoints, Seal

_OTHERS: Final = stat.S_IWGRP | stat.S_IWOTH


class Fast:
    """This node's fast tier.

    :param durable: the run's checkpoints; plan and recipe are theirs. :param keep: newest ones to keep.
    """

    def __init__(self, durable: Checkpoints, folder: str, keep: int) -> None:
        self.store = FolderStore(own_folder(folder) / durable.run)
        self.checkpoints = replace(durable, store=self.store, bad=set(), pause=0.0)
        self.keep = keep

    def here(self) -> dict[str, Seal]:
        """The sealed checkpoints of this node by digest; none if the folder cannot be read, which is said."""
        try:
            return {seal.digest: seal for seal in self.checkpoints.seals()}
        except Exception as error:  # a dying disk; the durable place has what counts
            self.checkpoints.say(f"the fast tier {self.store.uri} cannot be read ({error}); continuing without it")
            return {}

    def prune(self, step: int, spare: Collection[int]) -> None:
        """Delete all but the newest up to `step`, and those whose upload is going on."""
        steps = [seal.step for seal in self.checkpoints.seals() if seal.step <= step]
        stay = {*steps[-self.keep :], *spare}
        for at in self.checkpoints.steps():
            if at not in stay and at <= step:
                self.checkpoints.discard(at)

    def sweep(self, step: int) -> None:
        """After a resume from `step`: delete what was never finished, and what no rank can go on from any more."""
        with suppress(Exception):  # a dying disk; the durable place has what counts
            sealed = {seal.step for seal in self.checkpoints.seals()}
            for at in self.checkpoints.steps():
                if at not in sealed or at > step:
                    self.checkpoints.discard(at)

    def clear(self) -> None:
        """Delete everything of this run: it is done, and memory may be what holds it."""
        with suppress(OSError):
            self.store.delete_all("checkpoints/")
            self.store.root.rmdir()
            self.store.root.parent.rmdir()  # unless another run is there


def own_folder(folder: str) -> Path:
    """Where this user's runs have theirs."""
    return Path(folder) / f"dropforge-{os.geteuid()}"


def _lacking(folder: str) -> str | None:
    """Why there can be no fast tier in a folder, for whoever named it to mend."""
    if not Path(folder).is_dir():
        return "there is no such folder"
    return None if os.access(folder, os.W_OK | os.X_OK) else "it may not be written to"


def _taken(folder: str) -> str | None:
    """Why this user's own folder in it, which is made here, cannot be used."""
    own = own_folder(folder)
    try:
        own.mkdir(mode=0o700, exist_ok=True)
        found = own.lstat()
    except OSError as error:
        return str(error.strerror or error)
    if stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & _OTHERS:
        return None
    return f"{own} was made by another user, or others may write there"


def open_fast(durable: Checkpoints, gang: Gang, folder: str, keep: int) -> Fast | None:
    """The fast tier of this rank's node; a collective. None, which is said, where another user has this one's place.

    :raises RecipeError: on every rank, naming the nodes where there is no such folder, or one that nobody may write to.
    """
    lacking = _lacking(folder)
    told = gang.gather((os.uname().nodename, lacking, None if lacking else _taken(folder)))
    if wanting := sorted({f"{name} ({why})" for name, why, _ in told if why}):
        raise RecipeError(
            f"recipe key `train.fast_checkpoints.folder`: {folder}",
            f"it cannot be used on {', '.join(wanting)}",
            "Make or mount it on every node, name another such as /dev/shm, or leave the key out",
        )
    if taken := sorted({f"{name} ({why})" for name, _, why in told if why}):
        durable.say(f"no fast checkpoints: {', '.join(taken)}; continuing with those of `checkpoint_every` alone")
        return None
    return Fast(durable, folder, keep)
