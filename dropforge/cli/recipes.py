"""Commands that look at a recipe and start nothing: render, plan."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml
from rich.markup import escape
from rich.table import Table

from dropforge import curation_job
from dropforge.base_config import check_folder_there, from_bucket
from dropforge.cli.connect import StateOption
from dropforge.cli.job_manifests import manifest_of
from dropforge.cli.listing import Cell, Output, OutputOption, print_table, print_values
from dropforge.client.connection import Connection, connect, connect_embedded
from dropforge.client.patience import asking_mlflow
from dropforge.code import look_at, told
from dropforge.costs import limits_told
from dropforge.errors import DropforgeError, RecipeError
from dropforge.estimate import Estimate, check_length, check_memory, estimate, memory_text, packs, shape_of, size_text
from dropforge.folder_files import files_of
from dropforge.forecast import Forecast, Speed, forecast, steps_text
from dropforge.hub import UnreachableError, at_config, is_hub_id, pin_base
from dropforge.job import (
    check_requested_disk,
    evaluate_job,
    gang_environment,
    network_of,
    requested_disk,
    tokenise_job,
    train_job,
)
from dropforge.layout import RECIPE, SUCCESS, check_family, run_prefix
from dropforge.placement.catalogue import read
from dropforge.placement.fabrics import PREFLIGHT, Preflight, variables
from dropforge.placement.pods import told as placed_on
from dropforge.provenance import code_digest
from dropforge.readable import readable
from dropforge.recipe import Compute, Recipe
from dropforge.recipes import load_recipe, presets
from dropforge.recipes.load import about_preset, build_recipe, over_preset, read_named
from dropforge.recipes.rules import PLACEHOLDER, check_startable
from dropforge.run import RunSpec, run_name
from dropforge.run_limits import run_limits
from dropforge.small_data import too_small
from dropforge.store import open_store
from dropforge.terminal import Console, Text
from dropforge.text import counted

_HEADS: Final = {".jsonl": 0, ".csv": 1, ".tsv": 1}  # lines of a file that are no rows
_SMALL: Final = 4 << 20  # bytes of data whose rows are counted


def complete_recipe(incomplete: str) -> list[str]:
    return [name for name in presets() if name.startswith(incomplete)]


RecipeArgument = Annotated[
    str, typer.Argument(help="A preset's name or a recipe file.", autocompletion=complete_recipe, metavar="RECIPE")
]
RecipeOption = Annotated[
    str | None,
    typer.Option(
        "--recipe",
        help="A preset's name or a recipe file.",
        autocompletion=complete_recipe,
        show_default="the data's own",
    ),
]
FamilyOption = Annotated[str, typer.Option("--family", "-f", help="Name of the model family.")]


def render(
    recipe: RecipeArgument,
    family: FamilyOption = "example",
    bucket: Annotated[str, typer.Option(help="Bucket of the run's folder.")] = "dropforge",
    job: Annotated[str, typer.Option(help="Which job: curate, tokenise, train or evaluate.")] = "train",
) -> None:
    """Print a job of a recipe as the cluster gets it; for `curate` the SparkApplication, or the Job of Spark's driver.

    Where the recipe names no kind of job (`compute.kind`), it is a PyTorchJob: nothing is asked of a cluster.
    """
    from kubeflow_training.jobs.kinds import PYTORCH_JOB, kind_named

    builders = {"tokenise": tokenise_job, "train": train_job, "evaluate": evaluate_job}
    if job not in ("curate", *builders):
        raise typer.BadParameter(f"choose one of curate, {', '.join(builders)}", param_hint="--job")
    loaded, family = load_recipe(recipe), check_family(family)
    if job == "curate":
        manifest = _curation(loaded, family, bucket)
    else:
        named = loaded.compute.kind
        kind = PYTORCH_JOB if named == "auto" else kind_named(named)
        manifest = manifest_of(builders[job](example_run(loaded, family, bucket), loaded), kind)
    typer.echo(yaml.safe_dump(manifest, sort_keys=False), nl=False)


def _curation(recipe: Recipe, family: str, bucket: str) -> dict[str, Any]:
    """The job that would curate a drop. :raises RecipeError: if the recipe has it curated where Airflow's task runs."""
    asked = recipe.curation.spark.cluster
    if asked is None or recipe.curation.engine == "embedded":
        raise RecipeError(
            "recipe key `curation.spark.cluster`" if asked is None else "recipe key `curation.engine`",
            "the recipe curates without a job, in Airflow's task",
            "Set `curation.spark.cluster`, with `engine: auto` or `spark`",
        )
    example, prefix = curation_job.job_of(family, "0" * 64, 1, recipe.plain(), asked)
    return curation_job.manifest(example, f"s3://{bucket}/{prefix}job.json", asked)


def plan(
    recipe: RecipeArgument,
    data: Annotated[Path | None, typer.Option(help="The data, to count the steps.", exists=True)] = None,
    family: Annotated[
        str | None,
        typer.Option("--family", "-f", help="Family whose earlier runs give the speed.", show_default="none"),
    ] = None,
    state: StateOption = None,
) -> None:
    """Print steps, tokens, memory per rank, hours, cost and what would be done; starts nothing.

    A recipe that extends nothing and names no base is merged over the default preset, like the recipe of a drop. Fails
    if the memory is clearly too small, if the stack that runs here does not let it read what it names, or if it asks
    for more than `DROPFORGE_LIMITS` where that is set, as the run would.
    """
    limits = run_limits()
    loaded = build_recipe(over_preset(read_named(recipe)))
    size = rows = None
    if data is not None:
        files = files_of(data)
        limits.check_bytes(f"data {data}", sum(path.stat().st_size for path in files.values()))
        size, rows = sum(map(_text_bytes, files.values())), _rows(files.values())
    connection = connect_embedded(state) if family is None else connect(state)
    with _with_sizes(loaded, state, connection) as sized:
        figures = estimate(sized, size, data_rows=rows)
        speed = None
        if connection is not None and family is not None:
            speed = _measured(connection, check_family(family), loaded)
        Console().print(_plan_table(loaded, figures, forecast(sized, figures, speed), rows))
        check_startable(loaded)
        limits.check_recipe(loaded)
        if connection is not None and connection.reads is not None:
            connection.check_recipe(family, loaded)
        else:
            check_folder_there(loaded, readable().folders)
        check_length(sized)
        check_memory(loaded, figures)
        check_requested_disk(loaded)


@contextmanager
def _with_sizes(recipe: Recipe, state: Path | None, connection: Connection | None) -> Iterator[Recipe]:
    """The recipe with its base's config at hand; one in the bucket is read while the stack is there."""
    if not (recipe.base.model or "").startswith("s3://"):
        yield _from_hub(recipe)
        return
    try:
        bucket = (connection or connect(state)).settings.bucket
    except DropforgeError:
        yield recipe
        return
    with from_bucket(recipe, open_store(f"s3://{bucket}", hurried=True), bucket) as sized:
        yield sized


def _from_hub(recipe: Recipe) -> Recipe:
    """The recipe with its base's config at hand, as the task `plan` has it; itself where the sizes are known already,
    or the hub does not tell them here: Airflow's machines may have another token, and a cache."""
    model = recipe.base.model
    if model in (None, PLACEHOLDER) or not is_hub_id(model) or shape_of(recipe) is not None:
        return recipe
    try:
        return build_recipe(at_config(pin_base(recipe.plain())[0]))
    except (RecipeError, UnreachableError) as error:
        told = f"Its sizes stay unknown: {error}"
    except ImportError:
        told = "Its sizes stay unknown: huggingface-hub is not installed, which `dropforge[hub]` brings"
    Console(stderr=True).print(Text(f"Base model {model}: {told}", "yellow"), soft_wrap=True)
    return recipe


def presets_command(output: OutputOption = Output.TABLE) -> None:
    """List the presets: what each trains, how, and the memory that each rank takes.

    A recipe begins with `extends: PRESET`; `dropforge plan PRESET` shows more of one.
    """
    rows = [_preset_row(name) for name in presets()]
    if output is not Output.TABLE:
        print_values(rows, tuple(rows[0]), output)
        return
    cells = [
        (
            str(row["preset"]),
            str(row["method"]),
            _short(int(row["parameters"] or 0)),
            str(int(row["nodes"] or 1) * int(row["gpus"] or 0) or "CPU"),
            size_text(int(row["rank_bytes"])) if row["rank_bytes"] else "-",
            str(row["about"]),
        )
        for row in rows
    ]
    print_table(("preset", "method", "size", "GPUs", "memory", "what it is"), cells, Console())


def _short(parameters: int) -> str:
    """`8.03B`; a dash where it is not known."""
    for unit, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if parameters >= unit:
            return f"{parameters / unit:.3g}{letter}"
    return "-"


def _preset_row(name: str) -> dict[str, Cell]:
    recipe = load_recipe(name)
    figures, base = estimate(recipe), recipe.base.model
    return {
        "preset": name,
        "task": recipe.task,
        "base": None if base == PLACEHOLDER else base,
        "method": recipe.train.method,
        "parameters": figures.parameters,
        "trained": figures.trained,
        "nodes": recipe.compute.nodes,
        "gpus": recipe.compute.gpus,
        "rank_bytes": figures.rank_bytes,
        "about": about_preset(name),
    }


def _measured(connection: Connection, family: str, recipe: Recipe) -> Speed | None:
    from dropforge import speeds

    uri = connection.settings.tracking_uri
    with asking_mlflow(uri):
        return speeds.measured(uri, family, recipe)


def _text_bytes(path: Path) -> int:
    """Bytes of a file once unpacked; a guess for packed text, which is usually a fourth of its size."""
    return path.stat().st_size * (4 if path.suffix in {".gz", ".zst"} else 1)


def _rows(files: Collection[Path]) -> int | None:
    """About how many rows small data of one line each hold; None for other formats, and where they are many."""
    held = [path for path in files if path.name not in (RECIPE, SUCCESS)]
    if not held or any(path.suffix not in _HEADS for path in held) or sum(one.stat().st_size for one in held) > _SMALL:
        return None
    lines = {path: sum(bool(line.strip()) for line in path.read_bytes().splitlines()) for path in held}
    return sum(max(0, number - _HEADS[path.suffix]) for path, number in lines.items())


def example_run(recipe: Recipe, family: str, bucket: str) -> RunSpec:
    digest = "0" * 64  # the dataset is not known yet, so the names here are examples
    run = run_name(family, recipe.plain(), digest, code_digest())
    root = f"s3://{bucket}/{run_prefix(run)}".rstrip("/")
    return RunSpec(
        run=run,
        family=family,
        counter=1,
        root=root,
        data_root=f"s3://{bucket}",
        dataset=f"s3://{bucket}/datasets/{family}/{digest}/manifest.json",
        dataset_digest=digest,
        recipe=recipe.plain(),
        code=code_digest(),
    )


def _unknown_steps(recipe: Recipe) -> str:
    if recipe.data.mix is not None:
        return "follow from the rows of each source: `python -m trainer plan` counts them"
    if not packs(recipe):
        return "follow from the number of rows: give --data in JSON Lines, CSV or TSV of at most 4 MB"
    return "follows from the data: give --data"


def _plan_table(recipe: Recipe, figures: Estimate, plan: Forecast, rows_of_data: int | None) -> Table:
    train, compute = recipe.train, recipe.compute
    base = recipe.base.model or f"a new {recipe.base.scratch.name if recipe.base.scratch else ''} model"
    table = Table(show_header=False, box=None, padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    unknown = "unknown: the base model's config is not available"
    held_out = recipe.evaluate.max_rows
    if rows_of_data is not None:
        held_out = min(held_out, round(rows_of_data * recipe.data.eval_fraction))
    steps = steps_text(figures.steps, estimated=plan.estimated) if figures.steps else _unknown_steps(recipe)
    if train.passes is not None:
        steps += f"; {train.passes:g} {'epoch' if train.passes == 1 else 'epochs'}, by `train.epochs`"
    rows = [
        ("base", "none: set base.model" if base == PLACEHOLDER else escape(base)),
        *([("begins with", recipe.base.start)] if recipe.base.start != "base" else []),
        *([("own code", escape(told(recipe, look_at(recipe))))] if recipe.code is not None else []),
        ("method", f"{train.method}, {train.precision}"),
        ("parameters", f"{figures.parameters:,}" if figures.parameters else unknown),
        ("trained", f"{figures.trained:,}" if figures.trained else unknown),
        ("steps", steps),
        ("tokens", dict(plan.rows())["tokens"] if figures.tokens else "follow from the steps"),
        (
            "one step",
            f"{counted(figures.sequences_per_step, 'sequence')} of {train.sequence_length} tokens over "
            f"{counted(figures.ranks, 'rank')}, "
            f"{counted(figures.accumulation, 'forward pass', 'forward passes')} each",
        ),
        (
            "pods",
            f"{compute.nodes}{f' (or {compute.min_nodes})' if compute.min_nodes else ''} with "
            f"{compute.cpus:g} CPU cores, {compute.memory_gb:g} GB, "
            f"{counted(compute.gpus, 'GPU')}",
        ),
        *([("this machine", _room_here(compute))] if compute.backend == "local" else []),
        *([("given", escape(given))] if (given := given_to_pods(recipe)) else []),
        *network_rows(compute),
        *([("instance", escape(placed_on(compute, read())))] if compute.gpus or compute.backend != "local" else []),
        ("memory", memory_text(recipe, figures)),
        *((name, escape(text)) for name, text in plan.rows() if name in ("time", "takes")),
        *([("limits", "; ".join(limits))] if (limits := limits_told(plan.hours, recipe.compute.limits)) else []),
        *(
            ("small", line)
            for line in too_small(
                figures.steps, held_out, estimated=plan.estimated, rows_estimated=rows_of_data is not None
            )
        ),
        ("checkpoint", f"{_checkpoint(figures)}every {_interval(train.checkpoint_every)}"),
        (
            "then",
            f"evaluate on up to {recipe.evaluate.max_rows:,} rows, register, and move alias "
            f"{recipe.promote.alias!r} if {recipe.promote.metric} beats the champion's",
        ),
    ]
    for name, value in rows:
        table.add_row(name, value)
    return table


def _room_here(compute: Compute) -> str:
    """Whether the local cluster of a stack on this machine could ever start the pods."""
    from kubeflow_training.jobs.local.capacity import Resources, machine, never_fits

    total = machine()
    return never_fits(Resources(*compute.all_pods), total) or f"has room: {total}"


def given_to_pods(recipe: Recipe) -> str:
    """What Kubernetes is told of the pods beside their sizes: where they may run, by whom, and what they wait in."""
    compute = recipe.compute
    if compute.backend == "local":
        return ""
    asked = requested_disk(recipe)
    parts = {
        "kind": None if compute.kind == "auto" else compute.kind,
        "namespace": compute.namespace,
        "account": compute.service_account,
        "user": "the image's" if compute.run_as is None else str(compute.run_as),
        "queue": compute.queue,
        "priority": compute.priority or compute.priority_class,
        "nodes with": ", ".join(f"{key}={value}" for key, value in (compute.node_selector or {}).items()),
        "tolerates": ", ".join(f"{one.key}={one.value}" if one.value else one.key for one in compute.tolerations),
        "claims": ", ".join(f"{held.claim} at {held.path}" for held in compute.volumes),
        "pull secrets": ", ".join(compute.image_pull_secrets),
        "variables": ", ".join(sorted(compute.env)),
        "annotations": ", ".join(sorted(compute.annotations)),
        "disk": f"{compute.ephemeral_storage_gb:g} GB" if compute.ephemeral_storage_gb else None,
        "disk for base and exported model": size_text(asked) if asked else None,
        "shared memory": f"{compute.shared_memory_gb:g} GB" if compute.shared_memory_gb else None,
        "waits": f"{compute.queue_timeout_minutes} min at most" if compute.queue_timeout_minutes else None,
    }
    return "; ".join(f"{name} {value}" for name, value in parts.items() if value)


def network_rows(compute: Compute) -> list[tuple[str, str]]:
    """What the pods are told about their network, each with its reason; nothing for what needs to be told nothing."""
    network, env = network_of(compute), gang_environment(compute)
    reasons = {one.name: one.reason for one in variables(network)}
    lines = [
        f"{name}={value}  {'the recipe sets it' if name in compute.network_env else reasons[name]}"
        for name, value in env.items()
        if name != PREFLIGHT
    ]
    if PREFLIGHT in env:
        held = Preflight.from_json(env[PREFLIGHT])
        lines.append(
            f"preflight of at most {held.seconds:g} s: all ranks there"
            + (f", {held.gb_per_second:g} GB/s" if held.gb_per_second else "")
            + (f", {held.milliseconds:g} ms" if held.milliseconds else "")
        )
    named = "network" if network.name == "unknown" else f"network, {network.name}"
    return [(named, escape("\n".join(lines)))] if lines else []


def _interval(value: int | str) -> str:
    return f"{value} steps" if isinstance(value, int) else value


def _checkpoint(figures: Estimate) -> str:
    return "" if figures.checkpoint_bytes is None else f"about {size_text(figures.checkpoint_bytes)} "
