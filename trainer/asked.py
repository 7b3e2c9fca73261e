"""`python -m trainer.asked ADDRESS_OF_ORDER_JSON`: what somebody asked for with a checkpoint.

order.json: `{"run": address of run.json, "step", "digest", "verb": "evaluate" or "export", "to": folder of the model}`;
`result.json` beside it has `figures`, as of an evaluation, or `model`, or `error`. An export that is there already, of
the same checkpoint, is the result again.
"""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.json_objects import read_object
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store, split_uri, wait_for_s3
from trainer.compat import check_versions
from trainer.launch import Verdict, write_termination_message
from trainer.rank import ending
from trainer.report.console import Console, warn
from trainer.state.stop import StopSignal

RESULT = "result.json"


def do(uri: str, stop: StopSignal, console: Console) -> dict[str, Any]:
    """Do what an order says; its result.

    :raises DataError: if the checkpoint is not there, or another one by now. :raises RecipeError: if it is no order.
    """
    check_versions()
    order = read_order(uri)
    root, key = split_uri(order["run"])
    spec = RunSpec.read(open_store(root), key)
    stop.check()
    if order["verb"] == "evaluate":
        return {"figures": _evaluate(spec, order, stop, console)}
    return {"model": _export(spec, order, stop, console)}


def read_order(uri: str) -> dict[str, Any]:
    """The content of order.json. :raises RecipeError: if it is none."""
    root, key = split_uri(uri)
    try:
        values = read_object(open_store(root), key)
        if values["verb"] not in ("evaluate", "export"):
            raise ValueError(f"verb {values['verb']!r} is not known")
        return {
            "verb": values["verb"],
            "run": str(values["run"]),
            "step": int(values["step"]),
            "digest": str(values["digest"]),
            "to": str(values["to"]),
        }
    except (ValueError, KeyError, TypeError) as error:
        raise RecipeError(uri, f"it is no order ({error!r})", "Write it with this version") from error


def _evaluate(spec: RunSpec, order: Mapping[str, Any], stop: StopSignal, console: Console) -> dict[str, Any]:
    from trainer.config import read_settings
    from trainer.data.user_code import user_code
    from trainer.evaluate import evaluation_rows, measure_model
    from trainer.prepare import node_cache
    from trainer.restore import export_sealed

    settings = read_settings(spec.recipe)
    with user_code(settings.code) as code, tempfile.TemporaryDirectory(prefix="dropforge-asked-") as name:
        rows = evaluation_rows(spec, settings, code)
        console.phase(f"reading checkpoint step-{order['step']} of {spec.run}")
        model = Path(name) / "model"
        with node_cache(settings, console.say) as node:
            export_sealed(spec, order["step"], order["digest"], model, console.say, node, stop.check)
        measured = measure_model("checkpoint", str(model), rows, settings, stop, console, code)
    figures = measured.figures
    if "problem" in figures:
        raise DataError(
            f"checkpoint step-{order['step']} of {spec.run}", figures["problem"], "Ask for an older checkpoint"
        )
    return figures


def _export(spec: RunSpec, order: Mapping[str, Any], stop: StopSignal, console: Console) -> dict[str, Any]:
    from trainer.config import read_settings
    from trainer.prepare import node_cache
    from trainer.restore import export_to

    console.phase(f"reading checkpoint step-{order['step']} of {spec.run}")
    to, say = order["to"], console.say
    with node_cache(read_settings(spec.recipe), say) as node:
        return export_to(spec, order["step"], order["digest"], to, say, node=node, check=stop.check)


def main(argv: list[str] | None = None, env: Mapping[str, str] = os.environ) -> int:
    """Entry point; returns the exit code."""
    arguments = sys.argv[1:] if argv is None else argv
    if len(arguments) != 1:
        warn("usage: python -m trainer.asked ADDRESS_OF_ORDER_JSON")
        return 2
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch is imported
    stop = StopSignal()
    stop.install()
    result: dict[str, Any]
    try:
        result = do(arguments[0], stop, Console())
        verdict = Verdict(ExitCode.DONE, "done")
    except (Exception, KeyboardInterrupt) as error:
        code, message = ending(error)
        if not isinstance(error, DropforgeError) and code == 1:
            import traceback

            traceback.print_exc()
        warn(message)
        verdict = Verdict(code, message, 0)
        result = {"error": message}
    try:
        root, key = split_uri(f"{arguments[0].rpartition('/')[0]}/{RESULT}")
        open_store(root).put(key, json.dumps(result, indent=1, allow_nan=False).encode())
    except Exception as error:  # stores raise many kinds
        warn(f"the result could not be stored ({error})")
        verdict = verdict if verdict.code else Verdict(1, f"the result could not be stored ({error})", 0)
    write_termination_message(verdict, env)
    return int(verdict.code)


if __name__ == "__main__":
    wait_for_s3()
    raise SystemExit(main())
