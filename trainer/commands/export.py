"""`python -m trainer export`: a checkpoint of a run becomes a model folder."""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.text import escape
from trainer.commands.addresses import open_run, split_checkpoint
from trainer.commands.arguments import natural, subparser
from trainer.commands.terminal import table, tell

_EPILOG = """\
The folder holds weights (safetensors, fp32), tokenizer, chat template and generation config, and loads with
transformers alone; adapters are merged, and are in peft's format under adapter/ as well. A prefix cannot be merged: its
folder holds it in peft's format with the address of its base. The folder is read back and compared before it appears,
whole or not at all. A run that is done has such a folder of its last step already: RUN/model.

example:
  python -m trainer export s3://dropforge/runs/python-help-9ab3f12c77d0 --step 50 --to ./step-50
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands,
        "export",
        "turn a checkpoint into a model folder",
        "Write a checkpoint of a run as a model folder.",
        _EPILOG,
    )
    parser.add_argument(
        "run", metavar="RUN", help="address or name of the run, or address of one of its checkpoints/step-N"
    )
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--step", type=natural, help="checkpoint of this step (default: the newest)")
    which.add_argument("--best", action="store_true", help="checkpoint with the lowest evaluation loss")
    parser.add_argument(
        "--to", required=True, metavar="FOLDER", help="a folder or s3://BUCKET/..., empty or not there yet"
    )
    parser.add_argument("--json", action="store_true", help="print what was written as JSON")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Export; returns the exit code."""
    address, step = split_checkpoint(arguments.run) or (arguments.run, arguments.step)
    if arguments.step not in (None, step) or (arguments.best and step is not None):
        raise RecipeError(f"address {arguments.run}", "it names a checkpoint already", "Leave --step and --best out")
    spec = open_run(address)
    from dropforge.store import open_store
    from trainer.model.build import upload_folder
    from trainer.restore import Choice, export

    choice = Choice(step, arguments.best)
    target = str(arguments.to).removeprefix("file://").rstrip("/") or "/"
    if target.startswith("s3://"):
        _refuse_taken(target)
        with tempfile.TemporaryDirectory(prefix="dropforge-export-") as name:
            seal, exported = export(spec, choice, Path(name) / "model", tell)
            upload_folder(Path(name) / "model", open_store(target))
    else:
        seal, exported = export(spec, choice, Path(target).absolute(), tell)
    facts = exported.plain() | {
        "uri": target,
        "files": dict(exported.files),
        "run": spec.run,
        "step": seal.step,
        "eval_loss": seal.eval_loss,
    }
    if arguments.json:
        print(json.dumps(facts, indent=1, allow_nan=False))
        return 0
    loss = "not measured at this step" if seal.eval_loss is None else f"evaluation loss {seal.eval_loss:.4f}"
    print(
        table(
            [
                ("model", f"{escape(target)}, {exported.bytes / 1e6:.1f} MB"),
                ("from", f"{spec.run}, checkpoint step-{seal.step}, {loss}"),
                (
                    "checked",
                    f"read back, logits differ by {exported.max_logit_difference:.1e}; the tokenizer is the same",
                ),
                ("files", "\n".join(exported.files)),
            ]
        )
    )
    return 0


def _refuse_taken(target: str) -> None:
    from dropforge.store import open_store

    if next(iter(open_store(target).list()), None) is not None:
        raise RecipeError(f"folder {target}", "there is something in it", "Name a new folder, or remove what is in it")
