"""What the recipe of a drop may say, and of which family."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from dropforge import family_recipe
from dropforge.errors import DropforgeError, RecipeError
from dropforge.families import parse_family
from dropforge.layout import family_recipe_key
from dropforge.recipe import Recipe
from dropforge.recipes.drop_rules import DESCRIPTIVE, LENGTHS, RATES, STRICTER, Authority, is_allowed
from dropforge.recipes.load import build_recipe, key_names, put_drop_over, read_yaml, resolve
from dropforge.store import FolderStore, Store

FAMILY = Authority("family support", "`dropforge family set support` changes it")
#: What the family has: 20 steps, a learning rate of 1e-3, at least 1000 rows.
RECIPE = {"extends": "tiny", "curation": {"min_rows": 1000, "pii": {}}, "promote": {"min_improvement": 0.05}}


def ask(text: str, **more: object) -> Recipe:
    return build_recipe(put_drop_over(resolve({**RECIPE, **more}), read_yaml(text), FAMILY))


@pytest.mark.parametrize(
    ("text", "key"),
    [
        # Whoever may upload would buy a promotion, on rows of their own.
        ("promote: {min_improvement: -1.0}", "promote.min_improvement"),
        ("promote: {min_improvement: 0.5}", "promote.min_improvement"),
        ("promote: {better_than_base: false}", "promote.better_than_base"),
        ("promote: {metric: eval/accuracy}", "promote.metric"),
        ("promote: {alias: production}", "promote.alias"),
        ("evaluate: {max_rows: 1}", "evaluate.max_rows"),
        (f"evaluate: {{holdout: mine/{'0' * 64}}}", "evaluate.holdout"),
        ("data: {eval_fraction: 0.001}", "data.eval_fraction"),
        ("data: {split_salt: mine}", "data.split_salt"),
        ("data: {source: {prefix: lake/}}", "data.source"),
        # Whose data and models are read.
        ("base: {model: /etc, scratch: null}", "base.model"),
        ("base: {start: runs/other-1/step-5}", "base.start"),
        ("base: {scratch: {hidden_size: 32}}", "base.scratch.hidden_size"),
        ("curation: {decontaminate: {sets: {a: drops/other/d1/a.jsonl}}}", "curation.decontaminate"),
        # What runs, where, with how much.
        ("code: {wheel: /a/own-1.0-py3-none-any.whl, sha256: '%s'}" % ("0" * 64), "code"),
        ("compute: {image: evil}", "compute.image"),
        ("compute: {nodes: 500}", "compute.nodes"),
        ("compute: {nodes: 500, gpus: 8}", "compute."),
        ("compute: {memory_gb: 1.0e+3}", "compute.memory_gb"),
        ("compute: {deadline_minutes: 1}", "compute.deadline_minutes"),
        ("train: {checkpoints: 's3://elsewhere/x'}", "train.checkpoints"),
        ("train: {keep_checkpoints: 1000}", "train.keep_checkpoints"),
        ("train: {method: lora}", "train.method"),
        # Masks and limits.
        ("curation: {pii: null}", "curation.pii"),
        ("curation: {pii: {kinds: [ip]}}", "curation.pii.kinds"),
        ("curation: {pii: {key_env: AWS_SECRET_ACCESS_KEY}}", "curation.pii.key_env"),
        ("curation: none", "curation."),
        ("curation: {min_rows: 999}", "curation.min_rows"),
        ("curation: {max_quarantined: 0.9}", "curation.max_quarantined"),
        ("data: {max_left_out: 1}", "data.max_left_out"),
        ("drops: {bounds: {train.learning_rate: [0, 1]}}", "drops.bounds"),
        # Amounts.
        ("train: {max_steps: 21}", "train.max_steps"),
        ("train: {max_steps: null}", "train.max_steps"),
        ("train: {epochs: 1000}", "train.epochs"),
        ("train: {epochs: 0.5}", "train.epochs"),
        ("train: {sequence_length: 256}", "train.sequence_length"),
        ("train: {learning_rate: 1.0e-9}", "train.learning_rate"),
        ("train: {learning_rate: 0.1}", "train.learning_rate"),
        ("data: {max_row_bytes: 9000000}", "data.max_row_bytes"),
        ("extends: full", "base."),
    ],
)
def test_a_drop_does_not_decide_what_its_family_does(text: str, key: str) -> None:
    with pytest.raises(RecipeError, match=rf"recipe key `{re.escape(key)}") as told:
        ask(text)
    assert "family support" in told.value.cause
    assert "`dropforge family set support` changes it" in told.value.mend


def test_a_drop_describes_its_rows_and_may_ask_for_less() -> None:
    asked = ask(
        "data: {columns: {prompt: q, completion: a}, license: CC-BY-4.0, encoding: auto, keep_columns: [id], "
        "limit_rows: 50, max_left_out: 0.1}\n"
        "train: {max_steps: 5, learning_rate: 5.0e-4, sequence_length: 64, max_rows: 10}\n"
        "curation: {min_rows: 2000, max_quarantined: 0.0}\n"
        "promote: {min_improvement: 0.05}\n"  # as the family has it
    )
    assert asked.data.columns == {"prompt": "q", "completion": "a"}
    assert (asked.train.max_steps, asked.train.learning_rate, asked.curation.min_rows) == (5, 5e-4, 2000)
    assert ask("data: {prompt_template: '{a} and {b}'}").data.prompt_template == "{a} and {b}"


def test_where_all_drops_are_read_again_none_of_them_says_how() -> None:
    """Its columns would be those of every drop of the family, and of its evaluation rows."""
    growing = {**RECIPE["curation"], "scope": "family"}  # type: ignore[dict-item]
    swapped = "data: {columns: {prompt: completion, completion: prompt}}"
    with pytest.raises(
        RecipeError, match=r"(?s)`data\.columns`.*family support has .* for all its drops, which are read"
    ):
        ask(swapped, curation=growing)
    for key, value in (("text_column", "body"), ("keep_columns", "[a]"), ("encoding", "latin-1")):
        with pytest.raises(RecipeError, match=rf"`data\.{key}`"):
            ask(f"data: {{{key}: {value}}}", curation=growing)
    asked = ask("data: {license: MIT}\ntrain: {max_steps: 5}", curation=growing)
    assert (asked.data.license, asked.train.max_steps) == ("MIT", 5)
    same = read_yaml(swapped)
    assert ask(swapped, curation=growing, **same).data.columns is not None  # what the family says as well


def test_a_family_gives_numbers_bounds_of_their_own() -> None:
    drops = {"bounds": {"train.learning_rate": [1e-4, 2e-3], "train.epochs": [0.5, 3], "train.max_steps": [10, 400]}}
    assert ask("train: {max_steps: 400}", drops=drops).train.max_steps == 400
    assert ask("train: {epochs: 3}", drops=drops).train.epochs == 3
    for text, told in (
        ("train: {max_steps: 401}", "lets a drop ask for 10 to 400"),
        ("train: {max_steps: 9}", "lets a drop ask for 10 to 400"),
        ("train: {epochs: 3.5}", "lets a drop ask for 0.5 to 3"),
        ("train: {learning_rate: 5.0e-3}", r"lets a drop ask for 0.0001 to 0.002"),
    ):
        with pytest.raises(RecipeError, match=told):
            ask(text, drops=drops)
    with pytest.raises(RecipeError, match="the wrong way round"):
        ask("{}", drops={"bounds": {"train.epochs": [3, 1]}})
    with pytest.raises(RecipeError, match=r"drops\.bounds"):
        ask("{}", drops={"bounds": {"compute.nodes": [1, 100]}})


def test_a_rate_of_exactly_ten_times_the_family_s_is_within_a_factor_of_ten() -> None:
    for holds, wanted in ((3e-4, 3e-3), (1e-5, 1e-6), (3e-3, 3e-4), (7e-5, 7e-4)):
        assert ask(f"train: {{learning_rate: {wanted}}}", train={"learning_rate": holds}).train.learning_rate == wanted
    with pytest.raises(RecipeError, match=r"lets a drop ask for"):
        ask("train: {learning_rate: 3.01e-3}", train={"learning_rate": 3e-4})


def test_all_keys_that_a_drop_may_not_change_are_named_at_once() -> None:
    with pytest.raises(RecipeError) as caught:
        ask("train: {max_steps: 999, seed: 7, learning_rate: 5.0}\ndata: {text_column: body}")
    told = str(caught.value)
    for key in ("max_steps", "seed", "learning_rate"):
        assert told.count(f"`train.{key}`") == 1
    assert "text_column" not in told
    assert ". Leave them out of the drop; " in told
    config = ", ".join(f"key_{number}: 1" for number in range(40))
    with pytest.raises(RecipeError, match=r"`base.scratch.config.key_9`: .*; and 30 more keys\. Leave them"):
        ask(f"base: {{scratch: {{config: {{{config}}}}}}}", base={"scratch": {"config": {"model_type": "qwen2"}}})


@pytest.mark.parametrize("text", ["num_key_value_heads: null", "num_hidden_layers: 2.0", "tie_word_embeddings: 1"])
def test_a_config_is_compared_as_it_is_written(text: str) -> None:
    config = {"model_type": "qwen2", "vocab_size": 512, "num_hidden_layers": 2, "tie_word_embeddings": True}
    with pytest.raises(RecipeError, match=r"recipe key `base.scratch.config"):
        ask(f"base: {{scratch: {{config: {{{text}}}}}}}", base={"scratch": {"config": config}})


def test_every_key_that_a_drop_may_say_is_one_of_the_recipe() -> None:
    allowed = DESCRIPTIVE | LENGTHS | RATES | STRICTER.keys()
    assert allowed <= set(key_names())
    assert all(map(is_allowed, allowed))
    assert not any(map(is_allowed, ("data", "data.columns_of_others", "promote", "train")))


def test_the_ledger_s_recipe_holds_and_the_file_s_before_it(store: Store) -> None:
    assert not family_recipe.rule(store, "fam", "tiny").own
    for drop, steps, kept in (("d1", 7, True), ("d2", 9, False)):
        first = family_recipe.first({"train": {"max_steps": steps}}, "tiny", drop)
        assert family_recipe.keep_first(store, "fam", first) is kept
    found = family_recipe.rule(store, "fam", "sample")  # the preset changed since
    assert (found.own, build_recipe(found.values).train.max_steps) == (True, 7)
    assert "set by its first drop, d1" in found.authority.name
    before = family_recipe.write(
        store, "fam", {"extends": "tiny", "code": None, "train": {"max_steps": 8}}, "tiny", "ann"
    )
    assert before is not None
    assert before.by == "d1"
    assert build_recipe(family_recipe.rule(store, "fam", "tiny").values).train.max_steps == 8
    file = parse_family("recipe: {extends: tiny, train: {max_steps: 3}}")
    found = family_recipe.rule(store, "fam", "tiny", file)
    assert (found.values["train"]["max_steps"], "fam.yaml" in found.authority.name) == (3, True)
    # A file without a recipe says nothing of it.
    rules = parse_family("intake: {rate: 1 per day}")
    assert build_recipe(family_recipe.rule(store, "fam", "tiny", rules).values).train.max_steps == 8


def test_a_first_drop_s_recipe_is_held_to_a_preset_that_became_stricter(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    team = tmp_path / "team.yaml"
    team.write_text("extends: tiny")
    family_recipe.keep_first(store, "fam", family_recipe.first({"promote": {"min_improvement": -1.0}}, "tiny", "d1"))
    assert family_recipe.rule(store, "fam", "team").values["promote"]["min_improvement"] == -1.0
    team.write_text("extends: tiny\npromote: {min_improvement: 0.05, confidence: 0.95}")
    with pytest.raises(RecipeError, match=r"recipe of family fam.*`promote.min_improvement`.*family set fam"):
        family_recipe.rule(store, "fam", "team")


def test_a_recipe_over_a_preset_that_is_gone_or_cannot_work_any_more_is_named_with_its_family(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("DROPFORGE_PRESETS", str(tmp_path))
    (tmp_path / "team.yaml").write_text("extends: tiny")
    (tmp_path / "other.yaml").write_text("extends: tiny")
    family_recipe.write(store, "fam", {"train": {"sequence_length": 128}}, "team", "ann")
    assert family_recipe.rule(store, "fam", "lora").values["train"]["sequence_length"] == 128  # whatever the preset is
    (tmp_path / "team.yaml").write_text("extends: tiny\nbase: {scratch: {context: 64}}")
    with pytest.raises(RecipeError, match=r"recipe of family fam \(set by ann.*sequence_length.*family set fam"):
        family_recipe.rule(store, "fam", "tiny")
    (tmp_path / "team.yaml").unlink()
    with pytest.raises(RecipeError, match=r"recipe of family fam \(set by ann.*no preset 'team'.*family set fam"):
        family_recipe.rule(store, "fam", "tiny")


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"[1]",
        b"{}",
        b'{"recipe": 1, "origin": "drop", "by": "", "at": ""}',
        b"x" * 300_000,
        b"\xff\xfe{",
        b"[" * 90_000,
    ],
)
def test_a_recipe_in_the_ledger_that_cannot_be_read_is_named_and_can_be_set_anew(tmp_path: Path, data: bytes) -> None:
    store = FolderStore(tmp_path)
    store.put(family_recipe_key("fam"), data)
    with pytest.raises(DropforgeError, match=r"ledger/families/fam\.json.*dropforge family set fam"):
        family_recipe.rule(store, "fam", "tiny")
    assert family_recipe.write(store, "fam", {"extends": "tiny"}, "tiny", "ann") is None
    assert family_recipe.rule(store, "fam", "tiny").own
    assert json.loads(store.get(family_recipe_key("fam")))["origin"] == "person"
