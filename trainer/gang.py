"""The ranks of a run: who they are, and the few things they say to each other."""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from dropforge.errors import RecipeError
from trainer.node.device_errors import NodeError
from trainer.node.machine import available_cores
from trainer.peer_values import StrangeValueError, gather_values

TIMEOUT: Final = timedelta(minutes=30)  # of a collective
MEETING: Final = timedelta(hours=4)  # a node may download a large model for long, or prepare what no other has stored
_TELL: Final = 60.0  # seconds
GPUS: Final = Path("/proc/driver/nvidia/gpus")  # a folder for each that the driver has found
_LOOK: Final = 0.1  # seconds
_SIGNS = ("gloo", "nccl", "connection closed", "connection reset", "by peer", "timed out", "socket", "broken pipe")


class CollectiveError(Exception):
    """Ranks can no longer speak to each other: a peer died, or the network did."""


@dataclass(frozen=True)
class Gang:
    """This process among the ranks. With one rank there is no process group and every method is trivial."""

    rank: int = 0
    world: int = 1
    local_rank: int = 0
    local_world: int = 1
    device: torch.device = torch.device("cpu")  # noqa: RUF009 - immutable

    @property
    def leader(self) -> bool:
        return self.rank == 0

    @property
    def device_name(self) -> str:
        """As the driver has it; `cpu` without one."""
        return torch.cuda.get_device_name(self.device) if self.device.type == "cuda" else "cpu"

    def connect(self, say: Callable[[str], Any] = lambda _: None) -> None:
        """Form the process group, if there is none yet.

        Ranks meet in the store first: one that still downloads or builds its model must not meet the limit of a
        collective. The wait is in steps, so a stop signal is heard.

        :param say: told now and then for whom the first rank waits.
        :raises CollectiveError: if a peer does not come within `MEETING`.
        """
        if self.world == 1 or dist.is_initialized():
            return
        with collective():
            store, _, _ = next(rendezvous("env://", timeout=TIMEOUT))
            self._meet(PrefixStore("meeting", store), say)
            cuda = self.device.type == "cuda"
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if cuda else "gloo",
                store=PrefixStore("gang", store),
                rank=self.rank,
                world_size=self.world,
                timeout=TIMEOUT,
                device_id=self.device if cuda else None,
            )

    def _meet(self, store: Any, say: Callable[[str], Any]) -> None:
        began = told = time.monotonic()
        store.set(f"here/{self.rank}", "1")
        store.add("here", 1)
        while store.add("here", 0) < self.world:
            now = time.monotonic()
            late = now - began > MEETING.total_seconds()
            if late or (self.leader and now - told >= _TELL):
                missing = [rank for rank in range(self.world) if not store.check([f"here/{rank}"])]
                names = ", ".join(map(str, missing[:8])) + (" and others" if len(missing) > 8 else "")
                if late:
                    raise CollectiveError(f"after {MEETING} these ranks had not built their model: {names}")
                told = now
                say(f"waiting for {len(missing)} of {self.world} ranks: {names}")
            time.sleep(_LOOK)

    def sum(self, values: list[float]) -> list[float]:
        """Sum over ranks in float64; one collective, in the same order everywhere."""
        if self.world == 1:
            return values
        with collective():
            tensor = torch.tensor(values, dtype=torch.float64)
            dist.all_reduce(tensor)
            return tensor.tolist()

    def gather(self, value: Any) -> list[Any]:
        """Everybody's value, by rank."""
        if self.world == 1:
            return [value]
        with collective():
            return gather_values(value)

    def barrier(self) -> None:
        self.sum([0.0])

    def follow(self, what: str) -> None:
        """Wait until rank 0 has come here, however long that takes: a collective would give up after `TIMEOUT`.

        Nobody waits in vain: the launcher ends all ranks once one of them has failed.

        :param what: names this place, once in the life of the group.
        """
        if self.world == 1:
            return
        with collective():
            store = dist.distributed_c10d._get_default_store()
            if self.leader:
                store.set(f"followed/{what}", "1")
            while not store.check([f"followed/{what}"]):
                time.sleep(_LOOK)
        self.barrier()  # rank 0 may hold the store

    def leave(self) -> None:
        """End the process group after success. After a failure nobody says goodbye: the peers may be gone.

        The process has nothing else to do: garbage is left alone from here on, because collecting what had belonged to
        the group was once seen to wait for ever (torch 2.11).
        """
        if self.world > 1 and dist.is_initialized():
            gc.disable()
            dist.destroy_process_group()


@contextmanager
def collective() -> Iterator[None]:
    """Turn what the backends raise when a peer is gone into `CollectiveError`."""
    try:
        yield
    except StrangeValueError as error:
        raise CollectiveError(str(error)) from error
    except RuntimeError as error:
        text = str(error)
        if isinstance(error, dist.DistError) or any(sign in text.lower() for sign in _SIGNS):
            short = " ".join(text.split()).partition(" This is typically")[0].rstrip(".")
            raise CollectiveError(short[:300]) from error
        raise


def gang_from_env(gpus: int, env: dict[str, str] | None = None) -> Gang:
    """Who this process is, from torchrun's variables; alone without them.

    :param gpus: GPUs of this node that the recipe asks for; with 0 the CPU trains, whatever else is there.
    :raises RecipeError: if this rank finds no GPU of its own where there is none.
    :raises NodeError: if the driver knows it, or this is a pod: the node broke, and another one may do.
    """
    values = os.environ if env is None else env
    local_rank = int(values.get("LOCAL_RANK", 0))
    cuda = gpus > 0
    if cuda:
        there = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if local_rank >= there:
            raise _missing(f"{gpus} are asked for, and rank {local_rank} of this node finds {there}", there)
        torch.cuda.set_device(local_rank)
    return Gang(
        rank=int(values.get("RANK", 0)),
        world=int(values.get("WORLD_SIZE", 1)),
        local_rank=local_rank,
        local_world=int(values.get("LOCAL_WORLD_SIZE", 1)),
        device=torch.device("cuda", local_rank) if cuda else torch.device("cpu"),
    )


def _missing(cause: str, there: int) -> Exception:
    """Whose fault it is that there are too few GPUs. :param there: that torch finds."""
    key = "recipe key `compute.gpus`"
    if torch.version.cuda is None:
        mend = "Take an image whose torch has it, or set the key to 0"
        return RecipeError(key, f"{cause}: this torch was built without CUDA", mend)
    known = len(list(GPUS.iterdir())) if GPUS.is_dir() and "CUDA_VISIBLE_DEVICES" not in os.environ else 0
    # Kubernetes starts no pod without the GPUs that it asks for.
    if known <= there and "KUBERNETES_SERVICE_HOST" not in os.environ:
        mend = "Set it to the GPUs that a pod gets, or to 0, and see that the image has a torch for them"
        return RecipeError(key, cause, mend)
    try:
        torch.cuda.init()  # type: ignore[no-untyped-call]
        told = "the others do not answer"
    except (RuntimeError, AssertionError) as error:
        told = (str(error).strip().splitlines() or ["it says nothing"])[0]
    return NodeError(f"GPUs of this node: {cause} ({told}). Look at its driver with `nvidia-smi`")


def set_threads(local_world: int) -> None:
    """Share the cores between the ranks of this node, unless the environment says otherwise."""
    if not os.environ.get("OMP_NUM_THREADS"):
        torch.set_num_threads(max(1, available_cores() // local_world))
