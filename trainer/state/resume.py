"""All ranks resume from the same checkpoint, and each of them reads only what it holds: its shards, or its replica.

Rank 0 proposes the newest one. Each rank reads its part into tensors of its own, they tell each other how it went, and
only if the bytes were good for all of them does anything reach the model; otherwise the next older one is tried.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

import torch

from dropforge.errors import DropforgeError, RecipeError
from dropforge.json_objects import parse_object
from trainer.gang import Gang
from trainer.state.checkpoint import MOMENT, PROGRESS, RANDOM, WEIGHT, Checkpoints, Seal, StorageError
from trainer.state.fast import Fast
from trainer.state.reader import BlockReader, Copies, SpoiledCopyError, fill

_MOST_RANDOM: Final = 1 << 20  # numbers of a generator's state
FirstState = Callable[[torch.Tensor], Mapping[str, torch.Tensor]]


@dataclass(frozen=True)
class Restored:
    """A rank's part of a checkpoint.

    :param weights, moments: laid out as this rank holds them; no moments if no step had been taken.
    :param generators: this rank's random state, if as many ranks wrote it.
    :param progress: plain counters.
    :param durable: whether the durable place has it; otherwise only the fast tiers have.
    """

    seal: Seal
    weights: Mapping[str, torch.Tensor]
    moments: Mapping[str, torch.Tensor]
    generators: Mapping[str, torch.Tensor] | None
    progress: Mapping[str, Any]
    durable: bool = True


@dataclass(frozen=True)
class _Verdict:
    """Why a rank has not read a checkpoint. :param broken: whether an older one may take its place."""

    error: Exception
    broken: bool


def restore(
    checkpoints: Checkpoints,
    gang: Gang,
    weights: Mapping[str, torch.Tensor],
    first_state: FirstState,
    fast: Fast | None = None,
) -> Restored | None:
    """This rank's part of the newest checkpoint that every rank can read; None for a fresh start. A collective.

    :param fast: this node's fast tier. What is only there counts if all nodes have it.
    :param weights: trainable weights as this rank holds them. They are not changed.
    :param first_state: what the optimizer keeps of a weight, by its own names.
    :raises DropforgeError: on every rank, if it belongs to another plan, recipe, layout or model.
    :raises StorageError: on every rank, if one of them cannot read what is there.
    """
    everywhere = _in_fast_tiers(gang, fast)
    candidates = merged(checkpoints, everywhere)
    while True:
        failure, seal, durable = gang.gather(_propose(checkpoints, candidates) if gang.leader else None)[0]
        if failure is not None:
            raise failure
        if seal is None:
            break
        copies = Copies(checkpoints, seal, fast.checkpoints if fast else None, seal.digest in everywhere)
        found = _read(copies, gang, weights, first_state)
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
        _sweep(checkpoints, gang, fast, seal.step)
        return replace(found, durable=durable)
    _sweep(checkpoints, gang, fast, 0)
    return None


def merged(checkpoints: Checkpoints, fast: Mapping[str, Seal]) -> Iterator[tuple[Seal, bool]]:
    """Candidates of both tiers, the newest first; of one step the durable one first, and each content once.

    :return: with each, whether it is in the durable place.
    """
    ahead = ((seal, True) for seal in checkpoints.candidates())
    behind = ((seal, False) for seal in sorted(fast.values(), key=lambda seal: -seal.step))
    last = ""
    for seal, durable in heapq.merge(ahead, behind, key=lambda item: -item[0].step):
        if seal.digest != last:
            checkpoints.check_same(seal)
            yield seal, durable
        last = seal.digest


def _in_fast_tiers(gang: Gang, fast: Fast | None) -> dict[str, Seal]:
    """By digest, the checkpoints that the fast tiers of all nodes have; of the others is told."""
    if fast is None:
        return {}
    told = gang.gather(fast.here())
    found = {digest: seal for part in told for digest, seal in part.items()}
    lacking = {digest: [rank for rank, part in enumerate(told) if digest not in part] for digest in found}
    for digest, ranks in lacking.items():
        if ranks and gang.leader:
            fast.checkpoints.say(
                f"checkpoint step-{found[digest].step} is not in the fast tier of ranks {', '.join(map(str, ranks))}"
            )
    return {digest: seal for digest, seal in found.items() if not lacking[digest]}


def _propose(
    checkpoints: Checkpoints, candidates: Iterator[tuple[Seal, bool]]
) -> tuple[Exception | None, Seal | None, bool]:
    try:
        return None, *next(candidates, (None, False))
    except (DropforgeError, StorageError) as error:
        return error, None, False
    except Exception as error:  # the others wait for an answer, and not every error can be sent
        return StorageError(f"the checkpoints in {checkpoints.store.uri} cannot be looked at ({error})"), None, False


def _sweep(checkpoints: Checkpoints, gang: Gang, fast: Fast | None, step: int) -> None:
    """Remove what was never finished, before any rank of this attempt writes."""
    failure = None
    if fast is not None and gang.local_rank == 0:
        fast.sweep(step)
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


def _read(
    copies: Copies, gang: Gang, weights: Mapping[str, torch.Tensor], first_state: FirstState
) -> Restored | _Verdict:
    try:
        return read_part(copies, gang.rank, gang.world, weights, first_state)
    except (StorageError, RecipeError) as error:
        return _Verdict(error, broken=False)
    except (DropforgeError, ValueError, KeyError, IndexError, TypeError, OverflowError) as error:
        return _Verdict(ValueError(str(error)), broken=True)
    except Exception as error:  # of memory, for example; the others must not wait for this rank
        return _Verdict(StorageError(f"checkpoint step-{copies.seal.step} could not be read ({error!r})"), broken=False)


def read_part(
    copies: Copies, rank: int, world: int, weights: Mapping[str, torch.Tensor], first_state: FirstState
) -> Restored:
    """What one rank needs of a checkpoint, every byte of it checked.

    :raises DropforgeError, ValueError, KeyError: if it is broken. :raises StorageError: if it cannot be read now.
    :raises RecipeError: if it is of another model.
    """
    while True:
        try:
            return _read_part(copies, rank, world, weights, first_state)
        except SpoiledCopyError:  # its header may have told of anything, so all begins anew without it
            continue


def _read_part(
    copies: Copies, rank: int, world: int, weights: Mapping[str, torch.Tensor], first_state: FirstState
) -> Restored:
    seal = copies.seal
    progress = parse_object(copies.file(PROGRESS), PROGRESS)
    reader = BlockReader(copies, rank)
    state: dict[str, torch.Tensor] = {}
    moments = any(name.startswith(MOMENT) for name in reader.tensors)
    for name, weight in weights.items():
        state[f"{WEIGHT}{name}"] = torch.empty_like(weight, requires_grad=False)
        if moments:
            state |= {f"{MOMENT}{name}:{key}": tensor for key, tensor in first_state(weight).items()}
    _check_same_model(copies, reader, state)
    own = f"{RANDOM}{rank}:"
    if world == seal.world:
        for name, tensor in reader.tensors.items():
            if name.startswith(own):
                if tensor.size.numel() > _MOST_RANDOM:
                    copies.verify()  # a broken header tells of anything
                    raise ValueError(f"the random state of rank {rank} is none")
                state[name] = torch.empty(tensor.size, dtype=tensor.properties.dtype)
    generators = _below(state, own)
    if world == seal.world and not generators:
        raise ValueError(f"the random state of rank {rank} is not there")
    fill(reader, state)
    return Restored(seal, _below(state, WEIGHT), _below(state, MOMENT), generators or None, progress)


def _check_same_model(copies: Copies, reader: BlockReader, state: Mapping[str, torch.Tensor]) -> None:
    """:raises RecipeError: if the files, whose bytes are good, are those of another model."""
    wanted = {name: (tensor.shape, tensor.dtype) for name, tensor in state.items()}
    found = {
        name: (tensor.size, tensor.properties.dtype)
        for name, tensor in reader.tensors.items()
        if not name.startswith(RANDOM)
    }
    if found != wanted:
        copies.verify()  # a broken header tells of anything
        differing = sorted(name for name in {*found, *wanted} if found.get(name) != wanted.get(name))
        raise RecipeError(
            f"checkpoint {copies.durable.store.uri}/checkpoints/step-{copies.seal.step}",
            f"its weights are not those of this run's model, which differ in {', '.join(differing[:3])}",
            "Give back the base model, or start a new run",
        )


def _below(state: Mapping[str, torch.Tensor], prefix: str) -> dict[str, torch.Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in state.items() if name.startswith(prefix)}
