"""`dropforge curate`: what becomes of data, before a run has to find out."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Final

import typer

from dropforge import family_recipe
from dropforge.cli.connect import StateOption
from dropforge.cli.recipes import RecipeOption
from dropforge.client.connection import connect
from dropforge.drop import Drop, read_drop
from dropforge.errors import DataError, DropforgeError
from dropforge.layout import check_family
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe, default_preset
from dropforge.store import FolderStore, Store, open_store
from dropforge.terminal import Console, Text
from dropforge.whole_file import write_whole

console = Console(soft_wrap=True, highlight=False)
errors = Console(stderr=True, soft_wrap=True, highlight=False)


def _paths(incomplete: str) -> list[str]:
    """Paths of this machine that begin so. Drops are not listed: completion must not wait for the bucket."""
    parent = Path(incomplete).parent if not incomplete.endswith("/") else Path(incomplete)
    names = sorted(f"{path}/" if path.is_dir() else str(path) for path in parent.iterdir()) if parent.is_dir() else []
    return [name for name in names if name.startswith(incomplete)]


def curate(
    data: Annotated[
        str,
        typer.Argument(
            help="A file, a folder, or FAMILY/DROP in the bucket.",
            autocompletion=_paths,
            metavar="PATH|FAMILY/DROP",
        ),
    ],
    sample: Annotated[
        int | None, typer.Option(help="Sample about this many rows of all files; nothing is published.", min=100)
    ] = None,
    card: Annotated[Path | None, typer.Option(help="HTML file for the card.", dir_okay=False)] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder for the dataset version.", file_okay=False, show_default="the bucket")
    ] = None,
    recipe: RecipeOption = None,
    family: Annotated[str, typer.Option("--family", "-f", help="Model family, for data on this machine.")] = "local",
    store: Annotated[
        str | None, typer.Option(help="Where drops and evaluation sets are.", show_default="the stack's bucket")
    ] = None,
    state: StateOption = None,
) -> None:
    """Make a dataset version outside Airflow, or look at a sample of it first.

    Shows what happens to the rows and why, what the gate finds, and for a sample how long all data would take. Without
    --recipe the data's own `recipe.yaml` is used, over the recipe of its family for a drop in the bucket, otherwise
    over the preset.
    """
    try:
        from curation.earlier import mark
        from curation.gate import check, checks
        from curation.increments import aside
        from curation.local import Layered, card_of, check_out, folder_of, local_drop, look
        from curation.notes import NoUsableRowError
        from curation.pipeline import curate as make
        from curation.shown import shown
        from curation.told import card_lines, gate_lines, time_line
    except ImportError:
        raise DropforgeError("curate", "curation is not installed", "Install `dropforge[curation]`") from None

    if card is not None and not card.absolute().parent.is_dir():
        raise DropforgeError(f"card {card}", "its folder is not there", "Give --card a file in a folder that is")
    path = Path(data) if Path(data).exists() else None
    if path is not None:
        if out is not None:
            check_out(path, out)
        drop = local_drop(path, check_family(family), on_skip=_tell_skipped)
        under: list[tuple[str, Store]] = [(drop.prefix, FolderStore(folder_of(path)))]
        if sample is None and out is None:
            raise DropforgeError(f"path {path}", "nothing says where its dataset version goes", _WHERE)
    else:
        given, name = _parse_drop(data)
        place = _place(store, state)
        drop, under = read_drop(place, given, name), [("", place)]
    settings = _recipe(recipe, drop, under)
    if path is not None and settings.curation.decontaminate is not None:
        under.append(("", _place(store, state)))

    if sample is not None:
        if out is not None:
            raise typer.BadParameter("a sample publishes nothing", param_hint="--out")
        with shown(errors) as progress:
            found = look(under, drop, settings, sample, progress=progress, say=_say)
        _print([*card_lines(found.card), *gate_lines(found.checks), time_line(found.seconds)])
        _write(card, found.page)
        if found.refusal is not None:
            raise found.refusal
        return
    target = Layered(out, under) if out is not None else under[0][1]
    refusal: NoUsableRowError | None = None
    with tempfile.TemporaryDirectory(prefix="curation-") as work, shown(errors) as progress:
        try:
            manifest = make(target, drop, settings, workdir=Path(work), progress=progress, say=_say)
        except NoUsableRowError as error:
            if error.manifest is None:
                raise
            manifest, refusal = error.manifest, error
    _print([*card_lines(card_of(target, manifest)), *gate_lines(checks(manifest, settings))])
    _print([f"Dataset version {manifest.family}/{manifest.digest}", f"in {target.uri}"])
    _write(card, target.get(manifest.files["card_html"]))
    if refusal is not None:
        raise refusal
    check(manifest, settings, aside=aside(target, manifest))
    mark(target, manifest)


_WHERE = "Give --out FOLDER, or look at it with --sample 10000; `dropforge drop` uploads it"


#: Where nothing says which model is trained: rows are curated alike whichever it is.
_ANY: Final = "sample"


def _place(store: str | None, state: Path | None) -> Store:
    return connect(state).store if store is None else open_store(store)


def _parse_drop(data: str) -> tuple[str, str]:
    """The family and name of a drop. :raises DataError: if `data` is none, nor a path."""
    family, slash, name = data.partition("/")
    if not slash or not name or "/" in name:
        cause = "there is no such file or folder, and it is not FAMILY/DROP"
        raise DataError(f"data {data!r}", cause, "Give the path of data on this machine, or a drop in the bucket")
    return check_family(family), name


def _recipe(given: str | None, drop: Drop, under: Sequence[tuple[str, Store]]) -> Recipe:
    """The recipe that is given, else as the run will resolve it: the drop's own over the family's."""
    if given is not None:
        return load_recipe(given)
    (prefix, store), preset = under[0], default_preset() or _ANY
    # A folder of data is no bucket: what lies in its ledger/ or datasets/ is whoever's it came from.
    local = bool(prefix)
    ruling = family_recipe.without(drop.family, preset) if local else family_recipe.rule(store, drop.family, preset)
    own = family_recipe.read_own(store, drop, prefix)
    if own is None:
        return build_recipe(ruling.values)
    sets_it = local or family_recipe.sets_recipe(store, drop.family, ruling, self_service=True)
    return build_recipe(family_recipe.put_drop(ruling, own, sets_it=sets_it))


def _tell_skipped(path: Path, why: str) -> None:
    errors.print(Text(f"{path} is left out: {why}", "yellow"))


def _say(line: str) -> None:
    errors.print(line, style="dim", markup=False)


def _print(lines: Sequence[str]) -> None:
    for line in lines:
        console.print(line, markup=False)


def _write(card: Path | None, page: bytes) -> None:
    if card is None:
        return
    try:
        write_whole(card, page)
    except OSError as error:
        raise DropforgeError(f"card {card}", str(error.strerror), "Give --card a file in a folder of yours") from error
    console.print(f"Card written to {card}", markup=False)
