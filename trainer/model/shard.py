"""How ranks share one model: whole replicas that exchange gradients (DDP), or shards of it (FSDP2).

Both sum gradients over ranks: a step's loss is a sum over targets, divided by their number over all ranks. What was
asked for is what runs: after sharding, every weight is looked at, and anything else is an error.

FSDP: https://arxiv.org/abs/2304.11277. Its modes in the words of ZeRO (https://arxiv.org/abs/1910.02054, section 5):
`fsdp` is stage 3, `fsdp-no-reshard` is stage 2 with weights that are sharded between steps.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from dropforge.errors import DropforgeError, RecipeError
from trainer.compat import bound_group, exchange_seconds, time_exchange
from trainer.config import Parallel, Settings
from trainer.data.batch import Batch
from trainer.gang import TIMEOUT, Gang, collective
from trainer.model.build import Built
from trainer.model.compiled import compile_blocks, compiled
from trainer.model.fill import fill_shards, sums_of_shard
from trainer.model.isolation import largest_difference, tolerance
from trainer.model.loss import LossModel, Precision, matrix_products
from trainer.model.offload import ActivationsOnHost
from trainer.model.recompute import recompute, recomputed

_KEY: Final = "recipe key `compute.parallel`"


class ShardingError(DropforgeError):
    """The model is not sharded as asked."""


class Wrapped:
    """A model and its loss on this rank, ready for steps. This class is that of one rank alone, and does nothing else.

    :param loss: the loss with the model in it; `built` is the same model.
    :ivar host: where activations wait, if not on the device. :ivar states_on_host: whether weights, gradients and
        moments are kept there.
    """

    mode: Parallel = "auto"
    host: ActivationsOnHost | None = None
    states_on_host: bool = False

    def __init__(self, gang: Gang, built: Built, loss: LossModel) -> None:
        self.gang, self.built, self.loss = gang, built, loss
        self.precision: Precision = loss.precision
        self.module: nn.Module = loss

    def backward(self, batch: Batch, scale: float, last: bool) -> torch.Tensor:
        """The loss of a micro-batch summed over its targets; its gradient times `scale` is added to the weights'.

        :param last: whether it is the step's last one. Gradients are sums over all ranks only after that.
        """
        del last
        keeping: AbstractContextManager[Any] = nullcontext() if self.host is None else self.host.keeping()
        with collective(), matrix_products(self.precision):
            with keeping:
                loss = self.module(batch.ids, batch.positions, batch.places, batch.targets)
            (loss * scale).backward()
        return self.loss.told(loss)

    def clip(self, limit: float, scale: float = 1.0) -> float:
        """Scale all gradients so that their norm over all weights is at most `limit`; the norm before.

        :param scale: a power of two that they were multiplied by, and that is taken out of them first.
        """
        weights = [weight for _, weight in self.trainable()]
        gradients = [weight.grad for weight in weights if weight.grad is not None]
        with collective():
            if scale != 1.0:
                torch._foreach_mul_([_local(gradient) for gradient in gradients], 1.0 / scale)
            norm = nn.utils.get_total_norm(gradients)
            norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
            nn.utils.clip_grads_with_norm_(weights, limit, norm)
        return float(norm)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        """Names and weights that the optimizer moves, as this rank holds them."""
        return self.built.trainable()

    def trained_bytes(self) -> int:
        """Bytes of the weights that the optimizer moves, as this rank holds them."""
        return sum(_local(weight).numel() * weight.element_size() for _, weight in self.trainable())

    def full(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Whole tensors of weights or moments on the leader, nothing elsewhere; all ranks take part."""
        return dict(tensors) if self.gang.leader else {}

    def whole(self) -> Built | None:
        """The whole model on the leader, None elsewhere; all ranks take part. A sharded one is gathered on the CPU."""
        return self.built if self.gang.leader else None

    def evaluator(self, precision: Precision) -> LossModel:
        """The loss to evaluate with, whose arithmetic can be `precision`; all ranks take part. Let it go afterwards."""
        del precision
        return self.loss

    def prove(self, batch: Batch, expected: float) -> None:
        """Look whether the loss is still what it was before the ranks shared the model; all ranks take part.

        :param batch: the same on every rank. :param expected: `probe_loss` of it then.
        :raises ShardingError: if it is not.
        """

    def prove_isolation(self, length: int) -> float | None:
        """Look whether packed documents are apart in what trains, in its arithmetic; all ranks take part.

        :param length: longest row in tokens, the same on every rank.
        :returns: the largest difference of logits on any rank; None where rows are padded.
        :raises ShardingError: on every rank, if they are not.
        """
        if not self.loss.packed:
            return None
        with collective():
            found = largest_difference(self.loss, length)
        self.settle()
        everyone: list[float] = self.gang.gather(found)
        limit = tolerance(self.precision != "fp32")
        for rank, difference in enumerate(everyone):
            if not difference <= limit:  # NaN is no agreement
                raise ShardingError(
                    "the model as it is trained",
                    f"on rank {rank} packed documents see each other (logits differ by {difference:.2g})",
                    "Set `train.packing: off`, and report this with the log",
                )
        return max(everyone)

    def settle(self) -> None:
        """After a forward pass without a backward one: this rank holds again what it holds between steps."""

    def exchange_seconds(self) -> float | None:
        """Seconds of the step before this one in which this rank only waited for gradients; None if not known."""
        return 0.0

    def ran(self) -> dict[str, Any]:
        """What runs, for the report."""
        return {"parallel": "one rank", **self.passes()}

    def passes(self) -> dict[str, str]:
        """The attention that the model runs, by its own word, what keeps documents apart, and what is not kept."""
        packing = "padded" if not self.loss.packed else "mask" if self.loss.masked else "positions"
        modes, fused = recomputed(self.loss), compiled(self.loss)
        away = [name for name, there in (("activations", self.host), ("states", self.states_on_host)) if there]
        return {
            "attention": str(self.built.model.config.get_text_config()._attn_implementation),
            "packing": packing,
            "activation_checkpointing": f"{modes[0]}, {len(modes)} blocks" if modes else "none",
            "compiled": f"{fused} blocks" if fused else "none",
            "on_the_host": " and ".join(away) or "none",
        }


class Replicated(Wrapped):
    """A replica per rank (`DistributedDataParallel`)."""

    mode = "ddp"

    def __init__(self, gang: Gang, built: Built, loss: LossModel) -> None:
        super().__init__(gang, built, loss)
        with collective():
            cuda = gang.device.type == "cuda"
            self.replica = DistributedDataParallel(
                loss, device_ids=[gang.local_rank] if cuda else None, gradient_as_bucket_view=True
            )
        time_exchange(self.replica)
        self.module = self.replica

    def backward(self, batch: Batch, scale: float, last: bool) -> torch.Tensor:
        with nullcontext() if last else self.replica.no_sync():
            return super().backward(batch, scale * self.gang.world, last)  # DDP averages over ranks

    def exchange_seconds(self) -> float | None:
        return exchange_seconds(self.replica)

    def ran(self) -> dict[str, Any]:
        return {"parallel": self.mode, "ranks": self.gang.world, "backend": dist.get_backend(), **self.passes()}


class Sharded(Wrapped):
    """Weights, gradients and moments in shards (`fully_shard` of each block, then of the rest).

    :param shards: ranks that hold one copy together; fewer than all make a 2-D mesh of replicas.
    :param on_host: whether shards of weights, gradients and moments are kept in the host's memory, and updated there.
    :raises RecipeError: if the model cannot be sharded. :raises ShardingError: if it is not sharded as asked.
    """

    def __init__(
        self, gang: Gang, built: Built, loss: LossModel, mode: Parallel, shards: int, on_host: bool = False
    ) -> None:
        super().__init__(gang, built, loss)
        self.mode, self.shards, self.states_on_host = mode, shards, on_host
        cuda = gang.device.type == "cuda"
        place = CPUOffloadPolicy(pin_memory=cuda) if on_host else OffloadPolicy()
        blocks = find_blocks(built.model)
        check_dtypes(loss, blocks)
        self._skeleton = _skeleton(built)
        self.bytes = sum(weight.numel() * weight.element_size() for weight in loss.parameters())
        self.dtype = loss.narrow
        if self.dtype:
            loss.precision = "fp32"  # the policy casts weights and inputs; autocast would do it once more
        policy = MixedPrecisionPolicy(param_dtype=self.dtype, reduce_dtype=torch.float32 if self.dtype else None)
        with collective():
            sizes = {"replicate": gang.world // shards, "shard": shards}
            if shards == gang.world:
                del sizes["replicate"]
            self.mesh = init_device_mesh(gang.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
            for group in self.mesh.get_all_groups():
                bound_group(group, TIMEOUT)
            again = False if mode == "fsdp-no-reshard" else None  # None keeps the root's weights up to its backward
            try:
                for module in (*blocks, loss):
                    fully_shard(
                        module, mesh=self.mesh, mp_policy=policy, offload_policy=place, reshard_after_forward=again
                    )
            except (ValueError, NotImplementedError) as error:
                raise RecipeError(_KEY, f"this model cannot be sharded ({error})", "Use `ddp`") from error
        self.units = [module for module in loss.modules() if isinstance(module, FSDPModule)]
        for unit in self.units:  # neither call reaches further than the unit itself
            unit.set_gradient_divide_factor(1.0)
            unit.set_force_sum_reduction_for_comms(True)
        for name in ("logits", "next_logits"):
            register_fsdp_forward_method(loss, name)
        if built.slices is not None:
            fill_shards(built, self.mesh)
            self._check_sums()
        self._trainable = built.trainable()
        self._check(len(blocks))

    def backward(self, batch: Batch, scale: float, last: bool) -> torch.Tensor:
        root = self.units[0]
        # Gradients are scattered after each micro-batch, for a whole gradient is what sharding is to avoid; replicas
        # add theirs once. Weights that stay for the backward pass may as well stay for the next micro-batch.
        root.set_requires_all_reduce(last)
        if self.mode == "fsdp-no-reshard":
            root.set_reshard_after_backward(last)
        return super().backward(batch, scale, last)

    def trainable(self) -> list[tuple[str, nn.Parameter]]:
        return self._trainable

    def full(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        found: dict[str, torch.Tensor] = {}
        with collective():
            for name, tensor in tensors.items():
                # One at a time, and only the leader keeps it.
                value = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
                if self.gang.leader:
                    found[name] = value.detach().cpu()
        return found

    def whole(self) -> Built | None:
        self.settle()
        weights = self.full(dict(self.built.model.named_parameters()))
        # No GPU need hold the whole of it: that may be why it is sharded.
        return _filled(self._skeleton, weights, torch.device("cpu")) if self.gang.leader else None

    def evaluator(self, precision: Precision) -> LossModel:
        if precision == self.precision or self.dtype is None:
            return self.loss
        # Gathered weights are cast, whatever evaluates them: fp32 needs a model of its own, whole on every rank.
        self.settle()
        with collective():
            weights = {
                name: weight.full_tensor() if isinstance(weight, DTensor) else weight
                for name, weight in self.built.model.named_parameters()
            }
        built = _filled(self._skeleton, weights, self.gang.device)
        found = self.loss.like(built.model)
        found.exact = self.loss.exact
        return found

    def prove(self, batch: Batch, expected: float) -> None:
        with collective():
            found = probe_loss(self.loss, batch)
        self.settle()
        tolerance = 5e-2 if self.dtype else 1e-4
        if not abs(found - expected) <= tolerance * max(1.0, abs(expected)):  # NaN is no agreement
            raise ShardingError(
                "the sharded model",
                f"its loss on the first rows is {found:.6g}, it was {expected:.6g} before",
                "Use `compute.parallel: ddp`, and report this with the log",
            )

    def settle(self) -> None:
        for unit in self.units:
            unit.reshard()

    def exchange_seconds(self) -> float | None:
        return None  # shards come and go within the passes, and nothing says how long they are waited for

    def ran(self) -> dict[str, Any]:
        return {
            "parallel": self.mode,
            "ranks": self.gang.world,
            "backend": dist.get_backend(),
            "mesh": dict(zip(self.mesh.mesh_dim_names or (), self.mesh.shape, strict=True)),
            "units": len(self.units),
            "weight_bytes": self.bytes,
            "weight_bytes_of_rank": self.local_bytes(),
            "arithmetic": "tf32"
            if self.precision == "tf32"
            else str(self.dtype or torch.float32).removeprefix("torch."),
            "reduction": "float32",
            **self.passes(),
        }

    def local_bytes(self) -> int:
        """Bytes of the weights that this rank holds between steps."""
        return sum(
            _local(weight).untyped_storage().nbytes() if weight.numel() else 0 for weight in self.loss.parameters()
        )

    def _check_sums(self) -> None:
        """See that the ranks together have read what the first one read of the whole."""
        everyone = self.gang.gather(sums_of_shard(self.built, self.mesh))
        copies = self.gang.world // self.shards
        for name, whole in self.built.slices.sums.items():
            if (sum(mine[name] for mine in everyone) - copies * whole) % (1 << 64):
                raise ShardingError(
                    "the sharded model",
                    f"the ranks together have not read what the files have of {name}",
                    "See that all nodes have the same files, or use `ddp`, and report this with the log",
                )

    def _check(self, blocks: int) -> None:
        places = [*([Replicate()] if self.mesh.ndim == 2 else []), Shard(0)]
        whole = [
            name
            for name, weight in self.loss.named_parameters()
            if not isinstance(weight, DTensor) or list(weight.placements) != places or weight.device_mesh != self.mesh
        ]
        if whole:
            raise ShardingError("the sharded model", f"{whole[0]} is not sharded as asked", "Report this with the log")
        if len(self.units) != blocks + 1:
            raise ShardingError(
                "the sharded model", f"{len(self.units)} units for {blocks} blocks", "Report this with the log"
            )
        # A shard is a slice of the first dimension, rounded up.
        most = sum(
            -(-weight.shape[0] // self.shards) * (weight.numel() // max(1, weight.shape[0])) * weight.element_size()
            for weight in self.loss.parameters()
        )
        if self.local_bytes() > most:
            raise ShardingError(
                "the sharded model",
                f"this rank holds {self.local_bytes()} bytes of weights, its share is {most}",
                "Report this with the log",
            )


def wrap(settings: Settings, gang: Gang, built: Built, loss: LossModel) -> Wrapped:
    """Make the ranks share a model as the recipe says; a collective. Make the optimizer afterwards.

    :raises RecipeError: if that cannot be done with this model and these ranks.
    """
    mode, shards = choose(settings.parallel, settings.shard_group, gang)
    asked = settings.train.activation_checkpointing
    if settings.train.compile:
        compile_blocks(blocks_to_compile(built.model))
    if asked != "none":
        recompute(blocks_to_recompute(built.model), asked)
    offload = settings.train.offload
    if mode == "auto":
        wrapped = Wrapped(gang, built, loss)
    elif mode == "ddp":
        wrapped = Replicated(gang, built, loss)
    else:
        wrapped = Sharded(gang, built, loss, mode, shards, on_host=offload in ("states", "all"))
    if offload in ("activations", "all"):
        wrapped.host = ActivationsOnHost([loss, *blocks_to_offload(built.model)])
    return wrapped


def choose(asked: Parallel, group: int | None, gang: Gang) -> tuple[Parallel, int]:
    """The mode and the ranks that hold one copy of the weights together; `auto` is left for one rank only.

    :raises RecipeError: if the ranks cannot do it.
    """
    world = gang.world
    if asked == "auto":
        return ("ddp" if world > 1 else "auto"), 1
    if world == 1:
        raise RecipeError(_KEY, f"`{asked}` needs several ranks, and there is one", "Use `auto`, or more ranks")
    if asked != "hybrid":
        return asked, (1 if asked == "ddp" else world)
    shards = group or gang.local_world
    if not 1 < shards < world or world % shards:
        fitting = [size for size in range(2, world) if world % size == 0]
        raise RecipeError(
            "recipe key `compute.shard_group`",
            f"{world} ranks do not make several groups of {shards}",
            f"Use {' or '.join(map(str, fitting))}" if fitting else "Use `fsdp`",
        )
    return asked, shards


@torch.no_grad()
def probe_loss(loss: LossModel, batch: Batch) -> float:
    """The loss summed over a batch's targets, without dropout."""
    training = loss.training
    loss.eval()
    try:
        return float(loss(batch.ids, batch.positions, batch.places, batch.targets))
    finally:
        loss.train(training)


def find_blocks(model: nn.Module, key: str = _KEY, purpose: str = "to shard", instead: str = "ddp") -> list[nn.Module]:
    """The transformer blocks, in order: what the model says must not be split, else its longest list of modules.

    :param key: the recipe's that needs them. :param purpose: what for. :param instead: a value that needs none.
    :raises RecipeError: if there are none.
    """
    names = set(getattr(model, "_no_split_modules", None) or ())
    found = list(_outermost(model, names))
    if not found:
        lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
        found = list(max(lists, key=len, default=()))
    if not found:
        raise RecipeError(key, f"{type(model).__name__} has no blocks {purpose}", f"Use `{instead}`")
    return found


def blocks_to_recompute(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, for activation checkpointing. :raises RecipeError: if there are none."""
    return find_blocks(model, "recipe key `train.activation_checkpointing`", "whose work can be done again", "none")


def blocks_to_compile(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, for `torch.compile`. :raises RecipeError: if there are none."""
    return find_blocks(model, "recipe key `train.compile`", "to compile", "false")


def blocks_to_offload(model: nn.Module) -> list[nn.Module]:
    """The transformer blocks, for offload of activations. :raises RecipeError: if there are none."""
    return find_blocks(model, "recipe key `train.offload`", "whose activations could be moved", "none")


def _outermost(model: nn.Module, names: set[str]) -> Iterator[nn.Module]:
    for module in model.children():
        if type(module).__name__ in names:
            yield module
        else:
            yield from _outermost(module, names)


def check_dtypes(loss: nn.Module, blocks: list[nn.Module]) -> None:
    """:raises RecipeError: if trainable weights that are reduced together have different types."""
    names = {id(weight): name for name, weight in loss.named_parameters()}
    inside = {id(weight) for block in blocks for weight in block.parameters()}
    rest = [weight for weight in loss.parameters() if id(weight) not in inside]
    for group in (*(list(block.parameters()) for block in blocks), rest):
        trained = [weight for weight in group if weight.requires_grad]
        for weight in trained:
            if weight.dtype != trained[0].dtype:
                raise RecipeError(
                    _KEY,
                    f"trainable weights of one block have different types: {names[id(trained[0])]} is "
                    f"{trained[0].dtype}, {names[id(weight)]} is {weight.dtype}",
                    "Give all trainable weights one type, or use `ddp`",
                )


def like(full: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """A whole tensor laid out as a weight is: on its device, and only this rank's shard if the weight is sharded."""
    if isinstance(weight, DTensor):
        local = full.to(weight.device)
        return distribute_tensor(local, weight.device_mesh, weight.placements, src_data_rank=None).clone()
    return full.to(weight.device)


def _local(weight: torch.Tensor) -> torch.Tensor:
    return weight.to_local() if isinstance(weight, DTensor) else weight


def _skeleton(built: Built) -> Built:
    """A copy of the model without the memory of its weights: a sharded one can be neither copied nor merged."""
    empty: dict[int, Any] = {
        id(weight): nn.Parameter(torch.empty_like(weight, device="meta"), weight.requires_grad)
        for weight in built.model.parameters()
    }
    copied = copy.deepcopy(built.whole if built.whole is not None else built.model, empty)
    return built.around(copied)


def _filled(skeleton: Built, weights: Mapping[str, torch.Tensor], device: torch.device) -> Built:
    """A model from a skeleton and its weights; those that were tied stay tied."""
    built = copy.deepcopy(skeleton)
    filled = {
        id(empty): nn.Parameter(weights[name], empty.requires_grad) for name, empty in built.model.named_parameters()
    }
    for module in built.model.modules():
        for name, empty in module._parameters.items():
            if empty is not None:
                module._parameters[name] = filled[id(empty)]
    built.model.to(device)
    return built
