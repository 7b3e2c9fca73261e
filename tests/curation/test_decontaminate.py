"""Rows that hold an item of an evaluation set go, wherever the item stands in them, and each item is accounted for."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import Dataset
from hypothesis import given
from hypothesis import strategies as st

import curation
from curation.canonical import canonical
from curation.decontaminate import FOUND, Decontamination, Index, build, found, load, make_decontaminate
from curation.eval_sets import prepare
from curation.plan import make_rules
from curation.stage import put_through
from curation.streams import DEFAULT_LIMITS
from dropforge.dataset import Manifest
from dropforge.errors import DataError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]

QUESTION = "the old clock in our kitchen has stopped again at nine although nobody had touched it since last winter"
WORDS = QUESTION.split()
ASKED = {"sets": {"clocks": "eval-sets/clocks.jsonl"}}


def rules(words: int = 8, per_million: int = 500_000) -> Decontamination:
    return Decontamination((("set", "0" * 64),), words, per_million)


def index(*texts: str, **values: Any) -> Index:
    return build(texts, range(len(texts)), rules(**values))


def hits(row: str, *texts: str, per_million: int = 500_000) -> set[int]:
    return {text for _, text, _ in found([row], index(*texts), per_million)}


@pytest.mark.parametrize(
    "row",
    [
        QUESTION,
        f"Before it. {QUESTION.upper()}?! After it.",
        QUESTION.replace(" ", ",  \n"),
        " ".join(WORDS[:14]) + " and then other words altogether",
        "Cafe\u0301 " + QUESTION,
    ],
)
def test_an_item_is_found_in_other_clothes(row: str) -> None:
    assert hits(row, QUESTION, "a question of quite another kind that nobody here has ever asked at all") == {0}


@pytest.mark.parametrize(
    "row",
    [
        " ".join(reversed(WORDS)),
        " ".join(WORDS[:11]),
        " ".join(word for pair in zip(WORDS, "abcdefghijklmnopqrs", strict=False) for word in pair),
        "",
    ],
)
def test_what_shares_few_runs_stays(row: str) -> None:
    assert hits(row, QUESTION) == set()


def test_of_changed_numbers_those_are_found_that_break_few_runs() -> None:
    """What the docs say is lost: a number in the middle of a short item breaks eight of its runs."""
    item = "A train leaves the town at 9 with 120 people and comes to the sea after 3 hours how many"
    item += " of them are left if 40 get off at each of the 2 stops"
    changes = {"2": "5", "40": "45", "9": "7", "120": "121"}
    words = item.split()
    assert len(words) == 34

    def changed(*numbers: str) -> str:
        return " ".join(changes[word] if word in numbers else word for word in words)

    assert hits(changed("2"), item) == {0}
    assert hits(changed("9"), item) == {0}
    assert hits(changed("2", "40"), item) == {0}
    assert hits(changed("9", "40"), item) == set()
    assert hits(changed(*changes), item) == set()
    assert hits(" ".join([*WORDS[:10], "10", *WORDS[11:]]), QUESTION) == set()


def test_the_share_decides_to_the_run() -> None:
    total = len(WORDS) - 7
    for count in range(8, len(WORDS) + 1):
        shared = count - 7
        row = " ".join(WORDS[:count])
        assert hits(row, QUESTION, per_million=shared * 1_000_000 // total) == {0}
        assert hits(row, QUESTION, per_million=shared * 1_000_000 // total + 1) == set()


def test_short_texts_are_looked_for_as_a_whole_and_shorter_ones_not_at_all() -> None:
    made = index("Who wrote the ninth symphony", "Who wrote it", "")
    assert made.total.tolist() == [1, 0, 0]
    assert [
        text for _, text, _ in found(["So who wrote the ninth symphony, then? Who wrote it?"], made, 1_000_000)
    ] == [0]
    assert not list(found(["who wrote the ninth and only symphony"], made, 1_000_000))


def test_forms_of_words_are_no_items() -> None:
    """What a hundred items begin with says nothing of any of them; what is left of each does."""
    head = "Choose the right answer to the following question about history and write its letter:"
    texts = [f"{head} in which year did event number{n} happen to the city number{n} by the sea" for n in range(150)]
    made = index(*texts)
    assert not list(found([head], made, 1))
    assert {text for _, text, _ in found([texts[7]], made, 1_000_000)} == {7}
    assert made.total.max() < len(texts[0].split()) - 7


@given(st.lists(st.sampled_from(["a b c d e f", "b c d e f g", QUESTION, "x", ""]), max_size=6), st.integers(1, 5))
def test_how_rows_are_cut_into_batches_changes_nothing(rows: list[str], size: int) -> None:
    made = index("a b c d e", "b c d e f g", QUESTION)
    whole = [(row, text, shared) for row, text, shared in found(rows, made, 500_000)]
    parts = [
        (start + row, text, shared)
        for start in range(0, len(rows), size)
        for row, text, shared in found(rows[start : start + size], made, 500_000)
    ]
    assert whole == parts


def test_an_index_is_read_as_it_was_written(tmp_path: Path) -> None:
    made = index(QUESTION, "a b c d e", "short")
    made.save(tmp_path / "index.npz")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["index.npz"]
    read = load(tmp_path / "index.npz")
    assert list(found([QUESTION, "a b c d e"], read, 500_000)) == list(found([QUESTION, "a b c d e"], made, 500_000))


def chat(*contents: str) -> dict[str, Any]:
    roles = ("system", "user", "assistant", "tool", "assistant")
    return {"messages": [{"role": r, "content": c} for r, c in zip(roles, contents, strict=False)]}


def test_all_messages_are_looked_at_and_as_one(tmp_path: Path) -> None:
    index(QUESTION).save(tmp_path / "index.npz")
    half = " ".join(WORDS[:9]), " ".join(WORDS[9:])
    answer = json.dumps({"found": QUESTION.replace(" ", "\n", 3), "n": 1})
    rows = [
        chat(QUESTION, "hello", "yes"),
        chat("be nice", half[0], half[1]),
        chat("be nice", "look it up", "wait", answer, "done"),
        chat("be nice", "hello", "yes"),
    ]
    stage = make_decontaminate(rules(), tmp_path / "index.npz")
    done, counts = put_through([canonical(row) for row in rows], [stage])
    assert [getattr(row, "reason", None) for row in done] == ["contaminated"] * 3 + [None]
    assert counts == {f"{FOUND}0": 3}
    assert "item 1 of the evaluation sets: 12 of 12 runs of 8 words" in done[0].detail


def lines(*rows: Any) -> bytes:
    return b"\n".join(json.dumps(row).encode() for row in rows)


def drop() -> dict[str, bytes]:
    plain = [{"text": f"a row number {n} with words of its own, such as w{n} and v{n * 7}"} for n in range(40)]
    return {
        "a.jsonl": lines(*plain, {"text": f"Quiz: {QUESTION}"}, {"prompt": "What stopped?", "completion": QUESTION})
    }


def test_a_drop_loses_the_rows_and_tells_of_each_item(
    make: Make, store: FolderStore, rows: Any, ledger: Any, quarantine: Any
) -> None:
    items = [
        {"question": QUESTION, "answer": "nine"},
        {"q": ["Is it", {"of": "a b c d e f g h i j"}]},
        {"question": "Why"},
    ]
    store.put("eval-sets/clocks.jsonl", lines(*items))
    manifest = make(drop(), decontaminate=ASKED)
    assert manifest.counts["contaminated"] == 2
    assert not [row for row in rows(manifest) if "stopped again" in str(row)]
    assert sum(entry["end"] == "contaminated" for entry in ledger(manifest)) == 2
    told = [json.loads(line) for line in store.get(manifest.files["contamination"]).splitlines()]
    assert [(item["item"], item["set"], item["sought"], item["rows"]) for item in told] == [
        (1, "clocks", True, 2),
        (2, "clocks", True, 0),
        (3, "clocks", False, 0),
    ]
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["evaluation_sets"]["sets"] == {"clocks": {"items": 3, "not_sought": 1, "found": 1, "rows": 2}}
    assert (
        "evaluation set clocks: 1 of 3 items have no text of 5 words or more that can be looked for" in card["warnings"]
    )
    assert not [name for name in card["statistics"]["touched"] if name.startswith(FOUND)]
    page = store.get(manifest.files["card_html"]).decode()
    assert "Evaluation sets" in page
    assert QUESTION in page


def test_the_set_s_content_is_part_of_the_version(make: Make, store: FolderStore) -> None:
    store.put("eval-sets/clocks.jsonl", lines({"question": "nothing that occurs in any of these rows"}))
    first = make(drop(), decontaminate=ASKED)
    store.put("eval-sets/clocks.jsonl", lines({"question": "nothing else that occurs in any of these rows"}))
    second = make(drop(), decontaminate=ASKED)
    assert first.digest != second.digest
    assert first.rules["decontamination"]["sets"].keys() == {"clocks"}
    plain = make(drop())
    assert "decontamination" not in plain.rules


@pytest.mark.parametrize("kind", ["csv", "parquet", "bytes.parquet", "json", "arrow", "utf-16.jsonl", "utf-32-le.csv"])
def test_sets_come_in_any_format(make: Make, store: FolderStore, tmp_path: Path, kind: str) -> None:
    table = pa.table({"Frage": [QUESTION, "x"], "n": [1, 2]})
    pq.write_table(table, tmp_path / "set.parquet")
    pq.write_table(table.set_column(0, "Frage", table["Frage"].cast(pa.binary())), tmp_path / "set.bytes.parquet")
    Dataset.from_list(table.to_pylist()).save_to_disk(tmp_path / "saved")
    data = {
        "csv": f'Frage,n\n"{QUESTION}",1\nx,2\n'.encode(),
        "parquet": (tmp_path / "set.parquet").read_bytes(),
        "bytes.parquet": (tmp_path / "set.bytes.parquet").read_bytes(),
        "json": json.dumps(table.to_pylist(), indent=1).encode(),
        "arrow": next((tmp_path / "saved").glob("*.arrow")).read_bytes(),
        "utf-16.jsonl": lines(*table.to_pylist()).decode().encode("utf-16"),
        "utf-32-le.csv": f'\ufeffFrage,n\n"{QUESTION}",1\nx,2\n'.encode("utf-32-le"),
    }[kind]
    store.put(f"eval-sets/set.{kind}", data)
    assert make(drop(), decontaminate={"sets": {"s": f"eval-sets/set.{kind}"}}).counts["contaminated"] == 2


def test_a_set_of_one_item_a_line_of_text_is_told(make: Make, store: FolderStore) -> None:
    store.put("eval-sets/clocks.txt", "\n".join(f"Is clock {n} of the long hall on?" for n in range(9)).encode())
    made = make(drop(), decontaminate={"sets": {"clocks": "eval-sets/clocks.txt"}})
    card = json.loads(store.get(made.files["card_json"]))
    [told] = [line for line in card["warnings"] if line.startswith("evaluation set")]
    assert told.startswith("evaluation set clocks: read as text, a paragraph a row, though it has lines that each end")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (None, r"evaluation set 'clocks' \(eval-sets/clocks.jsonl\)"),
        (b"", "holds no item"),
        (b"PAR1 and no Parquet", "bad_parquet"),
        (b'{"question": "a"}\nbroken\n', "its row at 18 cannot be read: bad_json"),
    ],
)
def test_a_set_that_cannot_be_used_is_an_error(make: Make, store: FolderStore, data: bytes | None, said: str) -> None:
    if data is not None:
        store.put("eval-sets/clocks.jsonl", data)
    with pytest.raises(DataError, match=said):
        make(drop(), decontaminate=ASKED)
    assert not list(store.list("datasets/"))


def test_masked_rows_are_found_by_masked_items(make: Make, store: FolderStore) -> None:
    text = "please write a kind letter to jane@example-company.com about the broken clock in hall seven"
    store.put("eval-sets/clocks.jsonl", lines({"question": text}))
    files = {"a.jsonl": drop()["a.jsonl"] + b"\n" + lines({"text": text})}
    manifest = make(files, decontaminate={**ASKED, "threshold": 1.0}, pii={})
    assert manifest.counts["contaminated"] == 1
    report = store.get(manifest.files["contamination"])
    assert b"jane@" not in report


# Twenty words with a mark among them, without which fewer than half of its runs are left.
CITED = "the water in this tall glass boils much sooner[1] on a high hill than it does by the sea"
FIVE = " One is one. Two is two. Three is three. Four is four."
MARKED = " ".join(WORDS[:10]) + "[1] " + " ".join(WORDS[10:])


def marked() -> dict[str, bytes]:
    """Rows with items in which marks of citations stand, so that taking these out puts the items together."""
    texts = [f"Row number {n} of the test.{FIVE}" for n in range(40)]
    texts += [f"Quiz: {MARKED}.{FIVE}", f"{MARKED}. {MARKED}.{FIVE}", f"{QUESTION}. {MARKED}.{FIVE}", f"{CITED}.{FIVE}"]
    half = " ".join(WORDS[:9]), f"{' '.join(WORDS[9:12])}[1] {' '.join(WORDS[12:])}.{FIVE}"
    return {"a.jsonl": lines(*({"text": text} for text in texts), {"prompt": half[0], "completion": half[1]})}


def test_what_c4_puts_together_is_found_too(make: Make, store: FolderStore, rows: Any, ledger: Any) -> None:
    store.put("eval-sets/clocks.jsonl", lines({"question": QUESTION}, {"question": CITED}))
    before = make(marked(), "d1", decontaminate=ASKED)
    assert before.counts["contaminated"] == 2  # the whole item, and the one with a mark of its own
    manifest = make(marked(), "d2", decontaminate=ASKED, quality={"c4": {}})
    assert manifest.counts["contaminated"] == 5
    assert sum(entry["end"] == "contaminated" for entry in ledger(manifest)) == 5
    assert len(rows(manifest)) == 40
    told = [json.loads(line) for line in store.get(manifest.files["contamination"]).splitlines()]
    assert [item["rows"] for item in told] == [4, 1]  # each row once, also with two copies of an item
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["evaluation_sets"]["sets"] == {"clocks": {"items": 2, "not_sought": 0, "found": 2, "rows": 5}}


def test_a_ceiling_holds_for_what_c4_puts_together(
    make: Make, store: FolderStore, recipe: Callable[..., Recipe]
) -> None:
    store.put("eval-sets/clocks.jsonl", lines({"question": QUESTION}))
    asked = {"decontaminate": ASKED, "quality": {"c4": {}}, "gate": {"max": {"contaminated": 0}}}
    manifest = make({"a.jsonl": b"\n".join(marked()["a.jsonl"].splitlines()[:41])}, **asked)
    with pytest.raises(DataError, match=r"gate\.max\.contaminated"):
        curation.check(manifest, recipe(**asked))


@pytest.mark.parametrize(("pii", "end"), [({}, "contaminated"), ({"action": "drop-row"}, "personal_data")])
def test_what_c4_puts_together_is_masked_before_it_is_looked_for(
    make: Make, store: FolderStore, pii: dict[str, Any], end: str
) -> None:
    text = "please write a kind letter to jane{}@example-company.com about the broken clock in hall seven"
    store.put("eval-sets/clocks.jsonl", lines({"question": text.format("")}))
    plain = [{"text": f"Row number {n} of the test.{FIVE}"} for n in range(40)]
    files = {"a.jsonl": lines(*plain, {"text": text.format("[1]") + f".{FIVE}"})}
    manifest = make(files, decontaminate={**ASKED, "threshold": 1.0}, pii=pii, quality={"c4": {}})
    ends = {name: manifest.counts.get(name, 0) for name in ("contaminated", "personal_data")}
    assert ends == {"contaminated": 0, "personal_data": 0, end: 1}
    (told,) = [json.loads(line) for line in store.get(manifest.files["contamination"]).splitlines()]
    assert told["rows"] == (end == "contaminated")


@pytest.mark.parametrize(
    ("quality", "version"), [(None, 1), ({"gopher": {"min_words": 3}}, 1), ({"c4": {"citations": False}}, 2)]
)
def test_only_beside_c4_the_rules_have_another_version(
    store: FolderStore, recipe: Callable[..., Recipe], tmp_path: Path, quality: dict[str, Any] | None, version: int
) -> None:
    store.put("eval-sets/clocks.jsonl", lines({"question": QUESTION}))
    asked = recipe(decontaminate=ASKED, quality=quality)
    assert asked.curation.decontaminate is not None
    made, _ = prepare(store, asked.curation.decontaminate, make_rules(asked), tmp_path / "sets", DEFAULT_LIMITS)
    assert made.facts()["decontamination"]["version"] == version
