"""All ranks resume from the same checkpoint, and each of them reads only what it holds: its shards, or its replica.

Rank 0 proposes the newest one. Each rank reads its part into tensors of its own, they tell each other how it went, and
only if the bytes were good for all of them does anything reach the model; otherwise the next older one is tried.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from dropforge.errors import DropforgeError, RecipeError
from trainer.gang import Gang
from trainer.state.checkpoint import MOMENT, PROGRESS, RANDOM, WEIGHT, Checkpoints, Seal, StorageError
from trainer.state.reader import BlockReader, fill

_STEP: Final = "step"


@dataclass(frozen=True)
class Restored:
    """A rank's part of a checkpoint.

    :param weights, moments: laid out as this rank holds them; no moments if no step had been taken.
    :param generators: this rank's random state, if as many ranks wrote it.
    :param progress: plain counters.
    """

    seal: Seal
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    generators: Mapping[str, torch.Tensor] | None
    progress: Mapping[str, Any]


@dataclass(frozen=True)
class _Verdict:
    """Why a rank has not read a checkpoint. :param broken: whether an older one may take its place."""

    error: Exception
    broken: bool


def restore(checkpoints: Checkpoints, gang: Gang, weights: Mapping[str, torch.Tensor]) -> Restored | None:
    """This rank's part of the newest checkpoint that every rank can read; None for a fresh start. A collective.

    :param weights: trainable weights as this rank holds them. They are not changed.
    :raises DropforgeError: on every rank, if it belongs to another plan, recipe, layout or model.
    :raises StorageError: on every rank, if one of them cannot read what is there.
    """
    candidates = checkpoints.candidates()
    while True:
        failure, seal = gang.gather(_propose(checkpoints, candidates) if gang.leader else None)[0]
        if failure is not None:
            raise failure
        if seal is None:
            break
        found = _read(checkpoints, seal, gang, weights)
        verdicts = gang.gather(found if isinstance(found, _Verdict) else None)
        for rank, verdict in enumerate(verdicts):
            if verdict is not None and not verdict.broken:
                raise verdict.error if gang.world == 1 else _told(rank, verdict.error)
        broken = [(rank, verdict) for rank, verdict in enumerate(verdicts) if verdict is not None]
        if broken:
            rank, verdict = broken[0]
            who = f"rank {rank}: " if gang.world > 1 else ""
            checkpoints.pass_over(seal.step, f"{who}{verdict.error}")
            continue
        assert isinstance(found, Restored)
        _sweep(checkpoints, gang)
        return found
    _sweep(checkpoints, gang)
    return None


def _propose(checkpoints: Checkpoints, candidates: Iterator[Seal]) -> tuple[Exception | None, Seal | None]:
    try:
        return None, next(candidates, None)
    except (DropforgeError, StorageError) as error:
        return error, None
    except Exception as error:  # the others wait for an answer, and not every error can be sent
        return StorageError(f"the checkpoints in {checkpoints.store.uri} cannot be looked at ({error})"), None


def _sweep(checkpoints: Checkpoints, gang: Gang) -> None:
    """Remove what was never finished, before any rank of this attempt writes."""
    failure = None
    if gang.leader:
        try:
            checkpoints.sweep()
        except Exception as error:
            failure = StorageError(f"the checkpoints in {checkpoints.store.uri} cannot be looked at ({error})")
    failure = gang.gather(failure)[0]
    if failure is not None:
        raise failure


def _told(rank: int, error: Exception) -> Exception:
    if isinstance(error, StorageError):
        return StorageError(f"rank {rank}: {error}")
    return error


def _read(checkpoints: Checkpoints, seal: Seal, gang: Gang, weights: Mapping[str, torch.Tensor]) -> Restored | _Verdict:
    try:
        return read_part(checkpoints, seal, gang.rank, gang.world, weights)
    except (StorageError, RecipeError) as error:
        return _Verdict(error, broken=False)
    except (DropforgeError, ValueError, KeyError, IndexError, TypeError) as error:
        return _Verdict(ValueError(str(error)), broken=True)
    except Exception as error:  # of memory, for example; the others must not wait for this rank
        return _Verdict(StorageError(f"checkpoint step-{seal.step} could not be read ({error!r})"), broken=False)


def read_part(
    checkpoints: Checkpoints, seal: Seal, rank: int, world: int, weights: Mapping[str, torch.Tensor]
) -> Restored:
    """What one rank needs of a checkpoint, every byte of it checked.

    :raises DropforgeError, ValueError, KeyError: if it is broken. :raises StorageError: if it cannot be read now.
    :raises RecipeError: if it is of another model.
    """
    progress = json.loads(checkpoints.file(seal, PROGRESS))
    reader = BlockReader(checkpoints, seal, rank)
    state: dict[str, torch.Tensor] = {}
    moments = any(name.startswith(MOMENT) for name in reader.tensors)
    for name, weight in weights.items():
        state[f"{WEIGHT}{name}"] = torch.empty_like(weight, requires_grad=False)
        if moments:
            for key in ("exp_avg", "exp_avg_sq"):
                state[f"{MOMENT}{name}:{key}"] = torch.empty_like(weight, requires_grad=False)
            state[f"{MOMENT}{name}:{_STEP}"] = torch.zeros((), device=weight.device)
    _check_same_model(checkpoints, seal, reader, state)
    if world == seal.world:
        for name, tensor in reader.tensors.items():
            if name.startswith(f"{RANDOM}{rank}:"):
                state[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    fill(reader, state)
    return Restored(
        seal,
        _below(state, WEIGHT),
        _below(state, MOMENT),
        _below(state, f"{RANDOM}{rank}:") if world == seal.world else None,
        progress,
    )


def _check_same_model(
    checkpoints: Checkpoints, seal: Seal, reader: BlockReader, state: Mapping[str, torch.Tensor]
) -> None:
    """:raises RecipeError: if the files, whose bytes are good, are those of another model."""
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    found = {
        name: (tensor.size, tensor.properties.dtype)
        for name, tensor in reader.tensors.items()
        if not name.startswith(RANDOM)
    }
    if found != wanted:
        for file in seal.files:  # a broken header tells of anything
            checkpoints.verify(seal, file)
        differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise RecipeError(
            f"checkpoint {checkpoints.store.uri}/checkpoints/step-{seal.step}",
            f"its weights are not those of this run's model, which differ in {', '.join(differing[:3])}",
            "Give back the base model, or start a new run",
        )
    reader.check_whole(state)


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
