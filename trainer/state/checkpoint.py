"""Checkpoints: complete only with their manifest, checked byte for byte when they are read.

::

    checkpoints/step-N/model.safetensors      trainable weights by name
    checkpoints/step-N/optimizer.safetensors  moments by name
    checkpoints/step-N/rng.safetensors        generators of every rank
    checkpoints/step-N/progress.json          counters and evaluations
    checkpoints/step-N/manifest.json          sizes, SHA-256, world size, plan and recipe; written last
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Final

import torch
from safetensors.torch import load, save

from dropforge.errors import DropforgeError
from dropforge.store import Store

SCHEMA: Final = 1
_STEP: Final = re.compile(r"checkpoints/step-(\d+)/(.+)")


@dataclass(frozen=True)
class Snapshot:
    """The state between two steps.

    :param step: optimizer steps done.
    :param generators: for each rank its random state by generator.
    :param progress: plain counters.
    """

    step: int
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    generators: list[Mapping[str, torch.Tensor]]
    progress: Mapping[str, Any]


@dataclass(frozen=True)
class Seal:
    """The manifest of a checkpoint.

    :param world: ranks that wrote it. :param plan, recipe: digests that a resume must share.
    :param digest: SHA-256 over the files' digests.
    """

    run: str
    step: int
    world: int
    plan: str
    recipe: str
    files: Mapping[str, Mapping[str, Any]]
    digest: str
    eval_loss: float | None = None
    at: str = ""
    schema: int = SCHEMA

    @property
    def bytes(self) -> int:
        return sum(int(file["bytes"]) for file in self.files.values())


@dataclass
class Checkpoints:
    """The checkpoints of one run. :param say: where notices for people go."""

    store: Store
    run: str
    plan: str
    recipe: str
    say: Callable[[str], None] = print
    bad: set[int] = field(default_factory=set)

    def save(self, snapshot: Snapshot, eval_loss: float | None = None) -> Seal:
        """Write a checkpoint; it exists once this returns, and not before."""
        parts = {
            "model.safetensors": save(_contiguous(snapshot.weights)),
            "optimizer.safetensors": save(_contiguous(snapshot.moments)),
            "rng.safetensors": save(
                {f"{rank}:{name}": state for rank, own in enumerate(snapshot.generators) for name, state in own.items()}
            ),
            "progress.json": json.dumps(snapshot.progress).encode(),
        }
        prefix = _prefix(snapshot.step)
        if self.store.stat(f"{prefix}manifest.json") is not None:
            # An earlier attempt's, found broken or passed over: it is no checkpoint while it is being replaced.
            self.store.delete(f"{prefix}manifest.json")
        files = {}
        for name, data in parts.items():
            self.store.put(prefix + name, data)
            files[name] = {"bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        seal = Seal(
            run=self.run,
            step=snapshot.step,
            world=len(snapshot.generators),
            plan=self.plan,
            recipe=self.recipe,
            files=files,
            digest=_digest(files),
            eval_loss=eval_loss,
            at=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        )
        body = json.dumps(asdict(seal), indent=1, sort_keys=True).encode()
        if not self.store.put_if_absent(f"{prefix}manifest.json", body):
            raise DropforgeError(
                f"checkpoint {self.store.uri}/{prefix}",
                "another process wrote it at the same time",
                "Let only one job train a run; stop the other",
            )
        self.bad.discard(snapshot.step)
        return seal

    def seals(self) -> list[Seal]:
        """Readable manifests of complete checkpoints, oldest first; the others are passed over with a notice."""
        found = []
        for step, names in sorted(self._listing().items()):
            if "manifest.json" not in names:
                continue
            try:
                values = json.loads(self.store.get(f"{_prefix(step)}manifest.json"))
                seal = Seal(**values)
                if seal.schema != SCHEMA or seal.step != step or _digest(seal.files) != seal.digest:
                    raise ValueError("it contradicts itself")
            except (ValueError, TypeError, KeyError, AttributeError) as error:
                self._pass_over(step, f"its manifest cannot be read ({error})")
                continue
            found.append(seal)
        return found

    def newest(self) -> tuple[Seal, Snapshot] | None:
        """The newest checkpoint that is whole, walking back over broken ones, each with a notice.

        :raises DropforgeError: if it belongs to another plan or recipe.
        """
        for step, names in sorted(self._listing().items()):
            if "manifest.json" not in names:
                self.say(f"checkpoint step-{step} was never finished; passing over it")
        for seal in reversed(self.seals()):
            for what, mine, theirs in (("plan", self.plan, seal.plan), ("recipe", self.recipe, seal.recipe)):
                if mine != theirs:
                    raise DropforgeError(
                        f"checkpoint {self.store.uri}/{_prefix(seal.step)}",
                        f"its {what} {theirs[:12]} is not this run's {mine[:12]}, so its step counts other data",
                        "Start a new run, or give back the recipe and dataset of this one",
                    )
            try:
                return seal, self._read(seal)
            except (DropforgeError, OSError, ValueError, KeyError) as error:
                self._pass_over(seal.step, str(error))
        return None

    def _read(self, seal: Seal) -> Snapshot:
        parts = {}
        for name, facts in seal.files.items():
            data = self.store.get(_prefix(seal.step) + name)
            if len(data) != facts["bytes"] or hashlib.sha256(data).hexdigest() != facts["sha256"]:
                raise DropforgeError(name, "its bytes are not those that were written", "Nothing to do")
            parts[name] = data
        generators: list[dict[str, torch.Tensor]] = [{} for _ in range(seal.world)]
        for key, state in load(parts["rng.safetensors"]).items():
            rank, _, name = key.partition(":")
            generators[int(rank)][name] = state
        return Snapshot(
            seal.step,
            load(parts["model.safetensors"]),
            load(parts["optimizer.safetensors"]),
            list(generators),
            json.loads(parts["progress.json"]),
        )

    def _pass_over(self, step: int, cause: str) -> None:
        if step not in self.bad:  # once is enough
            self.say(f"checkpoint step-{step} is broken ({cause}); going back to an older one")
        self.bad.add(step)

    def prune(self, keep: int, step: int) -> list[int]:
        """Delete all but the `keep` newest checkpoints up to `step`; steps that were deleted.

        Nothing is deleted unless the newest one reads back whole, and what is broken does not count as kept.
        """
        seals = [seal for seal in self.seals() if seal.step <= step and seal.step not in self.bad]
        old = seals[:-keep]
        if not old:
            return []
        try:
            self._read(seals[-1])
        except (DropforgeError, OSError, ValueError, KeyError) as error:
            self._pass_over(seals[-1].step, str(error))
            return []
        for seal in old:
            # The manifest goes first: half of a checkpoint is none.
            for name in ("manifest.json", *seal.files):
                self.store.delete(_prefix(seal.step) + name)
        return [seal.step for seal in old]

    def _listing(self) -> dict[int, set[str]]:
        found: dict[int, set[str]] = {}
        for item in self.store.list("checkpoints/"):
            match = _STEP.fullmatch(item.key)
            if match:
                found.setdefault(int(match[1]), set()).add(match[2])
        return found


def generators(device: torch.device) -> dict[str, torch.Tensor]:
    """The random state of this rank."""
    states = {"torch": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return states


def set_generators(states: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Put this rank's random state back."""
    torch.set_rng_state(states["torch"])
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(states["cuda"], device)


def _contiguous(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _digest(files: Mapping[str, Mapping[str, Any]]) -> str:
    lines = sorted(f"{name} {facts['sha256']} {facts['bytes']}" for name, facts in files.items())
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def _prefix(step: int) -> str:
    return f"checkpoints/step-{step}/"
