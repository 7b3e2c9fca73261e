"""Rows and groups that are forgotten: in all drops, for good, and without a trace of their text."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from curation import forget, increments, pipeline, turns
from curation.canonical import canonical
from curation.explain import explain
from curation.forgotten import Forgotten
from curation.identity import document
from curation.mapping import Columns
from curation.plan import make_rules
from dropforge import layout
from dropforge.cli.explain import find
from dropforge.dataset import Manifest
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore
from tests.curation.test_increments import Rows, add, texts_of

MakeRecipe = Callable[..., Recipe]
GOPHER = {"gopher": {"min_words": 4}}


def test_what_is_forgotten_stays_so_and_nothing_changes_side(tmp_path: Path, recipe: MakeRecipe) -> None:
    rng = random.Random(3)
    asked = recipe(scope="family", dedup={"threshold": 0.8}, data={"eval_fraction": 0.3})
    texts = [" ".join(rng.choice("abcdefghijklmnop") * 3 + str(rng.randrange(9)) for _ in range(20)) for _ in range(40)]
    rows: Rows = [{"text": text} for text in texts] + [{"text": f"of a document {n}", "group": "doc"} for n in range(5)]
    add(tmp_path, rows[:25], asked, 1)
    near = {"text": f"{texts[0]} once more"}
    store, two = add(tmp_path, [*rows[25:], near], asked, 2)
    assert two.counts["near_duplicate"] == 1
    sides = {row: shard.split for shard in two.shards for row in texts_of(store, shard.key)}
    key = forget.key_of(store, "fam", "drops/fam/d1/a.jsonl@0")
    assert {one.digest for one in forget.held(store, "fam", key=key).holding} == {step.digest for step in two.steps}
    assert {one.digest for one in forget.held(store, "fam", group="doc").holding} == {two.digest}
    without = forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    assert without.counts["forgotten"] == 1
    assert "near_duplicate" not in without.counts  # what went for it stands for itself again
    now = {row: shard.split for shard in without.shards for row in texts_of(store, shard.key)}
    assert {row: now.get(row) for row in sides if row != texts[0]} == {r: s for r, s in sides.items() if r != texts[0]}
    assert texts[0] not in now
    assert now[near["text"]] == sides[texts[0]]
    doc = forget.name_of(store, "fam", "doc")
    more = forget.again(store, "fam", workdir=tmp_path / "g", say=lambda _: None, forget=doc)
    assert more.counts["forgotten"] == 6
    _, later = add(tmp_path, [rows[0], rows[-1], {"text": "something new altogether"}], asked, 3)
    assert later.counts["forgotten"] == 8
    assert later.parent == more.digest
    assert b"of a document" not in later.to_json()


def test_what_a_job_keeps_below_a_version_is_no_version(tmp_path: Path, recipe: MakeRecipe) -> None:
    """The trainer writes tokens there."""
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    store, made = add(tmp_path, rows, recipe(scope="family"), 1)
    key = forget.key_of(store, "fam", "a.jsonl@0")
    store.put(f"datasets/fam/{made.digest}/tokens/x/manifest.json", b"{}")
    assert [one.digest for one in forget.held(store, "fam", key=key).holding] == [made.digest]
    assert find(store, f"fam/{made.digest[:12]}")[0].digest == made.digest


def test_two_forgettings_at_a_time_forget_both(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    second = len(json.dumps(rows[0])) + 1
    keys = [forget.key_of(store, "fam", f"a.jsonl@{at}") for at in (0, second)]
    move, raced = increments.move, []

    def slow(*values: Any) -> bool:
        if not raced:
            raced.append(True)
            forget.again(store, "fam", workdir=tmp_path / "f0", say=lambda _: None, forget=keys[0])
        return move(*values)

    monkeypatch.setattr(increments, "move", slow)
    last = forget.again(store, "fam", workdir=tmp_path / "f1", say=lambda _: None, forget=keys[1])
    assert last.counts["forgotten"] == 2
    left = {text for shard in last.shards for text in texts_of(store, shard.key)}
    assert left == {row["text"] for row in rows[2:]}


def test_other_rules_do_not_bring_forgotten_rows_back(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows = [{"text": "write to jane@mail.example.org about her illness"}]
    rows += [{"text": f"row number {n} of the test"} for n in range(40)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    key = forget.key_of(store, "fam", "a.jsonl@0")
    without = forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    with pytest.raises(DataError, match="1 rows are forgotten, and other rules would bring 1 of them back"):
        add(tmp_path, [{"text": "something new"}], recipe(scope="family", pii={}), 2)
    head = increments.read_head(store, "fam")
    assert head is not None
    assert head.manifest.digest == without.digest


def test_rows_that_rules_between_have_filtered_do_not_come_back_either(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows = [{"text": "write to jane@mail.example.org about her illness"}]
    rows += [{"text": f"row number {n} of the test"} for n in range(40)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    key = forget.key_of(store, "fam", "a.jsonl@0")
    forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    filtering = recipe(scope="family", pii={"action": "drop-row"})
    _, between = add(tmp_path, [{"text": "something new"}], filtering, 2)
    assert between.counts["forgotten"] == 1
    shown = [between.steps[0].files[name] for name in ("quarantine", "card_json", "card_html")]
    assert not any(b"illness" in store.get(key) for key in shown)
    add(tmp_path, [{"text": "and more of that"}], filtering, 3)
    with pytest.raises(DataError, match="1 rows are forgotten, and other rules would bring 1 of them back"):
        add(tmp_path, [{"text": "the newest"}], recipe(scope="family", pii={}), 4)


@pytest.mark.parametrize(
    "other",
    [
        {"quality": {"gopher": {"min_words": 4}}},
        {"data": {"columns": {"text": "body"}}},
        {"data": {"columns": {"text": "body"}, "split_salt": "another"}},  # no side is kept
    ],
)
def test_what_other_rules_filter_or_cannot_read_stays_forgotten_and_is_not_shown(
    other: dict[str, Any], tmp_path: Path, recipe: MakeRecipe
) -> None:
    rows = [{"text": "secret jane illness"}]
    rows += [{"text": f"the row of number {n} is that", "body": f"the body {n} of the row"} for n in range(30)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    key = forget.key_of(store, "fam", "drops/fam/d1/a.jsonl:1")
    forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    more = {"text": "the new row of number 1 is that", "body": "a new row of the test"}
    _, two = add(tmp_path, [more], recipe(scope="family", **other), 2)
    assert explain(store, two, "drops/fam/d1/a.jsonl:1")[0].end == "forgotten"
    assert two.counts["train"] + two.counts["eval"] == 31
    shown = [two.steps[0].files[name] for name in ("quarantine", "card_json", "card_html")]
    assert not any(b"illness" in store.get(key) for key in shown)
    again = forget.again(store, "fam", workdir=tmp_path / "r", say=lambda _: None)
    assert again.digest == two.digest


def flagged(number: int, **more: Any) -> dict[str, Any]:
    asked = {"role": "user", "content": f"question {number}", **more}
    return {"messages": [asked, {"role": "assistant", "content": f"answer {number}"}]}


def flags_name_rows(patched: pytest.MonkeyPatch, version: int) -> None:
    """Another version of the program, in which a flag on a question makes another row. :param version: beside ours."""
    beside, prepared = turns.beside, pipeline.prepared

    def otherwise(message: Any, role: str = "assistant", nulls: bool = False) -> turns.Beside | None:
        found = beside(message, role, nulls)
        if role == "assistant" or message.get("weight") != 0:
            return found
        return turns.Beside({**(found.told if found else {}), "train": False}, found.unknown if found else ())

    def by_it(*given: Any, **named: Any) -> Any:
        rules, *rest = prepared(*given, **named)
        return replace(rules, version=rules.version + version), *rest

    patched.setattr(turns, "beside", otherwise)
    for module in (pipeline, forget):
        patched.setattr(module, "prepared", by_it)


def left_out(store: FolderStore, made: Manifest, *lines: int) -> list[bool]:
    """Which lines of the first drop are forgotten."""
    return [explain(store, made, f"drops/fam/d1/a.jsonl:{line}")[0].end == "forgotten" for line in lines]


def test_another_version_of_the_program_forgets_by_the_place_what_it_knows_by_another_key(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [flagged(n, weight=0) for n in range(30)] + [flagged(n + 30) for n in range(10)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    for line in (4, 32):
        key = forget.key_of(store, "fam", f"drops/fam/d1/a.jsonl:{line}")
        forget.again(store, "fam", workdir=tmp_path / f"f{line}", say=lambda _: None, forget=key)
    flags_name_rows(monkeypatch, +1)
    _, two = add(tmp_path, [flagged(n) for n in (3, 50)], recipe(scope="family"), 2)
    assert left_out(store, two, 4, 5, 32) == [True, False, True]
    assert two.counts["forgotten"] == 3  # and the new drop's copy of one
    assert len(two.rules["forgotten"]) == 3


@pytest.mark.parametrize("before", [[], [4]])
@pytest.mark.parametrize("copied", [False, True])
def test_what_is_to_be_forgotten_is_found_by_its_place_where_another_version_names_it_otherwise(
    before: list[int], copied: bool, tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [flagged(n, weight=0) for n in range(30)] + [flagged(n + 30) for n in range(10)]
    with monkeypatch.context() as patched:
        flags_name_rows(patched, -1)
        store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
        if copied:  # without the flag: another row then, and the same now
            add(tmp_path, [flagged(3), flagged(77)], recipe(scope="family"), 2)
        for line in before:
            key = forget.key_of(store, "fam", f"drops/fam/d1/a.jsonl:{line}")
            forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    key = forget.key_of(store, "fam", "drops/fam/d1/a.jsonl:7")
    made = forget.again(store, "fam", workdir=tmp_path / "g", say=lambda _: None, forget=key)
    assert left_out(store, made, 4, 5, 7) == [bool(before), False, True]
    assert made.counts["forgotten"] == len(before) + 1 + (copied and bool(before))
    head = increments.read_head(store, "fam")
    assert head is not None
    assert head.manifest.digest == made.digest


def test_a_version_of_one_drop_does_not_bring_forgotten_rows_back(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows = [{"text": f"row number {n} of the test"} for n in range(40)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    add(tmp_path, [{"text": f"other {n}"} for n in range(40)], recipe(scope="drop"), 2)  # nothing is forgotten yet
    key = forget.key_of(store, "fam", "a.jsonl@0")
    forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    with pytest.raises(DataError, match=r"`curation.scope`: 1 rows or groups of family fam are forgotten"):
        add(tmp_path, rows, recipe(scope="drop"), 1, "-again")


def test_a_new_row_of_a_forgotten_group_makes_up_for_none_that_comes_back(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows: Rows = [{"text": "write to jane@mail.example.org about her illness"}, {"text": "of her", "group": "doc"}]
    rows += [{"text": f"row number {n} of the test"} for n in range(40)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    for name in (forget.key_of(store, "fam", "a.jsonl@0"), forget.name_of(store, "fam", "doc")):
        without = forget.again(store, "fam", workdir=tmp_path / name.hex(), say=lambda _: None, forget=name)
    assert without.counts["forgotten"] == 2
    with pytest.raises(DataError, match="2 rows are forgotten, and other rules would bring 1 of them back"):
        add(tmp_path, [{"text": "more of her", "group": "doc"}], recipe(scope="family", pii={}), 2)
    head = increments.read_head(store, "fam")
    assert head is not None
    assert head.manifest.digest == without.digest


def test_a_name_that_no_row_has_is_refused_also_by_a_newer_kernel(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: Rows = [{"text": f"row number {n} of the test", "group": f"g{n}"} for n in range(40)]
    with monkeypatch.context() as old:
        old.setattr(pipeline, "make_rules", lambda asked: replace(make_rules(asked), version=1))
        store, one = add(tmp_path, rows, recipe(scope="family"), 1)
    assert one.rules["version"] == 1
    missing, there = (forget.name_of(store, "fam", group) for group in ("G3", "g3"))
    with pytest.raises(DataError, match="no row of its drops is what is to be forgotten"):
        forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=missing)
    made = forget.again(store, "fam", workdir=tmp_path / "g", say=lambda _: None, forget=there)
    assert made.counts["forgotten"] == 1


def test_a_group_whose_name_is_masked_is_found_and_forgotten(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family", pii={})
    rows: Rows = [{"text": f"row number {n} of the test", "group": f"g{n}"} for n in range(30)]
    store, one = add(tmp_path, [*rows, {"text": "what she wrote", "group": "jane@mail.example.org"}], asked, 1)
    assert [made.digest for made in forget.held(store, "fam", group="jane@mail.example.org").holding] == [one.digest]
    name = forget.name_of(store, "fam", "jane@mail.example.org")
    assert forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=name).counts["forgotten"] == 1


def test_clean_rows_add_up_and_may_be_forgotten(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(steps="none", scope="family", exact_duplicates="keep")
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(30)]
    add(tmp_path, rows, asked, 1)
    store, two = add(tmp_path, rows[:5], asked, 2)
    assert two.counts["train"] + two.counts["eval"] == 35
    key = forget.key_of(store, "fam", "drops/fam/d1/a.jsonl@0")
    less = forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=key)
    assert (less.counts["forgotten"], less.counts["train"] + less.counts["eval"]) == (2, 33)


def test_nothing_of_a_forgotten_group_is_shown_in_the_quarantine(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family", quality=GOPHER)
    rows: Rows = [{"text": f"the row of number {n} is that of the test"} for n in range(30)]
    rows += [{"text": "too short", "group": "jane"}, {"text": "", "note": "her illness", "Group": "jane"}]
    rows += [{"text": "her own words, of which that is the end and all", "group": "jane"}]
    store, one = add(tmp_path, rows, asked, 1)
    shown = store.get(one.files["quarantine"])
    assert b"too short" in shown
    assert b"her illness" in shown
    without = forget.again(
        store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=forget.name_of(store, "fam", "jane")
    )
    assert without.counts["forgotten"] == 3
    shown = store.get(without.files["quarantine"])
    for word in (b"too short", b"illness", b"jane"):
        assert word not in shown


def test_versions_of_other_rules_are_found_by_the_places_of_a_row_and_its_copies(
    tmp_path: Path, recipe: MakeRecipe
) -> None:
    who: Rows = [{"text": "write to jane@mail.example.org about her illness"}]
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(30)]
    store, one = add(tmp_path, who + rows, recipe(scope="family"), 1)
    # The same row in a drop that is in no version of all drops, and a drop without it.
    _, alone = add(tmp_path, rows + who, recipe(), 2)
    _, without = add(tmp_path, rows, recipe(), 3)
    _, masked = add(tmp_path, [{"text": "something new"}], recipe(scope="family", pii={}), 4)
    key = forget.key_of(store, "fam", "drops/fam/d1/a.jsonl@0")
    found = forget.held(store, "fam", key=key)
    first = {step.digest for step in masked.steps}
    assert {version.digest for version in found.holding} == {one.digest, alone.digest} | first
    assert found.unsure == ()
    store.delete(one.files["ledger"])  # then nobody knows what it was called there
    found = forget.held(store, "fam", key=key)
    assert {version.digest for version in found.holding} == first
    assert {version.digest for version in found.unsure} == {one.digest, alone.digest, without.digest}


@pytest.mark.parametrize(
    ("fields", "group", "columns", "gone"),
    [
        ({"group": 0}, "0", {}, True),
        ({"group": False}, "false", {}, True),
        ({"group": {"b": 1, "a": 2}}, '{"a": 2, "b": 1}', {}, True),
        ({"group": ["Zoë"]}, '["Zoë"]', {}, True),
        ({"group": "", "group_id": None, "Conversation_ID": "jane"}, "jane", {}, True),
        ({"group": "ward", "conversation_id": "jane"}, "jane", {}, False),
        ({"Patient": "jane"}, "jane", {"group": "patient"}, True),
        ({"patient": "joe", "conversation_id": "jane"}, "jane", {"group": "patient"}, False),
        ({"group": "jane"}, "jane", {"group": "patient"}, False),
        ({"patient": "joe", "group_id": "jane"}, "jane", {"group": "patient", "prompt": "p", "completion": "c"}, False),
        ({"group": "jane"}, "jane", {"prompt": "p", "completion": "c"}, True),
    ],
)
def test_the_group_of_an_unusable_row_is_told_as_that_of_a_usable_one(
    fields: dict[str, Any], group: str, columns: dict[str, str], gone: bool
) -> None:
    asked = Columns(tuple(sorted(columns.items())))
    forgotten = Forgotten([document(group).hex()], None, asked)
    assert forgotten.fields({"text": "", **fields}) is gone
    whole = {column: "some words" for name, column in columns.items() if name != "group"} or {"Text": "some words"}
    assert forgotten.group(canonical(asked.apply({**whole, **fields}, 1000)).group) is gone


def test_names_of_forgotten_groups_are_keyed_where_pseudonyms_are(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("A_KEY", "k" * 40)
    asked = recipe(scope="family", pii={"key_env": "A_KEY"})
    rows: Rows = [{"text": f"row number {n} of the test", "group": f"g{n}"} for n in range(30)]
    store, _ = add(tmp_path, rows, asked, 1)
    # As an earlier Dropforge named it, without a key: it stays forgotten.
    forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=document("g1"))
    assert forget.name_of(store, "fam", "g1") == document("g1")
    name = forget.name_of(store, "fam", "g2")
    assert name != document("g2")
    made = forget.again(store, "fam", workdir=tmp_path / "g", say=lambda _: None, forget=name)
    assert made.counts["forgotten"] == 2
    assert document("g2").hex() not in made.to_json().decode()
    monkeypatch.setenv("A_KEY", "l" * 40)
    with pytest.raises(DataError, match="2 rows are forgotten, and other rules would bring 1 of"):
        add(tmp_path, [{"text": "a row of another key"}], asked, 2)
    monkeypatch.delenv("A_KEY")
    with pytest.raises(DropforgeError, match="A_KEY"):
        forget.name_of(store, "fam", "g3")


def test_a_drop_that_is_forgotten_whole_is_a_version_without_a_row(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    rows: Rows = [{"text": f"row number {n} of the test", "group": "jane"} for n in range(30)]
    store, _ = add(tmp_path, rows, asked, 1)
    name = forget.name_of(store, "fam", "jane")
    none = forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=name)
    assert (none.counts["forgotten"], none.counts["train"] + none.counts["eval"], none.shards) == (30, 0, ())
    _, two = add(tmp_path, [{"text": f"another row, number {n}"} for n in range(20)], asked, 2)
    assert two.counts["train"] + two.counts["eval"] == 20
    assert two.parent == none.digest


def test_what_is_forgotten_makes_no_room_below_a_limit(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows: Rows = [{"text": f"row number {n:3} of the test", "group": f"g{n}"} for n in range(30)]
    size = len(rows[0]["text"])
    store, one = add(tmp_path, rows, recipe(scope="family", data={"limit_bytes": 20 * size}), 1)
    assert one.counts["input"] == 20
    name = forget.name_of(store, "fam", "g3")
    less = forget.again(store, "fam", workdir=tmp_path / "f", say=lambda _: None, forget=name)
    assert (less.counts["input"], less.counts["forgotten"]) == (20, 1)


def test_a_pointer_that_moves_while_it_is_read_is_read_again(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = recipe(scope="family")
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    store, one = add(tmp_path, rows[:30], asked, 1)
    stat, moved = type(store).stat, []

    def slow(self: Any, key: str) -> Any:
        info = stat(self, key)
        if key.endswith("head.json") and not moved:
            moved.append(True)
            add(tmp_path, rows[30:], asked, 2)
        return info

    monkeypatch.setattr(type(store), "stat", slow)
    head = increments.read_head(store, "fam")
    assert head is not None
    assert head.manifest.parent == one.digest


def test_a_rebuild_also_mends_the_sides_that_were_kept(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    rows: Rows = [{"text": f"row number {n} of the test", "group": f"g{n // 2}"} for n in range(60)]
    store, _ = add(tmp_path, rows, asked, 1)
    for group in ("g1", "g2"):
        name = forget.name_of(store, "fam", group)
        last = forget.again(store, "fam", workdir=tmp_path / group, say=lambda _: None, forget=name)
    for key in [info.key for info in store.list("datasets/fam/state/")]:
        store.delete(key)
    assert forget.again(store, "fam", workdir=tmp_path / "again", say=lambda _: None) == last
    _, two = add(tmp_path, [{"text": "something new"}, rows[0]], asked, 2)
    assert two.parent == last.digest


def test_a_place_in_two_drops_of_one_prefix_is_told_with_its_contents(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    add(tmp_path, [{"text": f"row number {n} of the test"} for n in range(30)], asked, 1)
    store, _ = add(tmp_path, [{"text": "written over the old file"}], asked, 1, work="b")
    with pytest.raises(DataError, match="several drops have such a row") as caught:
        forget.key_of(store, "fam", "drops/fam/d1/a.jsonl@0")
    keys = [part.split()[0] for part in caught.value.mend.split("; ")[1:]]
    assert len(keys) == 2
    assert forget.key_of(store, "fam", keys[1]).hex() == keys[1]


def test_a_forgotten_row_is_still_known_by_its_place(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked, rows = recipe(scope="family"), [{"text": f"row number {n} of the test"} for n in range(30)]
    store, _ = add(tmp_path, rows, asked, 1)
    keys = [forget.key_of(store, "fam", f"drops/fam/d1/a.jsonl:{n}") for n in (1, 2)]
    for n, key in enumerate(keys):
        forget.again(store, "fam", workdir=tmp_path / f"f{n}", say=lambda _: None, forget=key)
    # Who was cut off before the models were listed types the same command again.
    assert [forget.key_of(store, "fam", f"drops/fam/d1/a.jsonl:{n}") for n in (1, 2)] == keys
    add(tmp_path, [rows[0], {"text": "something new"}], asked, 2)
    assert forget.key_of(store, "fam", "drops/fam/d1/a.jsonl:2") == keys[1]
    with pytest.raises(DataError, match="it is forgotten, and no version says by which content"):
        forget.key_of(store, "fam", "drops/fam/d2/a.jsonl:1")


def test_state_is_named_by_what_it_says(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(30)]
    store, one = add(tmp_path, rows, recipe(scope="family"), 1)
    for (name,) in one.steps[0].state.values():
        path = store.root / layout.state_key("fam", name)
        pq.write_table(pq.read_table(path), path, compression="snappy", row_group_size=7)  # as another writer does
    _, two = add(tmp_path, [{"text": "something new"}], recipe(scope="family"), 2)
    assert two.parent == one.digest
    path = store.root / layout.state_key("fam", one.steps[0].state["colours"][0])
    pq.write_table(pq.read_table(path).slice(1), path)
    with pytest.raises(DataError, match="its content is not what its name says"):
        add(tmp_path, [{"text": "something else"}], recipe(scope="family"), 3)
