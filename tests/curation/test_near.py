"""Near duplicates: who goes, because of whom, and what never depends on order. A slow reference has the last word."""

from __future__ import annotations

import json
import random
import re
import unicodedata
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import curation
from curation import exchange
from curation import near as statements
from curation.engines.duck import DuckTables, Memory
from curation.kernel import run
from curation.plan import make_rules, tasks
from curation.task import Rules, Task
from dropforge.dataset import Manifest
from dropforge.drop import Drop, read_drop
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = list[dict[str, Any]]
MakeRecipe = Callable[..., Recipe]

#: Finds each pair whose similarity is at least a half: (1 - 0.5) ^ 200.
SURE = {"threshold": 0.5, "shingle_size": 2, "bands": 200, "rows_per_band": 1}


def lines(rows: list[dict[str, Any]]) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"


def settled(folder: Path, rows: list[dict[str, Any]], recipe: Recipe, parts: int = 1) -> DuckTables:
    """Kernel and exchange alone, over rows dealt out to some files."""
    store = FolderStore(folder / "bucket")
    for part in range(parts):
        store.put(f"drops/fam/d/{part}.jsonl", lines(rows[part::parts]))
    store.put("drops/fam/d/_SUCCESS", b"")
    drop = read_drop(store, "fam", "d")
    files = list(drop.data_files)
    paths = [store.root / "drops/fam/d" / file.key for file in files]
    work: list[Task] = list(tasks(drop, files, paths, make_rules(recipe), folder / "parts"))
    for task in work:
        run(task)
    tables = DuckTables(folder / "spill", Memory(threads=1))
    exchange.load(tables, work, make_rules(recipe))
    exchange.settle(tables, make_rules(recipe))
    return tables


def text_of(row: dict[str, Any]) -> str:
    return str(row["text"])


def shingles_of(text: str, size: int) -> frozenset[Any]:
    """What a row is compared by, said once more and slowly, for texts of ASCII words."""
    words = re.findall(r"\w+", text.lower())
    runs = frozenset(tuple(words[at : at + size]) for at in range(len(words) - size + 1))
    return runs or frozenset([" ".join(text.lower().split())])


def similar(one: str, other: str, size: int = 2, threshold: float = 0.5) -> bool:
    a, b = shingles_of(one, size), shingles_of(other, size)
    return len(a & b) >= threshold * len(a | b)


_word = st.sampled_from(["a", "b", "c", "d", "e", "f"])
_base = st.lists(_word, min_size=1, max_size=9)
_corpus = st.lists(st.tuples(_base, st.sampled_from(["x", "y"]), st.sampled_from(["s", "t"])), min_size=3, max_size=17)


@settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
@given(_corpus, st.sampled_from(["causal-lm", "classification"]), st.randoms(use_true_random=False))
def test_rows_go_as_a_slow_reference_says(
    tmp_path_factory: pytest.TempPathFactory,
    recipe: MakeRecipe,
    corpus: list[tuple[list[str], str, str]],
    task: str,
    rng: random.Random,
) -> None:
    rows = [{"text": " ".join(words), "label": label, "source": source} for words, label, source in corpus]
    asked = recipe(task=task, dedup=SURE, prefer=["t"], data={"eval_fraction": 0.4})
    tables = settled(tmp_path_factory.mktemp("near"), rng.sample(rows, len(rows)), asked, parts=2)
    with tables:
        found = tables.all(
            "select r.text, r.label, r.source, r.key, r.unit, e.ending, o.key, e.shared, e.either from rows r"
            " join ends e on r.file = e.file and r.position = e.position"
            " left join rows o on e.of_file = o.file and e.of_position = o.position"
        )
        side = dict(tables.all("select key, side from sides"))
    winners = {row[3]: row for row in found if row[5] != "duplicate"}
    assert len(winners) == len({row[3] for row in found})
    # Of the same content the preferred source stays.
    for text, label, source, key, *_ in found:
        assert winners[key][0] == text
        assert task == "causal-lm" or winners[key][1] == label
        assert source != "t" or winners[key][2] == "t"
    ranked = sorted(winners.values(), key=lambda row: (row[2] != "t", row[3]))
    survivors: list[Any] = []
    for row in ranked:
        match = next(
            (other for other in survivors if similar(row[0], other[0]) and (task == "causal-lm" or row[1] == other[1])),
            None,
        )
        if match is None:
            survivors.append(row)
        assert (row[5] == "near_duplicate") == (match is not None)
        if match is not None:
            assert row[6] == match[3]
            assert 2 * row[7] >= row[8] > 0
    # What is similar is on one side, through whatever rows it is so; of one component each row has one side.
    component = {row[3]: row[3] for row in ranked}
    for one, other in combinations(ranked, 2):
        if similar(one[0], other[0]):
            gone, kept = component[other[3]], component[one[3]]
            component = {key: kept if value == gone else value for key, value in component.items()}
    sides: dict[bytes, set[int]] = {}
    for row in survivors:
        sides.setdefault(component[row[3]], set()).add(side[row[3]])
    assert all(len(found) == 1 for found in sides.values())


def numbered(count: int, seed: int, words: int = 40) -> list[list[str]]:
    rng = random.Random(seed)
    return [[f"w{rng.randrange(3000)}" for _ in range(words)] for _ in range(count)]


def edited(words: list[str], places: tuple[int, ...]) -> list[str]:
    return ["edited" if place in places else word for place, word in enumerate(words)]


def test_a_chain_does_not_take_strangers_along(tmp_path: Path, recipe: MakeRecipe) -> None:
    """a ~ b ~ c, and c unlike a: never does a row go for the sake of one that goes itself. All are on one side."""
    for number, words in enumerate(numbered(4, 1, 36)):
        chain = [" ".join(words[start : start + 24]) for start in (0, 6, 12)]
        assert [similar(*pair) for pair in combinations(chain, 2)] == [True, False, True]
        others = [" ".join(words) for words in numbered(8, 100 + number)]
        rows = [{"text": text} for text in chain + others]
        asked = recipe(dedup=SURE, data={"eval_fraction": 0.4, "split_salt": str(number)})
        with settled(tmp_path / str(number), rows, asked) as tables:
            ends = dict(tables.all("select r.text, e.ending from rows r join ends e on r.position = e.position"))
            first = min(tables.all("select text, key from rows"), key=lambda row: (row[0] not in chain, row[1]))[0]
        gone = {text for text in chain if ends[text] == "near_duplicate"}
        assert gone == ({chain[1]} if first != chain[1] else {chain[0], chain[2]})
        assert len({ends[text] for text in chain if text not in gone}) == 1
        assert not any(ends[text] == "near_duplicate" for text in ends if text not in chain)


def test_variants_of_a_row_never_stand_on_both_sides(make: Make, rows: Any) -> None:
    """Planted variants of a text, each nearly the one before: those that stay are on one side, with all that shares a
    conversation with them."""
    rng = random.Random(5)
    planted, of = [], {}
    for cluster in range(40):
        words = [f"w{rng.randrange(10_000)}" for _ in range(30)]
        for step in range(5):
            text = " ".join(words)
            of[text] = cluster
            planted.append({"text": text, "group": f"g{cluster}" if cluster % 4 == 0 else f"own {cluster} {step}"})
            for at in range(4):  # the next one is nearly this one; that one's next is not
                words[(4 * step + at) % 30] = f"v{cluster}_{step}_{at}"
        # Someone else's words in the same conversation.
        planted.append({"text": f"beside {cluster} {rng.random()}", "group": planted[-5]["group"]})
        of[planted[-1]["text"]] = cluster
    manifest = make({"a.jsonl": lines(planted)}, dedup={**SURE, "threshold": 0.6}, data={"eval_fraction": 0.4})
    assert manifest.counts["near_duplicate"] >= 40
    sides: dict[int, set[str]] = {}
    kept = rows(manifest)
    for row in kept:
        sides.setdefault(of[row["text"]], set()).add(row["split"])
    assert len(kept) >= 2.5 * len(sides) == 100
    assert {len(side) for side in sides.values()} == {1}
    assert {split for side in sides.values() for split in side} == {"train", "eval"}


def test_a_crowded_bucket_costs_a_multiple_of_its_rows(tmp_path: Path, recipe: MakeRecipe) -> None:
    """Short rows that differ in case alone, and long ones in one word alone: each group leaves one row."""
    rng = random.Random(2)
    short = {"".join(rng.choice((c.lower(), c.upper())) for c in "thank you very much") for _ in range(4000)}
    words = numbered(1, 3, 120)[0]
    long = [" ".join(edited(words, ())) + f" n{number}" for number in range(4000)]
    rows = [{"text": text} for text in [*short, *long, "something else", *map(" ".join, numbered(5, 4))]]
    with settled(tmp_path, rows, recipe(dedup={"shingle_size": 3, "bands": 4})) as tables:
        counts = exchange.counts(tables)
        pairs = tables.one("select count(*) from verified")[0]
    assert counts["near_duplicate"] == len(short) + len(long) - 2
    assert counts["train"] + counts["eval"] == 8
    # A row shares at most four buckets, and has at most this many partners in each.
    assert pairs <= (len(short) + 4 * len(long)) * statements.HEADS


def test_rows_that_a_crowd_may_hide_from_each_other_are_told(make: Make, store: FolderStore) -> None:
    """All rows share a long template, which fills their buckets, and are not that similar for it."""
    head = " ".join(f"template{n}" for n in range(120))
    rows = [{"text": f"{head} {' '.join(body)}"} for body in numbered(60, 9, 30)]
    manifest = make({"a.jsonl": lines(rows)}, dedup={"threshold": 0.9, "rows_per_band": 1, "bands": 20})
    assert "near_duplicate" not in manifest.counts
    unmet = json.loads(store.get(manifest.files["card_json"]))["statistics"]["unmet"]
    assert len(rows) / 2 < unmet < len(rows) - statements.HEADS
    assert f"{unmet} rows stayed that share a print" in store.get(manifest.files["card_html"]).decode()
    few = make({"a.jsonl": lines(rows[:10])}, "d2", dedup={"threshold": 0.9, "rows_per_band": 1, "bands": 20})
    assert json.loads(store.get(few.files["card_json"]))["statistics"]["unmet"] == 0


def test_short_rows_go_only_for_their_equals(make: Make, rows: Any) -> None:
    texts = ["Yes", "yes", " YES ", "yes!", "no", "2 + 3", "2 - 3", "2  +  3", "go on", "Go on", "...", "???"]
    other = [{"text": " ".join(words)} for words in numbered(8, 5)]
    manifest = make({"a.jsonl": lines([{"text": text} for text in texts] + other)}, dedup={})
    kept = {" ".join(row["text"].lower().split()) for row in rows(manifest)} - {row["text"] for row in other}
    assert kept == {"yes", "yes!", "no", "2 + 3", "2 - 3", "go on", "...", "???"}
    assert manifest.counts["near_duplicate"] == 3  # white space alone is no difference to begin with
    assert manifest.counts["duplicate"] == 1 + 0


def test_scripts_without_spaces(make: Make) -> None:
    """One character in sixty changed: three in four such pairs are that similar, and all of these are found."""
    rng = random.Random(6)
    alphabets = (
        "".join(map(chr, range(0x4E00, 0x4F00))),
        "กขคงจฉชซญดตถทธนบปผพฟภมยรลวสหอฮ",
        "あいうえおかきくけこさしすせそ",
    )
    found = 0
    data = []
    for number in range(60):
        text = [rng.choice(alphabets[number % 3]) for _ in range(120)]
        data += ["".join(text), "".join([*text[:60], "龍", *text[61:]])]
    manifest = make({"a.jsonl": lines([{"text": text} for text in data])}, dedup={"shingle_size": 4})
    found = manifest.counts["near_duplicate"]
    assert 58 <= found <= 60


def test_a_shared_system_message_makes_no_duplicates(make: Make) -> None:
    system = " ".join(numbered(1, 7, 300)[0])
    rows = [{"system": system, "prompt": " ".join(words), "completion": "as you say"} for words in numbered(30, 8, 12)]
    assert "near_duplicate" not in make({"a.jsonl": lines(rows)}, dedup={}).counts


def corpus() -> list[dict[str, Any]]:
    """Texts with copies near and far, in chains and across sources."""
    rows = []
    for number, words in enumerate(numbered(60, 9)):
        rows.append({"text": " ".join(words), "source": "web"})
        for copy in range(number % 4):
            rows.append({"text": " ".join(edited(words, (copy * 9,))).upper(), "source": "book" if copy else "web"})
    return rows


def test_ledger_and_card_name_who_stays(make: Make, ledger: Any, store: FolderStore) -> None:
    data = corpus()
    data += data[1::3]
    manifest = make(
        {"a.jsonl": lines(data[::2]), "z.jsonl": lines(data[1::2])}, dedup={"threshold": 0.7}, prefer=["book"]
    )
    entries = ledger(manifest)
    ends = {(entry["file"], entry["position"]): entry for entry in entries}
    gone = [entry for entry in entries if entry["end"] == "near_duplicate"]
    assert len(gone) == manifest.counts["near_duplicate"] > 40
    assert manifest.counts["input"] == sum(rows for end, rows in manifest.counts.items() if end != "input")
    for entry in gone:
        assert ends[entry["duplicate_of_file"], entry["duplicate_of_position"]]["end"] in {"train", "eval"}
        assert 10 * entry["shared"] >= 7 * entry["either"] > 0
    assert any(entry["file"] != entry["duplicate_of_file"] for entry in gone)
    copies = [entry for entry in entries if entry["end"] == "duplicate"]
    assert {entry["key"] for entry in copies} & {entry["key"] for entry in gone}
    for entry in copies:
        assert ends[entry["duplicate_of_file"], entry["duplicate_of_position"]]["end"] in {"train", "eval"}
    assert all(entry["shared"] is None for entry in entries if entry["end"] != "near_duplicate")
    card = json.loads(store.get(manifest.files["card_json"]))
    page = store.get(manifest.files["card_html"]).decode()
    shares = [item["shared"] / item["either"] for item in card["statistics"]["near"]]
    assert shares == sorted(shares)
    assert len(shares) == 6
    assert "Near duplicates</h2>" in page
    assert f"<b>{len(gone) + manifest.counts.get('duplicate', 0):,}</b>" in page
    # Two books of one text share 26 of 46 shingles and stay both; the text that each is like goes for the first.
    sources = [pq.read_table(store.root / shard.key, columns=["source"]) for shard in manifest.shards]
    assert sum(table["source"].to_pylist().count("book") for table in sources) == 45


def test_digest_is_the_same_for_any_workers_splits_and_order(
    recipe: MakeRecipe, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = corpus()
    found, splits = set(), set()
    assert curation.plan.tasks.__defaults__ is not None
    rest = curation.plan.tasks.__defaults__[1:]
    for number, workers in enumerate((1, 2, 8)):
        rows = random.Random(number).sample(data, len(data))
        monkeypatch.setattr(curation.plan.tasks, "__defaults__", (3_000 * (number + 1), *rest))
        store = FolderStore(tmp_path / f"bucket-{number}")
        names = [f"{'zab'[(part + number) % 3]}{part}.jsonl" for part in range(3)]
        for part, name in enumerate(names):
            store.put(f"drops/fam/d/{name}", lines(rows[part::3]))
        store.put("drops/fam/d/_SUCCESS", b"")
        drop = read_drop(store, "fam", "d")
        shuffled = Drop(**{**dict(drop), "files": tuple(random.Random(number).sample(drop.files, len(drop.files)))})
        asked = recipe(workers=workers, dedup={"threshold": 0.7}, prefer=["book"])
        manifest = curation.curate(store, shuffled, asked, workdir=tmp_path / f"w{number}")
        found.add((manifest.digest, tuple(shard.sha256 for shard in manifest.shards)))
        splits.add(len(list((tmp_path / f"w{number}/parts").glob("*.json"))))
    assert len(found) == 1
    assert len(splits) == 3, "each time the files were cut another way"


def test_digest_sees_what_counts_as_near_and_nothing_where_it_is_not_asked_for(make: Make) -> None:
    data = {"a.jsonl": lines([{"text": " ".join(words)} for words in numbered(40, 10)])}
    plain, near, other = make(data, "d1"), make(data, "d2", dedup={}), make(data, "d3", dedup={"threshold": 0.9})
    assert len({plain.digest, near.digest, other.digest}) == 3
    assert not {"near", "prefer"} & plain.rules.keys()
    assert near.rules["near"] == {
        "shingle": "word",
        "size": 5,
        "bands": 14,
        "rows": 8,
        "per_million": 800_000,
        "profile": f"nfkc-casefold-1-unicode-{unicodedata.unidata_version}",
    }
    assert Rules(50_000, "s", "text", 1000, "drop", prefer=("a",)).facts()["prefer"] == ["a"]
