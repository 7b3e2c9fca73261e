"""Logs whose `messages` grow: no answer that is evaluated stands in a training row."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from curation.continued import MOST
from dropforge.dataset import Manifest
from dropforge.store import FolderStore

Rows = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Manifest]
EVAL = {"eval_fraction": 0.2}
LINE = "in several rows, as in a log"


def lines(rows: Sequence[Any]) -> dict[str, bytes]:
    return {"a.jsonl": b"\n".join(json.dumps(row).encode() for row in rows) + b"\n"}


def log(number: int, turns: int = 6, system: str | None = "Be brief.", **more: Any) -> list[dict[str, Any]]:
    """The requests of one conversation, each with all that was said before."""
    said = [] if system is None else [{"role": "system", "content": system}]
    requests = []
    for turn in range(turns):
        said = [*said, {"role": "user", "content": f"Question {turn} of talk {number}?"}]
        said = [*said, {"role": "assistant", "content": f"Answer {turn} of talk {number}."}]
        requests.append({"messages": said, **more})
    return requests


def learned_twice(rows: Sequence[dict[str, Any]]) -> set[str]:
    """Answers that stand on both sides."""
    sides: dict[str, set[str]] = {"train": set(), "eval": set()}
    for row in rows:
        sides[row["split"]] |= {turn["content"] for turn in row["messages"] if turn["role"] == "assistant"}
    assert sides["train"]
    assert sides["eval"]
    return sides["train"] & sides["eval"]


def told(store: FolderStore, manifest: Manifest) -> list[str]:
    return [line for line in json.loads(store.get(manifest.files["card_json"]))["warnings"] if LINE in line]


@pytest.mark.parametrize("kept", [1.0, 0.5])
def test_requests_of_one_conversation_are_on_one_side(make: Make, rows: Rows, store: FolderStore, kept: float) -> None:
    some = random.Random(3)
    requests = [request for number in range(40) for request in log(number) if some.random() < kept]
    some.shuffle(requests)
    manifest = make(lines(requests), data=EVAL)
    assert sum(row["split"] in {"train", "eval"} for row in rows(manifest)) == len(requests)
    assert not learned_twice(rows(manifest))
    [line] = told(store, manifest)
    assert kept < 1 or line.startswith("200 answers of conversations stand in several rows")


def test_what_is_said_beside_the_texts_makes_no_difference(make: Make, rows: Rows, store: FolderStore) -> None:
    """A log has the thoughts of the newest answer alone, flags of its own, other tools, and results behind answers."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    requests = []
    for number in range(40):
        for request in log(number, turns=4, tools=tools if number % 2 else None):
            *before, last = request["messages"]
            thought = {**last, "reasoning_content": "Let me think."}
            asked = [{"role": "user", "content": "And?"}] if number % 3 else []
            requests.append({**request, "messages": [*before, thought, *asked]})
    manifest = make(lines(requests), data=EVAL)
    assert not learned_twice(rows(manifest))
    assert told(store, manifest)


def test_a_greeting_ties_nothing(make: Make, rows: Rows, store: FolderStore) -> None:
    greeting = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "How can I help?"}]
    talks = [{"messages": [*greeting, *log(number, turns=1, system=None)[0]["messages"]]} for number in range(200)]
    manifest = make(lines([{"messages": greeting}, *talks]), data=EVAL)
    split = [row["split"] for row in rows(manifest)]
    assert 15 < split.count("eval") < 70
    assert not told(store, manifest)
    few = make(lines([{"messages": greeting}, *talks[: MOST - 1]]), "few", data=EVAL)
    assert len({row["split"] for row in rows(few)}) == 1
    assert [line.split(" of ")[0] for line in told(store, few)] == ["1 answer"]


def dated(number: int) -> list[dict[str, Any]]:
    """Each request has the time in its system message."""
    return [
        request for turn in range(5) for request in log(number, 5, f"It is {turn + number} o'clock.")[turn : turn + 1]
    ]


def cut(number: int) -> list[dict[str, Any]]:
    """A history of three turns at most."""
    return [{"messages": [*said[:1], *said[1:][-6:]]} for said in (request["messages"] for request in log(number))]


def thought(number: int) -> list[dict[str, Any]]:
    """An answer has its thoughts when it is new."""
    requests = []
    for request in log(number):
        *before, last = request["messages"]
        requests.append({"messages": [*before, {**last, "content": f"<think>\nHm.\n</think>\n\n{last['content']}"}]})
    return requests


def branched(number: int) -> list[dict[str, Any]]:
    """The second question was written in three ways; no request has the first one alone."""
    first = log(number, 1)[0]["messages"]
    return [
        {
            "messages": [
                *first,
                *({**turn, "content": f"{turn['content']} {way}"} for turn in log(number, 2)[1]["messages"][3:]),
            ]
        }
        for way in "abc"
    ]


@pytest.mark.parametrize("requests", [dated, cut, thought, branched])
def test_other_logs(
    make: Make, rows: Rows, store: FolderStore, requests: Callable[[int], list[dict[str, Any]]]
) -> None:
    every = [request for number in range(40) for request in requests(number)]
    manifest = make(lines(every), data=EVAL)
    assert manifest.counts["train"] + manifest.counts["eval"] == len(every)
    assert not learned_twice([*map(without_thoughts, rows(manifest))])
    assert told(store, manifest)


def without_thoughts(row: dict[str, Any]) -> dict[str, Any]:
    turns = [{**turn, "content": turn["content"].rpartition("</think>")[2].strip()} for turn in row["messages"]]
    return {**row, "messages": turns}


@pytest.mark.parametrize(("turns", "seen"), [(1, 2000), (4, 500), (20, 100)])
def test_the_evaluation_side_is_as_large_as_asked_for(make: Make, store: FolderStore, turns: int, seen: int) -> None:
    requests = [request for number in range(seen) for request in log(number, turns)]
    manifest = make(lines(requests), data={"eval_fraction": 0.1})
    part = manifest.counts["eval"] / len(requests)
    assert 0.04 < part < 0.18
    assert bool(told(store, manifest)) == (turns > 1)


def test_what_is_learned_once_is_tied_and_not_told(make: Make, rows: Rows, store: FolderStore) -> None:
    """Earlier answers are marked, or are no answers of a `prompt` and `completion`."""
    marked, pairs = [], []
    for number in range(40):
        for request in log(number):
            *before, last = request["messages"]
            silent = [{**turn, "train": False} if turn["role"] == "assistant" else turn for turn in before]
            marked.append({"messages": [*silent, last]})
            pairs.append({"prompt": before, "completion": [last]})
    for name, requests in (("marked", marked), ("pairs", pairs)):
        manifest = make(lines(requests), name, data=EVAL)
        assert not learned_twice(rows(manifest))
        assert not told(store, manifest)


def test_separate_conversations_are_left_alone(make: Make, store: FolderStore) -> None:
    manifest = make(lines([log(number)[-1] for number in range(60)]))
    assert manifest.counts["train"] + manifest.counts["eval"] == 60
    assert not told(store, manifest)


def test_a_conversation_with_a_label_for_each_turn_is_on_one_side(make: Make, rows: Rows, store: FolderStore) -> None:
    labelled = [{**request, "label": str(number % 2)} for number in range(40) for request in log(number, turns=3)]
    manifest = make(lines(labelled), task="classification", data=EVAL)
    assert not learned_twice(rows(manifest))
    assert not told(store, manifest)


@pytest.mark.parametrize("first", ["begins", "goes on"])
def test_a_later_drop_of_the_family_continues_them(make: Make, rows: Rows, store: FolderStore, first: str) -> None:
    """Each drop has another half of a conversation's requests, in both orders."""
    early = [log(number, turns=3)[turn] for number in range(60) for turn in (0, 2)]
    late = [log(number, turns=4)[turn] for number in range(60) for turn in (1, 3)]
    if first == "goes on":
        early, late = late, early
    make(lines(early), "d1", scope="family", data=EVAL)
    manifest = make(lines(late), "d2", scope="family", data=EVAL)
    assert manifest.counts["train"] + manifest.counts["eval"] == 240
    assert not learned_twice(rows(manifest))


def test_a_group_that_a_later_drop_names_stays_whole(make: Make, rows: Rows) -> None:
    """The first drop has a part of each group, without its name."""

    def talk(number: int, part: int, **more: Any) -> dict[str, Any]:
        turns = [{"role": "user", "content": f"{part} of {number}?"}, {"role": "assistant", "content": f"{number}"}]
        return {"messages": turns, **more}

    make(lines([talk(number, 0) for number in range(60)]), "d1", scope="family", data=EVAL)
    late = [talk(number, part, group=f"g{number}") for number in range(60) for part in range(3)]
    manifest = make(lines(late), "d2", scope="family", data=EVAL)
    assert manifest.counts["train"] + manifest.counts["eval"] == 180
    assert not learned_twice(rows(manifest))


SCRIPT = ("Is the light on?", "Is the cable in?", "Did it restart?", "Is it up to date?", "Do others work?")


def scripted(number: int, first: str, answers: Sequence[str]) -> dict[str, Any]:
    """A conversation by a script: what is asked is fixed, and so is what may be answered."""
    some = random.Random(number)
    turns = [{"role": "user", "content": first}]
    if first == "Hello":
        turns += [{"role": "assistant", "content": "Who is it?"}, {"role": "user", "content": f"It is {number}."}]
    for asked in SCRIPT:
        turns += [{"role": "assistant", "content": asked}, {"role": "user", "content": some.choice(answers)}]
    return {"messages": [*turns, {"role": "assistant", "content": f"Ticket {number} is open."}]}


def called(number: int) -> dict[str, Any]:
    """An agent's, whose calls differ and whose results do not."""
    turns: list[dict[str, Any]] = [{"role": "user", "content": f"Set up host {number}"}]
    for step in range(4):
        command = f"step {step} of host {number}" if step else "show everything that is here, one in a line"
        call = {"name": "run", "arguments": json.dumps({"command": command})}
        turns += [
            {"role": "assistant", "content": None, "tool_calls": [{"id": "c", "type": "function", "function": call}]},
            {"role": "tool", "tool_call_id": "c", "content": "ok"},
        ]
    return {"messages": [*turns, {"role": "assistant", "content": f"Host {number} is ready."}]}


@pytest.mark.parametrize(
    ("seen", "one"),
    [
        (300, lambda n: scripted(n, f"I am {n}, it is down.", ["Yes", "No", "Not sure"])),
        (300, lambda n: scripted(n, f"I am {n}, it is down.", ["Yes"])),
        (200, lambda n: scripted(n, "Hello", ["Yes", "No"])),
        (30, called),
        (4, called),
    ],
)
def test_a_script_and_results_that_many_have_tie_nothing(
    make: Make, store: FolderStore, seen: int, one: Callable[[int], dict[str, Any]]
) -> None:
    manifest = make(lines([one(number) for number in range(seen)]), data={"eval_fraction": 0.25})
    assert 0.15 < manifest.counts["eval"] / seen < 0.35
    assert not told(store, manifest)
    assert "behind other words" not in store.get(manifest.files["card_json"]).decode()


def test_examples_before_each_question_tie_nothing_and_are_told(make: Make, rows: Rows, store: FolderStore) -> None:
    shots = [turn for number in (1000, 1001) for turn in log(number, 2, None)[-1]["messages"]]
    talks = [{"messages": [*shots, *log(number, 1, None)[0]["messages"]]} for number in range(200)]
    manifest = make(lines(talks), data=EVAL)
    assert 15 < [row["split"] for row in rows(manifest)].count("eval") < 70
    assert not told(store, manifest)
    warned = json.loads(store.get(manifest.files["card_json"]))["warnings"]
    assert [line.split(" rows each")[0] for line in warned if "as examples before each question" in line] == [
        "3 answers with the same beginning are learned by up to 200"
    ]


def test_a_tree_of_conversations_is_on_one_side(make: Make, rows: Rows) -> None:
    """As OASST has them, each leaf with all that was said before it."""
    talks = []
    for number in range(40):
        root = log(number, 2, None)[-1]["messages"]
        for leaf in range(12):
            branch = log(100 * number + 1000 + leaf // 4, 1, None)[0]["messages"]
            end = log(1_000_000 + 100 * number + leaf, 1, None)[0]["messages"]
            talks.append({"messages": [*root, *branch, *end]})
    assert not learned_twice(rows(make(lines(talks), data=EVAL)))


def retrieved(number: int, turns: int, words: str = "The answer to the question has these words") -> list[Any]:
    """The requests of a log whose newest question has texts beside it that the history leaves out."""
    requests = []
    said: list[dict[str, Any]] = []
    for turn in range(turns):
        asked, found = f"Part {turn} of {number}?", f"Read this: text {turn} of {number}."
        reply = {"role": "assistant", "content": f"{words} {turn}-{number}"}
        requests.append({"messages": [*said, {"role": "user", "content": f"{found}\n{asked}"}, reply]})
        said = [*said, {"role": "user", "content": asked}, reply]
    return requests


@pytest.mark.parametrize(
    ("turns", "words"),
    [
        (2, "The answer to the question has these words"),
        (4, "The answer to the question has these words"),
        (2, "这是一个没有空格的回答" * 5),
    ],
)
def test_answers_on_both_sides_are_told(make: Make, rows: Rows, store: FolderStore, turns: int, words: str) -> None:
    requests = [one for number in range(100) for one in retrieved(number, turns, words)]
    manifest = make(lines(requests), data=EVAL)
    assert crossing(store, manifest) == (len(learned_twice(rows(manifest))), "of this drop")


@pytest.mark.parametrize("first", [0, 1])
def test_answers_on_both_sides_are_told_over_drops_of_a_family(
    make: Make, rows: Rows, store: FolderStore, first: int
) -> None:
    talks = [retrieved(number, 2) for number in range(100)]
    family = {"scope": "family", "data": EVAL}
    make(lines([talk[first] for talk in talks]), "d1", **family)
    manifest = make(lines([talk[1 - first] for talk in talks]), "d2", **family)
    both = learned_twice(rows(manifest))
    assert crossing(store, manifest) == (len(both), "of the family")
    # A drop that has nothing of it tells nothing of it.
    manifest = make(lines([retrieved(number, 1)[0] for number in range(200, 300)]), "d3", **family)
    assert "behind other words" not in store.get(manifest.files["card_json"]).decode()


def crossing(store: FolderStore, manifest: Manifest) -> tuple[int, str]:
    """How many answers are told to be on both sides, and of what."""
    warned = json.loads(store.get(manifest.files["card_json"]))["warnings"]
    [line] = [line for line in warned if "behind other words" in line]
    found = re.match(r"(\d+) answers of 8 words or more are learned and stand in evaluation rows (.*) too,", line)
    assert found, line
    return int(found[1]), found[2]


@pytest.mark.parametrize("scope", ["drop", "family"])
def test_answers_to_other_questions_and_texts_that_grow_are_told_on_both_sides(
    make: Make, rows: Rows, store: FolderStore, scope: str
) -> None:
    def told(name: str, *requests: dict[str, Any]) -> list[str]:
        made = make(lines([*requests]), name, scope=scope, data=EVAL)
        found = json.loads(store.get(made.files["card_json"]))["warnings"]
        return [line.partition(", as where")[0] for line in found if line.startswith("evaluation: ") and "too," in line]

    words = "Hold the red key of unit {0} for about ten seconds and then let it go"
    ways = ("How do I reset unit {0}?", "Unit {0} hangs, what now?", "Is there a way to restart unit {0}?")
    faq = [{"prompt": way.format(n), "completion": words.format(n)} for n in range(100) for way in ways]
    one = told("d1", *faq[: 200 if scope == "family" else 300])
    # Over drops of a family too: what is counted is of the new drop's rows.
    [line] = told("d2", *faq[200:]) if scope == "family" else one
    found = re.fullmatch(
        r"evaluation: (\d+) of its (\d+) answers of 8 words or more are learned in training rows too, behind other "
        r"questions",
        line,
    )
    assert found, line
    assert 10 <= int(found[1]) <= int(found[2]) <= 100
    calls = [f"Call {n}. " + " ".join(f"They say {part} of {n}." for part in range(60)) for n in range(60)]
    grown = [{"text": call[:end]} for call in calls for end in (500, 900)]
    [line] = [line for line in told("g1", *grown) if "beginnings" in line]
    assert re.match(r"evaluation: \d+ of its \d+ beginnings of texts \(300 characters\) are in training rows", line)
    assert told("g2", *({"text": call.replace("Call", "Talk")} for call in calls)) == []
