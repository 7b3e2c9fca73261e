"""`dropforge bench`: what the places where trainings run are able to do, measured by a job of its own."""

from __future__ import annotations

import json
import os
import secrets
import socket
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final

import typer
from botocore.exceptions import BotoCoreError, ClientError
from rich.table import Table

from dropforge.cli.connect import StateOption
from dropforge.cli.job_manifests import kind_for, manifest_of
from dropforge.cli.measuring import StoppedError, opened, run, stoppable
from dropforge.cli.recipes import RecipeOption
from dropforge.client.connection import stack_folder
from dropforge.errors import DropforgeError, RecipeError
from dropforge.job import network_job, network_of
from dropforge.network_baselines import (
    Baseline,
    Compared,
    Kept,
    Shape,
    causes,
    compare,
    keep,
    published,
    read_kept,
)  # fmt: skip
from dropforge.network_bench import LARGE, MARK, Figure, Measured, Order, algorithm, bus, culprit, figure, sizes
from dropforge.placement.catalogue import find, read
from dropforge.placement.fabrics import Network, preflight
from dropforge.placement.pods import sized
from dropforge.recipe import Compute
from dropforge.recipes import load_recipe
from dropforge.recipes.load import default_preset
from dropforge.recipes.network_rules import check_network
from dropforge.recipes.place_rules import check_place
from dropforge.stack.state import running_state
from dropforge.store import S3Store, Store
from dropforge.terminal import Console, Text
from dropforge.text import counted

app = typer.Typer(help="Measure the hardware that trainings run on.", no_args_is_help=True)

_LARGEST: Final = {True: 1 << 30, False: 64 << 20}  # bytes, with GPUs and without
_SLOW: Final = 1
_MEETING: Final = 600  # seconds that ranks may take to start and meet, once all pods run


@app.callback()
def bench() -> None:
    """Measure the hardware that trainings run on."""


@app.command("network")
def network(
    recipe: RecipeOption = None,
    nodes: Annotated[int | None, typer.Option(help="Pods. [default: the recipe's]", min=1, max=1000)] = None,
    backend: Annotated[
        str | None, typer.Option(help="kubernetes, or local for processes of this machine. [default: the recipe's]")
    ] = None,
    keep_it: Annotated[
        bool, typer.Option("--keep", help="Compare later measurements of such nodes with this one.")
    ] = False,
    tolerance: Annotated[
        float, typer.Option(help="Percent below the expected value that are tolerated.", min=0, max=99)
    ] = 15,
    seconds: Annotated[float, typer.Option(help="About how long ranks measure.", min=1, max=3600)] = 60,
    patience: Annotated[float, typer.Option(help="Minutes within which the pods must run.", min=0.1, max=10080)] = 30,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON; progress goes to stderr.")] = False,
    state: StateOption = None,
) -> None:
    """Measure the network between the pods of a recipe: its image, nodes, fabric, variables and queue.

    A separate job measures collectives over a range of sizes, and is removed again, also at Ctrl-C. The figures are
    compared with published ones of the instance, and with stored ones of such nodes.

    Exit code 1 if the network is slower than expected, 2 if nothing could be measured.
    """
    compute = _compute(recipe or default_preset() or "tiny", nodes, backend)
    over = network_of(compute)
    shape = Shape(
        instance=compute.instance or "",
        fabric=over.name,
        nodes=compute.nodes,
        processes_per_node=compute.processes_per_node,
        gpus=compute.gpus,
        host=socket.gethostname() if compute.backend == "local" else "",
    )
    told = Console(stderr=True, soft_wrap=True)
    store = _store(state)
    if store is None and keep_it:
        mend = "Set it, start the stack with `dropforge up`, or leave --keep out"
        raise DropforgeError("option --keep", "DROPFORGE_BUCKET is not set, and no stack runs", mend)
    kept = _kept(store, shape, told, must=keep_it)
    measured = _measure(compute, over, seconds, patience * 60, told)
    found = _Verdict(measured, shape, over, kept, tolerance / 100)
    if as_json:
        typer.echo(json.dumps(found.plain(), indent=1))
    else:
        found.show(Console())
    if keep_it and store is not None:
        keep(store, shape, measured, datetime.now(UTC).isoformat(timespec="seconds"), kept)
        told.print(Text(f"kept as {store.uri}/{shape.key}"))
    if found.slow:
        raise typer.Exit(_SLOW)


class _Verdict:
    """What the figures come to beside those that were expected."""

    def __init__(self, measured: Measured, shape: Shape, over: Network, kept: Kept, tolerance: float) -> None:
        self.measured, self.shape, self._over, self._tolerance = measured, shape, over, tolerance
        of = find(shape.instance, read()).gpus if shape.instance else 0
        against = [published(shape.instance, shape.nodes, shape.gpus, of), kept.baseline]
        self.notes: list[str] = []
        before = kept.baseline.before if kept.baseline is not None else None
        if before is not None and before.gpu != measured.gpu:
            self.notes.append(f"what was kept is of {before.gpu or 'no GPU'}, and this of {measured.gpu or 'no GPU'}")
            against, before = against[:1], None
        self.compared: list[Compared] = []
        for one in against:
            if isinstance(one, Baseline):
                self.compared += compare(measured, one, tolerance)
        floor = preflight(over).gb_per_second
        best = max(measured.speeds("all_reduce").values(), default=0.0)
        if floor and best < floor:
            share = best / floor
            self.compared.append(
                Compared("all_reduce", "is the least of a sound network", best, floor, "GB/s", share, slow=True)
            )
        self.causes = causes(measured, self.compared, before, over, culprit(measured.links))

    @property
    def slow(self) -> bool:
        return any(one.slow for one in self.compared)

    @property
    def word(self) -> str:
        if not self.compared:
            return "nothing to compare with: no figures of such nodes are published or kept (--keep keeps these)"
        if self.slow:
            return "slower than expected"
        return f"as expected, within {100 * self._tolerance:g}%"

    def plain(self) -> dict[str, Any]:
        """As JSON has it."""
        return {
            "shape": vars(self.shape),
            **self.measured.plain(),
            "latency_ms": 1e3 * self.measured.latency,
            "compared": [vars(one) for one in self.compared],
            "slow": self.slow,
            "verdict": self.word,
            "causes": self.causes,
            "notes": self.notes,
        }

    def show(self, console: Console) -> None:
        measured = self.measured
        versions = ", ".join(f"{name} {version}" for name, version in measured.versions.items())
        gpu = f", {measured.gpu}" if measured.gpu else ""
        console.print(
            Text(f"{measured.ranks} ranks on {measured.nodes} node(s) over {measured.transport}{gpu} ({versions})")
        )
        console.print(_table(measured.figures, measured.ranks))
        console.print(Text(f"latency: {1e3 * measured.latency:.3g} ms"))
        for (a, b), speed in measured.links.items():
            console.print(Text(f"node {a} ({measured.hosts[a]}) to node {b} ({measured.hosts[b]}): {speed:.3g} GB/s"))
        for one in self.compared:
            console.print(Text(str(one), style="red" if one.slow else ""))
        for note in self.notes:
            console.print(Text(note))
        rated = self._over.gbps / 8 if measured.nodes > 1 else 0
        if rated:
            best = max(measured.speeds("all_reduce").values(), default=0.0)
            console.print(Text(f"a node's network is rated {rated:.3g} GB/s: {100 * best / rated:.0f}% of it reached"))
        console.print(Text(self.word, style="red" if self.slow else "green" if self.compared else ""))
        for cause in self.causes:
            console.print(Text(f"- {cause}"))


def _table(figures: Sequence[Figure], ranks: int) -> Table:
    table = Table("collective", "size", "time", "algorithm", "bus", box=None, header_style="bold")
    for one in figures:
        speeds = (algorithm(one), bus(one, ranks)) if one.bytes >= LARGE else None
        words = [f"{speed:.3g} GB/s" for speed in speeds] if speeds else ["", ""]
        table.add_row(one.collective, _size(one.bytes), f"{1e3 * one.seconds:.3g} ms", *words)
    return table


def _size(count: int) -> str:
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if count >= unit:
            return f"{count / unit:.4g} {name}"
    return f"{count} B"


def _compute(recipe: str, nodes: int | None, backend: str | None) -> Compute:
    """What is to be measured. :raises DropforgeError: if there would be one rank, and none to reach."""
    if backend not in (None, "local", "kubernetes"):
        raise DropforgeError(f"backend {backend!r}", "there is none such", "Give kubernetes or local")
    found = load_recipe(recipe).compute
    if nodes is not None:
        found = _of_nodes(found, nodes)
    if backend == "kubernetes" and found.backend == "local":
        raise RecipeError(
            "recipe key `compute.backend`",
            "it is `local`, so nothing says which image and nodes a cluster's pods would have",
            "Name a recipe of the cluster by --recipe",
        )
    if found.nodes * found.processes_per_node == 1:
        raise DropforgeError("the recipe", "it has one rank, and none to reach", "Give --nodes 2")
    if backend == "local" or found.backend == "local":
        # Processes take what the machine has: they are not to wait for a cluster's sizes.
        gpus = found.gpus if found.backend == "local" else 0
        return Compute(
            nodes=found.nodes,
            processes_per_node=found.processes_per_node,
            gpus=gpus,
            cpus=0.01,
            memory_gb=0.01,
            network_env=found.network_env if found.backend == "local" else {},
        )
    return found


def _of_nodes(compute: Compute, nodes: int) -> Compute:
    """The same for another number of pods: of the recipe's rules, those of its place and network count."""
    fabric = compute.fabric if nodes > 1 else None
    if nodes > 1 and compute.nodes == 1 and compute.instance is not None:
        fabric = sized({"nodes": nodes, "gpus": compute.gpus}, find(compute.instance, read())).get("fabric")
    found = compute.model_copy(update={"nodes": nodes, "fabric": fabric})
    check_place(found)
    check_network(found)
    return found


def _measure(compute: Compute, over: Network, seconds: float, patience: float, told: Console) -> Measured:
    """:raises DropforgeError, typer.Exit: if it fails, or is stopped."""
    order = Order(compute.gpus, over.name, sizes(_LARGEST[compute.gpus > 0]), seconds, patience + _MEETING)
    name = f"bench-network-{secrets.token_hex(4)}"
    kind = kind_for(compute)
    manifest = manifest_of(network_job(compute, name, order), kind)
    figures: list[Figure] = []
    ends: list[dict[str, Any]] = []

    def line(text: str) -> None:
        _, mark, rest = text.partition(MARK)
        if not mark:
            told.print(Text(text, style="dim"))
            return
        values = dict(json.loads(rest))
        if "collective" not in values:
            ends.append(values)
            return
        one = figure(values)
        figures.append(one)
        told.print(Text(f"{one.collective} {_size(one.bytes)}: {1e3 * one.seconds:.3g} ms", style="dim"))

    told.print(
        Text(
            f"job {compute.namespace}/{name}: {counted(compute.nodes, 'pod')} of "
            f"{counted(compute.processes_per_node, 'rank')}"
        )
    )
    try:
        with stoppable(), opened(compute.backend, kind) as cluster:
            run(cluster, manifest, line, lambda text: told.print(Text(text, style="dim")), patience)
        return Measured.of(ends[-1], figures)
    except StoppedError as error:
        told.print("stopped, and the job is removed")
        raise typer.Exit(error.code) from None
    except (ValueError, TypeError, IndexError, RecursionError) as error:
        mend = "See that the image has this version of Dropforge"
        raise DropforgeError(
            f"job {compute.namespace}/{name}", f"its figures cannot be read ({error})", mend
        ) from error


def _store(state: Path | None) -> Store | None:
    """Where measurements are kept: the bucket of the stack, or of the environment; None if neither is there."""
    folder = stack_folder(state)
    stack = running_state(folder) if folder else None
    if stack is not None:
        os.environ.update(stack.env())
        return S3Store(stack.settings.bucket)
    bucket = os.environ.get("DROPFORGE_BUCKET")
    return S3Store(bucket) if bucket else None


def _kept(store: Store | None, shape: Shape, told: Console, *, must: bool) -> Kept:
    """What is kept of such nodes; a bucket that cannot be read spoils no measurement, unless it is to be written."""
    if store is None:
        return Kept()
    try:
        return read_kept(store, shape)
    except (DropforgeError, ClientError, BotoCoreError) as error:
        if must:
            raise
        told.print(Text(f"what is kept cannot be read, and is not compared with: {error}", style="yellow"))
        return Kept()
