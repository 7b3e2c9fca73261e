"""torch's elastic agent for one node: starts the ranks, watches them, and ends them together.

Differences to `torchrun`: a SIGTERM is forwarded and the ranks have the pod's own grace, their exit codes survive,
lines are prefixed through pipes and need no files, and on one machine the store listens on 127.0.0.1 alone.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any, Final

from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]
from torch.distributed.elastic.agent.server.api import WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, LogsDest
from torch.distributed.elastic.rendezvous.api import RendezvousInfo, RendezvousStoreInfo
from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

_LOOPBACK: Final = ("127.0.0.1", "localhost", "::1")
_PEER_SECONDS: Final = 10  # that ranks have to leave after one of them failed; nothing can be saved then
_JOINING: Final = timedelta(minutes=20).total_seconds()  # nodes may have to start, and large images to be pulled
_LAST_LINES: Final = 20
_PROGRESS: Final = "@progress "
_END: Final = b"\0dropforge-end\0"


@dataclass(frozen=True)
class Place:
    """This node among the nodes."""

    nodes: int
    node: int
    ranks: int
    address: str
    port: int

    @property
    def first_rank(self) -> int:
        return self.node * self.ranks


def place_from_env(env: Mapping[str, str]) -> Place:
    """Read the variables that the training operator sets (`PET_*`, else `MASTER_*`); alone on one node without them.

    :raises ValueError: if a number is none.
    """
    ranks = env.get("PET_NPROC_PER_NODE") or "1"
    if ranks in ("auto", "gpu", "cpu"):
        import torch

        ranks = str(torch.cuda.device_count() or 1)
    nodes = int((env.get("PET_NNODES") or "1").rpartition(":")[2])
    return Place(
        nodes=nodes,
        node=int(env.get("PET_NODE_RANK") or "0"),
        ranks=int(ranks),
        address=env.get("PET_MASTER_ADDR") or env.get("MASTER_ADDR") or "127.0.0.1",
        port=int(env.get("PET_MASTER_PORT") or env.get("MASTER_PORT") or "0"),
    )


class Rendezvous(StaticTCPRendezvous):
    """A static rendezvous whose store, on one machine, is closed to the network and may take any free port.

    It waits for the other nodes in steps, because a wait inside the store would not hear a SIGTERM.
    """

    def next_rendezvous(self) -> RendezvousInfo:
        """Meet the other nodes. :raises TimeoutError: if some do not come."""
        end = time.monotonic() + self.timeout.total_seconds()
        if self._store is None:
            self._store = self._serve() if self.rank == 0 else self._join(end)
        store = PrefixStore(self.run_id, self._store)
        here = store.add("nodes", 1)
        while here < self.world_size:
            _pause(end, f"{here} of {self.world_size} nodes came")
            here = store.add("nodes", 0)
        return RendezvousInfo(
            store, self.rank, self.world_size, RendezvousStoreInfo(self.master_addr, self.master_port)
        )

    def _serve(self) -> TCPStore:
        listener = _listen(self.master_addr, self.master_port)
        self.master_port = listener.getsockname()[1]
        return self._connect(is_master=True, master_listen_fd=listener.detach())

    def _join(self, end: float) -> TCPStore:
        while True:
            try:
                socket.create_connection((self.master_addr, self.master_port), timeout=5).close()
                return self._connect(is_master=False)
            except OSError as error:  # it may not be up, or not even have a name yet
                _pause(end, f"the first node does not answer ({error})")

    def _connect(self, **more: Any) -> TCPStore:
        return TCPStore(
            self.master_addr,
            self.master_port,
            self.world_size,
            timeout=self.timeout,
            wait_for_workers=False,
            multi_tenant=True,
            **more,
        )


def _listen(master: str, port: int) -> socket.socket:
    """The store's socket: on loopback alone where the master is, else for IPv4 and IPv6, as clusters have either."""
    if master == "::1":
        return socket.create_server((master, port), family=socket.AF_INET6, backlog=1024)
    if master in _LOOPBACK:
        return socket.create_server(("127.0.0.1", port), backlog=1024)
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", port), family=socket.AF_INET6, backlog=1024, dualstack_ipv6=True)
    return socket.create_server(("", port), backlog=1024)


def _pause(end: float, what: str) -> None:
    if time.monotonic() > end:
        raise TimeoutError(what)
    time.sleep(0.1)


@dataclass
class Output:
    """Copies what ranks print, line by line, with the rank in front.

    :param keep: is given every line with its rank, whether or not it can be printed.
    :param last: the last lines of each rank on stderr, for a failure's message.
    :param progress: the last progress line.
    """

    folder: Path
    first_rank: int
    keep: Callable[[str], None]
    last: dict[int, deque[str]] = field(default_factory=dict)
    progress: dict[str, Any] = field(default_factory=dict)
    threads: list[threading.Thread] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def pipe(self, local_rank: int, target: Any) -> str:
        """Path of a named pipe for one stream of one rank."""
        rank = self.first_rank + local_rank
        path = self.folder / f"rank-{rank}-{target.fileno()}"
        os.mkfifo(path, 0o600)
        # Open for reading and writing: opening never blocks, and the pipe has no end before we are done.
        descriptor = os.open(path, os.O_RDWR)
        thread = threading.Thread(target=self._copy, args=(descriptor, rank, target), daemon=True)
        thread.start()
        self.threads.append(thread)
        return str(path)

    def _copy(self, descriptor: int, rank: int, target: Any) -> None:
        lines = self.last.setdefault(rank, deque(maxlen=_LAST_LINES))
        with os.fdopen(descriptor, "rb", buffering=0) as stream:
            rest = b""
            while True:
                data = stream.read(65536)
                *whole, rest = (rest + data).split(b"\n")
                for raw in whole:
                    if raw == _END:
                        return
                    line = raw.decode(errors="replace")
                    if not line.strip():
                        continue
                    if target is sys.__stderr__:
                        lines.append(line)
                    self.tell(rank, line, target)

    def tell(self, rank: int, line: str, target: Any = None) -> None:
        """Add a line to a rank's log, with its time of the day (UTC): who reads it may read it later.

        :param target: stderr without one.
        """
        target = target or sys.__stderr__
        self.keep(f"[rank {rank}] {line}")
        text = f"{time.strftime('%H:%M:%SZ', time.gmtime())} [rank {rank}] {line}"
        # The job library looks for progress at the start of a line.
        if line.startswith(_PROGRESS):
            text = line
            self._note(line.removeprefix(_PROGRESS))
        # A full disk under the log, or nobody who reads it, must not stop the rank that writes here.
        with self.lock, suppress(OSError):
            target.write(f"{text}\n")
            target.flush()

    def _note(self, body: str) -> None:
        try:
            self.progress = dict(json.loads(body))
        except ValueError:
            return

    def close(self) -> None:
        """Copy what is still in the pipes and end the threads."""
        for path in self.folder.glob("rank-*"):
            if path.is_fifo():
                with path.open("wb", buffering=0) as stream:
                    stream.write(b"\n" + _END + b"\n")
        for thread in self.threads:
            thread.join(5)


class Pipes(DefaultLogsSpecs):
    """Where the agent sends the ranks' output."""

    def __init__(self, output: Output) -> None:
        super().__init__(log_dir=os.devnull)
        self._output = output

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        destination = super().reify(envs)
        for local_rank in envs:
            # The process's own streams: what is written to `sys.stdout` is kept as the launcher's words.
            destination.stdouts[local_rank] = self._output.pipe(local_rank, sys.__stdout__)
            destination.stderrs[local_rank] = self._output.pipe(local_rank, sys.__stderr__)
        return destination


class Agent(LocalElasticAgent):
    """The elastic agent with a way to reach its ranks.

    :ivar closed: ranks that still ran when the agent began to end them, because another had failed.
    """

    closed: frozenset[int] = frozenset()

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        started: dict[int, Any] = super()._start_workers(worker_group)
        context = self._pcontext
        assert context is not None
        close = context.close
        ranks = {local: worker.global_rank for local, worker in enumerate(worker_group.workers)}

        def close_soon(death_sig: signal.Signals | None = None, timeout: int = _PEER_SECONDS) -> None:
            # torch waits 30 s when a rank has failed; its `shutdown_timeout`, which 2.11 lacks, does not reach that.
            self.closed |= {ranks[local] for local, pid in context.pids().items() if _runs(pid)}
            close(death_sig, min(timeout, _PEER_SECONDS))

        context.close = close_soon  # type: ignore[method-assign]
        return started

    def store(self) -> Any:
        """Another client of the store that all nodes share."""
        return self._worker_group.spec.rdzv_handler._store.clone()  # type: ignore[attr-defined]

    def signal_ranks(self, number: int) -> bool:
        """Send a signal to all ranks of this node; False if they have not been started."""
        context = self._pcontext
        if context is None:
            return False
        for pid in context.pids().values():
            try:
                os.kill(pid, number)
            except ProcessLookupError:
                continue
        return True


def _runs(pid: int) -> bool:
    """Whether a child has not ended; it is left for its owner to wait for."""
    try:
        return os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False


def make_agent(place: Place, command: list[str], output: Output, joining: float = _JOINING) -> Agent:
    """An agent that runs `command` once per rank, without restarts: a failed gang is started anew as a whole.

    :param joining: seconds that this node waits for the others.
    """
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = "SIGINT"
    if place.address in _LOOPBACK:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    spec = WorkerSpec(
        role="trainer",
        local_world_size=place.ranks,
        rdzv_handler=Rendezvous(place.address, place.port, place.node, place.nodes, "dropforge", int(joining)),
        entrypoint=command[0],
        args=tuple(command[1:]),
        max_restarts=0,
        monitor_interval=0.1,
        master_addr=place.address,
        master_port=place.port or None,
    )
    return Agent(spec, Pipes(output), start_method="spawn")
