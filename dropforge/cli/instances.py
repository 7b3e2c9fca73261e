"""`dropforge instances`: the catalogue, and which of it have room for a pod."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from pydantic import ValidationError
from rich.table import Table

from dropforge.cli.listing import Cell, Output, OutputOption, print_values
from dropforge.errors import DropforgeError
from dropforge.placement.catalogue import Instance, Needs, Room, find, pod_room, read, suited
from dropforge.terminal import Console
from dropforge.validation_errors import cause

console = Console(width=200)  # a row is a line, for `grep` too: in a narrow terminal it goes on in the next one


def instances(
    name: Annotated[str | None, typer.Argument(help="Only this one.")] = None,
    gpus: Annotated[int, typer.Option(help="GPUs of a pod.", min=0)] = 0,
    gpu_memory: Annotated[float, typer.Option(help="Memory of each GPU in GiB.", min=0)] = 0,
    cpus: Annotated[float, typer.Option(help="Cores of a pod.", min=0)] = 0,
    memory: Annotated[float, typer.Option(help="Memory of a pod in GiB.", min=0)] = 0,
    arch: Annotated[str | None, typer.Option(help="`amd64` or `arm64`.")] = None,
    cloud: Annotated[str | None, typer.Option(help="Such as `aws` or `nebius`.")] = None,
    fabric: Annotated[str | None, typer.Option(help="`efa`, `infiniband` or `tcp`.")] = None,
    link: Annotated[str | None, typer.Option(help="Between GPUs: `nvlink` or `pcie`.")] = None,
    amx: Annotated[bool, typer.Option("--amx", help="With Intel AMX, to train on CPUs.")] = False,
    output: OutputOption = Output.TABLE,
    as_json: Annotated[bool, typer.Option("--json", help="As `-o json`.", hidden=True)] = False,
) -> None:
    """List instances with room for such a pod, the smallest first, and what one pod on each may request."""
    among = read()
    if name is not None:
        found = [find(name, among)]
    else:
        asked = {"gpus": gpus, "gpu_memory_gib": gpu_memory, "cpus": cpus, "memory_gib": memory, "arch": arch}
        try:
            needs = Needs(**asked, cloud=cloud, fabric=fabric, gpu_link=link, amx=amx)  # type: ignore[arg-type]
        except ValidationError as error:
            first = error.errors()[0]
            option = {"gpu_link": "link"}.get(str(first["loc"][0]), str(first["loc"][0]))
            raise DropforgeError(f"--{option}", cause(first), "See `dropforge instances --help`") from error
        found = suited(needs, among.values())
    if as_json or output is not Output.TABLE:
        names = [*Instance.model_fields, *(f"pod_{name}" for name in Room.model_fields)]
        print_values([_values(one) for one in found], names, Output.JSON if as_json else output)
        return
    table = Table(box=None, pad_edge=False)
    for heading in ("instance", "cloud", "arch", "GPUs", "link", "fabric", "Gbit/s", "NVMe, GB", "pod: cores", "GiB"):
        table.add_column(heading, justify="left" if heading in {"instance", "cloud", "arch", "GPUs"} else "right")
    for one in found:
        table.add_row(*_cells(one))
    console.print(table)


def _values(one: Instance) -> dict[str, Cell]:
    pod = {f"pod_{name}": value for name, value in pod_room(one).model_dump().items()}
    return {**one.model_dump(), **pod}


def _cells(one: Instance) -> list[str]:
    room, dash = pod_room(one), "-"
    cells: list[Any] = [
        one.name,
        one.cloud,
        one.arch,
        f"{one.gpus} x {one.gpu} {one.gpu_memory_gib:g} GiB" if one.gpus else dash,
        one.gpu_link or dash,
        f"{one.adapters} {one.fabric}" if one.adapters else one.fabric,
        f"{one.network_gbps:g}",
        one.nvme_gb or dash,
        f"{room.cpus:g}",
        f"{room.memory_gib:g}",
    ]
    return [str(cell) for cell in cells]
