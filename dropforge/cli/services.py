"""`dropforge up`, `down` and `doctor`: the embedded stack from the command line."""

from __future__ import annotations

import os
import shlex
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table

from dropforge.cli.cluster_checks import Asked, ahead_of, examine_cluster, job_of
from dropforge.cli.connect import StateOption, login_text
from dropforge.cli.kube import Cluster
from dropforge.cli.pod_check import look_from_a_pod
from dropforge.cli.probe import follow
from dropforge.client.connection import connect
from dropforge.readable import DEFAULT
from dropforge.recipes import load_recipe
from dropforge.recipes.load import default_preset
from dropforge.settings import READABLE, default_state, split
from dropforge.stack import control
from dropforge.stack.doctor import Level, examine
from dropforge.stack.state import StackState, check_folder, read_state, running_state
from dropforge.terminal import Console, Text

_STYLES = {
    "healthy": "green",
    "done": "green",
    "starting": "yellow",
    "waiting": "dim",
    "failing": "red",
    "restarting": "red",
    "failed": "bold red",
}
_LEVELS = {Level.OK: "[green]ok[/]", Level.WARN: "[yellow]warn[/]", Level.FAIL: "[bold red]fail[/]"}

_PortOption = typer.Option(min=1, max=65535, help="Port of 127.0.0.1. [default: the one of last time, or a free one]")


def up(
    state: StateOption = None,
    detach: Annotated[bool, typer.Option("--detach", "-d", help="Return when all is healthy.")] = False,
    airflow_port: Annotated[int | None, _PortOption] = None,
    mlflow_port: Annotated[int | None, _PortOption] = None,
    objects_port: Annotated[int | None, _PortOption] = None,
    pod_host: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Let S3 and MLflow listen on this address of the machine too, for the pods of a Kubernetes cluster.",
        ),
    ] = None,
) -> None:
    """Start Airflow, MLflow, S3 and SQS on this machine. Without --detach, Ctrl-C stops them.

    Airflow and MLflow keep their runs in a PostgreSQL that is started too, or in the one that DROPFORGE_DATABASE_URL
    names (postgresql://USER:PASSWORD@HOST:5432/NAME). What recipes may read is kept from the last start where
    DROPFORGE_READABLE is not set. Beside a stack that runs with another port, address or DROPFORGE_READABLE than is
    asked for, the exit code is 1.
    """
    console = Console()
    folder = check_folder(state or default_state())
    asked = {"airflow": airflow_port, "mlflow": mlflow_port, "objects": objects_port}
    ports = {name: port for name, port in asked.items() if port is not None}
    reader, writer = os.pipe()
    try:
        started = start(folder, ports, lifeline=None if detach else reader, pod_host=pod_host)
        if not started:
            state_now = running_state(folder)
            asked_env = {READABLE: os.environ[READABLE]} if READABLE in os.environ else {}
            other = differences(state_now, ports, pod_host, asked_env) if state_now is not None else {}
            if other:
                _tell_differences(folder, other, detach=detach)
                raise typer.Exit(1)
            console.print("The stack is already running.")
        elif not detach:
            stay(folder, console)
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        os.close(reader)
        os.close(writer)


def start(
    folder: Path,
    ports: dict[str, int] | None = None,
    *,
    lifeline: int | None = None,
    pod_host: str | None = None,
) -> bool:
    """Start the stack unless it runs, show what is waited for, return when it is ready; False if it ran already.

    :param lifeline: file descriptor whose other end keeps the stack alive; without it, it stays until `stop`.
    :raises DropforgeError: if it does not get ready; then nothing is left running.
    """
    console = Console()
    started = control.start(folder, ports, lifeline=lifeline, pod_host=pod_host)
    try:
        with Live(console=console, refresh_per_second=8, transient=True) as live:
            ready = control.wait_ready(folder, lambda state: live.update(_services_table(state)))
    except BaseException:
        if started:
            stop(folder)
        raise
    show_addresses(ready, console)
    return started


def differences(
    running: StackState, ports: Mapping[str, int], pod_host: str | None, env: Mapping[str, str]
) -> dict[str, tuple[str, str]]:
    """Return what a running stack has otherwise than is asked for: by option or variable, both values.

    :param ports: by service. :param env: `DROPFORGE_READABLE`, if it is set; empty is the default.
    """
    has = {f"--{name}-port": str(running.ports.get(name)) for name in ports} | {
        "--pod-host": running.pod_host or "none"
    }
    asked = {f"--{name}-port": str(port) for name, port in ports.items()} | (
        {"--pod-host": pod_host} if pod_host else {}
    )
    if READABLE in env:
        has[READABLE], asked[READABLE] = running.readable or DEFAULT, env[READABLE] or DEFAULT
    return {name: (has[name], asked[name]) for name in asked if {*split(has[name])} != {*split(asked[name])}}


def _tell_differences(folder: Path, other: Mapping[str, tuple[str, str]], *, detach: bool) -> None:
    """Say what the running stack has otherwise, and the lines that change it."""
    where = "" if folder == check_folder(default_state()) else f" --state {shlex.quote(str(folder))}"
    env = "".join(f"{name}={shlex.quote(asked)} " for name, (_, asked) in other.items() if name == READABLE)
    options = "".join(f" {name} {shlex.quote(asked)}" for name, (_, asked) in other.items() if name != READABLE)
    cause = "; ".join(f"{name} is {has}, not {asked}" for name, (has, asked) in other.items())
    told = Text.assemble(
        ("error:", "red"), f" stack in {folder}: it is already running, and was started otherwise: {cause}."
    )
    told.append("\nType these lines; unfinished runs continue:")
    told.append(f"\n  dropforge down{where}\n  {env}dropforge up{' -d' * detach}{options}{where}")
    Console(stderr=True).print(told, soft_wrap=True)


def stop(folder: Path) -> bool:
    """Stop the stack and everything that it started; False if nothing was running."""
    with Console().status("Stopping"):
        return control.stop(folder)


def down(state: StateOption = None) -> None:
    """Stop the stack and everything it started. Data, runs and models stay."""
    folder = check_folder(state or default_state())
    Console().print("Stopped." if stop(folder) else f"Nothing runs in {folder}.")


def status(state: StateOption = None) -> None:
    """Show whether the stack is running, where its pages are, and how each service is.

    Exit code 1 if it is not running or a service is not healthy.
    """
    console = Console()
    folder = check_folder(state or default_state())
    found = running_state(folder)
    if found is None:
        console.print(Text(f"No stack is running in {folder}. `dropforge up` starts one."))
        raise typer.Exit(1)
    show_addresses(found, console)
    console.print(_services_table(found))
    if found.phase != "ready":
        raise typer.Exit(1)


def doctor(
    state: StateOption = None,
    watcher: Annotated[
        bool,
        typer.Option("--watcher", help="Send a test object to each bucket of drops, and follow it."),
    ] = False,
    cluster: Annotated[
        bool,
        typer.Option("--cluster", help="Check whether the cluster of your kubeconfig can run a recipe's jobs."),
    ] = False,
    recipe: Annotated[
        str | None,
        typer.Option("--recipe", help="With --cluster, a preset or a recipe file.", show_default="DROPFORGE_PRESET"),
    ] = None,
    account: Annotated[
        str,
        typer.Option(
            help="With --cluster, the service account of the tasks, whose rights are checked.",
            metavar="NAMESPACE:NAME",
            show_default="yours",
        ),
    ] = "",
    pod: Annotated[
        str,
        typer.Option(
            "--pod",
            help="With --cluster, start one small pod of the recipe's image that looks at itself and at this bucket.",
            metavar="BUCKET",
            show_default="no pod",
        ),
    ] = "",
) -> None:
    """Check this machine: versions, disk, memory, ports, clock; with --watcher, the path of a drop to Airflow; or with
    --cluster, what a recipe's jobs need from a cluster. Nothing is changed there; the pod of --pod is removed again.

    Exit code 1 if something would not work.
    """
    if watcher and cluster:
        raise typer.BadParameter("one at a time: --watcher or --cluster")
    if (recipe or account or pod) and not cluster:
        raise typer.BadParameter("--recipe, --account and --pod are of --cluster")
    if account and account.count(":") != 1:
        raise typer.BadParameter("write it as NAMESPACE:NAME", param_hint="--account")
    if cluster:
        chosen = load_recipe(recipe or default_preset() or "tiny")
        with Console(stderr=True).status("Asking the cluster"):
            asked = Asked(chosen, job_of(chosen), account, ahead_of(chosen))
            there = Cluster()
            findings = list(examine_cluster(there, asked))
            if pod:
                findings += look_from_a_pod(there, asked, pod)
    elif watcher:
        with Console(stderr=True).status("Following a test object to the watcher"):
            findings = list(follow(connect(state)))
    else:
        findings = examine(check_folder(state or default_state()))
    table = Table("check", "", "found", "fix", box=None, header_style="bold")
    for finding in findings:
        # What services say may look like markup.
        table.add_row(finding.check, _LEVELS[finding.level], Text(finding.found), Text(finding.mend))
    Console().print(table)
    if any(finding.level is Level.FAIL for finding in findings):
        raise typer.Exit(1)


def show_addresses(state: StackState, console: Console) -> None:
    table = Table(box=None, show_header=False)
    table.add_row("Airflow", state.settings.airflow_url, login_text("airflow", state, console))
    table.add_row("MLflow", state.settings.tracking_uri, login_text("mlflow", state, console))
    table.add_row("S3 and SQS", state.env()["AWS_ENDPOINT_URL"], f"bucket {state.settings.bucket}")
    if state.readable is not None:
        table.add_row("May be read", Text(state.readable or DEFAULT), f"by recipes, and the bucket ({READABLE})")
    table.add_row("Logs", str(state.folder / "logs"), "")
    console.print(table)


def _services_table(state: StackState) -> Table:
    table = Table(box=None, show_header=False)
    for name, service in state.services.items():
        style = _STYLES.get(service.status, "")
        table.add_row(name, Text(service.status, style), Text(service.message, "dim"))
    return table


def stay(folder: Path, console: Console) -> None:
    """Say what happens to the services until Ctrl-C, then stop them; return if they are stopped by another command.

    A stack that was started in the same folder since then is another one, and keeps running.
    """
    console.print("Ctrl-C stops it.")
    begun = read_state(folder)
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.default_int_handler)
    said: dict[str, str] = {}
    try:
        while (state := running_state(folder)) is not None and begun is not None and _same(begun, state):
            for name, service in state.services.items():
                if said.get(name, "healthy") != service.status and service.status not in {"done", "stopped"}:
                    console.print(Text(f"{name}: {service.status} {service.message}", _STYLES.get(service.status, "")))
                said[name] = service.status if service.status != "done" else "healthy"
            signal.sigtimedwait([], 1.0)
    except KeyboardInterrupt:
        pass
    if (now := running_state(folder)) is None or (begun is not None and _same(begun, now)):
        stop(folder)  # also what a supervisor that was killed has left
    console.print("Stopped.")


def _same(begun: StackState, state: StackState) -> bool:
    """Whether both are of one supervisor, by its process and when that began."""
    return begun.supervisor == state.supervisor
