"""How far a version lies from the one before: the measure, which version is the one before, the card and the gate."""

from __future__ import annotations

import json
import os
import random
from collections import Counter
from collections.abc import Callable
from math import sqrt
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import curation
from curation.card import render
from curation.drift import by_chance, compare, distance, measured
from curation.earlier import Earlier, mark, newest, read_version
from curation.gate import overruled
from curation.told import card_lines
from dropforge import layout
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
EVIL = '<script>alert("x")</script>'


def rows(count: int, words: int, label: str = "a", start: int = 0) -> bytes:
    lines = (
        {"text": " ".join(f"word{n}x{index}" for index in range(words)), "label": f"{label}{n % 3}"}
        for n in range(start, start + count)
    )
    return b"\n".join(json.dumps(line).encode() for line in lines)


def card_of(store: FolderStore, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(manifest.files["card_json"]))
    return found


# --- the measure ---


def test_distance_by_hand() -> None:
    assert distance({"a": 3, "b": 5}, {"a": 6, "b": 10}) == 0
    assert distance({"a": 3}, {"b": 5}) == 1000
    # 1/2 (1/2 log2(2/3) + 1/2 log2 2) + 1/2 log2(4/3) = 0.3113 bits, whose root is 0.558.
    assert distance({"a": 1, "b": 1}, {"a": 7}) == 558


SHARES = st.dictionaries(st.sampled_from("abcdef"), st.integers(1, 10**9), min_size=1)


@given(SHARES, SHARES, SHARES)
def test_distance_is_a_metric(one: dict[str, int], two: dict[str, int], three: dict[str, int]) -> None:
    assert distance(one, two) == distance(two, one)
    assert 0 <= distance(one, two) <= 1000
    assert distance(one, three) <= distance(one, two) + distance(two, three) + 2  # thousandths are rounded


def test_chance_is_what_drops_of_one_heap_show() -> None:
    lot, heap = random.Random(1), list("aaaaabbbbcccddefgh")
    draws = [(Counter(lot.choices(heap, k=500)), Counter(lot.choices(heap, k=300))) for _ in range(200)]
    seen = sqrt(sum(distance(*pair) ** 2 for pair in draws) / len(draws))
    assert seen == pytest.approx(by_chance(*draws[0]), rel=0.1)


# --- the version before ---


def test_the_version_before_is_the_newest_one_by_the_time_of_its_manifest(make: Make, store: FolderStore) -> None:
    assert newest(store, "fam") is None
    made = [make({"a.jsonl": rows(40, words)}, name=f"d{words}") for words in (5, 6, 7)]
    store.put("datasets/other/" + "f" * 64 + "/manifest.json", b"{}")
    for age, manifest in enumerate(made):
        key = layout.manifest_key("fam", manifest.digest)
        os.utime(store.root / key, (2_000_000_000 - age, 2_000_000_000 - age))
    found = newest(store, "fam")
    assert found is not None
    assert found.digest == made[0].digest
    assert found.card == card_of(store, made[0])
    assert card_of(store, make({"a.jsonl": rows(40, 8)}, name="d8"))["drift"]["parent"] == made[0].digest


def test_the_first_version_has_no_drift_and_the_second_tells_it(make: Make, store: FolderStore) -> None:
    one = make({"a.jsonl": rows(200, 8) + b"\nbroken"})
    assert "drift" not in card_of(store, one)
    assert "drift" not in one.measured
    assert b"<h2>Drift" not in store.get(one.files["card_html"])
    two = make({"a.jsonl": rows(200, 60, "b", 90)}, name="d2", dedup={})
    card = card_of(store, two)
    found = card["drift"]["found"]
    assert card["drift"]["parent"] == one.digest
    assert card["drift"]["rules"] == ["near"]
    assert found["words"]["distance"] == found["chars"]["distance"] == found["labels"]["distance"] == 1000
    assert 0 < found["ends"]["distance"] < 200
    assert found["words"]["before"]["0"] == 200
    assert found["words"]["after"]["50"] == 200
    assert two.measured["drift"]["parent"] == one.digest
    assert two.measured["drift"]["found"]["words"] == [1000, found["words"]["chance"]]
    page = store.get(two.files["card_html"]).decode()
    section = page.split("<h2>Drift")[1].split("<section>")[0]
    assert one.digest[:16] in section
    for text in ("<code>near</code>", "1.000", "Characters a row", "from 0 to below 10: 100.0% before, 0.0% now"):
        assert text in section
    assert "bad_json: 0.50% before, 0.00% now" in section
    said = next(line for line in card_lines(card) if line.startswith("Drift from "))
    assert one.digest[:12] in said
    assert "words 1 (" in said


def test_the_same_rows_again_have_no_drift(make: Make, store: FolderStore) -> None:
    make({"a.jsonl": rows(120, 8)})
    again = make({"a.jsonl": rows(120, 8)}, name="d2", data={"split_salt": "other"})
    assert {name: pair[0] for name, pair in again.measured["drift"]["found"].items()} == {
        "chars": 0,
        "words": 0,
        "labels": 0,
    }


def test_languages_are_compared_where_both_know_them(make: Make, store: FolderStore) -> None:
    card = card_of(store, make({"a.jsonl": rows(40, 8)}))
    one, two = json.loads(json.dumps(card)), json.loads(json.dumps(card))
    one["statistics"]["touched"] |= {"language_en": 30, "language_de": 10}
    two["statistics"]["touched"] |= {"language_en": 10, "language_de": 30}
    drift = compare(two, Earlier("e" * 64, one))
    assert drift is not None
    assert drift["found"]["languages"]["before"] == {"en": 30, "de": 10}
    assert "de: 25.00% before, 75.00% now" in render({**two, "drift": drift})
    plain = compare(two, Earlier("e" * 64, card))
    assert plain is not None
    assert "languages" not in plain["found"]


def test_labels_that_a_card_does_not_all_name_are_not_compared(make: Make, store: FolderStore) -> None:
    card = card_of(store, make({"a.jsonl": rows(40, 8)}))
    card["statistics"]["labels"] = [[f"{EVIL}{n}", 3] for n in range(12)]
    drift = compare(card, Earlier("e" * 64, card))
    assert drift is not None
    assert "labels" not in drift["found"]
    card["statistics"]["labels"].pop()
    drift = compare(card, Earlier("e" * 64, card))
    assert drift is not None
    assert len(drift["found"]["labels"]["before"]) == 11
    assert EVIL not in render({**card, "drift": drift})


# --- a card that is not there, or is none ---


def broken(card: dict[str, Any], how: str) -> bytes:
    if how == "no JSON":
        return b"{"
    if how == "a list":
        return b"[]"
    if how == "deep":
        return b"[" * 100_000
    if how == "no statistics":
        del card["statistics"]
    if how == "fractions":
        card["counts"]["train"] = 1.5
    if how == "less than nothing":
        card["statistics"]["histograms"]["words"]["train"][0] = -1000
    if how == "other bins":
        card["statistics"]["histograms"]["words"]["train"].pop()
    if how == "no rules":
        card["rules"] = 7
    return json.dumps(card).encode()


@pytest.mark.parametrize(
    "how",
    [
        *("gone", "no JSON", "a list", "deep", "no statistics", "fractions", "less than nothing", "other bins"),
        "no rules",
    ],
)
def test_a_card_before_that_cannot_be_read_is_told(how: str, make: Make, store: FolderStore, recipe: Any) -> None:
    one = make({"a.jsonl": rows(40, 8)})
    key = one.files["card_json"]
    if how == "gone":
        store.delete(key)
    else:
        store.put(key, broken(card_of(store, one), how))
    two = make({"a.jsonl": rows(40, 9)}, name="d2")
    assert card_of(store, two)["drift"] == {"parent": one.digest, "rules": [], "found": {}}
    assert b"cannot be read" in store.get(two.files["card_html"])
    curation.check(two, recipe())
    with pytest.raises(DataError, match=r"little drift.*cannot be read.*max_drift"):
        curation.check(two, recipe(gate={"max_drift": 1.0}))


def test_a_manifest_before_that_is_broken_does_no_harm(make: Make, store: FolderStore) -> None:
    digest = "e" * 64
    store.put(layout.manifest_key("fam", digest), b"no manifest")
    assert make({"a.jsonl": rows(40, 8)}).measured["drift"] == {"parent": digest, "found": {}}


def test_what_pods_of_trainings_may_write_is_no_version(make: Make, store: FolderStore) -> None:
    """A pod that keeps tokens below a version may write keys with `/tokens/` in them."""
    one = make({"a.jsonl": rows(40, 8)})
    for folder in ("tokens", f"{one.digest}/tokens"):
        for name in ("manifest.json", "passed.json"):
            store.put(f"datasets/fam/{folder}/{name}", one.to_json())
    assert newest(store, "fam") == read_version(store, "fam", one.digest)


def test_a_drop_that_joins_its_family_is_compared_with_the_one_before_and_its_words_are_added(
    make: Make, store: FolderStore, recipe: Callable[..., Recipe]
) -> None:
    one = make({"a.jsonl": rows(60, 8)}, scope="family")
    two = make({"a.jsonl": rows(40, 30, start=100)}, name="d2", scope="family")
    assert two.parent == two.measured["drift"]["parent"] == one.digest
    assert card_of(store, two)["drift"]["found"]["words"]["after"]["20"] == 40
    assert (one.measured["words"], two.measured["words"]) == (480, 480 + 1200)
    curation.check(two, recipe(gate={"min_words": 1680}))
    unknown = Manifest(**{**one.__dict__, "measured": {}})
    assert "words" not in measured(card_of(store, two), unknown)


# --- the gate ---


def test_a_ceiling_on_drift(make: Make, recipe: Callable[..., Recipe]) -> None:
    asked = recipe(gate={"max_drift": 0.5})
    one = make({"a.jsonl": rows(200, 8)})
    result = {item.name: item for item in curation.check(one, asked)}
    assert result["little drift"].found == "there was no version of the family before"
    assert "little drift" not in {item.name for item in curation.check(one, recipe())}
    two = make({"a.jsonl": rows(150, 8, start=500) + b"\n" + rows(50, 60)}, name="d2")
    furthest, (least, chance) = max(two.measured["drift"]["found"].items(), key=lambda item: (item[1][0], item[0]))
    assert 300 < least < 500
    assert curation.check(two, asked)
    assert curation.check(two, recipe(gate={"max_drift": least / 1000}))
    tight = {"max_drift": (least - 1) / 1000}
    with pytest.raises(DataError) as caught:
        curation.check(two, recipe(gate=tight))
    told = (f"{furthest} are {least / 1000:g} away", one.digest[:12], f"about {chance / 1000:g}", "gate.max_drift")
    assert all(text in str(caught.value) for text in told)
    assert overruled(curation.check(two, recipe(gate={**tight, "override": "meant to be longer"}))) == ("little drift",)


def test_a_manifest_that_measured_nothing_is_refused_where_it_is_asked(make: Make, recipe: Any) -> None:
    old = Manifest(**{**make({"a.jsonl": rows(40, 8)}).__dict__, "measured": {}})
    curation.check(old, recipe())
    with pytest.raises(DataError, match="split_salt"):
        curation.check(old, recipe(gate={"max_drift": 0.5}))


def test_what_was_measured_survives_the_manifest(make: Make, store: FolderStore) -> None:
    made = make({"a.jsonl": rows(40, 8)})
    assert made.measured == measured(card_of(store, made)) == {"words": 320}
    assert Manifest.from_json(store.get(layout.manifest_key("fam", made.digest))).measured == {"words": 320}


def test_a_drop_without_a_row_and_the_one_after_it_pass(make: Make, recipe: Callable[..., Recipe]) -> None:
    asked = recipe(gate={"max_drift": 0.4})
    one = make({"a.jsonl": rows(200, 8)}, scope="family", max_filtered=1.0)
    two = make({"a.jsonl": rows(50, 8)}, name="d2", scope="family", max_filtered=1.0)
    assert two.counts["duplicate"] == 50
    assert curation.check(two, asked)
    three = make({"a.jsonl": rows(200, 8, start=900)}, name="d3", scope="family", max_filtered=1.0)
    assert three.parent == two.digest
    assert three.measured["drift"]["parent"] == one.digest
    assert curation.check(three, asked)


def test_a_version_is_compared_with_one_that_passed(make: Make, store: FolderStore, recipe: Any) -> None:
    one = make({"a.jsonl": rows(200, 8)})
    bad = make({"a.jsonl": rows(100, 60) + b"\nbroken" * 100}, name="d2")
    with pytest.raises(DataError, match="few rows quarantined"):
        curation.check(bad, recipe())
    for age, manifest in enumerate((bad, one)):
        key = layout.manifest_key("fam", manifest.digest)
        os.utime(store.root / key, (2_000_000_000 - age, 2_000_000_000 - age))
    assert make({"a.jsonl": rows(200, 9)}, name="d3").measured["drift"]["parent"] == one.digest
    mark(store, bad)  # as with an override, which another recipe does not have
    assert make({"a.jsonl": rows(200, 10)}, name="d4").measured["drift"]["parent"] == bad.digest


@pytest.mark.parametrize("asked", [{"max_drift": 0.5}, {"min_words": 10}, {"type_changes": "refuse"}])
def test_a_version_of_an_earlier_dropforge_is_compared_with(
    asked: dict[str, Any], make: Make, store: FolderStore, recipe: Any
) -> None:
    one = make({"a.jsonl": rows(200, 8)})
    store.put(layout.manifest_key("fam", one.digest), Manifest(**{**one.__dict__, "measured": {}}).to_json())
    two = make({"a.jsonl": rows(200, 60)}, name="d2", gate=asked)
    assert two.measured["drift"]["parent"] == one.digest
    if "max_drift" in asked:
        with pytest.raises(DataError, match="little drift"):
            curation.check(two, recipe(gate=asked))


def test_what_is_to_be_forgotten_is_no_part_of_a_share(make: Make, recipe: Callable[..., Recipe]) -> None:
    made = make({"a.jsonl": rows(98, 8) + b"\nbroken" * 2})
    counts = {**made.counts, "input": 900, "forgotten": 800}
    asked = recipe(max_filtered=0.1, max_quarantined=0.01)
    with pytest.raises(DataError, match=r"few rows quarantined.*2\.00% of 100 rows"):
        curation.check(Manifest(**{**made.__dict__, "counts": counts}), asked)
    lenient = recipe(max_filtered=0.1, max_quarantined=0.02)
    assert curation.check(Manifest(**{**made.__dict__, "counts": counts}), lenient)
