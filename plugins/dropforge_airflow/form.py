"""The form in Airflow's UI, made from the recipe's own JSON schema, and what a filled form asks for.

Pure: no Airflow. Every field may be left empty, which means the value of the preset (or of the drop's own recipe);
what the form does not show can be given as JSON under `overrides`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from dropforge.data_names import SYNTAX
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.recipes import presets
from dropforge.recipes.load import RECIPE_LIMIT, join, merge

# Sections of the form and the recipe keys they show, in this order. What to train stands before them, without a
# section, because the page shows only those fields unfolded.
SECTIONS: Final[Mapping[str, tuple[str, ...]]] = {
    "Model": (
        "task",
        "base.model",
        "base.revision",
        "base.start",
        "train.method",
        "train.lora.r",
        "train.lora.alpha",
    ),
    "Data": ("data.eval_fraction", "data.text_column", "curation.exact_duplicates", "curation.min_rows"),
    "Training": (
        "train.epochs",
        "train.max_steps",
        "train.learning_rate",
        "train.schedule",
        "train.tokens_per_step",
        "train.sequence_length",
        "train.micro_batch",
        "train.precision",
        "train.seed",
        "train.eval_every",
        "train.checkpoint_every",
    ),
    "Compute": (
        "compute.backend",
        "compute.instance",
        "compute.nodes",
        "compute.processes_per_node",
        "compute.parallel",
        "compute.cpus",
        "compute.memory_gb",
        "compute.gpus",
        "compute.image",
        "compute.priority",
        "compute.deadline_minutes",
        "compute.retries",
    ),
    "Evaluation and promotion": (
        "evaluate.max_rows",
        "promote.metric",
        "promote.min_improvement",
        "promote.confidence",
        "promote.better_than_base",
        "promote.alias",
        "promote.approval.deadline_hours",
        "promote.approval.otherwise",
    ),
    "Costs": (
        "compute.limits.ask_above.gpu_hours",
        "compute.limits.ask_above.core_hours",
        "compute.limits.ask_above.cost",
        "compute.limits.unknown",
        "compute.limits.deadline_hours",
        "compute.limits.otherwise",
        "compute.limits.stop_above.gpu_hours",
        "compute.limits.stop_above.core_hours",
        "compute.limits.stop_above.cost",
        "compute.price.gpu_hour",
        "compute.price.core_hour",
        "compute.price.currency",
        "compute.gpu_tflops",
    ),
    "Own code": ("code.wheel", "code.sha256"),
}

_YES_NO: Final = {"yes": True, "no": False}
_EMPTY: Final = "as in the family's recipe or the preset"


@dataclass(frozen=True)
class FormField:
    """One field: the arguments of an Airflow `Param`."""

    default: Any
    description: str
    schema: Mapping[str, Any]


def form_fields(default_preset: str | None = None) -> dict[str, FormField]:
    """All fields of the form, by name, in the order of the page.

    :raises RecipeError: if `default_preset` is no preset.
    """
    known = list(presets())
    if default_preset is not None and default_preset not in known:
        raise RecipeError(
            "environment variable DROPFORGE_PRESET",
            f"there is no preset {default_preset!r}",
            f"Presets: {', '.join(known)}",
        )
    otherwise = "" if default_preset is None else f", else {default_preset}"
    fields = {
        "preset": FormField(
            None,
            "Empty for the recipe of the family. A preset takes its place, and of a recipe.yaml in the drop only "
            "what describes its rows counts then. The fields below win over both.",
            {
                "type": ["string", "null"],
                "enum": [None, *known],
                "values_display": {"None": f"that of the family{otherwise}"},
                "title": "Preset",
            },
        ),
        "data": _text("Data", f"What to train on: {SYNTAX}. Runs that a drop started leave it empty.", 4000),
        "family": _text("Family", "Family of the model; needed unless `data` is `FAMILY/DROP` or an id."),
        "again": FormField(
            False,
            "Train although the drop was trained on before.",
            {"type": "boolean", "title": "Train again"},
        ),
    }
    fields["recipe"] = FormField(
        None,
        "A recipe as YAML or JSON, whole or in part. It wins over preset and drop; a field below that says otherwise "
        "is refused. Its `extends` takes the preset's place.",
        {"type": ["string", "null"], "format": "multiline", "maxLength": RECIPE_LIMIT, "title": "Recipe to paste"},
    )
    schema = Recipe.model_json_schema()
    for section, keys in SECTIONS.items():
        fields |= {field_name(key): _recipe_field(schema, key, section) for key in keys}
    fields["overrides"] = FormField(
        None,
        'Any other recipe keys, as nested JSON: `{"train": {"clip": 0.5}}`. They win over all fields above.',
        {"type": ["object", "null"], "title": "More recipe keys", "section": "Everything else"},
    )
    return fields


def field_name(key: str) -> str:
    """The form's name for a recipe key: `train.learning_rate` is `train_learning_rate`."""
    return key.replace(".", "_")


def form_overrides(params: Mapping[str, Any]) -> dict[str, Any]:
    """The nested recipe values that a filled form asks for; empty fields ask for nothing.

    :raises RecipeError: if `overrides` is no object.
    """
    asked: dict[str, Any] = {}
    for key in (key for keys in SECTIONS.values() for key in keys):
        value = params.get(field_name(key))
        if value is None or value == "":
            continue
        if key == "promote.better_than_base":
            value = _YES_NO.get(value, value)
        nested: Any = value
        for part in reversed(key.split(".")):
            nested = {part: nested}
        asked = join(asked, nested)  # two fields that contradict each other are refused, not chosen from
    more = params.get("overrides") or {}
    if not isinstance(more, Mapping):
        raise RecipeError("form field `overrides`", "it is no JSON object", 'Write it as {"train": {"clip": 0.5}}')
    return merge(asked, more)


def _text(title: str, description: str, longest: int = 160) -> FormField:
    schema = {"type": ["string", "null"], "maxLength": longest, "title": title}
    return FormField(None, description, schema)


def _recipe_field(schema: Mapping[str, Any], key: str, section: str) -> FormField:
    found = _find(schema, key)
    description = str(found.get("description", ""))
    shape = _joined(found)
    # Two limits of the same name, and an adapter's rank, are told apart by the section that they are in.
    inside = " ".join(key.split(".")[1:-1]).replace("_", " ").capitalize()
    field: dict[str, Any] = {"title": f"{inside}: {found['title']}" if inside else str(found["title"])}
    field["section"] = section
    choices = shape.get("enum") or ([shape["const"]] if "const" in shape else None)
    if shape.get("type") == "boolean":
        choices = list(_YES_NO)  # a switch knows no third state for "as in the preset"
    if choices:
        field |= {"type": ["string", "null"], "enum": [None, *choices], "values_display": {"None": _EMPTY}}
        return FormField(None, description, field)
    types = shape["type"] if isinstance(shape["type"], list) else [shape["type"]]
    field["type"] = [*types, "null"]
    limits = ("minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf", "pattern")
    field |= {limit: shape[limit] for limit in limits if limit in shape}
    return FormField(None, description, field)


def _joined(found: Mapping[str, Any]) -> Mapping[str, Any]:
    """The alternatives of a key as one schema: limits say nothing about text, and a pattern nothing about numbers."""
    parts = [part for part in found.get("anyOf", []) if part.get("type") != "null"]
    if not parts:
        return found
    types = [part["type"] for part in parts if "type" in part]
    joined: dict[str, Any] = {key: value for part in reversed(parts) for key, value in part.items()}
    return joined | {"type": types} if len(types) > 1 else joined


def _find(schema: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    found: Mapping[str, Any] = schema
    for part in key.split("."):
        options = (found, *found.get("anyOf", ()))  # a section that may be left out is one of two
        reference = next((part["$ref"] for part in options if "$ref" in part), "")
        if reference:
            found = schema["$defs"][reference.rpartition("/")[2]]
        found = found["properties"][part]
    return found
