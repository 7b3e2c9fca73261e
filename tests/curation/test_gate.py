"""The gate before training: each rule refuses with the thing, the cause and the mend."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from typing import Any

import pytest

import curation
from curation.gate import overruled
from dropforge.dataset import Manifest, Shard
from dropforge.errors import DataError
from dropforge.recipe import Recipe

SOUND = {"input": 110, "train": 90, "eval": 10, "duplicate": 5, "bad_json": 5}


def manifest(**changes: int) -> Manifest:
    counts = {**SOUND, **changes}
    counts["input"] = changes.get("input", sum(rows for name, rows in counts.items() if name != "input"))
    shards = tuple(Shard(split, f"{split}.parquet", "0" * 64, counts[split], 1) for split in ("train", "eval"))
    return Manifest("fam", "d" * 64, counts, {}, shards)


def test_sound_dataset_passes_every_rule(recipe: Callable[..., Recipe]) -> None:
    result = curation.check(manifest(), recipe())
    assert [item.ok for item in result] == [True] * 7


@pytest.mark.parametrize(
    ("changes", "values", "said"),
    [
        ({"train": 10, "eval": 5}, {}, ("enough rows", "15 rows", "at least 20", "curation.min_rows")),
        ({"bad_json": 40}, {}, ("quarantined", "mostly bad_json (40)", "at most 20.00%", "curation.max_quarantined")),
        (
            {"gopher_few_words": 1000, "c4_no_lines": 30},
            {},
            (
                "few rows filtered",
                "mostly gopher_few_words (1,000)",
                "at most 90.00%",
                "gopher.min_words",
                "max_filtered",
            ),
        ),
        ({"torn_file": 1}, {"max_quarantined": 1.0}, ("whole files", "torn_file (1)", "upload the file again")),
        ({"eval": 0}, {}, ("both splits", "90 train, 0 eval", "group")),
        ({"input": 111}, {}, ("ledger adds up", "111 rows read")),
    ],
)
def test_each_rule_refuses(
    recipe: Callable[..., Recipe], changes: dict[str, int], values: dict[str, Any], said: tuple[str, ...]
) -> None:
    with pytest.raises(DataError) as caught:
        curation.check(manifest(**changes), recipe(**values))
    assert all(text in str(caught.value) for text in said)


LEFT: dict[str, tuple[str, bytes]] = {
    "file_encoding": ("b.jsonl", '{"text": "sixteen bits"}\n'.encode("utf-16")),
    "bad_format": ("b.jsonl.xz", lzma.compress(b'{"text": "packed"}\n')),
    "bad_header": ("b.csv", b"text,text\na,b\n"),
    "torn_file": ("b.json", b'[{"text": "a"}, {"text": "b"'),
    "bad_arrow": ("b.arrow", b"\xff\xff\xff\xff" + bytes(300)),
}


@pytest.mark.parametrize("reason", LEFT)
def test_a_file_that_is_not_read_to_its_end_is_no_single_row(
    make: Callable[..., Manifest], recipe: Callable[..., Recipe], texts: Callable[..., list[bytes]], reason: str
) -> None:
    name, data = LEFT[reason]
    made = make({"a.jsonl": b"\n".join(texts(200)), name: data})
    with pytest.raises(DataError, match=rf"whole files.*{reason} \(1\)"):
        curation.check(made, recipe())


def test_shards_that_hold_other_numbers_are_refused(recipe: Callable[..., Recipe]) -> None:
    sound = manifest()
    short = Manifest(**{**sound.__dict__, "shards": sound.shards[:1]})
    with pytest.raises(DataError, match="ledger adds up"):
        curation.check(short, recipe())


def test_one_group_cannot_be_split(make: Callable[..., Manifest], recipe: Callable[..., Recipe]) -> None:
    rows = [b'{"text": "row %d", "group": "only"}' % n for n in range(50)]
    with pytest.raises(DataError, match="one input, or of one group"):
        curation.check(make({"a.jsonl": b"\n".join(rows)}), recipe())


# --- ceilings of the recipe's own, and a person's word against them ---


def test_a_ceiling_for_a_reason(recipe: Callable[..., Recipe]) -> None:
    many = manifest(near_duplicate=90)
    with pytest.raises(DataError) as caught:
        curation.check(many, recipe(gate={"max": {"near_duplicate": 0.4}}))
    said = str(caught.value)
    assert all(text in said for text in ("few rows near_duplicate", "45.00% of 200 rows (90)", "at most 40.00%"))
    assert "curation.gate.max.near_duplicate" in said
    curation.check(many, recipe(gate={"max": {"near_duplicate": 0.45}}))


def test_nothing_contaminated_is_a_ceiling_of_zero(recipe: Callable[..., Recipe]) -> None:
    asked = recipe(gate={"max": {"contaminated": 0}})
    curation.check(manifest(), asked)
    with pytest.raises(DataError, match="few rows contaminated"):
        curation.check(manifest(contaminated=1), asked)


def test_a_ceiling_for_no_reason_is_refused_before_any_work(
    make: Callable[..., Manifest], store: Any, recipe: Callable[..., Recipe]
) -> None:
    with pytest.raises(DataError, match="Write `near_duplicate`"):
        make({"a.jsonl": b'{"text": "a"}'}, gate={"max": {"near_duplicates": 0.4}})
    assert not list(store.list("datasets/"))


def test_a_floor_in_words(make: Callable[..., Manifest], recipe: Callable[..., Recipe]) -> None:
    made = make({"a.jsonl": b"\n".join(b'{"text": "row  number\\n%d"}' % n for n in range(60)) + b"\nbroken"})
    assert {item.name: item.found for item in curation.check(made, recipe(gate={"min_words": 180}))}[
        "enough words"
    ] == "180 words after curation"
    with pytest.raises(DataError) as caught:
        curation.check(made, recipe(gate={"min_words": 181}))
    assert all(text in str(caught.value) for text in ("enough words", "at least 181", "curation.gate.min_words"))
    assert overruled(curation.check(made, recipe(gate={"min_words": 181, "override": "a first look"}))) == (
        "enough words",
    )
    with pytest.raises(DataError, match=r"does not record.*split_salt"):
        curation.check(manifest(), recipe(gate={"min_words": 1}))


def test_an_override_lets_a_limit_pass_and_says_which(recipe: Callable[..., Recipe]) -> None:
    asked = recipe(gate={"override": "a first look, agreed with Ada"})
    assert overruled(curation.check(manifest(train=10, eval=5, bad_json=0), asked)) == ("enough rows",)
    assert overruled(curation.check(manifest(), asked)) == ()


@pytest.mark.parametrize("changes", [{"eval": 0}, {"input": 111}])
def test_no_override_lets_a_broken_dataset_pass(recipe: Callable[..., Recipe], changes: dict[str, int]) -> None:
    with pytest.raises(DataError):
        curation.check(manifest(**changes), recipe(gate={"override": "a first look, agreed with Ada"}))


def test_the_card_tells_the_override(make: Callable[..., Manifest], store: Any) -> None:
    rows = b"\n".join(b'{"text": "row number %d"}' % n for n in range(60))
    made = make({"a.jsonl": rows}, gate={"override": "a <first> look"})
    assert b"a &lt;first&gt; look" in store.get(made.files["card_html"])
    plain = make({"a.jsonl": rows}, name="d2")
    assert plain.digest == made.digest
