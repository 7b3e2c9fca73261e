"""`python -m trainer evaluate`: the figures of any model on the evaluation rows of a dataset version."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from dropforge.errors import RecipeError
from dropforge.run import RunSpec
from dropforge.text import escape
from trainer.commands.addresses import open_dataset, open_run, spec_of
from trainer.commands.arguments import positive, subparser
from trainer.commands.terminal import tell
from trainer.config import Generation, Settings, read_settings
from trainer.scores import PREFIX, SCORES

_COLUMNS = (
    "eval/loss", "eval/perplexity", "eval/accuracy", "eval/macro_f1", "eval/bits_per_byte", "rows", "target_tokens"
)  # fmt: skip
_EPILOG = """\
A MODEL is a folder or s3://... of one; a run that is done, or RUN/checkpoints/step-N; models:/NAME/VERSION or
models:/NAME@champion of the MLflow server of MLFLOW_TRACKING_URI; or an id of the Hugging Face hub, with @REVISION.

With --run, rows, sequence length, mask and packing are those of the run, and its own evaluation gives the same
figures. Each model reads the rows with its own tokenizer: eval/loss compares two models only where they share it,
eval/bits_per_byte any two. Classifiers are measured by the rows whose label they know, and say how many they leave out.
The arithmetic is the recipe's evaluate.precision, which is fp32 by default.

With --answers N, or where the run's recipe has evaluate.generation, the models answer the first N rows whose own last
answer is held out, greedily, and gen/... are means of how like both are, from 0 to 1. --json has all answers.

examples:
  python -m trainer evaluate s3://dropforge/runs/RUN/checkpoints/step-50 --run s3://dropforge/runs/RUN
  python -m trainer evaluate ./ours models:/python-help@champion --dataset s3://dropforge/datasets/python-help/DIGEST
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands,
        "evaluate",
        "measure any model on a dataset version",
        "Measure models on the evaluation rows of a dataset version.",
        _EPILOG,
    )
    parser.add_argument("models", metavar="MODEL", nargs="+", help="what to measure; see below")
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--run", help="take dataset and settings of this run")
    which.add_argument("--dataset", help="address of a dataset version: its folder or manifest.json")
    parser.add_argument(
        "--rows", type=positive, help="most rows, in the order of their keys (default: the run's, or 2000)"
    )
    parser.add_argument("--length", type=positive, help="tokens of a row (default: the run's, or 512)")
    parser.add_argument(
        "--loss-on", choices=("answers", "all"), help="tokens that count in conversations (default: answers)"
    )
    parser.add_argument("--micro-batch", type=positive, help="rows of a forward pass (default: the run's, or 2)")
    parser.add_argument(
        "--answers", type=positive, metavar="N", help="rows to be answered (default: the run's, or none)"
    )
    parser.add_argument("--max-new-tokens", type=positive, help="tokens of an answer (default: the run's, or 128)")
    parser.add_argument("--json", action="store_true", help="print a list of objects, one for each model")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Measure; returns the exit code."""
    if arguments.run is not None:
        spec = open_run(arguments.run)
        settings = read_settings(spec.recipe)
    else:
        dataset = open_dataset(arguments.dataset)
        spec, settings = spec_of(dataset), plain_settings()
    settings = _with(settings, arguments)

    from trainer.compat import check_versions
    from trainer.data.user_code import user_code
    from trainer.evaluate import evaluation_rows

    check_versions()
    found = []
    with user_code(settings.code) as code:
        rows = evaluation_rows(spec, settings, code)
        for model in arguments.models:
            print(f"measuring {escape(model)} on {len(rows)} rows", file=sys.stderr)
            found.append(_measure(model, spec, settings, rows, code))
    if arguments.json:
        print(json.dumps(found, indent=1, allow_nan=False))
    else:
        print(_table(found))
    return 0


def plain_settings() -> Settings:
    """Settings for a dataset without a run: the defaults of a recipe."""
    from dropforge.recipes.load import build_recipe

    return read_settings(build_recipe({"base": {"model": "none"}}).plain())


def _with(settings: Settings, arguments: argparse.Namespace) -> Settings:
    train = settings.train
    if arguments.length is not None and arguments.length < 2:
        raise RecipeError("option --length", "no token of a row would come after another", "Set it to 2 or more")
    given = {
        "sequence_length": arguments.length,
        "loss_on": arguments.loss_on,
        "micro_batch": arguments.micro_batch,
    }
    train = replace(train, **{key: value for key, value in given.items() if value is not None})
    settings = replace(settings, train=train, eval_rows=arguments.rows or settings.eval_rows)
    return replace(settings, generation=_generation(settings.generation, arguments))


def _generation(asked: Generation | None, arguments: argparse.Namespace) -> Generation | None:
    """The run's, changed by what the options say; all metrics where there is no run that names some."""
    if asked is None and arguments.answers is None:
        if arguments.max_new_tokens is not None:
            raise RecipeError("option --max-new-tokens", "no row is answered", "Give --answers too")
        return None
    asked = asked or Generation(rows=1, max_new_tokens=128, metrics=tuple(SCORES), batch=8, every=1)
    return replace(
        asked,
        rows=arguments.answers or asked.rows,
        max_new_tokens=arguments.max_new_tokens or asked.max_new_tokens,
    )


def _measure(model: str, spec: RunSpec, settings: Settings, rows: list[Any], code: Any) -> dict[str, Any]:
    from trainer.commands.models import fetch_model
    from trainer.compat import quiet_libraries
    from trainer.evaluate import measure_model
    from trainer.model.build import task_of
    from trainer.report.console import Console
    from trainer.state.stop import StopSignal

    quiet_libraries()
    with tempfile.TemporaryDirectory(prefix="dropforge-evaluate-") as name:
        folder = fetch_model(model, Path(name), tell)
        if not spec.run:  # a dataset version alone has no task: the model's own
            settings = replace(settings, task=task_of(folder))
        if settings.generation is not None and settings.task == "classification":
            raise RecipeError("option --answers", f"{model} is a classifier, which writes no text", "Leave it out")
        measured = measure_model("model", str(folder), rows, settings, StopSignal(), Console(quiet=True), code)
    for note in measured.notes:
        print(f"{escape(model)}: {escape(note)}", file=sys.stderr)
    about = {"model": model, "dataset": spec.dataset_digest, "run": spec.run or None, "notes": [*measured.notes]}
    table = None if measured.answers is None else measured.answers.table()
    answers = {} if table is None else {"answers": [dict(zip(table["columns"], r, strict=True)) for r in table["data"]]}
    return {**about, **measured.figures, **answers}


def _table(found: Sequence[Mapping[str, Any]]) -> str:
    told = {name for item in found for name in item}
    names = [name for name in _COLUMNS if name in told or ("eval/macro_f1" not in told and name != "eval/macro_f1")]
    names += dict.fromkeys(name for item in found for name in item if name.startswith(PREFIX))
    width = max(5, *(len(escape(str(item["model"]))) for item in found))
    lines = [f"{'model':<{width}}  " + "  ".join(f"{name:>{max(len(name), 10)}}" for name in names)]
    for item in found:
        cells = []
        for name in names:
            value = item.get(name)
            text = "-" if value is None else f"{value:.6f}" if isinstance(value, float) else f"{value:,}"
            cells.append(f"{text:>{max(len(name), 10)}}")
        lines.append(f"{escape(str(item['model'])):<{width}}  " + "  ".join(cells))
    lines += [f"{escape(str(item['model']))}: {item['problem']}" for item in found if "problem" in item]
    return "\n".join(lines)
