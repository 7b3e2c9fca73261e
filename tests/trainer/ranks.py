"""Ranks for tests: forked from one server that has imported everything, joined by gloo on 127.0.0.1.

With `DROPFORGE_RANKS_ON=cuda` (`make test-gpu`) each rank has a GPU of its own and they are joined by NCCL; what needs
more GPUs than there are is left out, by name. The server touches no GPU: a fork could not use it after that.

A fresh `python -m trainer.launch` pays seconds of imports for each rank; a fork of the server pays none. Tests of
signals, exit codes and the launcher itself still start real processes.
"""

from __future__ import annotations

import faulthandler
import multiprocessing
import os
import pickle
import resource
import signal
import sys
import time
import traceback
from collections.abc import Callable
from multiprocessing import forkserver
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import pytest

# What ranks import. This module comes last: its `IMPORTED_BY` is the server's process id, if all went well.
_PRELOAD = [
    "pytest",
    "torch._dynamo",
    "torch.distributed.fsdp",
    "torch.distributed.checkpoint.state_dict",
    "transformers.models.llama.modeling_llama",
    "transformers.models.gpt2.modeling_gpt2",
    "torch.nn.modules.linear_cross_entropy",  # not in every version; what cannot be imported is passed over
    "peft",
    "trainer.training",
    "tests.trainer.toy",
    "tests.trainer.ranks_course",
    "tests.trainer.ranks_warm",
    "tests.trainer.ranks",
]
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "GLOO_SOCKET_IFNAME": "lo",
    "TORCH_FR_BUFFER_SIZE": "2000",  # as trainer.compat.flight_recorder sets it
}
ON_GPUS = os.environ.get("DROPFORGE_RANKS_ON", "cpu") == "cuda"
_PEERS = 10.0  # seconds that peers get to notice that a rank has failed
IMPORTED_BY = os.getpid()


class RanksError(AssertionError):
    """Some rank failed. :param errors: what was raised, by rank; the text tells the rest."""

    def __init__(self, text: str, errors: dict[int, BaseException]) -> None:
        super().__init__(text)
        self.errors = errors


class Ranks:
    """Runs a function on several ranks at once.

    :param folder: for results and output, a new one for each call.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.calls = 0
        server = forkserver._forkserver  # type: ignore[attr-defined]
        if server._preload_modules != _PRELOAD:  # another file's tests may have started it, with what they need
            server._stop()
        forkserver.set_forkserver_preload(_PRELOAD)
        before = {key: os.environ.get(key) for key in _ENVIRONMENT}
        os.environ.update(_ENVIRONMENT)
        forkserver.ensure_running()
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value

    def __call__(self, work: Callable[..., Any], world: int, *args: Any, limit: float = 60.0) -> list[Any]:
        """What `work(gang, *args)` returns on each rank of a connected `Gang`.

        :param work: a function of a module, not of a function: ranks import it by name.
        :param limit: seconds; a rank that takes longer is ended, and the error shows all of its stacks.
        :raises RanksError: if any rank raises, dies or hangs; the cause is told first.
        """
        if ON_GPUS and world > gpus():
            pytest.skip(f"needs {world} GPUs, {gpus()} are here")
        folder = self.folder / str(self.calls)
        self.calls += 1
        folder.mkdir(parents=True)
        context = multiprocessing.get_context("forkserver")
        ranks = [context.Process(target=_rank, args=(folder, rank, world, work, args)) for rank in range(world)]
        for process in ranks:
            process.start()
        ended: list[int] = []
        hung: list[int] = []
        deadline = time.monotonic() + limit
        while len(ended) < world:
            living = {process.sentinel: rank for rank, process in enumerate(ranks) if rank not in ended}
            done = [living[sentinel] for sentinel in wait(list(living), max(0.0, deadline - time.monotonic()))]  # type: ignore[index]
            if not done:  # SIGABRT has faulthandler write the stacks of all threads, whatever they wait for
                hung += [rank for rank in living.values() if rank not in hung]
                for rank in living.values():
                    os.kill(ranks[rank].pid or 0, signal.SIGABRT)
                deadline = time.monotonic() + _PEERS
            for rank in done:
                ranks[rank].join()
                if ranks[rank].exitcode:
                    deadline = min(deadline, time.monotonic() + _PEERS)
            ended += done
        if any(process.exitcode for process in ranks):
            raise _error(folder, ended, hung, [process.exitcode for process in ranks])
        return [pickle.loads((folder / f"result-{rank}").read_bytes()) for rank in range(world)]


def gpus() -> int:
    """GPUs of this machine, counted without using one."""
    import torch

    return torch.cuda.device_count()


def _error(folder: Path, ended: list[int], hung: list[int], codes: list[int | None]) -> RanksError:
    from trainer.gang import CollectiveError

    told: list[str] = []
    raised = {rank: folder / f"raised-{rank}" for rank in ended}
    errors = {rank: pickle.loads(path.read_bytes()) for rank, path in raised.items() if path.exists()}
    # Whose end broke a peer's collective may be seen after that peer's.
    for rank in sorted(ended, key=lambda rank: isinstance(errors.get(rank), CollectiveError)):
        if not codes[rank]:
            told.append(f"rank {rank} succeeded")
            continue
        how = "hung" if rank in hung else f"ended with {codes[rank]}"
        output = (folder / f"output-{rank}").read_text(errors="replace").strip()
        told.append(f"rank {rank} {how}:\n{output[-6000:]}")
    return RanksError("\n\n".join(told), errors)


def _rank(folder: Path, rank: int, world: int, work: Callable[..., Any], args: tuple[Any, ...]) -> None:
    """A rank's life, in the forked process."""
    import torch.distributed as dist

    from trainer.gang import Gang
    from trainer.state.stop import die_with_parent

    die_with_parent(os.getppid())
    with (folder / f"output-{rank}").open("w") as stream:
        for descriptor in (1, 2):
            os.dup2(stream.fileno(), descriptor)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    faulthandler.enable(file=2)
    try:
        gang = Gang(rank, world, rank, world, _device(rank))
        _join(folder, gang)
        result = pickle.dumps(work(gang, *args))
        if dist.is_initialized():
            gang.barrier()
            gang.leave()
        (folder / f"result-{rank}").write_bytes(result)
    except BaseException as error:
        traceback.print_exc()
        sys.stderr.flush()
        _keep(folder / f"raised-{rank}", error)
        os._exit(1)  # no goodbyes: peers are to see a rank that is gone
    os._exit(0)


def _device(rank: int) -> Any:
    """Where a rank computes. On a GPU the same bits each time: what is compared here is often compared to the bit."""
    import torch

    if not ON_GPUS:
        return torch.device("cpu")
    from trainer.model import deterministic

    os.environ.update(deterministic.ENVIRONMENT)
    deterministic.enable()
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _join(folder: Path, gang: Any) -> None:
    """The group of `Gang.connect`, found through a file instead of a port that somebody else may take."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if gang.world > 1:
        store = dist.FileStore(str(folder / "store"), gang.world)
        backend, device = ("cpu:gloo,cuda:nccl", gang.device) if ON_GPUS else ("gloo", None)
        dist.init_process_group(backend, store=store, rank=gang.rank, world_size=gang.world, device_id=device)


def _keep(path: Path, error: BaseException) -> None:
    try:
        data = pickle.dumps(error)
        pickle.loads(data)
    except Exception:  # an exception with arguments of its own
        data = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
    path.write_bytes(data)
