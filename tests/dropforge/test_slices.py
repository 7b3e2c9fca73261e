"""Slices of evaluation rows: which rows stand together, and names that outsiders may choose."""

from __future__ import annotations

import json
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dropforge import tracking
from dropforge.errors import RecipeError
from dropforge.promotion import Policy, Verdict, decide, policy_of
from dropforge.recipes.drop_rules import Authority
from dropforge.recipes.load import build_recipe, merge, put_drop_over, read_yaml, resolve
from dropforge.run import RunSpec
from dropforge.slices import NONE, REST, Cut, cut, kept_value, metric_name, named
from tests.markdown import narrow

HOSTILE = [
    "../../etc/passwd", "a|b|c", "<script>alert(1)</script>", "`x`\n| forged | row |", "..", ".", "", " ", "a b", "a_b",
    "日本語", "ä" * 500, "\u202eevil", "\ud800", "(none)", "(rest)", "x" * 61, "x" * 62, "rest", "none",
]  # fmt: skip


def test_names_from_outside_are_told_apart_and_break_no_table() -> None:
    names = [named(value) for value in [*HOSTILE, None]]
    assert len(set(names)) == len(names)
    assert not any(re.search(r"[|<>`\s/()]", name) for name in names[:-1])
    assert named("tickets-2026.jsonl") == "tickets-2026.jsonl"
    assert named("日本語") == "日本語"
    assert (names[-1], max(map(len, names)) < 80) == (NONE, True)


@given(st.text(), st.text())
def test_two_values_never_share_a_metric(one: str, other: str) -> None:
    first, second = (metric_name("candidate", "by", named(value), "eval/loss") for value in (one, other))
    assert re.fullmatch(r"candidate/slice/by/[A-Za-z0-9_. -]+/loss", first)
    assert (first == second) is (one == other)
    assert {named(one), named(other)}.isdisjoint({NONE, REST})
    assert first not in {metric_name("candidate", "by", name, "eval/loss") for name in (NONE, REST)}


def test_the_largest_slices_are_told_and_the_rest_together() -> None:
    values = ["b", "a", "b", None, "c", "a", "b", "d"]
    found = cut(Cut("source", 2, 1), values)
    assert [(one.name, one.places) for one in found] == [("b", (0, 2, 6)), ("a", (1, 5)), (REST, (3, 4, 7))]
    assert [one.name for one in cut(Cut("source", 9, 1), values)] == ["b", "a", "c", "d", NONE]
    assert sorted(place for one in found for place in one.places) == list(range(len(values)))


@pytest.mark.parametrize(
    ("extras", "value"),
    [
        ('{"lang": "de"}', "de"),
        ('{"lang": 3}', "3"),
        ('{"lang": 3.0}', "3"),
        ('{"lang": 0.5}', "0.5"),
        ('{"lang": "3.0"}', "3"),  # pandas' floats in CSV
        ('{"lang": "3.00"}', "3"),  # a decimal
        ('{"lang": "1.3.0"}', "1.3.0"),
        ('{"lang": "3.10"}', "3.10"),
        ('{"lang": "03"}', "03"),
        ('{"lang": "True"}', "true"),
        ('{"lang": "FALSE"}', "false"),
        ('{"lang": "de "}', "de"),
        ('{"lang": " "}', None),
        ('{"lang": true}', "true"),
        ('{"lang": {"a": 1}}', None),
        ('{"lang": ""}', None),
        ("{}", None),
        ("", None),
        ("not json", None),
        ("[]", None),
    ],
)
def test_a_kept_column_names_a_slice_only_by_something_plain(extras: str, value: str | None) -> None:
    assert kept_value(extras, "lang") == value


SLICES = [
    {"by": "source", "name": "a.jsonl", "rows": 50, "candidate": {"eval/loss": 1.0}, "champion": {"eval/loss": 2.0}},
    {"by": "source", "name": "b.jsonl", "rows": 40, "candidate": {"eval/loss": 2.2}, "champion": {"eval/loss": 2.0}},
    {"by": "source", "name": REST, "rows": 3, "too_few": 20},
]


def judged(guards: list[dict[str, object]], champion: bool = True) -> Verdict:
    section = {"metric": "eval/loss", "min_improvement": 0.0, "better_than_base": False}
    policy = policy_of({**section, "slices": [{"by": "source", "guards": guards}]}, same_tokenizer=True)
    return decide({"eval/loss": 1.5}, {"eval/loss": 2.0} if champion else None, None, policy, slices=SLICES)


def test_a_slice_that_falls_behind_holds_a_better_candidate_back() -> None:
    verdict = judged([{"metric": "eval/loss", "max_regression": 0.05}])
    assert not verdict.promote
    assert verdict.reason == (
        "source b.jsonl (40 rows): eval/loss is worse than the champion's by 10.00%; 5.00% is let pass"
    )
    assert judged([{"metric": "eval/loss", "max_regression": 0.2}]).promote
    assert not judged([{"metric": "eval/loss", "at_most": 2.1}]).promote
    assert judged([{"metric": "eval/loss", "max_regression": 0.05}], champion=False).promote
    assert not judged([{"metric": "gen/valid-json", "at_least": 0.5}]).promote  # nobody measured it


def test_slices_without_guards_are_told_and_judge_nothing() -> None:
    verdict = judged([])
    assert verdict.promote
    table = verdict.as_markdown()
    assert "| slice | 2.2000 | 2.0000 | yes | eval/loss of source b.jsonl (40 rows) |" in narrow(table)
    assert "source (rest) (3 rows): too few to measure, 20 are needed" in table
    assert "b.jsonl" not in verdict.reason


@pytest.mark.parametrize(
    ("days", "loss", "promote"), [(10.0, 1.99, False), (91.0, 2.1, True), (91.0, 2.3, False), (None, 2.1, False)]
)
def test_an_old_champion_is_replaced_at_a_regression_that_is_let_pass(
    days: float | None, loss: float, promote: bool
) -> None:
    section = {"metric": "eval/loss", "min_improvement": 0.01, "better_than_base": False}
    policy = policy_of({**section, "stale": {"after_days": 90, "min_improvement": -0.1}}, same_tokenizer=True)
    verdict = decide({"eval/loss": loss}, {"eval/loss": 2.0}, None, policy, champion_days=days)
    assert verdict.promote is promote, verdict.reason
    [aged] = [check for check in verdict.checks if check.name == "age"]
    assert ("91.0 days old, more than 90: a gain of -10.00% is enough" in aged.reason) is (days == 91.0)
    assert decide({"eval/loss": loss}, None, None, policy, champion_days=days).promote
    assert not any(
        check.name == "age" for check in decide({"eval/loss": 1.0}, {"eval/loss": 2.0}, None, Policy()).checks
    )


def test_figures_of_slices_with_hostile_names_stand_in_mlflow_as_in_the_verdict(mlflow_server: str) -> None:
    spec = RunSpec("sl-1", "sl", 1, "s3://b/runs/r", "s3://b", "m", "d" * 64, {"train": {"method": "full"}}, "c")
    run = tracking.open_run(mlflow_server, spec, {}, {})
    slices = [
        {**SLICES[0], "name": named(value), "candidate": {"eval/loss": float(number)}}
        for number, value in enumerate(HOSTILE)
    ]
    evaluation = {"candidate": {"eval/loss": 1.0}, "champion": {"eval/loss": 2.0}, "slices": [*slices, SLICES[2]]}
    policy = policy_of(
        {"metric": "eval/loss", "min_improvement": 0, "better_than_base": False, "slices": [{"by": "source"}]},
        same_tokenizer=True,
    )
    verdict = decide(evaluation["candidate"], evaluation["champion"], None, policy, slices=evaluation["slices"])  # type: ignore[arg-type]
    tracking.log_evaluation(mlflow_server, run.run_id, "sl", evaluation, verdict, 7)
    metrics = tracking.client(mlflow_server).get_run(run.run_id).data.metrics
    for one in slices:
        for side in ("candidate", "champion"):
            name = metric_name(side, "source", str(one["name"]), "eval/loss")
            assert metrics[name] == one[side]["eval/loss"]  # type: ignore[index]
    # The table has the numbers that MLflow shows.
    told = [(check.candidate, check.reference) for check in verdict.checks if check.name == "slice"]
    assert told[:-1] == [(float(number), 2.0) for number in range(len(HOSTILE))]
    assert len(verdict.as_markdown().splitlines()) == len(verdict.checks) + 2


HELD = f"evaluate: {{holdout: own/{'a' * 64}}}\n"


def build(text: str) -> None:
    build_recipe(merge(resolve(read_yaml("extends: tiny")), read_yaml(text)))


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("promote: {slices: [{by: lang}]}", "no column 'lang' is kept"),
        ("promote: {slices: [{by: source}, {by: source}]}", "twice"),
        ("promote: {slices: [{min_rows: 100000}]}", "more than the"),
        ("promote: {slices: [{guards: [{metric: gen/rouge-l, at_least: 0.5}]}]}", "nothing measures it"),
        ("promote: {slices: [{guards: [{metric: eval/macro_f1, at_least: 0.5}]}]}", "mean over labels"),
        ("promote: {slices: [{guards: [{metric: model/bytes, at_most: 5}]}]}", "the same in each slice"),
        ("promote: {guards: [{metric: cost/gpu_hours, max_regression: 0.1}]}", "other data and machines"),
        ("promote: {guards: [{metric: cost/total, at_most: 3}]}", "no price makes a cost known"),
        ("promote: {guards: [{metric: holdout/loss, at_most: 3}]}", "Name them in `evaluate.holdout`"),
        (f"{HELD}promote: {{guards: [{{metric: holdout/macro_f1, at_least: 0.5}}]}}", "nothing of a language model"),
        (f"{HELD}promote: {{slices: [{{guards: [{{metric: holdout/loss, at_most: 3}}]}}]}}", "the same in each slice"),
        ("evaluate: {holdout: fam/latest}", "evaluate.holdout"),
        ("promote: {metric: holdout/loss}", "promote.metric"),
        ("promote: {stale: {after_days: 0, min_improvement: 0}}", "after_days"),
    ],
)
def test_what_no_slice_can_show_is_refused(text: str, told: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(told)):
        build(text)


def test_size_and_speed_are_held_against_the_champion_whatever_the_tokenizers() -> None:
    guards = [
        {"metric": "model/bytes", "max_regression": 0.5},
        {"metric": "model/rows_per_second", "max_regression": 0.2, "at_least": 5.0},
    ]
    section = {"metric": "eval/loss", "min_improvement": 0, "better_than_base": False, "guards": guards}
    policy = policy_of(section, same_tokenizer=False)
    champion = {"eval/bits_per_byte": 2.0, "model/bytes": 2_000_000, "model/rows_per_second": 10.0}
    better = {"eval/bits_per_byte": 1.0, "model/bytes": 2_900_000, "model/rows_per_second": 8.5}
    assert decide(better, champion, None, policy).promote
    assert not decide({**better, "model/bytes": 3_100_000}, champion, None, policy).promote
    slower = decide({**better, "model/rows_per_second": 7.0}, champion, None, policy)
    assert "model/rows_per_second is worse than the champion's by 30.00%" in slower.reason
    assert not decide({**better, "model/rows_per_second": 4.0}, None, None, policy).promote


def test_kept_columns_name_slices() -> None:
    build(json.dumps({"data": {"keep_columns": ["lang"]}, "promote": {"slices": [{"by": "lang"}, {"by": "label"}]}}))
    build(json.dumps({"data": {"keep_columns": "all"}, "promote": {"slices": [{"by": "lang"}]}}))


@pytest.mark.parametrize(
    ("by", "data", "key"),
    [
        ("topic", "{keep_columns: all, columns: {source: topic}}", "data.columns.source"),
        ("topic", "{keep_columns: all, columns: {source: ' TOPIC '}}", "data.columns.source"),
        ("topic", '{keep_columns: all, prompt_template: "{topic}: {x}"}', "data.prompt_template"),
        ("topic", "{keep_columns: all, text_column: topic}", "data.text_column"),
        ("group", "{keep_columns: all}", "data.keep_columns"),
    ],
    ids=["column", "case", "template", "text", "usual name"],
)
def test_no_drop_switches_the_family_s_slices_off(by: str, data: str, key: str) -> None:
    family = f"data: {{keep_columns: [{by}]}}\npromote: {{slices: [{{by: {by}}}]}}"
    under = merge(resolve({"extends": "tiny"}), read_yaml(family))
    authority = Authority("family support", "its file may change it")
    told = re.escape(f"recipe key `{key}`: the column {by!r} is read") + f".*`promote.slices.0..by` is {by!r}"
    with pytest.raises(RecipeError, match=told):
        build_recipe(put_drop_over(under, read_yaml(f"data: {data}"), authority))
    # What is named is kept whatever it is read for.
    build_recipe(
        put_drop_over(under, read_yaml(f"data: {data.replace('keep_columns: all', 'license: MIT')}"), authority)
    )
