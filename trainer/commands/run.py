"""`python -m trainer run`: train, as the container does."""

from __future__ import annotations

import argparse
import hashlib
import os
import sys
from contextlib import suppress
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.store import open_store
from trainer.commands.addresses import open_dataset, open_run, run_uri, spec_of
from trainer.commands.arguments import positive, subparser
from trainer.commands.start import settled
from trainer.commands.terminal import tell

_EPILOG = """\
A run that was interrupted resumes from its newest whole checkpoint; one that is done is left alone. Ctrl-C ends it at
once; SIGTERM saves a checkpoint first. `python -m trainer.launch ADDRESS_OF_RUN_JSON` is the same without options.
With --recipe, --dataset and --to, run.json is written into a folder first: a run on this machine alone, without
Airflow and MLflow. The same command again resumes it.

examples:
  python -m trainer run s3://dropforge/runs/python-help-9ab3f12c77d0 --ranks 2
  python -m trainer run --recipe tiny --dataset bucket/datasets/python-help/DIGEST --to runs/first
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(commands, "run", "train, or resume training", "Train a run on this machine.", _EPILOG)
    parser.add_argument("run", metavar="RUN", nargs="?", help="address of a run's folder or run.json, or a run's name")
    parser.add_argument("--recipe", help="a recipe file or a preset's name, for a new run")
    parser.add_argument("--dataset", help="address of a dataset version, for a new run")
    parser.add_argument("--to", metavar="FOLDER", help="folder or s3://... of a new run")
    parser.add_argument(
        "--ranks", type=positive, help="processes of this node (default: PET_NPROC_PER_NODE of the environment, or 1)"
    )
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Train; the process ends here, with the code of the rank that failed first."""
    new = (arguments.recipe, arguments.dataset, arguments.to)
    if (arguments.run is None) == (None in new) or (arguments.run is not None and any(new)):
        raise RecipeError(
            "command line",
            "neither a run nor all of --recipe, --dataset and --to is given, or both are",
            "See `python -m trainer run --help`",
        )
    # A wrong address is told like anywhere else, before anything is started.
    uri = run_uri(arguments.run) if arguments.run is not None else write_run(*new)
    open_run(uri)
    from trainer import launch

    if arguments.ranks is not None:
        os.environ["PET_NPROC_PER_NODE"] = str(arguments.ranks)
    code = launch.main([uri])
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(code)  # as the launcher: an ordinary exit would wait for threads that may hang


def write_run(recipe: str, dataset: str, folder: str) -> str:
    """Write `run.json` of a new run, or find the same one there; its address.

    :raises RecipeError: if the folder has another run.
    """
    from dropforge.provenance import code_digest, git_revision
    from dropforge.recipes import load_recipe
    from dropforge.run import run_name

    found = open_dataset(dataset)
    store = open_store(folder.rstrip("/"))
    before = RunSpec.read(store, "run.json") if store.stat("run.json") is not None else None
    family, root = found.manifest.family, open_store(found.root).uri
    plain, start = settled(load_recipe(recipe), root, family, before)
    plain = _pinned(plain, before)
    name = run_name(family, plain, found.manifest.digest, code_digest())
    spec = replace(
        spec_of(found),
        # Two folders are two runs: what lies outside them, such as fast checkpoints, is named after the run.
        run=f"{name}-{hashlib.sha256(store.uri.encode()).hexdigest()[:8]}",
        counter=1,
        root=store.uri,
        data_root=root,
        dataset=found.uri if "://" in found.uri else str(Path(found.uri).absolute()),
        recipe=plain,
        start=start,
        code=code_digest(),
        git=git_revision(),
        date=datetime.now(UTC).strftime("%Y-%m-%d"),
    )
    uri = f"{store.uri}/run.json"
    if not store.put_if_absent("run.json", spec.to_json()):
        there = RunSpec.read(store, "run.json")
        # Code may have changed since: whether a checkpoint of it can be gone on from is the trainer's to say.
        if (there.recipe, there.dataset_digest) != (spec.recipe, spec.dataset_digest):
            raise RecipeError(
                f"folder {folder}", "it has a run of another recipe or dataset", "Name another folder, or give RUN"
            )
    return uri


def _pinned(recipe: dict[str, Any], before: RunSpec | None) -> dict[str, Any]:
    """The recipe with the commit of its base model: the one that the folder's run began with, unless one is named."""
    from dropforge.hub import pin_base

    base = recipe["base"]
    if before is not None and base["revision"] is None and before.recipe["base"]["model"] == base["model"]:
        return {**recipe, "base": {**base, "revision": before.recipe["base"]["revision"]}}
    pinned, line = pin_base(recipe)
    if line:
        tell(line)
    return pinned
