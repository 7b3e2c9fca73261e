"""Versions of a whole family: one drop after the other, all at once, and a slow reference give the same rows."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

import curation
from curation import forget, increments
from curation.exchange import eval_cut
from curation.explain import explain
from curation.gate import check
from dropforge import layout, ledger
from dropforge.dataset import Manifest
from dropforge.drop import read_drop
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

MakeRecipe = Callable[..., Recipe]
Rows = list[dict[str, Any]]
#: Finds each pair whose similarity is at least a half: (1 - 0.5) ^ 200.
SURE = {"threshold": 0.5, "shingle_size": 2, "bands": 200, "rows_per_band": 1}


def add(
    folder: Path, rows: Rows, recipe: Recipe, number: int, work: str = "", **more: Any
) -> tuple[FolderStore, Manifest]:
    """One more drop of the family."""
    store = FolderStore(folder / "bucket")
    name = f"d{number}"
    data = b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"
    store.put(f"drops/fam/{name}/a.jsonl", data)
    store.put(f"drops/fam/{name}/_SUCCESS", b"")
    drop = read_drop(store, "fam", name)
    return store, curation.curate(store, drop, recipe, workdir=folder / f"work-{name}{work}", **more)


def ends(store: FolderStore, manifest: Manifest) -> list[list[str]]:
    """The end of each row of each drop."""
    return [pq.read_table(store.root / step.files["ledger"]).column("end").to_pylist() for step in manifest.steps]


def shingles(text: str) -> frozenset[Any]:
    words = text.split()
    return frozenset(pairwise(words)) or frozenset([text])


def similar(one: str, other: str) -> bool:
    a, b = shingles(one), shingles(other)
    return 2 * len(a & b) >= len(a | b)


class Named(NamedTuple):
    """A row as the kernel names it."""

    text: str
    label: str | None
    key: bytes
    unit: bytes
    input: bytes
    rank: bytes
    buckets: frozenset[int] = frozenset()


def coin(units: set[bytes]) -> bytes:
    """What decides on the side of a component."""
    label = min(units)
    return label if len(units) == 1 else label[8:] + label[:8]


def reference(
    drops: list[list[Named]], near: bool, policy: str, per_million: int, heads: int | None = None
) -> list[list[str]]:
    """The fold in plain Python.

    :param heads: rows of a bucket that later ones are compared with; None compares all rows, whatever their buckets.
    """
    crowd: dict[int, list[bytes]] = {}  # of each bucket the rows in the order of rank
    old: set[bytes] = set()
    unit_of: dict[bytes, bytes] = {}
    index: list[tuple[Named, bool]] = []  # what near duplicates are looked for in, and whether it stayed
    seen: dict[bytes, dict[bytes, tuple[bytes, bool]]] = {}  # input: key, unit, whether it ended in a conflict
    side_of: dict[bytes, int] = {}
    held: set[int] = set()
    result = []
    for rows in drops:
        first: dict[bytes, Named] = {}
        for row in rows:
            first.setdefault(row.key, row)
        asked = sorted((row for key, row in first.items() if key not in old), key=lambda row: row.rank)
        conflicts: set[bytes] = set()
        for row in asked:
            others = dict(seen.get(row.input, {}))
            same = [other.key for other in asked if other.input == row.input]
            stands = next((key for key, (_, ended) in others.items() if not ended), same[0])
            lone = not others and len(same) == 1
            if (policy == "first" and row.key != stands) or (policy == "drop" and not lone):
                conflicts.add(row.key)
        new = sorted(row.key for row in asked if row.key not in conflicts)
        links: list[tuple[bytes, bytes]] = []
        gone: set[bytes] = set()
        for at, key in enumerate(new if near else ()):
            row, stays = first[key], True
            met_in = {other for bucket in row.buckets for other in crowd.get(bucket, [])[:heads]}
            for bucket in row.buckets:
                crowd.setdefault(bucket, []).append(key)
            for other, survives in index + [(first[k], k not in gone) for k in new[:at]]:
                if (heads is None or other.key in met_in) and similar(row.text, other.text):
                    links.append((row.unit, other.unit))
                    stays = stays and not (survives and row.label == other.label)
            if not stays:
                gone.add(key)
        kept = [key for key in new if key not in gone]
        for key in kept:  # the same input is on one side
            links += [(first[key].unit, first[k].unit) for k in kept if first[k].input == first[key].input]
            links += [(first[key].unit, u) for u, ended in seen.get(first[key].input, {}).values() if not ended]
        for row in asked:
            seen.setdefault(row.input, {})[row.key] = (row.unit, row.key in conflicts)
        for row in rows:  # a copy of an earlier drop's row may name another group
            if row.key in old:
                links.append((row.unit, unit_of[row.key]))
        component = {unit: {unit} for unit in [first[key].unit for key in kept] + [u for pair in links for u in pair]}
        for one, other in links:
            joined = component[one] | component[other]
            for unit in joined:
                component[unit] = joined
        colours = {unit: {side_of[u] for u in component[unit] if u in side_of} for unit in component}
        plain = [coin(component[first[key].unit]) for key in kept if not colours[first[key].unit]]
        held |= {min(colours[first[key].unit]) for key in kept if len(colours[first[key].unit]) == 1}
        low, high = min(plain, default=b""), max(plain, default=b"")
        cut = eval_cut(per_million, low, high, trained=0 in held, evaluated=1 in held)
        found = {}
        for unit, before in colours.items():
            if len(before) < 2:
                found[unit] = min(before) if before else int(coin(component[unit]) < cut)
        staying = {key for key in kept if first[key].unit in found}
        held |= {found[first[key].unit] for key in staying}
        told, met = [], set()
        for row in rows:
            key, unit = row.key, row.unit
            if key in old or key in met:
                told.append("duplicate")
            elif key in conflicts:
                told.append("label_conflict")
            elif key in gone:
                told.append("near_duplicate")
            else:
                told.append(("train", "eval")[found[unit]] if key in staying else "crosses_split")
            met.add(key)
        result.append(told)
        side_of |= found
        old |= {row.key for row in asked}
        unit_of |= {row.key: row.unit for row in asked}
        index += [(first[key], key in staying) for key in new]
    return result


_row = st.tuples(
    st.lists(st.sampled_from("abcdef"), min_size=1, max_size=7),
    st.sampled_from(["", "", "g", "h", "i"]),
    st.sampled_from("xy"),
)


#: Later drops give other labels to texts of earlier ones, in other groups, beside copies.
_AGAIN = [
    [(["a", "b", "c"], "g", "x"), (["d"], "", "x"), (["e", "f"], "", "y"), (["e", "f"], "", "x")],
    [(["a", "b", "c"], "h", "y"), (["d"], "", "y"), (["d"], "i", "x"), (["f", "b"], "", "x"), (["f", "b"], "i", "y")],
    [(["a", "b", "c"], "i", "y"), (["a", "b", "c"], "", "z"), (["e", "f"], "", "z"), (["f", "b"], "h", "y")],
]


#: Each text is like the two before it and unlike the others, so that it matters which ones a bucket compares.
_CHAIN = [[(list("abcdef")[at : at + 3], "", "x") for at in range(begin, 4, 2)] * 2 for begin in (0, 1)]


@example(_AGAIN, None, "keep")
@example(_AGAIN, 16, "first")
@example(_AGAIN, None, "drop")
@example(_AGAIN, 1, "keep")
@example(_CHAIN, 2, "keep")
@settings(max_examples=8, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(st.lists(_row, min_size=2, max_size=9), min_size=2, max_size=3),
    st.sampled_from([None, 16, 2, 1]),
    st.sampled_from(["keep", "first", "drop"]),
)
def test_drops_one_by_one_equal_a_rebuild_and_a_slow_reference(
    tmp_path_factory: pytest.TempPathFactory, recipe: MakeRecipe, drops: list[list[Any]], heads: int | None, policy: str
) -> None:
    """:param heads: of a crowded bucket, 16 as it is and fewer for small drops; None without near duplicates."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("curation.near.HEADS", heads or 16)
        one_by_one(tmp_path_factory.mktemp("fold"), recipe, drops, heads, policy)


def one_by_one(folder: Path, recipe: MakeRecipe, drops: list[list[Any]], heads: int | None, policy: str) -> None:
    asked = recipe(
        {"eval_fraction": 0.4},
        task="classification",
        scope="family",
        dedup=SURE if heads else None,
        label_conflicts=policy,
        max_filtered=1.0,
    )
    made, rows = [], []
    for number, given_rows in enumerate(drops):
        values = [
            {"text": f"{' '.join(words)}", "label": label} | ({"group": group} if group else {})
            for words, group, label in given_rows
        ]
        # A drop with the same bytes is the same drop.
        values.append({"text": f"drop {number} says {number * 17}", "label": "x"})
        store, manifest = add(folder, values, asked, number)
        made.append(manifest)
        rows.append(sorted(named(folder / f"work-d{number}"), key=lambda row: row.rank))
    assert [step.digest for step in made[-1].steps] == [manifest.digest for manifest in made]
    # Rows that are the same to the byte are told apart by their place alone, which is the last part of the rank.
    wanted = reference(rows, heads is not None, policy, 400_000, None if heads == 16 else heads)
    for number, told in enumerate(ends(store, made[-1])):
        order = sorted(zip(rows[number], wanted[number], strict=True), key=lambda pair: pair[0].rank[-8:])
        assert told == [end for _, end in order]
    for table in {name for step in made[-1].steps for name in step.state}:
        store.delete(layout.state_key("fam", made[0].steps[0].state[table][0]))
    before = {info.key: info.etag for info in store.list("datasets/")}
    again = forget.again(store, "fam", workdir=folder / "again", say=lambda _: None)
    assert again == made[-1]
    after = {info.key: info.etag for info in store.list("datasets/")}
    assert before.items() <= after.items()
    assert {key for key in after if key not in before} == {
        layout.state_key("fam", digests[0]) for digests in made[0].steps[0].state.values()
    } - before.keys()


def named(work: Path) -> list[Named]:
    """What the kernel calls the rows of a drop."""
    buckets: dict[tuple[int, int], set[int]] = {}
    for row in parts(work, "bands"):
        buckets.setdefault((row["file"], row["position"]), set()).add(row["bucket"])
    return [
        Named(
            **{name: row[name] for name in Named._fields if name != "buckets"},
            buckets=frozenset(buckets.get((row["file"], row["position"]), ())),
        )
        for row in parts(work, "rows")
    ]


def parts(work: Path, name: str) -> Rows:
    return [row for path in (work / "parts").glob(f"*.{name}.parquet") for row in pq.read_table(path).to_pylist()]


def test_old_shards_stay_and_a_drop_is_taken_once(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    _, one = add(tmp_path, rows[:40], asked, 1)
    store, two = add(tmp_path, rows[20:], asked, 2)
    assert two.counts["input"] == 80
    assert two.counts["duplicate"] == 20
    assert two.counts["train"] + two.counts["eval"] == 60
    assert two.parent == one.digest
    assert two.shards[: len(one.shards)] == one.shards
    copies = pq.read_table(store.root / two.files["ledger"]).to_pylist()[:20]
    assert {row["duplicate_of_file"] for row in copies} == {"drops/fam/d1/a.jsonl"}
    assert Manifest.from_json(two.to_json()) == two
    # The first drop again gives its version; the family's newest one stays.
    assert add(tmp_path, rows[:40], asked, 1, work="again")[1] == one
    head = increments.read_head(store, "fam")
    assert head is not None
    assert head.manifest == two


def test_a_drop_of_copies_alone_adds_no_row(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows = [{"text": f"row number {n} of the test"} for n in range(40)]
    _, one = add(tmp_path, rows, recipe(scope="family"), 1)
    _, two = add(tmp_path, rows[:9], recipe(scope="family"), 2)
    assert two.shards == one.shards
    assert two.counts["duplicate"] == 9


def test_a_race_loses_no_drop(tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = recipe(scope="family")
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    add(tmp_path, rows[:20], asked, 1)
    move, raced = increments.move, []

    def slow(*values: Any) -> bool:
        if not raced:
            raced.append(True)
            add(tmp_path, rows[20:40], asked, 3)
        return move(*values)

    monkeypatch.setattr(increments, "move", slow)
    _, last = add(tmp_path, rows[40:], asked, 2)
    assert [step.name for step in last.steps] == ["d1", "d3", "d2"]
    assert last.counts["input"] == 60


def test_state_that_is_damaged_is_named_with_its_mend(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    store, one = add(tmp_path, rows[:30], asked, 1)
    key = layout.state_key("fam", one.steps[0].state["colours"][0])
    store.put(key, store.get(key)[:-1] + b"x")
    with pytest.raises(DataError, match=r"state .*its content is not.*dropforge rebuild fam"):
        add(tmp_path, rows[30:], asked, 2)


def test_other_rules_begin_anew_over_all_drops(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    add(tmp_path, rows[:30], recipe(scope="family"), 1)
    _, two = add(tmp_path, rows[30:] + rows[:3], recipe(scope="family", exact_duplicates="keep"), 2)
    assert [step.name for step in two.steps] == ["d1", "d2"]
    assert two.counts["train"] + two.counts["eval"] == 63


def test_a_limit_that_goes_brings_the_files_behind_it(tmp_path: Path, recipe: MakeRecipe) -> None:
    store = FolderStore(tmp_path / "bucket")
    for name, start in (("a", 0), ("b", 30)):
        lines = [json.dumps({"text": f"row number {n} of the test"}).encode() for n in range(start, start + 30)]
        store.put(f"drops/fam/d1/{name}.jsonl", b"\n".join(lines))
    store.put("drops/fam/d1/_SUCCESS", b"")
    drop = read_drop(store, "fam", "d1")
    ledger.record(store, drop)
    few = recipe(scope="family", data={"limit_rows": 25})
    assert curation.curate(store, drop, few, workdir=tmp_path / "few").counts["input"] == 25
    _, two = add(tmp_path, [{"text": f"another row {n}"} for n in range(10)], recipe(scope="family"), 2)
    assert two.counts["input"] == 70


def test_other_rules_change_no_side_unless_they_are_about_sides(tmp_path: Path, recipe: MakeRecipe) -> None:
    letters = [" ".join(random.Random(n).choices("abcdefghijklmnop", k=12)) for n in range(30)]
    rows: Rows = [{"text": text} for text in letters] + [{"text": f"{text} almost"} for text in letters]
    half = {"eval_fraction": 0.49}
    # A row stands with those that are nearly the same, also where these are rows of their own later.
    store, one = add(tmp_path, rows, recipe(half, scope="family", dedup=SURE), 1)
    assert one.counts["near_duplicate"] == 30
    _, two = add(tmp_path, [{"text": "the one row of d2"}], recipe(half, scope="family"), 2)
    assert two.rules["sides_of"] == one.digest
    before, after = sides(store, one), sides(store, two)
    assert len(after) == 61
    assert before.items() <= after.items()
    assert forget.again(store, "fam", workdir=tmp_path / "again", say=lambda _: None) == two
    _, anew = add(tmp_path, [{"text": "the one of d3"}], recipe({**half, "split_salt": "another"}, scope="family"), 3)
    assert "sides_of" not in anew.rules
    assert not before.items() <= sides(store, anew).items()


def by_place(store: FolderStore, manifest: Manifest) -> dict[tuple[str, str, int], str]:
    """The sides of rows by (drop, file, position)."""
    return {
        (step.name, row["file"], row["position"]): row["end"]
        for step in manifest.steps
        for row in pq.read_table(store.root / step.files["ledger"]).to_pylist()
        if row["end"] in ("train", "eval")
    }


@pytest.mark.parametrize(
    "other",
    [
        {"pii": {"action": "mask", "kinds": ["email"]}},
        {"data": {"prompt_template": "{text}, they said"}},
        {"data": {"text_column": "body"}},
    ],
    ids=["mask", "template", "column"],
)
def test_rows_keep_their_sides_where_rules_change_what_they_say(
    tmp_path: Path, recipe: MakeRecipe, other: dict[str, Any]
) -> None:
    half = {"eval_fraction": 0.49}

    def rows(of: int) -> Rows:
        said = [f"person {of} {n} has the address p{of}.{n}@example.org for mail" for n in range(60)]
        return [{"text": text, "body": f"{text} and more"} for text in said]

    add(tmp_path, rows(1), recipe(half, scope="family"), 1)
    store, two = add(tmp_path, rows(2), recipe(half, scope="family"), 2)
    kept = {name: value for name, value in other.items() if name != "data"}
    changed = recipe({**half, **other.get("data", {})}, scope="family", **kept)
    _, three = add(tmp_path, rows(3), changed, 3)
    before, after = by_place(store, two), by_place(store, three)
    assert set(sides(store, two)).isdisjoint(sides(store, three))
    assert len(before) == 120
    assert before.items() <= after.items()
    assert forget.again(store, "fam", workdir=tmp_path / "again", say=lambda _: None) == three


def test_rows_keep_their_sides_over_rules_between_that_removed_them(tmp_path: Path, recipe: MakeRecipe) -> None:
    half = {"eval_fraction": 0.49}
    rows: Rows = [{"text": f"row {n} of the test, " + "long " * (n % 2) * 20} for n in range(60)]
    store, one = add(tmp_path, rows, recipe(half, scope="family"), 1)
    long = recipe(half, scope="family", quality={"gopher": {"min_words": 15}})
    _, two = add(tmp_path, [{"text": "long " * 30}], long, 2)
    assert two.counts["gopher_few_words"] == 30
    template = recipe({**half, "prompt_template": "{text}, they said"}, scope="family")
    _, three = add(tmp_path, [{"text": "the one row of d3"}], template, 3)
    before, after = by_place(store, one), by_place(store, three)
    assert len(before) == 60
    assert before.items() <= after.items()


def test_earlier_drops_that_lose_their_rows_by_other_rules_are_told(tmp_path: Path, recipe: MakeRecipe) -> None:
    first: Rows = [{"text": f"row {n} of the test"} for n in range(60)]
    for n, row in enumerate(first[:54]):
        row["body"] = f"body {n}"
    add(tmp_path, first, recipe(scope="family"), 1)
    both: Rows = [{"text": f"old row {n}", "body": f"another row {n}"} for n in range(60)]
    add(tmp_path, both, recipe(scope="family"), 2)
    rows: Rows = [{"body": f"row {n} of the third drop"} for n in range(60)]
    other = recipe({"columns": {"text": "body"}}, scope="family")
    store, three = add(tmp_path, rows, other, 3)
    assert [step.counts["train"] + step.counts["eval"] for step in three.steps] == [54, 60, 60]
    told = json.loads(store.get(three.files["card_json"]))["warnings"]
    assert "drop d1: by the rules of now 54 of 60 rows of the version before are left: no_content 6" in told
    assert not any("are left" in line for line in told if line.startswith("drop d2"))
    store, four = add(tmp_path, [{"body": "one more row"}], other, 4)
    assert not any("are left" in line for line in json.loads(store.get(four.files["card_json"]))["warnings"])


def test_rows_of_both_sides_that_become_one_are_told(tmp_path: Path, recipe: MakeRecipe) -> None:
    half = {"eval_fraction": 0.49}
    rows: Rows = [{"text": f"row {n} of the test", "by": f"team {n // 5}"} for n in range(60)]
    store, one = add(tmp_path, rows, recipe(half, scope="family"), 1)
    groups = recipe({**half, "columns": {"group": "by"}}, scope="family")
    said: list[str] = []
    _, two = add(tmp_path, [{"text": "the one row of d2", "by": "team of d2"}], groups, 2, say=said.append)
    before, after = by_place(store, one), by_place(store, two)
    assert len(after) == 61  # no row is lost for it
    changed = sum(after[place] != side for place, side in before.items())
    card = json.loads(store.get(two.steps[0].files["card_json"]))
    [told] = [line for line in card["warnings"] if "another side of the split" in line]
    assert told.startswith(f"{changed} rows are on another side")
    # The last card speaks for all drops, and so does the log.
    assert f"drop d1: {told}" in json.loads(store.get(two.files["card_json"]))["warnings"]
    assert f"drop d1: {told}" in said
    first = [after[place] for place in sorted(before)]
    assert all(len({*first[n : n + 5]}) == 1 for n in range(0, 60, 5))
    _, three = add(tmp_path, [{"text": "the one row of d3", "by": "team of d3"}], groups, 3)
    assert not any(told in line for line in json.loads(store.get(three.files["card_json"]))["warnings"])


def test_what_other_rules_no_longer_read_of_earlier_drops_is_told(tmp_path: Path, recipe: MakeRecipe) -> None:
    """As a column that has another name by now: no row is lost, and what it said is."""
    rows: Rows = [{"prompt": f"what is {n}?", "completion": f"it is {n}", "system": "Be brief."} for n in range(60)]
    add(tmp_path, rows, recipe(scope="family"), 1)
    columns = {"columns": {"system": "sys", "prompt": "prompt", "completion": "completion"}}
    renamed: Rows = [{"prompt": f"where is {n}?", "completion": f"at {n}", "sys": "Be brief."} for n in range(60)]
    said: list[str] = []
    store, two = add(tmp_path, renamed, recipe(columns, scope="family"), 2, say=said.append)
    line = "drop d1: Keys that mean nothing here and are not learned: `system` (60 rows)"
    assert line in json.loads(store.get(two.files["card_json"]))["warnings"]
    assert line in said


def sides(store: FolderStore, manifest: Manifest) -> dict[str, str]:
    return {text: shard.split for shard in manifest.shards for text in texts_of(store, shard.key)}


def test_a_later_drop_that_is_named_as_kept_for_tests_is_told(tmp_path: Path, recipe: MakeRecipe) -> None:
    """The rows that are trained on lie in the drops before it."""
    rows = [{"text": f"row number {n} of the test"} for n in range(40)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    lines = "".join(json.dumps({"text": f"another row {n} of the test"}) + "\n" for n in range(40))
    store.put("drops/fam/d2/validation.jsonl", lines.encode())
    store.put("drops/fam/d2/_SUCCESS", b"")
    made = curation.curate(store, read_drop(store, "fam", "d2"), recipe(scope="family"), workdir=tmp_path / "work-d2")
    warnings = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert any(line.startswith("validation.jsonl: named as rows that are kept for tests") for line in warnings)


def test_a_later_drop_without_a_row_says_so(tmp_path: Path, recipe: MakeRecipe) -> None:
    store, _ = add(tmp_path, [{"text": f"row number {n} of the test"} for n in range(40)], recipe(scope="family"), 1)
    store.put("drops/fam/d2/a.jsonl", b"")
    store.put("drops/fam/d2/_SUCCESS", b"")
    with pytest.raises(DataError, match="its files hold no row"):
        curation.curate(store, read_drop(store, "fam", "d2"), recipe(scope="family"), workdir=tmp_path / "work-d2")


def test_the_trainer_reads_a_version_of_several_drops(tmp_path: Path, recipe: MakeRecipe) -> None:
    np, rows = pytest.importorskip("numpy"), pytest.importorskip("trainer.data.rows")
    texts = [{"text": f"row number {n} of the test"} for n in range(90)]
    for number in (1, 2, 3):
        store, made = add(tmp_path, texts[: 30 * number], recipe(scope="family"), number)
        keys = {
            split: np.array([row.key for row in rows.read_rows(store, made, split)], dtype="V16")
            for split in ("train", "eval")
        }
        rows.check_keys(made, keys)
        assert sum(map(len, keys.values())) == 30 * number
        changed = np.concatenate([keys["train"][:-1], np.array([b"x" * 16], dtype="V16")])
        for wrong in (keys["train"][:-1], changed):
            with pytest.raises(DataError):
                rows.check_keys(made, {**keys, "train": wrong})


def texts_of(store: FolderStore, key: str) -> list[str]:
    texts: list[str] = pq.read_table(store.root / key).column("text").to_pylist()
    return texts


def test_the_gate_judges_the_drop_that_came_last(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family", max_quarantined=0.2, gate={"max": {"duplicate": 0.5}})
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(100)]
    _, one = add(tmp_path, rows, asked, 1)
    check(one, asked)
    _, two = add(tmp_path, [{"text": "one row more"}, {"text": ""}], asked, 2)
    with pytest.raises(DataError, match=r"few rows quarantined.*50\.00% of 2 rows"):
        check(two, asked)
    _, three = add(tmp_path, rows[:10], asked, 3)
    with pytest.raises(DataError, match=r"few rows duplicate.*100\.00% of 10 rows"):
        check(three, asked)
    store, four = add(tmp_path, [{"text": "two rows more"}, {"text": "which are new"}], asked, 4)
    check(four, asked)  # alone it would not be enough
    card, page = (store.get(four.files[name]).decode() for name in ("card_json", "card_html"))
    told = json.loads(card)
    assert told["counts"]["input"] == 2
    # What the gate refused is not in what comes later.
    assert [drop["counts"]["input"] for drop in told["version"]["drops"]] == [100, 2]
    assert told["version"]["counts"] == dict(four.counts)
    assert "Drops of the version" in page


def test_a_refused_drop_is_in_no_later_version_until_it_passes(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family", max_quarantined=0.2, min_rows=30)
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(60)]
    store, one = add(tmp_path, rows[:20], asked, 1)
    assert not increments.aside(store, one)
    with pytest.raises(DataError, match=r"enough rows.*at least 30. Drop more"):
        check(one, asked, aside=increments.aside(store, one))  # too few are no reason to leave them out
    bad: Rows = [*rows[20:30], *({"text": ""} for _ in range(5))]
    _, two = add(tmp_path, bad, asked, 2)
    with pytest.raises(DataError, match=r"few rows quarantined.*not in the family's next version"):
        check(two, asked, aside=increments.aside(store, two))
    _, three = add(tmp_path, rows[30:], asked, 3)
    assert check(three, asked, aside=increments.aside(store, three))
    assert [step.name for step in three.steps] == ["d1", "d3"]
    assert three.counts["train"] + three.counts["eval"] == 50
    lenient = recipe(scope="family", max_quarantined=0.2, min_rows=30, gate={"override": "looked at by hand"})
    _, four = add(tmp_path, bad, lenient, 2, work="again")
    assert [step.name for step in four.steps] == ["d1", "d3", "d2"]
    assert not increments.aside(store, four)


def test_a_sample_says_that_it_stands_alone(tmp_path: Path, recipe: MakeRecipe) -> None:
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(200)]
    store, _ = add(tmp_path, rows, recipe(scope="family"), 1)
    for scope, sample in (("family", 100), ("drop", 120)):  # another sample is another version
        drop, folder = read_drop(store, "fam", "d1"), tmp_path / scope
        made = curation.curate(store, drop, recipe(scope=scope), workdir=folder, sample=sample)
        told = json.loads(store.get(made.files["card_json"]))["warnings"]
        assert any("is curated alone" in line for line in told) is (scope == "family")
    head = increments.read_head(store, "fam")
    assert head is not None
    assert [step.name for step in head.manifest.steps] == ["d1"]


def test_rows_of_all_drops_are_explained(tmp_path: Path, recipe: MakeRecipe) -> None:
    asked = recipe(scope="family")
    rows: Rows = [{"text": f"row number {n} of the test"} for n in range(30)]
    add(tmp_path, rows, asked, 1)
    store, two = add(tmp_path, [*rows[:2], rows[0], {"text": ""}, {"text": "something new"}], asked, 2)
    first, copy = explain(store, two, "a.jsonl@0")
    assert (first.file, first.end in {"train", "eval"}, first.copies) == ("drops/fam/d1/a.jsonl", True, 2)
    assert (copy.file, copy.end, copy.kept) == ("drops/fam/d2/a.jsonl", "duplicate", ("drops/fam/d1/a.jsonl", 0))
    assert explain(store, two, "drops/fam/d2/a.jsonl@0") == [copy]
    assert [fate.end for fate in explain(store, two, first.key)] == [first.end, "duplicate", "duplicate"]
    at = 3 * (len(json.dumps(rows[0])) + 1)
    [bad] = explain(store, two, f"drops/fam/d2/a.jsonl@{at}")
    assert (bad.end, bad.head) == ("empty", '{"text": ""}')
    with pytest.raises(DataError, match="no such row"):
        explain(store, two, "a.jsonl@1")
    with pytest.raises(DataError, match=r"no file 'b\.jsonl': it was made of drops/fam/d1/a\.jsonl"):
        explain(store, two, "b.jsonl@0")


@pytest.mark.parametrize(
    "change",
    [{"drop": "../../out"}, {"state": {"keys": ["../../../victim"]}}],
    ids=["a drop's id", "a file of its state"],
)
def test_a_manifest_that_names_files_outside_the_work_folder_is_none(
    tmp_path: Path, recipe: MakeRecipe, change: dict[str, Any]
) -> None:
    """Names of a manifest become names of files here, and pods may write below `datasets/`."""
    rows = [{"text": f"row number {number} of the drop"} for number in range(40)]
    store, made = add(tmp_path, rows, recipe(scope="family"), 1)
    key = layout.manifest_key("fam", made.digest)
    told = json.loads(store.get(key))
    told["steps"][0] |= change
    store.put(key, json.dumps(told).encode())
    with pytest.raises(DataError, match="SHA-256 is none"):
        add(tmp_path, rows[:1], recipe(scope="family"), 2)


@pytest.mark.parametrize(
    ("change", "word"),
    [
        (lambda version: version["measured"].update(known_groups={"a": 5}), "known_groups are no lists"),
        (lambda version: version.update(digest=None), "digest or family is no text"),
        (lambda version: version.update(schema=True), "it has schema True"),
        (lambda version: version["measured"].update(known_groups={"a": [1]}), "known_groups are no texts"),
        (lambda version: version["measured"].update(groups_otherwise={"a": "x"}), "groups_otherwise are no numbers"),
        (lambda version: version["measured"].update(words="x"), "words are no number"),
        (lambda version: version["steps"][0]["counts"].update(train="x"), "counts are no numbers"),
        (lambda version: version["steps"][0]["files"].pop("ledger"), "no ledger, card or sides"),
        (lambda version: version["steps"][0]["state"].pop("colours"), "no ledger, card or sides"),
        (lambda version: version.update(rules=[]), "rules are no object"),
    ],
)
def test_a_version_before_of_another_shape_is_an_error_with_its_name(
    tmp_path: Path, recipe: MakeRecipe, change: Callable[[dict[str, Any]], Any], word: str
) -> None:
    rows = [{"text": f"row {n} of the test"} for n in range(20)]
    store, one = add(tmp_path, rows, recipe(scope="family"), 1)
    path = store.root / layout.manifest_key("fam", one.digest)
    version = json.loads(path.read_text())
    change(version)
    path.write_text(json.dumps(version))
    with pytest.raises(DataError, match=f"dataset manifest .*{one.digest}.*{word}"):
        add(tmp_path, rows[:2], recipe(scope="family", label_conflicts="drop"), 2)


def test_a_torn_ledger_is_an_error_with_its_name_and_a_torn_card_ends_nothing(
    tmp_path: Path, recipe: MakeRecipe
) -> None:
    rows = [{"text": f"row {n} of the test"} for n in range(20)]
    store, one = add(tmp_path, rows, recipe(scope="family"), 1)
    (store.root / one.steps[0].files["card_json"]).write_text('{"warnings": 5}')
    _, two = add(tmp_path, rows[:2], recipe(scope="family", label_conflicts="drop"), 2)
    ledger = store.root / two.steps[1].files["ledger"]
    for data in (b"", ledger.read_bytes()[:50]):
        ledger.write_bytes(data)
        with pytest.raises(DataError, match=f"object .*{two.steps[1].files['ledger']}: it cannot be read"):
            add(tmp_path, rows[:2], recipe(scope="family"), 3)


def test_lines_of_cards_go_to_the_log_as_lines(tmp_path: Path, recipe: MakeRecipe) -> None:
    """Sources and labels of strangers are within them."""
    rows = [{"text": f"row {n} of the test"} for n in range(20)]
    store, one = add(tmp_path, rows, recipe(scope="family"), 1)
    _, two = add(tmp_path, rows[:2], recipe(scope="family", label_conflicts="drop"), 2)
    path = store.root / two.steps[0].files["card_json"]
    card = json.loads(path.read_text())
    path.write_text(json.dumps({**card, "warnings": ["source web\n[2026] ERROR - \x1b[31mfailed\u202e: 12 rows"]}))
    [line] = increments.told_anew(store, one.steps, two.steps)
    assert line == "drop d1: source web\\u000a[2026] ERROR - \\u001b[31mfailed\\u202e: 12 rows"
