"""`python -m trainer plan`: what a run will do, and what it would be refused for; nothing is started or written."""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from dropforge.errors import DropforgeError, RecipeError
from dropforge.run import RunSpec
from dropforge.text import counted, escape
from trainer.commands.addresses import open_dataset, open_run, spec_of
from trainer.commands.arguments import positive, subparser
from trainer.commands.errors import exit_code
from trainer.commands.start import settled
from trainer.commands.terminal import Paint, table, tell
from trainer.config import Settings, read_settings

if TYPE_CHECKING:
    from trainer.commands.dry import Rehearsal

_WIDTH = 60
_SOURCES = 20
_BARS = "▁▂▃▄▅▆▇█"

_EPILOG = """\
The data is read, checked, tokenised and packed as the run does it, so that all counts are exact; this takes as long
as the run's own start, but for a base model's weights: of it, config and tokenizer are fetched. No GPU and no other
rank is needed, and nothing is written into the run's folder. Memory is an estimate. What the run would be refused for
is shown last, and the exit code is the one that the run would end with.

examples:
  python -m trainer plan s3://dropforge/runs/python-help-9ab3f12c77d0 --ranks 8
  python -m trainer plan --recipe recipe.yaml --dataset s3://dropforge/datasets/python-help/DIGEST
"""


def add(commands: Any) -> None:
    """Describe the command."""
    parser = subparser(
        commands, "plan", "say what a run will do", "Say what a run will do, and start nothing.", _EPILOG
    )
    parser.add_argument("run", metavar="RUN", nargs="?", help="a run's address or name; or give --recipe and --dataset")
    parser.add_argument("--recipe", help="a recipe file or a preset's name, instead of the run's own recipe")
    parser.add_argument("--dataset", help="address of a dataset version, instead of the run's own")
    parser.add_argument("--ranks", type=positive, help="plan for this many ranks (default: the recipe's)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(main=main)


def main(arguments: argparse.Namespace) -> int:
    """Plan; returns the exit code that the run would be refused with, or 0."""
    spec = _spec(arguments)
    recipe = _for_ranks(spec.recipe, arguments.ranks)
    refusals: list[DropforgeError] = []

    def refused(check: Callable[[], Any]) -> Any:
        try:
            return check()
        except DropforgeError as error:
            refusals.append(error)
            return None

    facts: dict[str, Any] = {"run": spec.run or None, "family": spec.family, "dataset": spec.dataset_digest}
    facts["start"] = None if spec.start is None else str(spec.start)
    settings: Settings | None = refused(lambda: read_settings(recipe))
    if settings is not None:
        from trainer.commands.dry import rehearse
        from trainer.compat import check_quantising
        from trainer.loop.schedule import check_steps
        from trainer.node.compiler import check_compiler
        from trainer.report.board import check_board

        with tempfile.TemporaryDirectory(prefix="dropforge-plan-") as name:
            made: Rehearsal | None = refused(lambda: rehearse(spec, settings, Path(name), tell))
            facts["memory"] = _memory(
                recipe, made.config if made and settings.base.model else None, _targets(made), refused
            )
            refused(lambda: check_board(settings.train.tensorboard))
            refused(lambda: check_compiler(settings.train.compile))
            refused(lambda: check_quantising(settings.train.method, settings.train.optimizer))
            if made is not None:
                refused(lambda: check_steps(settings.train, made.plan.steps))
                compute = recipe["compute"]
                facts |= (
                    refused(
                        lambda: describe(
                            made,
                            settings,
                            int(compute["nodes"]) * int(compute["processes_per_node"]),
                            f"{spec.checkpoints_root}/checkpoints" if spec.root or settings.train.checkpoints else None,
                        )
                    )
                    or {}
                )
    facts["refused"] = [{"thing": e.thing, "cause": e.cause, "mend": e.mend} for e in refusals]
    if arguments.json:
        print(json.dumps(facts, indent=1, allow_nan=False))
    else:
        print(text_of(facts, Paint.of(sys.stdout)))
    return exit_code(refusals[0]) if refusals else 0


def _spec(arguments: argparse.Namespace) -> RunSpec:
    """The run, or one that is put together for the occasion."""
    if arguments.run is None and (arguments.recipe is None or arguments.dataset is None):
        raise RecipeError("command line", "neither a run nor a recipe with its dataset is given", "See plan --help")
    spec = open_run(arguments.run) if arguments.run is not None else None
    if arguments.dataset is not None:
        other = spec_of(open_dataset(arguments.dataset))
        spec = other if spec is None else replace(other, recipe=spec.recipe)
    assert spec is not None
    if arguments.recipe is not None:
        from dropforge.recipes import load_recipe

        # Another recipe may train another tokenizer, so the run's own folder is not looked at.
        plain, start = settled(load_recipe(arguments.recipe), spec.data_root, spec.family)
        spec = replace(spec, recipe=plain, start=start, root="", run="")
    return spec


def _for_ranks(recipe: Any, ranks: int | None) -> Any:
    """The recipe for another number of ranks: one in each pod, with its share of the pod's memory."""
    if ranks is None or not isinstance(recipe.get("compute"), dict):
        return recipe
    compute = dict(recipe["compute"])
    each = max(1, int(compute.get("processes_per_node") or 1))
    share = {"nodes": ranks, "processes_per_node": 1, "memory_gb": float(compute.get("memory_gb") or 0) / each}
    return {**recipe, "compute": compute | share | {"gpus": min(1, int(compute.get("gpus") or 0))}}


def _memory(
    recipe: Any, config: Path | None, targets: float, refused: Callable[[Callable[[], Any]], Any]
) -> dict[str, Any] | None:
    """The estimate of `dropforge plan`, and what the recipe's own rules refuse.

    :param config: folder with the base model's config, once it is here. :param targets: share of the tokens.
    """
    try:
        from dropforge.estimate import check_memory, estimate, memory_text, size_text
        from dropforge.recipes.load import build_recipe
    except ModuleNotFoundError as error:  # the trainer's image may lack it
        return {"text": f"not estimated: the package {error.name} is not installed"}
    if config is not None:
        recipe = {**recipe, "base": {**recipe["base"], "model": str(config), "revision": None}}
    loaded = refused(lambda: build_recipe(recipe))
    if loaded is None:
        return None
    figures = estimate(loaded, targets=targets)
    refused(lambda: check_memory(loaded, figures))
    text = memory_text(loaded, figures)
    if figures.parts is None or figures.rank_bytes is None:
        return {"text": text}
    checkpoint = "" if figures.checkpoint_bytes is None else size_text(figures.checkpoint_bytes)
    return {
        "text": text,
        "bytes": figures.rank_bytes,
        "parts": figures.parts,
        "most_rows": figures.most_rows,
        "checkpoint": checkpoint,
    }


def _targets(made: Rehearsal | None) -> float:
    """Share of the tokens that are learned from; all where that is not known."""
    facts = made.prepared.train.facts if made is not None else {}
    return float(facts["targets"]) / max(1, int(facts["tokens"])) if facts else 1.0


def describe(made: Rehearsal, settings: Settings, ranks: int, place: str | None) -> dict[str, Any]:
    """What will be done, as JSON values. :param place: of checkpoints, None where there is no run yet."""
    from trainer.interval import Interval
    from trainer.loop.batching import solve
    from trainer.loop.schedule import learning_rate

    train, plan, isolation = settings.train, made.plan, made.attention.isolation
    first, last = plan.step(0), plan.step(plan.steps - 1)
    micro_batch = solve(plan.rows, ranks, train.micro_batch).micro_batch
    spread = [[len(batch) for batch in plan.share(first, r, ranks, micro_batch)] for r in range(ranks)]
    fast = train.fast_checkpoints
    evaluated, saved = Interval.parse(train.eval_every), Interval.parse(train.checkpoint_every)
    counts = {key: value for key, value in made.prepared.train.facts.items() if isinstance(value, int)}
    return {
        "task": settings.task,
        "labels": None if made.prepared.labels is None else made.prepared.train.facts["labels"],
        "user_code": None if made.prepared.code.wheel is None else made.prepared.code.wheel.plain(),
        "train": counts,
        "eval": {key: value for key, value in made.prepared.eval.facts.items() if isinstance(value, int)},
        "packing": {
            "on": made.attention.packs,
            "reason": made.attention.isolation.reason,
            "attention": str(made.attention),
            "asked": train.attention,
            "layers_tried": made.layers if train.packing != "off" else 0,
            "difference": isolation.difference if math.isfinite(isolation.difference) else None,
            "filled": round(plan.filled(), 4),
            "packs_per_epoch": plan.packs_per_epoch,
            "sources": plan.mixture(),
        },
        "model": {
            "base": settings.base.model
            or f"a new {settings.base.scratch.plain['model_type'] if settings.base.scratch else ''}",
            "method": train.method,
            "precision": train.precision,
            "activation_checkpointing": train.activation_checkpointing,
            "compiled": train.compile,
            "parameters": made.parameters,
            "trained": made.trained,
        },
        "steps": plan.steps,
        "epochs": round(plan.passes(plan.steps), 4),
        "tokens": sum(int(plan.lengths[pack].sum()) for step in range(plan.steps) for pack in plan.step(step))
        if plan.steps <= 100_000
        else None,
        "step": {
            "rows": plan.rows,
            "places": plan.size,
            "ranks": ranks,
            "micro_batches": len(spread[0]),
            "micro_batch": max((size for batches in spread for size in batches), default=0),
            "idle_ranks": sum(not any(batches) for batches in spread),
            "rows_of_the_last": len(last),
        },
        "learning_rate": {
            "schedule": train.schedule,
            "curve": [[step + 1, learning_rate(train, step, plan.steps)] for step in points(plan.steps, _WIDTH)],
        },
        "evaluations": None if evaluated.seconds else 2 + times(evaluated.steps, plan.steps - 1),
        "answers": None
        if settings.generation is None
        else {
            "rows": len(made.prepared.prompts),
            "refused": sum(not prompt.ids for prompt in made.prepared.prompts),
            "longest_prompt": max(len(prompt.ids) for prompt in made.prepared.prompts),
            "max_new_tokens": settings.generation.max_new_tokens,
        },
        "checkpoints": {
            "every": str(saved),
            "written": None if saved.seconds else 1 + times(saved.steps, plan.steps - 1),
            "kept": train.keep_checkpoints,
            "best_kept": train.keep_best,
            "place": place,
            "fast": None
            if fast is None
            else {"folder": fast.folder, "every": str(Interval.parse(fast.every)), "kept": fast.keep},
        },
    }


def points(steps: int, most: int) -> list[int]:
    """At most `most` steps (0-based), evenly spread, the first and the last among them; a pure function."""
    if steps <= most:
        return list(range(steps))
    return [round(index * (steps - 1) / (most - 1)) for index in range(most)]


def times(every: int, steps: int) -> int:
    """How often an interval ends within so many steps; 0 is never."""
    return steps // every if every else 0


def often(count: int | None) -> str:
    """How often, where it is known beforehand."""
    return "" if count is None else f"; {count} times"


def bars(values: list[float]) -> str:
    """Values as a line of bars, from 0 to the largest."""
    top = max(values, default=0.0) or 1.0
    return "".join(_BARS[min(7, max(0, math.ceil(value / top * 8) - 1))] for value in values)


def text_of(facts: dict[str, Any], paint: Paint) -> str:
    """The plan for people."""
    rows = [("run", facts["run"] or "none yet"), ("dataset", f"{facts['family']}/{facts['dataset'][:12]}")]
    if facts["start"]:
        rows.append(("begins with", facts["start"]))
    if "steps" in facts:
        rows += _rows(facts)
    elif facts.get("memory"):
        rows.append(("memory", facts["memory"]["text"]))
    told = "nothing"
    if facts["refused"]:
        told = "\n".join(f"{e['thing']}: {e['cause'].rstrip('.')}. {e['mend']}" for e in facts["refused"])
        told = paint(escape(told), "red")
    return table([*rows, ("refused", told)])


def _sources(sources: dict[str, dict[str, float]]) -> list[tuple[str, str]]:
    """What an epoch takes of each source, the largest first."""
    ordered = sorted(sources.items(), key=lambda item: (-item[1]["token_share"], item[0]))
    told = [
        f"{escape(name)}: {one['passes']:g} passes over {one['documents']:,} documents "
        f"({one['passes_asked']:g} asked), {one['token_share']:.1%} of the tokens"
        for name, one in ordered[:_SOURCES]
    ]
    if len(ordered) > _SOURCES:
        told.append(f"and {len(ordered) - _SOURCES} more sources")
    return [("sources", "\n".join(told))] if told else []


def _answers(asked: dict[str, int] | None) -> list[tuple[str, str]]:
    """What the model is to answer."""
    if asked is None:
        return []
    told = f"of {asked['rows']:,} eval rows, with up to {asked['max_new_tokens']:,} tokens; the longest prompt has "
    told += f"{asked['longest_prompt']:,}"
    refused = f"\n{asked['refused']} of them are refused by the chat template" if asked["refused"] else ""
    return [("answers", told + refused)]


def _labels(facts: dict[str, Any]) -> list[tuple[str, str]]:
    """The labels that a classifier learns, with their rows, and what is left out for another one."""
    if facts["labels"] is None:
        return []
    named = [f"{escape(label)} ({rows:,})" for label, rows in facts["labels"].items()]
    told = ", ".join(named[:_SOURCES]) + (f" and {len(named) - _SOURCES} more" if len(named) > _SOURCES else "")
    if facts["eval"]["unseen_labels"]:
        told += f"\n{facts['eval']['unseen_labels']:,} evaluation rows have others, and are left out"
    return [("labels", told)]


def _own(code: dict[str, Any] | None) -> list[tuple[str, str]]:
    """What takes part of the user's wheel."""
    if code is None:
        return []
    lines = [f"{escape(code['wheel'])}, SHA-256 {code['sha256'][:12]}"]
    return [("own code", "\n".join([*lines, *(f"{words}: {', '.join(n)}" for words, n in code["provides"].items())]))]


def _rows(facts: dict[str, Any]) -> list[tuple[str, str]]:
    from trainer.data.template import UNWRITTEN

    train, packing, step, model = facts["train"], facts["packing"], facts["step"], facts["model"]
    notes = [
        f"{train[key]:,} {text}"
        for key, text in (
            ("without_targets", "rows teach nothing and are left out"),
            *UNWRITTEN.items(),
            ("cut_conversations", "conversations are longer than a row and are cut"),
            ("split_texts", "texts are longer than a row and are split"),
            ("cut_rows", "rows are longer than a row of the model and are cut"),
        )
        if train.get(key)
    ]
    if packing["on"]:
        told = f"on, {packing['filled']:.1%} of the places hold tokens; documents do not see each other "
        told += f"(largest difference {packing['difference']:.1e}, tried with {packing['layers_tried']} layers)"
    else:
        told = f"off: {packing['reason']}; rows are padded"
    attends = packing["attention"]
    if packing["asked"] not in ("auto", attends.split(",")[0].split(" ")[0]):
        attends += f"\n`{packing['asked']}` is asked for, and tried on the GPU at the run's start"
    spread = (
        f"{counted(step['rows'], 'row')} of {step['places']} tokens over {counted(step['ranks'], 'rank')}: each "
        f"{counted(step['micro_batches'], 'forward pass', 'forward passes')} of at most "
        f"{counted(step['micro_batch'], 'row')}"
    )
    if step["rows_of_the_last"] < step["rows"]:
        spread += f"\nthe last step has {step['rows_of_the_last']} rows"
    if step["idle_ranks"]:
        spread += f"\n{step['idle_ranks']} of the ranks have nothing to do"
    curve = facts["learning_rate"]["curve"]
    peak = max(curve, key=lambda point: point[1])
    rate = f"{facts['learning_rate']['schedule']}: {curve[0][1]:.3g} at step 1, {peak[1]:.3g} at step {peak[0]}, "
    rate += f"{curve[-1][1]:.3g} at step {curve[-1][0]}\n{bars([point[1] for point in curve])}"
    saved = facts["checkpoints"]
    size = (facts["memory"] or {}).get("checkpoint")
    stay = f"the newest {saved['kept']} stay"
    if saved["best_kept"]:
        stay += f", and the {saved['best_kept']} with the lowest evaluation loss"
    if saved["place"] is not None:
        stay += f"\nin {escape(saved['place'])}"
    if saved["fast"] is not None:
        stay += f"\nevery {saved['fast']['every']} in {escape(saved['fast']['folder'])} of each node; "
        stay += f"the newest {saved['fast']['kept']} stay there"
    again = ""
    if model["activation_checkpointing"] != "none":
        again = f", activation checkpointing: {model['activation_checkpointing']}"
    if model["compiled"]:
        again += ", compiled blocks"
    tokens = "" if facts["tokens"] is None else f", {facts['tokens']:,} tokens"
    return [
        ("train rows", "\n".join([f"{train['rows']:,} rows, {train['documents']:,} documents", *notes])),
        ("", f"{train['tokens']:,} tokens, {train['targets']:,} of them targets"),
        (
            "eval rows",
            f"{facts['eval']['rows']:,} rows, {facts['eval']['targets']:,} targets{often(facts['evaluations'])}",
        ),
        *_labels(facts),
        *_own(facts["user_code"]),
        *_answers(facts["answers"]),
        ("attention", attends),
        ("packing", told),
        ("packs", f"{packing['packs_per_epoch']:,} in an epoch"),
        *_sources(packing["sources"]),
        ("steps", f"{facts['steps']:,}, {facts['epochs']:g} epochs{tokens}"),
        ("one step", spread),
        ("model", f"{escape(model['base'])}, {model['method']}, {model['precision']}{again}"),
        ("", f"{model['parameters']:,} weights, {model['trained']:,} of them trained"),
        ("memory", (facts["memory"] or {}).get("text", "unknown")),
        (
            "checkpoints",
            f"every {saved['every']}{f', about {size} each' if size else ''}{often(saved['written'])}; {stay}",
        ),
        ("rate", rate),
    ]
