"""`dropforge init`: a commented recipe to begin with."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import typer
import yaml

from dropforge.cli.recipes import complete_recipe
from dropforge.errors import DropforgeError, RecipeError
from dropforge.recipes import load_recipe, presets
from dropforge.recipes.load import help_of_key
from dropforge.recipes.rules import PLACEHOLDER
from dropforge.terminal import Console, Text
from dropforge.whole_file import write_new

#: What people change first, by section; those that the preset leaves open are left out.
KEYS: Final = {
    "data": ("text_column", "eval_fraction"),
    "train": (
        "method",
        "lora",
        "sequence_length",
        "tokens_per_step",
        "micro_batch",
        "epochs",
        "max_steps",
        "learning_rate",
        "schedule",
        "warmup",
        "precision",
        "activation_checkpointing",
        "loss_on",
        "eval_every",
        "checkpoint_every",
        "seed",
    ),
    "compute": ("nodes", "gpus", "cpus", "memory_gb", "deadline_minutes", "retries"),
    "evaluate": ("max_rows",),
    "promote": ("alias", "min_improvement", "better_than_base"),
}
_HELP: Final = 90  # characters


def init(
    path: Annotated[Path, typer.Argument(help="The file to write.", metavar="FILE")] = Path("recipe.yaml"),
    preset: Annotated[
        str, typer.Option(help="The preset that it extends.", autocompletion=complete_recipe, metavar="PRESET")
    ] = "lora",
    base: Annotated[
        str | None,
        typer.Option(
            help="The model to start from: a Hugging Face id, a folder or s3://...", show_default="the preset's"
        ),
    ] = None,
) -> None:
    """Write a recipe with what is changed most often as comments, each with its meaning and the preset's value."""
    text = recipe_text(preset, base, path.name)
    try:
        write_new(path, text.encode())
    except FileExistsError:
        raise DropforgeError(f"file {path}", "it is there already", "Name another one: `dropforge init FILE`") from None
    console = Console(soft_wrap=True, highlight=False)
    console.print(Text(f"Written to {path}. See what it takes with `dropforge plan {path}`, then train:"))
    console.print(Text(f"  dropforge drop DATA --family NAME --recipe {path} --follow"))


def recipe_text(preset: str, base: str | None, name: str) -> str:
    """Return the recipe's YAML. :raises RecipeError: if there is no such preset."""
    if preset not in presets():
        raise RecipeError(f"preset {preset!r}", "there is none", f"Presets: {', '.join(presets())}")
    recipe = load_recipe(preset)
    values = recipe.plain()
    values["train"]["epochs"] = recipe.train.passes
    lines = [
        f"# A recipe: `dropforge plan {name}` shows what it takes, `dropforge presets` what else it could extend.",
        "# Behind `#-` are the preset's values: to change one, take the `#-` from its line and from its section's.",
        f"extends: {preset}",
        *_base(base, values["base"].get("model")),
    ]
    for section, keys in KEYS.items():
        lines += ["", f"#-{section}:", *_section(section, keys, values[section])]
    return "\n".join(lines) + "\n"


def _base(base: str | None, model: str | None) -> Iterator[str]:
    about = _about("base.model")
    if base is not None or model == PLACEHOLDER:
        shown = yaml.safe_dump({"model": base or "Qwen/Qwen2.5-0.5B-Instruct"}, width=1 << 16, allow_unicode=True)
        yield "base:"
        yield f"  {shown.strip()}  # {about}"
    elif model is not None:
        yield "#-base:"
        yield f"#-  model: {model}  # {about}"


def _section(section: str, keys: tuple[str, ...], values: dict[str, Any]) -> Iterator[str]:
    for key in keys:
        if values.get(key) is not None:
            shown = yaml.safe_dump({key: values[key]}, default_flow_style=True, sort_keys=False, width=1 << 16)
            yield f"#-  {shown.strip()[1:-1]}  # {_about(f'{section}.{key}')}"


def _about(key: str) -> str:
    """Return the beginning of a key's help, on one line."""
    text = " ".join(help_of_key(key).split())
    first = text.partition(". ")[0].partition("; ")[0].rstrip(".")
    return first if len(first) <= _HELP else f"{first[:_HELP].rpartition(' ')[0]} ..."
