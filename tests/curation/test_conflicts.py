"""Rows that ask the same and answer otherwise, and sources with a most."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from curation.explain import explain
from curation.notes import NoUsableRowError
from dropforge.dataset import Manifest
from dropforge.store import FolderStore

Rows = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Manifest]


def chat(question: str, answer: str, **more: Any) -> dict[str, Any]:
    turns = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
    return {"messages": turns, **more}


def lines(rows: Sequence[Any]) -> dict[str, bytes]:
    return {"a.jsonl": b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"}


CHATS = [chat(f"What is {n} and {n}?", f"It is {2 * n}.") for n in range(40)]
WRONG = [chat(f"What is  {n} and {n}?", "Nobody knows.") for n in range(5)]  # white space is no difference


def answers(rows: list[dict[str, Any]]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {}
    for row in rows:
        question, answer = (turn["content"] for turn in row["messages"])
        found.setdefault(" ".join(question.split()), set()).add(answer)
    return found


@pytest.mark.parametrize("policy", ["keep", "first", "drop"])
def test_one_question_with_two_answers(make: Make, rows: Rows, store: FolderStore, policy: str) -> None:
    manifest = make(lines([*CHATS, *WRONG, CHATS[0], WRONG[0]]), label_conflicts=policy)
    by_question = answers(rows(manifest))
    several = {question for question, found in by_question.items() if len(found) > 1}
    asked = {f"What is {n} and {n}?" for n in range(5)}
    gone = {"keep": 0, "first": 5, "drop": 10}[policy]
    assert manifest.counts.get("label_conflict", 0) == gone
    assert manifest.counts["duplicate"] == 2
    assert several == (asked if policy == "keep" else set())
    assert by_question.keys() & asked == (set() if policy == "drop" else asked)
    card = json.loads(store.get(manifest.files["card_json"]))
    contested = card["statistics"]["contested"]
    assert (contested["inputs"], contested["rows"]) == (5, 12)
    assert {item["answer"] for item in contested["examples"]} >= {"Nobody knows."}
    assert "Label conflicts" in store.get(manifest.files["card_html"]).decode()


@pytest.mark.parametrize(("policy", "told"), [("keep", True), ("first", False)])
def test_a_classifier_s_rows_of_one_input_and_several_labels_are_told(
    make: Make, store: FolderStore, policy: str, told: bool
) -> None:
    rows = [{"text": f"mail number {n}", "label": label} for n in range(20) for label in ("spam", "urgent")]
    made = make(lines(rows), task="classification", label_conflicts=policy)
    line = (
        "labels: 40 rows have another label than rows with the same input; a row has one class, and "
        "`curation.label_conflicts` takes such rows out"
    )
    assert (line in json.loads(store.get(made.files["card_json"]))["warnings"]) == told


def test_files_and_drops_that_answer_the_same_questions_otherwise_are_told(make: Make, store: FolderStore) -> None:
    """As an older and a corrected version, or two configurations of a data set, side by side."""

    def told(files: dict[str, list[Any]], prefix: str, **more: Any) -> list[str]:
        made = make({name: lines(rows)["a.jsonl"] for name, rows in files.items()}, prefix, **more)
        found = json.loads(store.get(made.files["card_json"]))["warnings"]
        return [line.partition(", and answer")[0] for line in found if "and answer otherwise" in line]

    fixed = [chat(row["messages"][0]["content"], "Corrected.") for row in CHATS[:20]]
    assert told({"v1/a.jsonl": CHATS, "v2/a.jsonl": fixed}, "d1") == [
        "v2/a.jsonl: 20 rows ask what rows of v1/a.jsonl ask"
    ]
    assert told({"a.jsonl": CHATS}, "d3", scope="family") == []
    assert told({"b.jsonl": fixed}, "d4", scope="family") == ["b.jsonl: 20 rows ask what rows of earlier drops ask"]
    # Few of many rows, and several answers to one question, which parts of one data set have in any order.
    few = [*fixed[:12], *(chat(f"And {n}?", "Yes.") for n in range(40))]
    drawn = [chat(f"What is {n % 20}?", f"Answer {n}.") for n in range(80)]
    parts = {"part-0.jsonl": drawn[:40], "part-1.jsonl": drawn[40:]}
    assert told({"a.jsonl": CHATS, "b.jsonl": few, **parts}, "d5") == []


@pytest.mark.parametrize(
    ("other", "told"),
    [
        ("if x{0}:\n    a()\n    b()", True),  # another program
        ("if x{0}: a() b()", True),  # as Excel, or a broken export, leaves it
        ("if x{0}:\n    a()\n\nb()", True),
        ("if x{0}:\r\n    a() \r\nb()\n\n", False),
        ("if x{0}:\n    a()\nb()\n", False),
        ("if\tx{0}:\n    a()\nb()", True),
        ("    if x{0}:\n    a()\nb()", True),
        ("if x{0}:\u2028    a()\nb()", False),
        ("\u200bif x{0}:\n    a()\nb()", False),
    ],
)
def test_copies_of_other_lines_are_told_within_a_drop_and_over_drops(
    make: Make, store: FolderStore, other: str, told: bool
) -> None:
    """White space is no part of a row's key, and makes another program all the same."""

    def lines_of(made: Manifest) -> list[str]:
        found = json.loads(store.get(made.files["card_json"]))["warnings"]
        return [line.partition(", with other")[0] for line in found if "line breaks, indentation" in line]

    first = [chat(f"Write {n}.", f"if x{n}:\n    a()\nb()") for n in range(20)]
    again = [chat(f"Write {n}.", other.format(n)) for n in range(12)]
    one = make(lines([*first, *again, *first[:5]]), "both")
    assert one.counts["duplicate"] == 17
    assert bool(lines_of(one)) == told  # which one of a pair stays is decided by its hash
    assert lines_of(make(lines(first), "d1", scope="family")) == []
    later = make(lines([*again, *first[:3]]), "d2", scope="family")
    assert later.steps[1].counts["duplicate"] == 15
    assert lines_of(later) == (["a.jsonl: 12 rows went as copies"] if told else [])
    kept = make(lines([*first, *again]), "kept", exact_duplicates="keep")
    assert lines_of(kept) == []


@pytest.mark.parametrize("scope", ["drop", "family"])
def test_a_drop_without_a_row_after_settling_fails_with_its_funnel(make: Make, store: FolderStore, scope: str) -> None:
    twice = [chat(f"What is {n} and {n}?", answer) for n in range(20) for answer in ("This.", "That.")]
    with pytest.raises(NoUsableRowError) as caught:
        make(lines([*twice, *twice, *twice, {"x": 1}]), label_conflicts="drop", scope=scope)
    said = "none of 121 rows can be used; copies aside, most often the reason is label_conflict (40 rows)"
    assert said in str(caught.value)
    steps = "121 read, 120 readable (no_content 1), 40 left by exact copies (duplicate 80), 0 left by label conflicts"
    assert steps in str(caught.value)
    assert "curation.label_conflicts" in caught.value.mend
    assert caught.value.manifest is not None
    assert caught.value.manifest.counts["label_conflict"] == 40
    assert not any(info.key.endswith("head.json") for info in store.list("datasets/"))


def test_a_drop_that_adds_nothing_to_its_family_is_no_error(make: Make) -> None:
    values: dict[str, Any] = {"scope": "family"}
    twice = [chat(f"Where is {n}?", answer) for n in range(20) for answer in ("Here.", "There.")]
    make(lines(twice), name="d1", **values)
    # By other rules the first drop has no row any more, and what the second one brings stays.
    two = make(lines(CHATS), name="d2", label_conflicts="drop", **values)
    assert two.steps[0].counts["label_conflict"] == two.steps[0].counts["input"] == 40
    assert two.counts["train"] + two.counts["eval"] == len(CHATS)
    three = make(lines([*WRONG, *twice]), name="d3", label_conflicts="drop", **values)
    assert three.steps[2].counts["train"] + three.steps[2].counts["eval"] == 0
    assert three.counts["train"] + three.counts["eval"] == len(CHATS)


def test_the_row_that_stayed_is_named(make: Make, store: FolderStore) -> None:
    files = lines([*CHATS, *WRONG])
    manifest = make(files, label_conflicts="first")
    starts = [0]
    for line in files["a.jsonl"].splitlines(keepends=True):
        starts.append(starts[-1] + len(line))
    for n in range(5):
        pair = [explain(store, manifest, f"a.jsonl@{at}")[0] for at in (starts[n], starts[40 + n])]
        [stayed] = [fate for fate in pair if fate.end in {"train", "eval"}]
        [gone] = [fate for fate in pair if fate.end == "label_conflict"]
        assert gone.kept == (stayed.file, stayed.position)
        assert f"{stayed.file}@{stayed.position}" in gone.why
        assert stayed.copies == 1


def long_chat(n: int, m: int) -> dict[str, Any]:
    """Only the last answer is another one."""
    asked = ["system", "Be brief."], ["user", "Hello"], ["assistant", "Hi"], ["user", f"What is {n}?"]
    return {"messages": [{"role": role, "content": said} for role, said in (*asked, ("assistant", f"It is {m}."))]}


ASKED: dict[str, tuple[str, Callable[[int, int], dict[str, Any]]]] = {
    "chat": ("causal-lm", lambda n, m: chat(f"What is {n}?", f"It is {m}.")),
    "groups": ("causal-lm", lambda n, m: chat(f"What is {n}?", f"It is {m}.", group=f"g{m}{n}")),
    "long chat": ("causal-lm", long_chat),
    "pair": ("causal-lm", lambda n, m: {"prompt": f"What is {n}?", "completion": f"It is {m}."}),
    "task": ("sequence-to-sequence", lambda n, m: {"instruction": "Add", "input": f"{n}", "output": f"It is {m}."}),
    "label": ("classification", lambda n, m: {"text": f"What is {n}?", "label": f"{m}"}),
    "labelled chat": ("classification", lambda n, m: chat(f"What is {n}?", "It is so.", label=f"{m}")),
    "text": ("causal-lm", lambda n, m: {"text": f"What is {n}?", "label": f"{m}"}),
}


@pytest.mark.parametrize("scope", ["drop", "family"])
@pytest.mark.parametrize("shape", ASKED)
def test_all_answers_to_a_question_stand_on_one_side(make: Make, rows: Rows, shape: str, scope: str) -> None:
    task, row = ASKED[shape]
    data = lines([row(n, m) for n in range(60) for m in range(3)])
    manifest = make(data, data={"eval_fraction": 0.4}, task=task, scope=scope, exact_duplicates="keep")
    sides: dict[str, set[str]] = {}
    for kept in rows(manifest):
        turns = kept["messages"] or [{"content": kept["text"]}]
        [asked] = [turn["content"] for turn in turns if any(mark.isdigit() for mark in turn["content"])][:1]
        sides.setdefault(asked, set()).add(kept["split"])
    assert len(sides) == 60
    assert {len(found) for found in sides.values()} == {1}
    assert {side for found in sides.values() for side in found} == {"train", "eval"}


def test_one_text_with_two_labels(make: Make, rows: Rows) -> None:
    texts = [{"text": f"row {n} of the test", "label": "good"} for n in range(40)]
    texts += [{"text": f"row {n} of the test", "label": "bad"} for n in range(4)]
    kept = make(lines(texts), name="k", task="classification")
    assert kept.counts["train"] + kept.counts["eval"] == 44
    first = make(lines(texts), name="f", task="classification", label_conflicts="first")
    assert first.counts["label_conflict"] == 4
    assert len({row["text"] for row in rows(first)}) == 40
    copies = make(
        lines(texts + texts[-1:]), name="c", task="classification", label_conflicts="drop", exact_duplicates="keep"
    )
    assert copies.counts["label_conflict"] == 9


def test_a_source_has_a_most_over_all_drops(make: Make, rows: Rows, store: FolderStore) -> None:
    def some(first: int) -> list[dict[str, str]]:
        return [
            {"text": f"row {n} says something", "source": "wiki" if n % 2 else "it's; drop table rows"}
            for n in range(first, first + 60)
        ]

    most = {"wiki": 20, "nobody": 1}
    one = make(lines(some(0)), name="d1", scope="family", max_rows_per_source=most)
    assert one.counts["over_cap"] == 10
    two = make(lines(some(60)), name="d2", scope="family", max_rows_per_source={**most, "wiki": 20})
    assert two.counts["over_cap"] == 40
    assert Counter(row["source"] for row in rows(two)) == {"wiki": 20, "it's; drop table rows": 60}
    assert {row["text"] for row in rows(one)} <= {row["text"] for row in rows(two)}
    more = {"wiki": 30, "it's; drop table rows": 7}
    both = make(lines(some(0)), name="d3", max_rows_per_source=more)
    assert Counter(row["source"] for row in rows(both)) == {"wiki": 30, "it's; drop table rows": 7}
    assert both.counts["over_cap"] == 23
