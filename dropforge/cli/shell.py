"""`dropforge shell`: a shell, or a command, where a rank of a run works."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from dropforge.cli.connect import StateOption
from dropforge.cli.gangs import Gang, api_client, gangs_of
from dropforge.cli.named import RunArgument
from dropforge.cli.pod_exec import run_in_pod
from dropforge.cli.top import ranks_each
from dropforge.client.connection import connect
from dropforge.client.named import find
from dropforge.errors import DropforgeError

_POD_SHELL = ("sh", "-c", "command -v bash >/dev/null && exec bash || exec sh")


def shell(
    run: RunArgument,
    command: Annotated[
        list[str] | None, typer.Argument(help="What to run instead of a shell; after --.", metavar="[-- COMMAND...]")
    ] = None,
    rank: Annotated[int, typer.Option("--rank", "-r", help="The rank.", min=0)] = 0,
    state: StateOption = None,
) -> None:
    """Open a shell where a rank runs, and end with its exit code.

    On a cluster: in the rank's pod, with the rights of your kubeconfig (`create` on pods/exec). On this machine: in the
    rank's working folder and with its environment, including its secrets; only for the user whose process it is.
    """
    connection = connect(state)
    named = find(connection, run)
    gang = gangs_of(named).newest() if named.row is not None else None
    if gang is None or not gang.there:
        raise DropforgeError(
            f"run {named.title}",
            "none of its jobs is running now",
            f"See what it does with `dropforge follow {named.title}`; `dropforge logs` has what its ranks wrote",
        )
    pod = pod_of(gang, rank)
    if named.params.get("compute.backend") == "local":
        _become(pod, rank, command or [os.environ.get("SHELL") or "/bin/sh"])
    metadata = pod["metadata"]
    raise typer.Exit(run_in_pod(api_client(), str(metadata["name"]), str(metadata["namespace"]), command or _POD_SHELL))


def pod_of(gang: Gang, rank: int) -> Any:
    """The pod of a rank. :raises DropforgeError: if it has none that runs."""
    from kubeflow_training.jobs.kinds import kind_seen

    kind, each = kind_seen(gang.snapshot.job), ranks_each(gang)
    pods = {kind.node_rank(pod, gang.snapshot.job): pod for pod in gang.snapshot.pods}
    pod, thing, seen = pods.get(rank // each), f"rank {rank} of job {gang.name}", gang.seen
    doing, wait = seen.message or seen.phase.value, "Wait until it runs: `dropforge top` shows when"
    if not pods:
        raise DropforgeError(thing, f"the job has no pods: {doing}", wait)
    if pod is None:
        there = f"the job has ranks 0 to {max(pods) * each + each - 1}"
        raise DropforgeError(thing, there, "Name one of its ranks")
    phase = str((pod.get("status") or {}).get("phase") or "Pending")
    where = f"its pod {pod['metadata']['name']}"
    if phase == "Pending":
        raise DropforgeError(thing, f"{where} is pending: {doing}", wait)
    if phase != "Running":
        raise DropforgeError(thing, f"{where} has {phase.lower()}", "`dropforge logs` has what it wrote")
    return pod


def _become(pod: Any, rank: int, command: Sequence[str]) -> None:
    """Turn this process into the command, so that signals and its exit code are its own."""
    from kubeflow_training.jobs.local.environment import POD_MARK
    from kubeflow_training.jobs.local.usage import processes_of

    thing = f"rank {rank} in pod {pod['metadata']['name']}"
    found = processes_of(str(pod["metadata"]["uid"]))
    process = next((one for one in found if one.rank == rank), None)
    if process is None:
        cause = "its process has not begun, has ended, or is another user's"
        raise DropforgeError(thing, cause, "See with `dropforge top`, and give the command as the user of the stack")
    try:
        if os.stat(f"/proc/{process.pid}").st_uid != os.geteuid():  # noqa: PTH116 - as of the process itself
            raise DropforgeError(thing, "it is another user's process", "Give the command as the user of the stack")
        # The mark would have the shell killed with the pod's own processes.
        env = {key: value for key, value in process.env.items() if key != POD_MARK}
        os.chdir(f"/proc/{process.pid}/cwd")
        os.execvpe(command[0], list(command), env | {"TERM": os.environ.get("TERM", "dumb")})  # noqa: S606
    except OSError as error:
        raise DropforgeError(thing, f"{command[0]} cannot be started ({error})", "Name another command") from error
