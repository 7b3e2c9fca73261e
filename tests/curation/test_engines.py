"""One dataset whatever runs it: every statement alike on both engines, and one digest for all ways to run a drop."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import curation
from curation import caps, conflicts, continued, exchange, near, plan, previous_sides, state
from curation.engines.duck import DuckTables
from curation.engines.tables import Engine
from curation.kernel import run
from curation.plan import make_rules, tasks
from curation.statistics import measure
from dropforge.dataset import Manifest
from dropforge.drop import Drop, read_drop
from dropforge.errors import DropforgeError
from dropforge.recipe import Recipe
from dropforge.recipes import load_recipe
from dropforge.spark import find_spark
from dropforge.store import FolderStore
from tests.wheels import make_wheel

MakeRecipe = Callable[..., Recipe]
pytestmark = pytest.mark.timeout(900)  # Spark on a machine that others keep busy

#: For starts and queries of a second, compiling well costs more than it brings.
JAVA = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC -Dspark.sql.codegen.wholeStage=false"


@pytest.fixture(scope="module")
def spark(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    try:
        find_spark()
    except DropforgeError as error:
        pytest.skip(str(error))
    from curation.engines.spark import SparkEngine, session

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("JAVA_TOOL_OPTIONS", JAVA)
        with session(tmp_path_factory.mktemp("spark") / "engine", workers=2, memory="768m") as started:
            yield SparkEngine(started)


# --- a drop with everything that goes wrong ---


def sentence(rng: random.Random, words: int = 24) -> list[str]:
    return [rng.choice(WORDS) + str(rng.randrange(40)) for _ in range(words)]


WORDS = ("river", "stone", "cloud", "lamp", "paper", "green", "seven", "north")


def nasty(labelled: bool) -> dict[str, bytes]:
    """Copies, chains of near duplicates, groups tied across files, faults of several kinds, formats, an empty file."""
    rng = random.Random(11)
    rows: list[dict[str, Any]] = []
    for number in range(90):
        words = sentence(rng)
        row = {"text": " ".join(words), "group": f"g{number % 30}", "source": f"s{number % 4}"}
        rows.append(row)
        if number % 9 == 0:  # each next one differs from the one before in one word more
            for step in range(4):
                words[5 * step] = f"other{number}"
                rows.append({"text": " ".join(words), "source": "chain"})
        if number % 7 == 0:
            rows.append({**row, "text": row["text"].replace(" ", "   ", 2), "group": f"tied{number % 3}"})
    if labelled:
        rows = [{**row, "label": "ab"[index // 9 % 2]} for index, row in enumerate(rows)]
    else:
        rows += [
            {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": "n" * m}]}
            for n in range(1, 40)
            for m in ({n, n + 1} if n % 5 == 0 else {n})
        ]
        rows += [  # with tools, calls and thoughts, some of them copies
            {
                "messages": [
                    {"role": "user", "content": f"is lamp {n % 12} on?"},
                    {"role": "assistant", "content": None, "tool_calls": [{"name": "look", "arguments": {"n": n % 8}}]},
                    {"role": "tool", "content": "on"},
                    {"role": "assistant", "content": "yes", "thinking": f"hm {n % 4}"},
                ],
                "tools": [{"name": "look"}] if n % 2 else None,
            }
            for n in range(40)
        ]
        turns = [{"role": role, "content": f"{role} {n}"} for n in range(8) for role in ("user", "assistant")]
        rows += [{"messages": turns[: 2 * n]} for n in range(1, 9)]  # a log
    rng.shuffle(rows)
    lines = [json.dumps(row).encode() for row in rows]
    faults = [b"{broken", b"[1]", b'{"text": ""}', b'{"text": "\xff"}', b"", b'{"text": 7}', b'{"text": "\\ud800"}']
    texts = pa.table({"text": [f"a row of a table {n} \u00e9" for n in range(30)], "label": ["a"] * 30})
    parquet = pa.BufferOutputStream()
    pq.write_table(texts, parquet, row_group_size=7)
    when = pa.array([None, 2**31 - 1, None], pa.date32())
    late = pa.table({"text": [f"a row with a date {n}" for n in range(3)], "label": ["a"] * 3, "group": when})
    dates = pa.BufferOutputStream()
    pq.write_table(late, dates)
    first = json.loads(lines[0]).get("text", "x")
    return {
        "a.jsonl": b"\n".join([*lines[:150], *faults]) + b"\n",
        "b.jsonl.gz": gzip.compress(b"\n".join(lines[120:170])) + gzip.compress(b"\n" + b"\n".join(lines[170:])),
        "deep/er/c.csv": f"text,label\nfrom a table,a\n{first},a\nragged,row,more\n".encode(),
        "d.parquet": parquet.getvalue().to_pybytes(),
        "e.json": json.dumps([{"text": f"one of a list {n}", "label": "b"} for n in range(9)]).encode(),
        "empty.jsonl": b"",
        "f.tsv": b'text\tlabel\n"an open quote\t1.0\nin a table"\ttrue\n"in two"\t1\n',
        "notes.txt": b"plain text beside tables\n",
        "late.parquet": dates.getvalue().to_pybytes(),
        "docs/README.md": b"what describes them\n",
    }


def uploaded(folder: Path, files: dict[str, bytes]) -> tuple[FolderStore, Drop]:
    store = FolderStore(folder / "bucket")
    for key, data in files.items():
        store.put(f"drops/fam/d/{key}", data)
    store.put("drops/fam/d/_SUCCESS", b"")
    return store, read_drop(store, "fam", "d")


# --- every statement ---


def statements(module: Any) -> dict[str, str]:
    """A module's statements by name; one of several texts has several names."""
    named = {name: value for name, value in vars(module).items() if name.isupper()}
    several = {
        f"{name}.{key}": text for name, value in named.items() if isinstance(value, dict) for key, text in value.items()
    }
    return {name: text for name, text in (named | several).items() if isinstance(text, str)}


def pattern(statement: str) -> re.Pattern[str]:
    """What a statement looks like when its blanks are filled in."""
    return re.compile(".*".join(map(re.escape, re.split(r"\{\w+\}", statement))), re.DOTALL)


def shape(kind: pa.DataType) -> Any:
    """A type without the names that engines give to the items of a list."""
    if pa.types.is_list(kind):
        return ("list", shape(kind.value_type))
    if pa.types.is_struct(kind):
        return [(kind.field(index).name, shape(kind.field(index).type)) for index in range(kind.num_fields)]
    return str(kind)


class Both:
    """`Tables` that run each statement on two engines, and fail where rows or types of columns differ."""

    def __init__(self, duck: DuckTables, spark: Any) -> None:
        self.duck, self.spark = duck, spark
        self.seen: list[str] = []

    def view(self, name: str, paths: Sequence[Path]) -> None:
        self.duck.view(name, paths)
        self.spark.view(name, paths)

    def do(self, statement: str) -> None:
        self.seen.append(statement)
        self.duck.do(statement)
        self.spark.do(statement)
        if made := re.match(r"\s*create table (\w+) as", statement):
            theirs = pq.read_table(self.spark.scratch / "tables" / made[1])
            ours = self.duck.db.sql(f"select * from {made[1]}").to_arrow_reader().read_all()
            alike(ours, theirs, statement, ordered=False)

    def one(self, statement: str) -> tuple[Any, ...]:
        return self.all(statement)[0]

    def all(self, statement: str) -> list[tuple[Any, ...]]:
        self.seen.append(statement)
        ours, theirs = self.duck.all(statement), self.spark.all(statement)
        if "order by" in statement:
            assert ours == theirs, statement
        else:
            assert sorted(ours, key=repr) == sorted(theirs, key=repr), statement
        return ours

    def batches(self, statement: str, rows: int = 4096) -> Iterator[pa.RecordBatch]:
        self.seen.append(statement)
        found = [list(tables.batches(statement)) for tables in (self.duck, self.spark)]
        if found == [[], []]:
            return
        ours, theirs = map(pa.Table.from_batches, found)
        alike(ours, theirs, statement, ordered=True)
        yield from ours.to_batches()


def alike(ours: pa.Table, theirs: pa.Table, statement: str, ordered: bool) -> None:
    kinds = [[(field.name, shape(field.type)) for field in table.schema] for table in (ours, theirs)]
    assert kinds[0] == kinds[1], statement
    rows = [[tuple(row.values()) for row in table.to_pylist()] for table in (ours, theirs)]
    if not ordered:
        rows = [sorted(part, key=repr) for part in rows]
    assert rows[0] == rows[1], statement


@pytest.mark.parametrize("way", ["near", "keep", "family"])
def test_every_statement_means_the_same_on_both_engines(
    spark: Engine, tmp_path: Path, recipe: MakeRecipe, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(exchange, "_ORDINARY", 100)  # characters: many of these rows are long ones
    monkeypatch.setattr(exchange, "_AT_ONCE", 10_000)
    asked = {
        "near": recipe(dedup={"threshold": 0.7}, prefer=["s1"], label_conflicts="first"),
        "keep": recipe(exact_duplicates="keep"),
        "family": recipe(
            dedup={"threshold": 0.7},
            scope="family",
            label_conflicts="drop",
            max_rows_per_source={"s1": 9, "chain": 3, "s2": 90},
        ),
    }[way]
    store, drop = uploaded(tmp_path, nasty(labelled=False))
    files = sorted(drop.data_files, key=lambda file: file.key)
    before: dict[str, list[Path]] = {}
    if way == "family":
        half = drop.model_copy(update={"files": tuple(files[:1]), "id": "half"})
        first = curation.curate(store, half, asked, workdir=tmp_path / "first")
        before = state.fetch(store, "fam", first.steps, tmp_path / "state")
    if way == "keep":
        first = curation.curate(store, drop, recipe(scope="family"), workdir=tmp_path / "first")
        names = [file.key for file in files]
        before["old_sides"] = [previous_sides.write(store, first.steps, names, tmp_path / "old" / "sides.parquet")]
    paths = [store.root / "drops/fam/d" / file.key for file in files]
    rules = replace(make_rules(asked), sides_of="a version" if way == "keep" else "")
    work = list(tasks(drop, files, paths, rules, tmp_path / "parts"))
    for task in work:
        run(task)
    capped = caps.write(rules.max_rows_per_source, tmp_path / "caps.parquet") if way == "family" else None
    with DuckTables(tmp_path / "spill") as duck, spark.tables(tmp_path / "spark") as other:
        both = Both(duck, other)
        exchange.load(both, work, rules, before, capped)
        exchange.settle(both, rules, trained=bool(before), evaluated=bool(before))
        if way == "keep":
            assert previous_sides.changed(both, asked=True) == 0
            assert both.one("select count(*) from units_placed")[0] > 100
        counts = exchange.counts(both)
        for side in (0, 1):
            for statement in (exchange.KEYS, exchange.SHARDS):
                assert sum(batch.num_rows for batch in both.batches(statement.format(side=side, within=""))) > 0
            whole = pa.Table.from_batches(both.batches(exchange.SHARDS.format(side=side, within="")))
            parts = pa.Table.from_batches(exchange.shard_rows(both, side, extras=True))
            assert parts.to_pylist() == whole.to_pylist()
        assert sum("unhex" in ran for ran in both.seen) > 4  # so the rows came in parts
        if way == "family":
            assert counts["duplicate"] > 100  # of rows that an earlier drop had
            assert counts["over_cap"] > 0
            assert counts["label_conflict"] > 0
            assert len(state.write(both, rules, tmp_path / "left", 7)) == len(before)
        for statement in (exchange.LEDGER.format(files=len(files)), exchange.QUARANTINE):
            assert sum(batch.num_rows for batch in both.batches(statement)) > 0
        if way == "near":
            measure(both, [file.key for file in files], {})
            assert counts["near_duplicate"] >= 10
    # A new statement is one that this test runs.
    modules = (exchange, near, conflicts, continued, caps, previous_sides)
    named = {name: text for module in modules for name, text in statements(module).items()}
    assert len(named) == sum(len(statements(module)) for module in modules)
    remembered = {name for name in named if name.startswith("REMEMBERED.")}
    nothing = {name for name in named if name.startswith("NOTHING.")}
    none = {"NO_PHRASES", "NO_CONTINUED", "NO_THREADED"}
    stood = {"BY_PLACE", "UNITS_PLACED", "CHANGED", "NOTHING.old_sides"}
    elsewhere = {
        "near": {"KEPT.keep", "ASKED.keep", "NO_NEAR", "NO_LINKED", "NO_UNMET", "HEADED", *none, *remembered, *stood}
        | {"CONFLICTS.keep", "CONFLICTS.drop", "BEYOND", "WITHIN", "NOTHING.old_sources"},
        "keep": {
            "KEPT.drop",
            "ASKED.drop",
            "REPEATED",
            "EXAMPLES",
            "CROSSING",
            "BOTH_SIDES",
            "NO_UNITS_PLACED",
            "NOTHING.old_sides",
            *none,
            *(set(statements(near)) - {"NO_NEAR", "NO_LINKED", "NO_UNMET"}),
            *remembered,
        }
        | {"ELECTED", "CONFLICTS.first", "CONFLICTS.drop", "BEYOND", "WITHIN", "NOTHING.old_sources"},
        "family": {
            "KEPT.keep",
            "ASKED.keep",
            "NO_NEAR",
            "NO_LINKED",
            "NO_UNMET",
            "REPEATED",
            "EXAMPLES",
            "CROSSING",
            "BOTH_SIDES",
            *none,
            *nothing,
            *stood,
        }
        | {"ELECTED", "CONFLICTS.first", "CONFLICTS.keep", "NONE_BEYOND"},
    }
    missed = {name for name, text in named.items() if not any(pattern(text).fullmatch(ran) for ran in both.seen)}
    assert missed == elsewhere[way]
    assert len(named) > 25


def test_spark_listens_on_this_machine_alone_and_once(spark: Engine, tmp_path: Path) -> None:
    from curation.engines.spark import session

    [java] = [child for child in psutil.Process().children(recursive=True) if child.name() == "java"]
    heard = {c.laddr.ip.removeprefix("::ffff:") for c in java.net_connections("inet") if c.status == psutil.CONN_LISTEN}
    assert heard == {"127.0.0.1"}
    with pytest.raises(DropforgeError, match=r"a session runs in this process already"), session(tmp_path / "other"):
        pass
    with pytest.raises(DropforgeError, match=r"a path with \*.*Choose another folder"), session(tmp_path / "a*"):
        pass


# --- one digest ---


def curated(
    folder: Path, recipe: Recipe, files: dict[str, bytes], engine: Engine | None = None, seed: int = 0
) -> tuple[Manifest, list[dict[str, Any]], list[Any], list[bytes], dict[str, Any]]:
    """(manifest, ledger, quarantine, the shards' bytes, the card), in a store of their own."""
    store, drop = uploaded(folder, files)
    order = tuple(random.Random(seed).sample(drop.files, len(drop.files)))
    shuffled = Drop(**{**dict(drop), "files": order})
    manifest = curation.curate(store, shuffled, recipe, workdir=folder / "work", engine=engine)
    ledger = pq.read_table(store.root / manifest.files["ledger"]).to_pylist()
    quarantine = [json.loads(line) for line in store.get(manifest.files["quarantine"]).splitlines()]
    card = json.loads(store.get(manifest.files["card_json"]))
    return manifest, ledger, quarantine, [store.get(shard.key) for shard in manifest.shards], card


@pytest.mark.parametrize("labelled", [False, True], ids=["chat", "classification"])
def test_one_digest_for_workers_orders_and_splits(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    values, files = asked_of(labelled), nasty(labelled)
    whole = curated(tmp_path / "one", recipe(workers=1, **values), files)
    counts = whole[0].counts
    assert {"duplicate", "near_duplicate", "bad_json", "ragged", "bad_time"} <= set(counts)
    assert len(curation.quarantined(counts)) > 4
    assert min(counts["near_duplicate"], counts["train"], counts["eval"]) > 4
    in_small_splits(monkeypatch)
    for workers in (2, 8):
        same(tmp_path / str(workers), recipe(workers=workers, **values), files, whole, seed=workers)


@pytest.mark.parametrize(
    "labelled",
    [pytest.param(False, marks=pytest.mark.smoke), True],
    ids=["chat", "classification"],
)
def test_one_digest_for_both_engines(
    spark: Engine, tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    values, files = asked_of(labelled), nasty(labelled)
    whole = curated(tmp_path / "one", recipe(workers=1, **values), files)
    in_small_splits(monkeypatch)
    # An engine is no part of a dataset: the recipe may name it or not.
    same(tmp_path / "spark", recipe(engine="spark", **values), files, whole, engine=spark, seed=2)


def test_a_drop_has_64_splits_within_bounds() -> None:
    sizes = {plan.split_size(planned) >> 20 for planned in (1, 32 << 20)}
    assert sizes == {32}
    assert [plan.split_size(planned) >> 20 for planned in ((32 << 20) + 1, 1 << 30, 1 << 40)] == [4, 16, 32]


def test_a_second_try_with_other_splits_makes_the_same(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As after an upgrade in the middle of a run: what lies in the work folder is of other splits."""
    values, files = asked_of(False), nasty(False)
    whole = curated(tmp_path / "one", recipe(workers=1, **values), files)
    (tmp_path / "other").mkdir()
    shutil.copytree(tmp_path / "one/work/parts", tmp_path / "other/work/parts")
    in_small_splits(monkeypatch)
    same(tmp_path / "other", recipe(workers=1, **values), files, whole)


def asked_of(labelled: bool) -> dict[str, Any]:
    task = "classification" if labelled else "causal-lm"
    return {"task": task, "dedup": {"threshold": 0.7}, "prefer": ["s1"]}


def in_small_splits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert plan.tasks.__defaults__ is not None
    monkeypatch.setattr(plan.tasks, "__defaults__", (3000, *plan.tasks.__defaults__[1:]))


def same(folder: Path, asked: Recipe, files: dict[str, bytes], whole: tuple[Any, ...], **how: Any) -> None:
    other = curated(folder, asked, files, **how)
    assert len(list((folder / "work/parts").glob("*.json"))) > 8
    assert other[0].digest == whole[0].digest
    assert (other[0].counts, other[0].rules, other[0].shards) == (whole[0].counts, whole[0].rules, whole[0].shards)
    assert other[1:] == whole[1:]


KERNEL = """
import re

def tidy(passages):
    texts = [re.sub("river", "brook", text) for _, text in passages]
    return "too_early" if re.search("cloud7\\\\b", texts[0]) else texts
"""


def test_a_kernel_of_one_s_own_and_kept_columns_are_the_same_on_spark(spark: Engine, tmp_path: Path) -> None:
    rng = random.Random(3)
    rows = [{"text": " ".join(sentence(rng)), "id": n, "meta": {"b": [n], "a": "\u00e9"}} for n in range(120)]
    rows += [{"text": f"<|im_end|> {' '.join(sentence(rng))}", "source": "web"} for _ in range(12)]
    files = {"a.jsonl": "\n".join(map(json.dumps, rows)).encode(), "b.jsonl": json.dumps(rows[0]).encode()}
    code = make_wheel(tmp_path, {"own_spark.py": KERNEL}, {"dropforge.kernels": {"tidy": "own_spark:tidy"}})
    made = []
    for name, engine in (("embedded", None), ("spark", spark)):
        values = {"curation": {"workers": 1, "kernels": ["tidy"], "engine": name}, "data": {"keep_columns": "all"}}
        made.append(curated(tmp_path / name, load_recipe("tiny", {"code": code, **values}), files, engine))
    counts = made[0][0].counts
    assert counts["duplicate"] == 1
    assert counts["own_kernel"] >= 5
    assert (made[1][0].digest, made[1][0].shards) == (made[0][0].digest, made[0][0].shards)
    assert made[1][1:] == made[0][1:]
    kept = [row for data in made[1][3] for row in pq.read_table(pa.BufferReader(data)).to_pylist()]
    assert len(kept) == counts["train"] + counts["eval"]
    assert not any("river" in row["text"] for row in kept)
    assert {json.loads(row["extras"])["meta"]["a"] for row in kept if row["source"] != "web"} == {"\u00e9"}
    assert any("source web" in line for line in made[0][4]["warnings"])


@pytest.mark.timeout(600)  # two drops are many small jobs of Spark
def test_a_family_is_the_same_on_spark(spark: Engine, tmp_path: Path, recipe: MakeRecipe) -> None:
    """Drop after drop: personal data masked, evaluation items looked for, near duplicates of earlier drops."""
    rng = random.Random(5)
    old, new = ([" ".join(sentence(rng)) for _ in range(60)] for _ in range(2))
    item = " ".join(sentence(rng))
    near = [f"{text} and one" for text in old[:9]]
    mails = [f"{' '.join(sentence(rng))} please write to n{n}@mail.test today" for n in range(5)]
    drops = [old, [*new, *near, *old[9:14], f"Quiz: {item}", *mails]]
    values = {"scope": "family", "pii": {}, "decontaminate": {"sets": {"quiz": "eval-sets/quiz.jsonl"}}}
    asked = recipe(dedup={"threshold": 0.7}, **values)

    def fold(folder: Path, engine: Engine | None) -> tuple[list[Manifest], dict[str, bytes]]:
        store, made = FolderStore(folder / "bucket"), []
        store.put("eval-sets/quiz.jsonl", json.dumps({"question": item}).encode())
        for number, texts in enumerate(drops):
            data = "\n".join(json.dumps({"text": text}) for text in texts).encode()
            store.put(f"drops/fam/d{number}/a.jsonl", data)
            store.put(f"drops/fam/d{number}/_SUCCESS", b"")
            drop = read_drop(store, "fam", f"d{number}")
            made.append(curation.curate(store, drop, asked, workdir=folder / f"work{number}", engine=engine))
        named = [made[-1].files["ledger"], *(shard.key for shard in made[-1].shards)]
        return made, {key: store.get(key) for key in named}

    made, files = fold(tmp_path / "embedded", None)
    again, same_files = fold(tmp_path / "spark", spark)
    assert [one.digest for one in again] == [one.digest for one in made]
    assert (again[-1].counts, again[-1].rules, again[-1].shards) == (made[-1].counts, made[-1].rules, made[-1].shards)
    assert same_files == files
    counts = made[-1].counts
    assert (counts["input"], counts["duplicate"], counts["contaminated"]) == (140, 5, 1)
    assert counts["near_duplicate"] >= 9
    shards = [data for key, data in files.items() if key != made[-1].files["ledger"]]
    texts = [text for data in shards for text in pq.read_table(pa.BufferReader(data)).column("text").to_pylist()]
    assert sum("please write to" in text for text in texts) == len(mails)
    assert "@mail.test" not in " ".join(texts)


# --- kills ---

CHILD = """
import sys
from pathlib import Path
from curation import curate
from dropforge.drop import read_drop
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore

root = Path(sys.argv[1])
store = FolderStore(root / "bucket")
workers = 1 if sys.argv[2] == "spark" else 2
recipe = load_recipe("tiny", {"curation": {"workers": workers, "engine": sys.argv[2]}})
curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "work")
"""


@pytest.mark.parametrize(("engine", "below", "rows"), [("spark", "java", 200), ("embedded", "python", 1000)])
def test_a_killed_run_leaves_no_process_and_goes_on_from_its_splits(
    tmp_path: Path, recipe: MakeRecipe, engine: str, below: str, rows: int
) -> None:
    if engine == "spark":
        try:
            find_spark()
        except DropforgeError as error:
            pytest.skip(str(error))
    files = {
        f"{n:03}.jsonl": b"\n".join(json.dumps({"text": f"row {m} of {n}"}).encode() for m in range(rows))
        for n in range(150)
    }
    root = tmp_path / "a folder"
    store, drop = uploaded(root, files)
    parts = root / "work" / "parts"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root), engine], env={**os.environ, "JAVA_TOOL_OPTIONS": JAVA}, text=True
    )
    try:
        while child.poll() is None and not any(parts.glob("*.json")):
            time.sleep(0.01)
        family = psutil.Process(child.pid).children(recursive=True)
        assert any(below in process.name() for process in family)
    finally:
        child.kill()
        child.wait()
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert 0 < len(done) < len(files)
    # What a killed run wrote of a split without a report is nobody's: any engine goes on with the rest.
    again = curation.curate(store, drop, recipe(workers=1), workdir=root / "work")
    assert again.counts["input"] == rows * len(files)
    now = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert len(now) == len(files)
    assert done.items() <= now.items()
    whole = curated(tmp_path / "whole", recipe(workers=1), files)
    assert whole[0].digest == again.digest


def test_a_driver_that_was_submitted_is_told_the_memory_that_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyspark")
    from curation.engines.spark import SparkTables

    def died(statement: str) -> None:
        raise ConnectionError(statement)

    session = SimpleNamespace(sql=died, sparkContext=SimpleNamespace(defaultParallelism=1))
    session.newSession = lambda: session
    for env, key in ((None, "curation.spark.driver_memory"), ("1", "curation.spark.cluster.memory")):
        if env is not None:
            monkeypatch.setenv("PYSPARK_GATEWAY_PORT", env)
        with pytest.raises(DropforgeError, match=f"with `{key}`"):
            SparkTables(session, Path("x")).do("select 1")  # type: ignore[arg-type]
