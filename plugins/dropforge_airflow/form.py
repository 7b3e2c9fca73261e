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
from dropforge.recipes.load import RECIPE_LIMIT, about_preset, join, merge

# Sections of the form and the recipe keys they show, with their labels, in this order. What to train stands before
# them, without a section, because the page shows only those fields unfolded.
SECTIONS: Final[Mapping[str, Mapping[str, str]]] = {
    "Model": {
        "task": "Task",
        "base.model": "Base model",
        "base.revision": "Revision of the base model",
        "base.start": "Start from",
        "train.method": "Method",
        "train.lora.r": "LoRA rank",
        "train.lora.alpha": "LoRA alpha",
        "train.lora.dropout": "LoRA dropout",
    },
    "Data": {
        "data.eval_fraction": "Share of rows for evaluation",
        "data.text_column": "Text column",
        "curation.exact_duplicates": "Exact duplicates",
        "curation.min_rows": "Fewest rows",
    },
    "Training": {
        "train.epochs": "Epochs",
        "train.max_steps": "Steps (instead of epochs)",
        "train.learning_rate": "Peak learning rate",
        "train.schedule": "Learning rate schedule",
        "train.tokens_per_step": "Tokens per step, all ranks",
        "train.sequence_length": "Sequence length (tokens)",
        "train.micro_batch": "Micro-batch (sequences per rank)",
        "train.precision": "Precision",
        "train.activation_checkpointing": "Activation checkpointing",
        "train.seed": "Seed",
        "train.eval_every": "Evaluate every (steps or minutes)",
        "train.checkpoint_every": "Checkpoint every (steps or minutes)",
    },
    "Compute": {
        "compute.backend": "Backend",
        "compute.instance": "Instance type",
        "compute.nodes": "Pods",
        "compute.processes_per_node": "Ranks per pod",
        "compute.parallel": "Parallelism",
        "compute.cpus": "CPU cores per pod",
        "compute.memory_gb": "Memory per pod (GB)",
        "compute.gpus": "GPUs per pod",
        "compute.gpu_memory_gb": "Memory of each GPU (GB)",
        "compute.image": "Trainer image",
        "compute.priority": "Priority class (Kueue)",
        "compute.deadline_minutes": "Deadline of each job (minutes)",
        "compute.retries": "Retries after infrastructure failures",
    },
    "Evaluation and promotion": {
        "evaluate.max_rows": "Most evaluation rows",
        "promote.metric": "Deciding metric",
        "promote.min_improvement": "Smallest improvement (fraction)",
        "promote.confidence": "Confidence",
        "promote.better_than_base": "Must beat the base model",
        "promote.alias": "Alias",
        "promote.approval.deadline_hours": "Approval: wait for (hours)",
        "promote.approval.otherwise": "Approval: without an answer",
    },
    "Costs": {
        "compute.limits.ask_above.gpu_hours": "Ask above (GPU-hours)",
        "compute.limits.ask_above.core_hours": "Ask above (core-hours)",
        "compute.limits.ask_above.cost": "Ask above (cost)",
        "compute.limits.unknown": "If the plan cannot estimate it",
        "compute.limits.deadline_hours": "Question: wait for (hours)",
        "compute.limits.otherwise": "Question: without an answer",
        "compute.limits.stop_above.gpu_hours": "Stop above (GPU-hours)",
        "compute.limits.stop_above.core_hours": "Stop above (core-hours)",
        "compute.limits.stop_above.cost": "Stop above (cost)",
        "compute.price.gpu_hour": "Price of a GPU-hour",
        "compute.price.core_hour": "Price of a core-hour",
        "compute.price.currency": "Currency (three letters)",
        "compute.gpu_tflops": "Speed of each GPU (TFLOP/s)",
    },
    "Own code": {"code.wheel": "Wheel", "code.sha256": "SHA-256 of the wheel"},
}

_YES_NO: Final = {"yes": True, "no": False}
_INTERVALS: Final = frozenset({"train.eval_every", "train.checkpoint_every"})
_DEEPEST: Final = 16  # levels of a recipe or sweep in the form
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
                "values_display": {
                    "None": f"that of the family{otherwise}",
                    **{name: f"{name}: {about_preset(name)}" for name in known},
                },
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
        fields |= {field_name(key): _recipe_field(schema, key, section, label) for key, label in keys.items()}
    fields["overrides"] = FormField(
        None,
        'Any other recipe keys, as nested JSON: `{"train": {"clip": 0.5}}`. They win over all fields above.',
        {**nested_object(), "title": "More recipe keys", "section": "Everything else"},
    )
    return fields


def nested_object() -> dict[str, Any]:
    """JSON schema of an object, or nothing, as far as Airflow carries one to its tasks: whole numbers have 64 bits."""
    number = {"type": "number", "minimum": -(2**63), "maximum": 2**63 - 1}
    plain: list[dict[str, Any]] = [number, {"type": ["string", "boolean", "null"]}]
    levels: dict[str, Any] = {}
    for level in range(_DEEPEST):
        inner = {"$ref": f"#/$defs/level{level + 1}"}
        lists = {"type": "array", "items": inner}
        levels[f"level{level}"] = {"anyOf": [*plain, lists, {"type": "object", "additionalProperties": inner}]}
    levels[f"level{_DEEPEST}"] = {"anyOf": plain}
    return {"type": ["object", "null"], "additionalProperties": {"$ref": "#/$defs/level0"}, "$defs": levels}


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
        if key == "promote.better_than_base" and isinstance(value, str):
            value = _YES_NO.get(value, value)
        elif key in _INTERVALS and isinstance(value, str) and value.isdecimal():
            value = int(value)
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


def _recipe_field(schema: Mapping[str, Any], key: str, section: str, label: str) -> FormField:
    found = _find(schema, key)
    description = str(found.get("description", ""))
    shape = _joined(found)
    field: dict[str, Any] = {"title": label, "section": section}
    choices = shape.get("enum") or ([shape["const"]] if "const" in shape else None)
    if shape.get("type") == "boolean":
        choices = list(_YES_NO)  # a switch knows no third state for "as in the preset"
    if choices:
        field |= {"type": ["string", "null"], "enum": [None, *choices], "values_display": {"None": _EMPTY}}
        return FormField(None, description, field)
    if key in _INTERVALS:
        least = "[1-9]" if shape["minimum"] else "[0-9]"
        # Of several types Airflow's page takes the first: a line of text, where a number's digits are text too.
        field |= {"type": ["string", "integer", "null"], "pattern": rf"^{least}[0-9]{{0,8}}$|{shape['pattern']}"}
        return FormField(None, description, field | {"minimum": shape["minimum"], "maximum": shape["maximum"]})
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
