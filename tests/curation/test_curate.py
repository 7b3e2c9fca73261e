"""From a drop to a dataset version: one end for every row, one digest whatever the order, nothing half-visible."""

from __future__ import annotations

import dataclasses
import gzip
import hashlib
import json
import random
import shutil
import signal
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import curation
from curation import pipeline, plan, pool, written
from curation.exchange import eval_cut
from curation.notes import funnel
from curation.reasons import Filtered, Reason
from dropforge import dataset, layout
from dropforge.dataset import Manifest
from dropforge.drop import Drop, DropFile, identity
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Texts = Callable[..., list[bytes]]
Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]
MakeRecipe = Callable[..., Recipe]
Patch = pytest.MonkeyPatch


def join(rows: list[bytes]) -> bytes:
    return b"\n".join(rows) + b"\n"


def test_every_row_has_one_end(make: Make, texts: Texts, rows: Rows, ledger: Any, quarantine: Any) -> None:
    good = texts(60)
    manifest = make(
        {
            "a.jsonl": join([*good[:40], good[3], b"{broken", b'{"text": 7}', b"", good[5].replace(b" ", b"  ", 1)]),
            "b.jsonl.gz": gzip.compress(join(good[30:]))[:-12],
            "c.csv": b"text\nfrom a table\nragged,row\n",
            "empty.jsonl": b"",
            "recipe.yaml": b"extends: tiny\n",
            "_hidden/x.jsonl": good[0],
        }
    )
    counts = manifest.counts
    assert counts["input"] == sum(rows_ for name, rows_ in counts.items() if name != "input")
    assert curation.quarantined(counts) == {"bad_field": 1, "bad_json": 1, "ragged": 1, "torn_file": 1}
    entries = ledger(manifest)
    assert Counter(entry["end"] for entry in entries) == {k: v for k, v in counts.items() if k != "input"}
    assert len({(entry["file"], entry["position"]) for entry in entries}) == counts["input"] == len(entries)
    for entry in entries:
        assert (entry["duplicate_of_file"] is not None) == (entry["end"] == "duplicate")
    assert {item["key"]: item["rows"] for item in manifest.inputs} == {
        name: sum(entry["file"] == name for entry in entries)
        for name in ("a.jsonl", "b.jsonl.gz", "c.csv", "empty.jsonl")
    }
    kept = {(entry["key"], entry["end"]) for entry in entries if entry["end"] in dataset.SPLITS}
    assert {(row["key"], row["split"]) for row in rows(manifest)} == kept
    bad = {(item["file"], item["reason"]): item for item in quarantine(manifest)}
    assert bad["a.jsonl", "bad_json"]["head"] == "{broken"
    assert bad["a.jsonl", "bad_json"]["position"] == len(join([*good[:40], good[3]]))


def test_shards_are_what_the_manifest_says(make: Make, texts: Texts, rows: Rows, store: FolderStore) -> None:
    manifest = make({"a.jsonl": join(texts(200))})
    for shard in manifest.shards:
        data = store.get(shard.key)
        assert hashlib.sha256(data).hexdigest() == shard.sha256
        assert shard.key == layout.shard_key("fam", shard.sha256)
        assert len(data) == shard.bytes
    keys = {split: [row["key"] for row in rows(manifest, split)] for split in dataset.SPLITS}
    assert all(found == sorted(found) for found in keys.values())
    assert {len(key) for found in keys.values() for key in found} == {16}
    assert dataset.digest(keys, manifest.counts, manifest.rules) == manifest.digest
    assert {len(set(keys["train"]) & set(keys["eval"]))} == {0}
    stored = store.get(layout.manifest_key("fam", manifest.digest))
    assert Manifest.from_json(stored) == dataclasses.replace(
        manifest, inputs=tuple(dict(item) for item in manifest.inputs), rules=dict(manifest.rules)
    )
    assert set(manifest.files) == {"ledger", "quarantine", "card_html", "card_json", "croissant"}


def test_duplicates_across_files_and_formats_name_the_winner(make: Make, ledger: Any) -> None:
    manifest = make(
        {
            "a.jsonl": join([b'{"prompt": "q%d", "completion": "a"}' % n for n in range(30)]),
            "b.csv": b"Question,Answer\nq7,a\n",
            "c.json": b'[{"messages": [{"role": "user", "content": " q7"}, {"role": "assistant", "content": "a\\n"}]}]',
        }
    )
    assert manifest.counts["duplicate"] == 2
    seven = [entry for entry in ledger(manifest) if entry["key"] is not None]
    groups: dict[bytes, list[dict[str, Any]]] = {}
    for entry in seven:
        groups.setdefault(entry["key"], []).append(entry)
    (cluster,) = [entries for entries in groups.values() if len(entries) > 1]
    (winner,) = [entry for entry in cluster if entry["end"] != "duplicate"]
    losers = [entry for entry in cluster if entry["end"] == "duplicate"]
    assert {(e["duplicate_of_file"], e["duplicate_of_position"]) for e in losers} == {
        (winner["file"], winner["position"])
    }


def test_kept_duplicates_stay_on_one_side(make: Make, texts: Texts, rows: Rows) -> None:
    good = texts(80)
    manifest = make(
        {"a.jsonl": join(good), "b.jsonl": join(good)}, exact_duplicates="keep", data={"eval_fraction": 0.3}
    )
    assert "duplicate" not in manifest.counts
    assert manifest.counts["train"] + manifest.counts["eval"] == 160
    sides: dict[bytes, set[str]] = {}
    for row in rows(manifest):
        sides.setdefault(row["key"], set()).add(row["split"])
    assert all(len(side) == 1 for side in sides.values())


@pytest.mark.parametrize("duplicates", ["drop", "keep"])
def test_groups_are_never_torn_apart(make: Make, rows: Rows, duplicates: str) -> None:
    lines = [json.dumps({"text": f"text {n}", "group": f"g{n % 25}"}).encode() for n in range(200)]
    # A chain of groups, each sharing one text with the next, must fall on one side as a whole.
    lines += [json.dumps({"text": f"link {n}", "group": f"c{n + step}"}).encode() for n in range(12) for step in (0, 1)]
    manifest = make({"a.jsonl": join(lines)}, exact_duplicates=duplicates, data={"eval_fraction": 0.3})
    sides: dict[str, set[str]] = {}
    for row in rows(manifest):
        sides.setdefault(row["group"], set()).add(row["split"])
    assert all(len(side) == 1 for side in sides.values())
    assert {side for found in sides.values() for side in found} == {"train", "eval"}
    if duplicates == "keep":
        assert len({next(iter(side)) for group, side in sides.items() if group.startswith("c")}) == 1


def test_a_row_stays_on_its_side_when_data_grows(make: Make, texts: Texts, rows: Rows) -> None:
    data = {"eval_fraction": 0.2}
    small = {row["key"]: row["split"] for row in rows(make({"a.jsonl": join(texts(150))}, "d1", data=data))}
    large = {row["key"]: row["split"] for row in rows(make({"a.jsonl": join(texts(300))}, "d2", data=data))}
    assert small.items() <= large.items()
    assert 15 < sum(split == "eval" for split in small.values()) < 50


@pytest.mark.parametrize("count", [2, 3, 20])
@pytest.mark.parametrize("fraction", [0.0001, 0.4999])
def test_both_sides_have_rows(make: Make, texts: Texts, count: int, fraction: float) -> None:
    manifest = make({"a.jsonl": join(texts(count))}, data={"eval_fraction": fraction})
    assert manifest.counts["eval"] >= 1
    assert manifest.counts["train"] >= 1


def test_cut_is_the_recipe_alone_where_it_can_be() -> None:
    low, middle, high = b"\x10" * 16, b"\x80" + b"\0" * 15, b"\xf0" * 16
    assert eval_cut(500_000, low, high) == middle
    assert low < eval_cut(1, low, high) <= low + b"\0"
    assert eval_cut(499_999, low, b"\x20" * 16) == b"\x20" * 16
    assert not low < eval_cut(500_000, low, low)


# --- the digest ---


def test_digest_is_the_same_for_any_workers_splits_and_order(
    store: FolderStore,
    upload: Any,
    texts: Texts,
    recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    good = texts(400)
    files = {
        "a.jsonl": join([*good[:200], b"{bad", good[7]]),
        "b.jsonl.gz": gzip.compress(join(good[150:300])),
        "c.jsonl": join(good[300:]),
    }
    digests = set()
    for number, workers in enumerate((1, 2, 4)):
        monkeypatch.setattr(plan.cut, "__defaults__", (1_000 * (number + 1),))
        monkeypatch.setattr(plan.tasks, "__defaults__", (1_000 * (number + 1), *plan.tasks.__defaults__[1:]))
        drop = upload(files, "d1")
        shuffled = Drop(**{**dict(drop), "files": tuple(random.Random(number).sample(drop.files, len(drop.files)))})
        # Another store each time: nothing to adopt.
        fresh = FolderStore(tmp_path / f"bucket-{number}")
        for key, data in files.items():
            fresh.put(f"drops/fam/d1/{key}", data)
        manifest = curation.curate(fresh, shuffled, recipe(workers=workers), workdir=tmp_path / f"w{number}")
        assert manifest.shards[0].rows == manifest.counts["train"]
        digests.add((manifest.digest, manifest.shards))
    assert len(digests) == 1


_row = st.one_of(
    st.builds(lambda n: json.dumps({"text": f"t {n}"}).encode(), st.integers(0, 30)),
    st.builds(
        lambda n, g: json.dumps({"text": f"t  {n}", "group": f"g{g}"}).encode(), st.integers(0, 30), st.integers(0, 3)
    ),
    st.builds(lambda n: json.dumps({"prompt": f"q{n}", "completion": "a", "source": "s"}).encode(), st.integers(0, 9)),
    st.sampled_from([b"{bad", b"[1]", b'{"text": ""}', b'{"text": "\xff"}']),
)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(st.lists(_row, min_size=4, max_size=40), st.randoms(use_true_random=False), st.sampled_from(["drop", "keep"]))
def test_digest_does_not_see_how_rows_are_spread(
    tmp_path_factory: pytest.TempPathFactory,
    recipe: MakeRecipe,
    lines: list[bytes],
    rng: random.Random,
    mode: str,
) -> None:
    lines = [*lines, b'{"text": "always"}', b'{"text": "there"}']

    def digest(rows: list[bytes], parts: int) -> tuple[str, dict[str, int]]:
        root = tmp_path_factory.mktemp("spread")
        folder = FolderStore(root / "bucket")
        files = []
        for part in range(parts):
            data = join(rows[part::parts])
            folder.put(f"drops/fam/d/{part}.jsonl", data)
            info = folder.stat(f"drops/fam/d/{part}.jsonl")
            assert info
            files.append(DropFile(key=f"{part}.jsonl", size=info.size, content=f"etag:{info.etag}", etag=info.etag))
        drop = Drop(family="fam", drop="d", id=identity(files), bucket="", files=tuple(files))
        manifest = curation.curate(folder, drop, recipe(exact_duplicates=mode), workdir=root / "w")
        return manifest.digest, dict(manifest.counts)

    shuffled = rng.sample(lines, len(lines))
    assert digest(lines, 1) == digest(shuffled, 3)


def test_digest_sees_data_and_rules(make: Make, texts: Texts) -> None:
    good = texts(50)
    indented = [good[0].replace(b"row ", b"row    "), *good[1:]]
    labelled = [good[0][:-1] + b', "label": "x"}', *good[1:]]
    digests = [
        make({"a.jsonl": join(good)}, "d1").digest,
        make({"a.jsonl": join(good[1:])}, "d2").digest,
        make({"a.jsonl": join(indented)}, "d3").digest,
        make({"a.jsonl": join(labelled)}, "d4").digest,
        make({"a.jsonl": join(good)}, "d5", data={"split_salt": "other"}).digest,
        make({"a.jsonl": join([*good, b"{bad"])}, "d6").digest,
    ]
    assert len(set(digests)) == len(digests)
    assert make({"other-name.jsonl": join(good[::-1])}, "d7").digest == digests[0]


def test_rows_with_labels(make: Make, rows: Rows, ledger: Any) -> None:
    """A label is a column of its own and a part of what a row is; the words alone decide the side of the split."""
    good = [{"text": f"the row {number}", "label": ("spam", 3, True)[number % 3]} for number in range(60)]
    twins = [{"text": f"the  row {number}", "label": "other"} for number in range(60)]
    asked = {"messages": [{"role": "user", "content": "only a question"}], "label": "spam"}
    bad = [{"text": "no label"}, {"text": "null label", "label": None}, {"messages": [], "label": "x"}]
    lines = [json.dumps(row).encode() for row in [*good, *twins, good[0], asked, *bad]]
    manifest = make({"a.jsonl": join(lines)}, task="classification", data={"eval_fraction": 0.3})
    found = rows(manifest)
    assert curation.quarantined(manifest.counts) == {"no_label": 2, "bad_messages": 1}
    assert manifest.counts["duplicate"] == 1
    assert Counter(row["label"] for row in found) == {"spam": 21, "3": 20, "true": 20, "other": 60}
    assert len({row["key"] for row in found}) == len(found) == 121
    sides: dict[str, set[str]] = {}
    for row in found:
        sides.setdefault(" ".join((row["text"] or "").split()), set()).add(row["split"])
    assert all(len(side) == 1 for side in sides.values())
    assert {split for side in sides.values() for split in side} == {"train", "eval"}
    # The same file for the other task is another dataset version; and that one is what it was before there were tasks.
    other = make({"a.jsonl": join(lines)}, "d2", data={"eval_fraction": 0.3})
    assert other.digest != manifest.digest
    assert "task" not in other.rules
    assert manifest.rules["task"] == "classification"


def test_rows_for_an_encoder_decoder_need_an_answer(make: Make, rows: Rows) -> None:
    good = [{"prompt": f"question {number}", "completion": f"answer {number}"} for number in range(40)]
    chat = {"messages": [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]}
    bad = [{"text": "a text is no prompt"}, {"prompt": "no answer", "completion": ""}]
    lines = [json.dumps(row).encode() for row in [*good, chat, *bad]]
    manifest = make({"a.jsonl": join(lines)}, task="sequence-to-sequence", data={"eval_fraction": 0.3})
    assert curation.quarantined(manifest.counts) == {"no_answer": 2}
    assert len(rows(manifest)) == 41
    assert all(row["text"] is None for row in rows(manifest))
    assert manifest.rules["task"] == "sequence-to-sequence"


@pytest.mark.parametrize(("task", "told"), [("sequence-to-sequence", True), ("causal-lm", False)])
def test_answers_that_are_only_read_are_told(make: Make, store: FolderStore, task: str, told: bool) -> None:
    turns = [{"role": role, "content": f"{role} {n}"} for n in range(2) for role in ("user", "assistant")]
    lines = [json.dumps({"messages": [{"role": "system", "content": f"{n}"}, *turns]}).encode() for n in range(30)]
    card = json.loads(store.get(make({"a.jsonl": join(lines)}, task=task).files["card_json"]))
    line = "a.jsonl: 30 rows have several answers, of which an encoder-decoder learns the last one alone"
    assert any(one.startswith(line) for one in card["warnings"]) == told


def test_of_copies_one_with_a_group_stays(make: Make, rows: Rows) -> None:
    """Or the group's other rows could be on the other side."""
    texts = [f"row number {n} of the test" for n in range(80)]
    plain = join([json.dumps({"text": text}).encode() for text in texts])
    grouped = join([json.dumps({"text": text, "group": f"g{n % 8}"}).encode() for n, text in enumerate(texts)])
    found = rows(make({"a.jsonl": plain, "b.jsonl": grouped}, data={"eval_fraction": 0.3}))
    sides: dict[str, set[str]] = {}
    for row in found:
        sides.setdefault(row["group"], set()).add(row["split"])
    assert len(found) == 80
    assert sides.keys() == {f"g{n}" for n in range(8)}
    assert {len(side) for side in sides.values()} == {1}


# --- publishing ---


def test_two_curations_at_once_agree_on_one_manifest(
    store: FolderStore,
    upload: Any,
    texts: Texts,
    recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    first, second = upload({"a.jsonl": join(texts(50))}, "d1"), upload({"b.jsonl": join(texts(50))}, "d2")
    meeting = threading.Barrier(2, timeout=60)
    publish = pipeline.publish

    def together(*arguments: Any) -> Manifest:
        meeting.wait()
        return publish(*arguments)

    monkeypatch.setattr(pipeline, "publish", together)
    results: dict[str, Manifest] = {}

    def work(drop: Drop) -> None:
        results[drop.drop] = curation.curate(store, drop, recipe(), workdir=tmp_path / drop.drop)

    threads = [threading.Thread(target=work, args=(drop,)) for drop in (first, second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results["d1"] == results["d2"]
    stored = Manifest.from_json(store.get(layout.manifest_key("fam", results["d1"].digest)))
    assert stored.to_json() == results["d1"].to_json()
    assert all(store.stat(key) for key in stored.files.values())


def test_killed_before_the_manifest_nothing_is_visible_and_a_second_try_completes(
    store: FolderStore,
    upload: Any,
    texts: Texts,
    recipe: MakeRecipe,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    drop = upload({"a.jsonl": join(texts(50))})

    class KilledError(BaseException):
        pass

    def killed(*_: Any) -> bool:
        raise KilledError

    with monkeypatch.context() as patch:
        patch.setattr(FolderStore, "put_if_absent", killed)
        with pytest.raises(KilledError):
            curation.curate(store, drop, recipe(), workdir=tmp_path / "w")
    written = [info.key for info in store.list("datasets/")]
    assert any(key.startswith("datasets/fam/shards/") for key in written)
    assert not any(key.endswith("manifest.json") for key in written)
    # The second try finds the parts of the first one and reads no row again.
    monkeypatch.setattr("curation.kernel.read", None)
    manifest = curation.curate(store, drop, recipe(), workdir=tmp_path / "w")
    assert sorted(written) == sorted(
        info.key for info in store.list("datasets/") if not info.key.endswith("manifest.json")
    )
    assert store.stat(layout.manifest_key("fam", manifest.digest))


def test_a_second_curation_takes_the_first_manifest(make: Make, texts: Texts, store: FolderStore) -> None:
    first = make({"a.jsonl": join(texts(50))}, "d1")
    before = {info.key: info.etag for info in store.list("datasets/")}
    assert make({"a.jsonl": join(texts(50))}, "d2").to_json() == first.to_json()
    assert {info.key: info.etag for info in store.list("datasets/")} == before


# --- what a person is told ---


def test_changed_object_is_named(store: FolderStore, upload: Any, texts: Texts, recipe: Any, tmp_path: Path) -> None:
    drop = upload({"a.jsonl": join(texts(50))})
    store.put("drops/fam/d1/a.jsonl", join(texts(51)))
    with pytest.raises(DataError, match=r"a\.jsonl.*changed") as caught:
        curation.curate(store, drop, recipe(), workdir=tmp_path / "w")
    assert "new drop" in caught.value.mend


def test_wrong_checksum_is_named(store: FolderStore, upload: Any, texts: Texts, recipe: Any, tmp_path: Path) -> None:
    drop = upload({"a.jsonl": join(texts(50))})
    file = drop.files[0].model_copy(update={"content": "sha256:" + "0" * 64})
    with pytest.raises(DataError, match=r"a\.jsonl"):
        curation.curate(store, drop.model_copy(update={"files": (file,)}), recipe(), workdir=tmp_path / "w")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"a.jsonl": b"{bad\n{bad\n[1]\n", "b.csv": b"x\n1\n"}, ("a.jsonl, b.csv", "bad_json (2 rows)", "json.dumps")),
        ({"a.jsonl": b""}, ("a.jsonl", "hold no row", "JSON lines")),
        ({"_chat.txt": b"hello\n"}, ("_chat.txt is skipped, because a name with a leading `_`", "another name")),
        ({"a.parquet": b"<html>"}, ("a.parquet", "bad_format", "JSONL")),
        ({"a.csv": b"x,y\n1,2\n"}, ("a.csv", "no_content", "data.columns")),
        ({"a.jsonl.gz": gzip.compress(b"x" * 9999)[:20]}, ("a.jsonl.gz", "torn_file", "upload the file again")),
    ],
)
def test_no_usable_row_names_files_reason_and_mend(make: Make, files: dict[str, bytes], said: tuple[str, ...]) -> None:
    with pytest.raises(DataError) as caught:
        make(files)
    assert all(text in str(caught.value) for text in said)


def test_no_usable_row_tells_what_each_step_left(make: Make) -> None:
    good = [json.dumps({"text": f"only {n} words"}) for n in range(9)]
    french = [json.dumps({"text": f"Il y a {n} chats dans le jardin et la maison est grande"}) for n in range(4)]
    bad = ["{bad", '{"x": 1}', '{"x": 2}', '{"text": ""}', '{"text": NaN}']
    data = "\n".join([*good, *french, *bad]).encode()
    language = {"keep": ["en"]}
    with pytest.raises(DataError) as caught:
        make({"a.jsonl": data}, language=language, quality={"gopher": {"min_words": 50}})
    steps = "18 read, 13 readable (no_content 2, bad_json 1, bad_number 1, ...), "
    assert steps + "9 left by language (other_language 4), 0 left by quality (gopher_few_words 9)" in str(caught.value)
    # A reason that no step has would leave rows that nobody tells of.
    told = funnel(dict.fromkeys([*Reason, *Filtered, "duplicate", "near_duplicate"], 1))
    assert told[-5:] == [
        "4 left by exact copies (duplicate 1)",
        "3 left by label conflicts (label_conflict 1)",
        "2 left by near copies (near_duplicate 1)",
        "1 left by caps of sources (over_cap 1)",
        "0 left by the split (crosses_split 1)",
    ]


@pytest.mark.parametrize(
    ("number", "told"),
    [(28, "the disk is full"), (27, r"File too large. Raise .* \(`ulimit -f`\)")],
    ids=["disk", "limit"],
)
def test_full_disk(number: int, told: str, make: Make, texts: Texts, monkeypatch: Patch) -> None:
    def full(*_: Any) -> None:
        raise OSError(number, "as the system says it")

    monkeypatch.setattr(written, "write_ledger", full)
    with pytest.raises(DropforgeError, match=told):
        make({"a.jsonl": join(texts(50))})


def test_a_full_disk_is_told_by_the_folder_that_is_on_it(
    make: Make, store: FolderStore, texts: Texts, monkeypatch: Patch
) -> None:
    """The work folder may be on another disk, and room there would help nobody."""

    def full(_stream: Any, target: Any, _size: int) -> None:
        target.write(b"x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(shutil, "copyfileobj", full)
    with pytest.raises(DropforgeError, match=rf"^file {store.uri}/datasets/.*: No space left on device"):
        make({"a.jsonl": join(texts(50))})


def test_progress_reaches_the_end_of_every_stage(
    store: FolderStore, upload: Any, texts: Texts, recipe: MakeRecipe, tmp_path: Path
) -> None:
    last: dict[str, tuple[int, int]] = {}
    drop = upload({"a.jsonl": join(texts(50))})
    curation.curate(
        store,
        drop,
        recipe(),
        workdir=tmp_path / "w",
        progress=lambda stage, done, total, rows: last.update({stage: (done, total)}),
    )
    assert list(last) == ["fetch", "read", "deduplicate", "write", "publish"]
    assert all(done == total for done, total in last.values())


# --- worker processes ---


def test_a_worker_that_dies_is_replaced_and_then_named(
    upload: Any,
    texts: Texts,
    recipe: MakeRecipe,
    store: FolderStore,
    tmp_path: Path,
    monkeypatch: Patch,
) -> None:
    drop = upload({"a.jsonl": join(texts(50)), "b.jsonl": join(texts(50, 50))})
    ask = pool._Worker.ask
    died = []

    def dying(self: Any, task: Any) -> Any:
        if len(died) < deaths:
            died.append(self.process.pid)
            self.process.send_signal(by)
        return ask(self, task)

    monkeypatch.setattr(pool._Worker, "ask", dying)
    deaths, by = 1, signal.SIGKILL
    assert curation.curate(store, drop, recipe(workers=2), workdir=tmp_path / "w1").counts["input"] == 100
    assert len(died) == 1
    deaths = 100
    with pytest.raises(DropforgeError, match=r"worker died 2 times \(SIGKILL\). Give curation more memory"):
        curation.curate(store, drop, recipe(workers=2), workdir=tmp_path / "w2")
    died, by = [], signal.SIGSEGV
    with pytest.raises(DropforgeError, match=r"a split of '[ab].jsonl': .*\(SIGSEGV\). Look at this file"):
        curation.curate(store, drop, recipe(workers=2), workdir=tmp_path / "w3")
