"""The form shows the recipe, and what is filled in comes back as recipe values."""

from __future__ import annotations

import json

import jsonschema
import pytest
from dropforge_airflow.form import SECTIONS, form_fields, form_overrides

from dropforge.errors import RecipeError
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
        assert key in values or key.rpartition(".")[0] in values  # or its whole section is left out
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
    """Airflow's page reads a field of several types as JSON, and as text if it is none."""
    schema = dict(form_fields()[key].schema)
    for good in (25, "10 min", None):
        jsonschema.validate(good, schema)
        asked = form_overrides({key: good})
        build_recipe(merge(load_recipe("tiny").plain(), asked))
        assert bool(asked) == (good is not None)
    for bad in (-1, 2.5, "10 hours", "ten", True):
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
    assert field.default == "tiny"
    assert field.schema["enum"] == list(presets())
    with pytest.raises(RecipeError, match="DROPFORGE_PRESET"):
        form_fields("nope")


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
