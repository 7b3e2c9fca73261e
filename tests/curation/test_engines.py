"""One dataset whatever runs it: every statement alike on both engines, and one digest for all ways to run a drop."""

from __future__ import annotations

import gzip
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import curation
from curation import exchange, near, plan
from curation.engines.choice import AUTO_SPARK_BYTES, Choice, choose
from curation.engines.duck import DuckTables
from curation.engines.tables import Engine
from curation.kernel import run
from curation.plan import make_rules, tasks
from curation.statistics import measure
from dropforge.dataset import Manifest
from dropforge.drop import Drop, read_drop
from dropforge.errors import DropforgeError
from dropforge.recipe import Recipe
from dropforge.spark import find_spark
from dropforge.store import FolderStore

MakeRecipe = Callable[..., Recipe]

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
            {"messages": [{"role": "user", "content": f"what is {n}?"}, {"role": "assistant", "content": "n" * n}]}
            for n in range(1, 40)
        ]
    rng.shuffle(rows)
    lines = [json.dumps(row).encode() for row in rows]
    faults = [b"{broken", b"[1]", b'{"text": ""}', b'{"text": "\xff"}', b"", b'{"text": 7}', b'{"text": "\\ud800"}']
    texts = pa.table({"text": [f"a row of a table {n} \u00e9" for n in range(30)], "label": ["a"] * 30})
    parquet = pa.BufferOutputStream()
    pq.write_table(texts, parquet, row_group_size=7)
    first = json.loads(lines[0]).get("text", "x")
    return {
        "a.jsonl": b"\n".join([*lines[:150], *faults]) + b"\n",
        "b.jsonl.gz": gzip.compress(b"\n".join(lines[120:170])) + gzip.compress(b"\n" + b"\n".join(lines[170:])),
        "deep/er/c.csv": f"text,label\nfrom a table,a\n{first},a\nragged,row,more\n".encode(),
        "d.parquet": parquet.getvalue().to_pybytes(),
        "e.json": json.dumps([{"text": f"one of a list {n}", "label": "b"} for n in range(9)]).encode(),
        "empty.jsonl": b"",
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
        ours, theirs = (pa.Table.from_batches(list(tables.batches(statement))) for tables in (self.duck, self.spark))
        alike(ours, theirs, statement, ordered=True)
        yield from ours.to_batches()


def alike(ours: pa.Table, theirs: pa.Table, statement: str, ordered: bool) -> None:
    kinds = [[(field.name, shape(field.type)) for field in table.schema] for table in (ours, theirs)]
    assert kinds[0] == kinds[1], statement
    rows = [[tuple(row.values()) for row in table.to_pylist()] for table in (ours, theirs)]
    if not ordered:
        rows = [sorted(part, key=repr) for part in rows]
    assert rows[0] == rows[1], statement


@pytest.mark.parametrize("way", ["near", "keep"])
def test_every_statement_means_the_same_on_both_engines(
    spark: Engine, tmp_path: Path, recipe: MakeRecipe, way: str
) -> None:
    asked = recipe(dedup={"threshold": 0.7}, prefer=["s1"]) if way == "near" else recipe(exact_duplicates="keep")
    store, drop = uploaded(tmp_path, nasty(labelled=False))
    files = sorted(drop.data_files, key=lambda file: file.key)
    paths = [store.root / "drops/fam/d" / file.key for file in files]
    work = list(tasks(drop, files, paths, make_rules(asked), tmp_path / "parts"))
    for task in work:
        run(task)
    with DuckTables(tmp_path / "spill") as duck, spark.tables(tmp_path / "spark") as other:
        both = Both(duck, other)
        exchange.load(both, work, make_rules(asked))
        exchange.settle(both, make_rules(asked))
        counts = exchange.counts(both)
        for side in (0, 1):
            for statement in (exchange.KEYS, exchange.SHARDS):
                assert sum(batch.num_rows for batch in both.batches(statement.format(side=side))) > 0
        for statement in (exchange.LEDGER, exchange.QUARANTINE):
            assert sum(batch.num_rows for batch in both.batches(statement)) > 0
        if way == "near":
            measure(both, [file.key for file in files], {})
            assert counts["near_duplicate"] >= 10
    # A new statement is one that this test runs.
    named = statements(exchange) | statements(near)
    elsewhere = {
        "near": {"KEPT.keep", "NO_NEAR", "NO_LINKED"},
        "keep": {"KEPT.drop", *(set(statements(near)) - {"NO_NEAR", "NO_LINKED"})},
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
) -> tuple[Manifest, list[dict[str, Any]], list[Any], list[bytes]]:
    """(manifest, ledger, quarantine, the shards' bytes), in a store of their own."""
    store, drop = uploaded(folder, files)
    order = tuple(random.Random(seed).sample(drop.files, len(drop.files)))
    shuffled = Drop(**{**dict(drop), "files": order})
    manifest = curation.curate(store, shuffled, recipe, workdir=folder / "work", engine=engine)
    ledger = pq.read_table(store.root / manifest.files["ledger"]).to_pylist()
    quarantine = [json.loads(line) for line in store.get(manifest.files["quarantine"]).splitlines()]
    return manifest, ledger, quarantine, [store.get(shard.key) for shard in manifest.shards]


@pytest.mark.parametrize("labelled", [False, True], ids=["chat", "classification"])
def test_one_digest_for_workers_orders_splits_and_engines(
    spark: Engine, tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch, labelled: bool
) -> None:
    task = "classification" if labelled else "causal-lm"
    values: dict[str, Any] = {"task": task, "dedup": {"threshold": 0.7}, "prefer": ["s1"]}
    files = nasty(labelled)
    whole = curated(tmp_path / "one", recipe(workers=1, **values), files)
    counts = whole[0].counts
    assert {"duplicate", "near_duplicate", "bad_json", "ragged"} <= set(counts)
    assert len(curation.quarantined(counts)) > 4
    assert min(counts["near_duplicate"], counts["train"], counts["eval"]) > 4
    monkeypatch.setattr(plan.cut, "__defaults__", (3000,))
    monkeypatch.setattr(plan.tasks, "__defaults__", (3000, *plan.tasks.__defaults__[1:]))
    # An engine is no part of a dataset: the recipe may name it or not.
    ways: list[tuple[Recipe, Engine | None]] = [(recipe(workers=n, **values), None) for n in (2, 8)]
    ways.append((recipe(engine="spark", **values), spark))
    for number, (asked, engine) in enumerate(ways):
        other = curated(tmp_path / str(number), asked, files, engine, seed=number)
        assert len(list((tmp_path / str(number) / "work/parts").glob("*.json"))) > 8
        assert other[0].digest == whole[0].digest
        assert (other[0].counts, other[0].rules, other[0].shards) == (counts, whole[0].rules, whole[0].shards)
        assert other[1:] == whole[1:]


# --- which engine ---


def absent() -> str:
    raise DropforgeError("Spark", "there is no `java` on the path", "Install Java 17 or later")


def test_auto_takes_spark_for_what_one_machine_is_long_about() -> None:
    assert choose("auto", AUTO_SPARK_BYTES - 1, absent).engine == "embedded"
    assert choose("auto", AUTO_SPARK_BYTES, lambda: "PySpark 4") == Choice(
        "spark", "200.0 GB planned, Spark from 200 GB on (PySpark 4)"
    )
    stays = choose("auto", AUTO_SPARK_BYTES, absent)
    assert stays.engine == "embedded"
    assert stays.why.endswith("Spark from 200 GB on, but there is no `java` on the path")


def test_spark_is_refused_before_anything_is_read_where_java_is_missing(
    tmp_path: Path, recipe: MakeRecipe, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, drop = uploaded(tmp_path, {"a.jsonl": b'{"text": "a"}\n{"text": "b"}\n'})
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("JAVA_HOME", raising=False)
    with pytest.raises(DropforgeError, match=r"Spark: .*(java|PySpark).*curation.engine: embedded"):
        curation.curate(store, drop, recipe(engine="spark"), workdir=tmp_path / "work")
    assert not (tmp_path / "work").exists()
    told: list[str] = []
    curation.curate(store, drop, recipe(engine="auto"), workdir=tmp_path / "work", say=told.append)
    assert told == ["Curation is embedded: 0.0 GB planned, Spark from 200 GB on"]


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
recipe = load_recipe("tiny", {"curation": {"workers": 1, "engine": "spark"}})
curate(store, read_drop(store, "fam", "d"), recipe, workdir=root / "work")
"""


def test_a_killed_run_leaves_no_process_and_goes_on_from_its_splits(tmp_path: Path, recipe: MakeRecipe) -> None:
    try:
        find_spark()
    except DropforgeError as error:
        pytest.skip(str(error))
    files = {
        f"{n:03}.jsonl": b"\n".join(json.dumps({"text": f"row {m} of {n}"}).encode() for m in range(200))
        for n in range(150)
    }
    root = tmp_path / "a folder"
    store, drop = uploaded(root, files)
    parts = root / "work" / "parts"
    child = subprocess.Popen(
        [sys.executable, "-c", CHILD, str(root)], env={**os.environ, "JAVA_TOOL_OPTIONS": JAVA}, text=True
    )
    try:
        while child.poll() is None and not any(parts.glob("*.json")):
            time.sleep(0.01)
        family = psutil.Process(child.pid).children(recursive=True)
        assert any("java" in process.name() for process in family)
    finally:
        child.kill()
        child.wait()
    _, left = psutil.wait_procs(family, timeout=60)
    assert left == []
    done = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert 0 < len(done) < len(files)
    # What a killed run wrote of a split without a report is nobody's: any engine goes on with the rest.
    again = curation.curate(store, drop, recipe(workers=1), workdir=root / "work")
    assert again.counts["input"] == 200 * len(files)
    now = {path.name: path.stat().st_mtime_ns for path in parts.glob("*.json")}
    assert len(now) == len(files)
    assert done.items() <= now.items()
    whole = curated(tmp_path / "whole", recipe(workers=1), files)
    assert whole[0].digest == again.digest
