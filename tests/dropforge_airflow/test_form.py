"""The form shows the recipe, and what is filled in comes back as recipe values."""

from __future__ import annotations

import json
from typing import Any

import jsonschema
import pytest
from airflow.sdk import Param
from airflow.sdk.exceptions import ParamValidationError
from dropforge_airflow.filled import filled
from dropforge_airflow.form import SECTIONS, form_fields, form_overrides

from dropforge.errors import DataError, RecipeError
from dropforge.recipes import load_recipe, presets
from dropforge.recipes.load import build_recipe, merge

KEYS = [key for keys in SECTIONS.values() for key in keys]


def test_every_default_is_valid_because_a_partitioned_dag_needs_it() -> None:
    for name, field in form_fields().items():
        jsonschema.Draft202012Validator.check_schema(dict(field.schema))
        jsonschema.validate(field.default, dict(field.schema))
        assert field.description, name
        assert json.dumps(field.schema)


def test_an_untouched_form_asks_for_nothing() -> None:
    assert form_overrides({name: field.default for name, field in form_fields().items()}) == {}


def test_every_recipe_field_of_the_form_exists_and_takes_the_presets_value() -> None:
    fields, values = form_fields(), load_recipe("sample").flat()
    plain = load_recipe("sample").plain()
    for key in KEYS:
        # Or a section that it is in is left out.
        assert any(".".join(key.split(".")[:end]) in values for end in range(1, key.count(".") + 2))
        value = plain
        for part in key.split("."):
            value = None if value is None else value[part]
        shown = {True: "yes", False: "no"}.get(value, value) if isinstance(value, bool) else value
        jsonschema.validate(shown, dict(fields[key.replace(".", "_")].schema))


@pytest.mark.parametrize(
    ("name", "value"), [("train_learning_rate", -1), ("train_method", "magic"), ("compute_nodes", 0), ("preset", "x")]
)
def test_the_form_itself_refuses_what_the_recipe_would_refuse(name: str, value: object) -> None:
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(value, dict(form_fields()[name].schema))


@pytest.mark.parametrize("key", ["train_eval_every", "train_checkpoint_every"])
def test_a_field_takes_all_that_its_text_offers(key: str) -> None:
    """Airflow's page shows the first type of several, a line of text; a program may give a number."""
    schema = dict(form_fields()[key].schema)
    assert next(kind for kind in schema["type"]) == "string"
    for good, kept in ((25, 25), ("25", 25), ("10 min", "10 min")):
        jsonschema.validate(good, schema)
        asked = form_overrides({key: good})
        assert asked == {"train": {key.removeprefix("train_"): kept}}
        build_recipe(merge(load_recipe("tiny").plain(), asked))
    jsonschema.validate(None, schema)
    assert form_overrides({key: None}) == {}
    for bad in (-1, 2.5, "10 hours", "ten", "-1", "²", True):
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(bad, schema)


def test_a_filled_form_becomes_nested_recipe_values() -> None:
    filled = {
        "preset": "tiny",
        "train_max_steps": 5,
        "train_lora_r": 4,
        "base_model": "",
        "promote_better_than_base": "no",
        "overrides": {"train": {"max_steps": 6, "clip": 0.5}},
    }
    assert form_overrides(filled) == {
        "train": {"max_steps": 6, "lora": {"r": 4}, "clip": 0.5},
        "promote": {"better_than_base": False},
    }


def test_the_presets_are_offered_and_the_default_follows_the_environment() -> None:
    field = form_fields("tiny")["preset"]
    assert field.default is None
    shown = field.schema["values_display"]
    assert shown["None"] == "that of the family, else tiny"
    assert shown["llama-3.1-8b"] == "llama-3.1-8b: Adapters on Llama 3.1 8B, on one GPU of 80 GB."
    assert field.schema["enum"] == [None, *presets()]
    with pytest.raises(RecipeError, match="DROPFORGE_PRESET"):
        form_fields("nope")


def test_what_airflow_cannot_carry_to_a_task_is_refused_by_the_form() -> None:
    """Its own protocol has 64 bits for a whole number, and ends the task's process before the task begins."""
    field = form_fields()["overrides"]

    def take(value: Any) -> Any:
        return Param(field.default, field.description, **field.schema).resolve(value)

    deep: Any = 1
    for _ in range(14):
        deep = {"a": [deep]} if _ % 2 else {"a": deep}
    for good in (None, {}, {"train": {"max_steps": 6, "clip": 0.5}}, {"a": [{"b": 2**63 - 1}, "c", None]}):
        assert take(good) == good
    digits = int("9" * 60)
    for bad in ({"train": {"max_steps": digits}}, {"a": [{"b": -digits}]}, {"a": 2**63}, {"a": deep}):
        with pytest.raises(ParamValidationError):
            take(bad)


def test_overrides_must_be_an_object() -> None:
    with pytest.raises(RecipeError, match="overrides"):
        form_overrides({"overrides": [1]})


def test_a_wheel_of_ones_own_needs_its_digest() -> None:
    filled = {"code_wheel": "s3://b/own-1.0-py3-none-any.whl", "code_sha256": "0" * 64}
    fields = form_fields()
    for name, value in filled.items():
        jsonschema.validate(value, dict(fields[name].schema))
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate("s3://b/own-1.0.tar.gz", dict(fields["code_wheel"].schema))
    plain = load_recipe("tiny").plain()
    assert build_recipe(merge(plain, form_overrides(filled))).code is not None
    with pytest.raises(RecipeError, match=r"`code.sha256`"):
        build_recipe(merge(plain, form_overrides({"code_wheel": filled["code_wheel"]})))


PASTED = """\
extends: tiny
train: {max_steps: 7, learning_rate: 1e-3}
promote: {approval: {deadline_hours: 2}}
"""


def test_a_pasted_recipe_and_the_fields_say_one_thing_together() -> None:
    params = {"preset": None, "recipe": PASTED, "train_micro_batch": 2, "train_max_steps": 7}
    found = filled(params, "b")
    assert found.preset == "tiny"  # nobody touched the field
    assert found.over == {
        "train": {"max_steps": 7, "learning_rate": 1e-3, "micro_batch": 2},
        "promote": {"approval": {"deadline_hours": 2}},
    }
    resolved = load_recipe("tiny", {"train": {"max_steps": 3}}).plain()
    text = "\n" + json.dumps(resolved, indent="\t")
    found = filled({"preset": "sample", "recipe": text, "train_seed": None}, "b")
    assert build_recipe(merge(load_recipe("sample").plain(), found.over)).plain() == resolved
    assert filled({"recipe": "  \n"}, "b").over == filled({"recipe": None}, "b").over == {}


@pytest.mark.parametrize(
    ("params", "told"),
    [
        ({"recipe": PASTED, "train_max_steps": 8}, r"`train_max_steps`.*`train.max_steps` 8, and the pasted.* says 7"),
        ({"recipe": PASTED, "overrides": {"train": {"max_steps": 8}}}, r"the pasted recipe says 7"),
        ({"recipe": PASTED, "preset": "lora"}, r"`preset`: it is lora, and the pasted recipe extends 'tiny'"),
        ({"recipe": "data: {source: {prefix: x/}}", "data": "prefix:y/"}, r"form field `data`.*says 'x/'"),
        ({"recipe": "train: [1"}, r"form field `recipe`: recipe.*not a YAML mapping"),
        ({"recipe": "a: &x [1]\nb: *x"}, "aliases are not allowed"),
        ({"recipe": "!!python/object/apply:os.system ['x']"}, "not a YAML mapping"),
        ({"recipe": "train: {seed: 1, seed: 2}"}, "appears twice"),
        ({"recipe": '{"train": {"seed": 1, "seed": 2}}'}, "key 'seed' appears twice"),
        ({"recipe": '{"train": {"clip": NaN}}'}, "NaN is no number"),
        ({"recipe": '{"train": {"seed": ' + "9" * 5000 + "}}"}, "99999... is a number of 5000 digits"),
        ({"recipe": '{"extends": ' + "9" * 4000 + "}"}, "`extends`: it is a number of about 4000 digits"),
        ({"recipe": "extends: 0x" + "f" * 5000}, "a number of 5002 characters, line 1"),
        ({"recipe": '{"a":' * 9000}, "recipe"),
        ({"recipe": "x" * 70_000}, "larger than 64 KiB"),
        ({"recipe": "ä" * 40_000}, "larger than 64 KiB"),
        ({"recipe": "- a list"}, "not a YAML mapping"),
        ({"recipe": {"train": {}}}, "it is no text"),
        ({"data": "fam/a", "drop": "fam/b"}, "`drop` is given too"),
    ],
)
def test_a_form_that_contradicts_itself_or_is_hostile_is_refused_with_the_mend(
    params: dict[str, object], told: str
) -> None:
    with pytest.raises((RecipeError, DataError), match=told):
        filled(params, "b")


def test_two_ways_to_say_the_same_are_not_chosen_from() -> None:
    found = filled({"recipe": "train: {epochs: 2}", "train_max_steps": 5}, "b")
    with pytest.raises(RecipeError, match=r"train.epochs.*train.max_steps"):
        build_recipe(merge(load_recipe("tiny").plain(), found.over))


def test_what_people_set_about_promotion_and_costs_is_reachable() -> None:
    params = {
        "promote_confidence": 0.9,
        "promote_approval_deadline_hours": 2,
        "compute_limits_ask_above_core_hours": 3,
        "compute_limits_stop_above_core_hours": 9,
        "compute_limits_otherwise": "start",
        "compute_price_core_hour": 0.1,
        "compute_price_currency": "EUR",
    }
    fields = form_fields()
    for name, value in params.items():
        jsonschema.validate(value, dict(fields[name].schema))
    made = build_recipe(merge(load_recipe("tiny").plain(), form_overrides(params)))
    assert made.promote.approval is not None
    assert made.compute.limits is not None
    assert made.compute.limits.ask_above is not None
    assert made.compute.limits.ask_above.core_hours == 3
    titles = [str(field.schema["title"]) for field in fields.values()]
    assert len(titles) == len(set(titles))
