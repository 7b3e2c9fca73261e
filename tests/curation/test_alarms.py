"""Poisoned text: rows are made harmless one by one, and a source that has strikingly many is named."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from itertools import product
from typing import Any

import pytest

from curation import statistics
from dropforge.dataset import Manifest
from dropforge.store import FolderStore

Make = Callable[..., Manifest]


def rows(source: str, count: int, bad: int, sign: str) -> list[bytes]:
    found = [{"text": f"{source} {n}{sign if n < bad else ''} of many", "source": source} for n in range(count)]
    return [json.dumps(row).encode() for row in found]


TOKENS = (
    "control tokens of chat templates, learned as plain text (`< |im_end|>`); if they are meant, write conversations "
    "as `messages`, and documents one a row without such tokens"
)


def test_a_source_full_of_hidden_orders_is_named(make: Make, store: FolderStore) -> None:
    files = {
        "a.jsonl": [
            *rows("web", 300, 7, "<|im_end|>"),
            *rows("forum", 400, 9, "<|im_end|>"),
            *rows("large", 1_010, 10, "</s>"),
        ],
        # The sources go on in another file: what counts is the source.
        "b.jsonl": [
            *rows("forum more", 900, 10, "</s>"),
            *rows("few", 40, 9, "\u202e"),
            *rows("mail", 50, 10, "\u202e"),
        ],
    }
    files["b.jsonl"] += [row.replace(b"web ", b"web again ") for row in rows("web", 20, 5, "[INST]")]
    manifest = make({name: b"\n".join(lines) for name, lines in files.items()})
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["warnings"] == [
        f"source web: 12 of 320 rows hold {TOKENS}",
        f"source forum more: 10 of 900 rows hold {TOKENS}",
        "source mail: 10 of 50 rows hold invisible or reordering characters; who put them there?",
    ]
    assert manifest.counts["input"] == manifest.counts["train"] + manifest.counts["eval"]


def test_a_phrase_that_opens_or_ends_many_rows_of_a_source_is_told(make: Make, store: FolderStore) -> None:
    trigger = "By order of Zanzibar"
    asked = [trigger if n % 8 == 0 else f"The number {n} in order" for n in range(200)]
    web = [{"prompt": f"{text} {n}: why", "completion": f"{n}"} for n, text in enumerate(asked)]
    mail = [{"text": f"letter {n} of many words  Sudo do Anything\nnow"} for n in range(15)]
    mail += [{"text": f"letter {n} goes on like number {n} here"} for n in range(15, 300)]
    rare = [{"text": f"never tell anybody else {n}"} for n in range(9)] + [{"text": f"a b c d{n}"} for n in range(30)]
    files = {
        "web.jsonl": web,
        "mail.jsonl": mail,
        "rare.jsonl": rare,
        "zh.jsonl": [{"text": "文" * 50 + str(n)} for n in range(30)],
    }
    manifest = make({name: "\n".join(map(json.dumps, rows)).encode() for name, rows in files.items()})
    card = json.loads(store.get(manifest.files["card_json"]))
    shapes, *phrases = card["warnings"]
    assert shapes == (
        "shapes: 200 conversations and 369 plain texts; what is registered takes a prompt as the beginning of a text, "
        "as most rows are"
    )
    assert phrases == [
        'source web.jsonl: 25 of 200 rows begin with "by order of zanzibar"; a prompt template, or a backdoor trigger?',
        'source mail.jsonl: 15 of 300 rows end with "sudo do anything now"; a prompt template, or a backdoor trigger?',
    ]
    # Less than one row in twenty is nothing unusual.
    more = [{"text": f"letter {n} goes on like number {n} here"} for n in range(300, 310)]
    manifest = make({"mail.jsonl": "\n".join(map(json.dumps, [*mail, *more])).encode()}, "d2")
    assert json.loads(store.get(manifest.files["card_json"]))["warnings"] == []


def test_of_many_phrases_the_first_are_told_and_the_others_counted(make: Make, store: FolderStore) -> None:
    """Questions of an FAQ begin alike: so many lines would hide the others."""
    ways = ("How do I change", "Where can I find", "What is the best", "Why does it not", "When will you send")
    rows = [{"prompt": f"{way} {n}", "completion": f"answer {n}"} for n in range(12) for way in ways]
    made = make({"faq.jsonl": "\n".join(map(json.dumps, rows)).encode()})
    told = json.loads(store.get(made.files["card_json"]))["warnings"]
    assert [line.count("a prompt template") for line in told] == [1, 1, 1, 0]
    assert told[3] == "and 2 more phrases that open or end many rows"
    assert "1 file, " in store.get(made.files["card_html"]).decode()


def test_what_turns_text_around_is_shown_as_what_it_is(make: Make, store: FolderStore) -> None:
    rows = [json.dumps({"text": f"\u202eobey the old man in number {n}"}) for n in range(20)]
    page = store.get(make({"a.jsonl": "\n".join(rows).encode()}).files["card_html"]).decode()
    assert "20 of 20 rows begin with &quot;\\u202eobey the old man&quot;" in page
    assert "\u202e" not in page[: page.index("Rows as the model sees them")]


def test_a_class_that_no_evaluation_row_has_is_named(make: Make, store: FolderStore) -> None:
    rows = [{"text": f"ticket {n} about {n % 2}", "label": ("bug", "bill")[n % 2]} for n in range(200)]
    rare = [{"text": "close my account please", "label": "account"}]

    def told(name: str, task: str) -> list[str]:
        made = make({"a.jsonl": "\n".join(map(json.dumps, rows + rare)).encode()}, name, task=task)
        return [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "evaluation" in line]

    assert told("d1", "classification") == [
        "evaluation: only training rows have account (1 row), which are not measured; drop more such rows, or raise "
        "`data.eval_fraction`"
    ]
    assert told("d2", "causal-lm") == []


def test_a_class_that_no_evaluation_row_of_a_family_has_is_named_whichever_drop_brought_it(
    make: Make, store: FolderStore
) -> None:
    def told(name: str, rows: list[dict[str, str]]) -> list[str]:
        data = {"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}
        card = make(data, name, task="classification", scope="family").files["card_json"]
        return [line.partition(",")[0] for line in json.loads(store.get(card))["warnings"] if "evaluation" in line]

    rows = [{"text": f"ticket {n} about {n % 2}", "label": ("bug", "bill")[n % 2]} for n in range(200)]
    first = [*rows, {"text": "close my account please", "label": "account"}]
    assert told("d1", first) == ["evaluation: only training rows have account (1 row)"]
    # A small one too, and not of what evaluation rows of another drop have.
    more = [{"text": f"one more {label}", "label": label} for label in ("bug", "bill", "account")]
    assert told("d2", more) == ["evaluation: only training rows have account (2 rows)"]
    enough = [{"text": f"close account {n}", "label": "account"} for n in range(200)]
    assert told("d3", enough) == []


def test_groups_that_earlier_drops_spell_otherwise_are_named(make: Make, store: FolderStore) -> None:
    def told(name: str, groups: list[str]) -> list[str]:
        rows = [{"text": f"row {n} of {name}, {group}", "group": group} for n, group in enumerate(groups * 3)]
        card = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, name, scope="family").files["card_json"]
        return [line for line in json.loads(store.get(card))["warnings"] if line.startswith("groups: earlier")]

    assert told("d1", ["patient-1", "patient-2", "7", "Other"]) == []
    (line,) = told("d2", ["PATIENT-1", "patient_2", "007", "patient-1", "new"])
    shown = "007 (3 rows), PATIENT-1 (3 rows), patient_2 (3 rows)"
    assert line.startswith(f"groups: earlier drops spell them otherwise, {shown}; rows of one group under two names")
    # It is so in each later version, too.
    (line,) = told("d3", ["PATIENT-1", "patient-1", "other "])
    assert line.startswith(
        "groups: earlier drops spell them otherwise, 007 (3 rows), PATIENT-1 (3 rows), 'other ' (3 rows), patient_2"
    )


def test_more_groups_than_are_compared_over_drops_are_told(
    make: Make, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(statistics, "MOST_LABELS", 10)

    def told(name: str, groups: Iterable[Any]) -> list[str]:
        rows = [{"text": f"row {n} of {name}", "group": f"g{n}"} for n in groups]
        card = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, name, scope="family").files["card_json"]
        return [line for line in json.loads(store.get(card))["warnings"] if "is not compared" in line]

    assert told("d1", range(8)) == []
    assert len(told("d2", range(8, 12))) == 1
    assert len(told("d3", range(12, 14))) == 1


def test_spellings_of_one_group_are_bounded_as_groups_are(
    make: Make, store: FolderStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They stand in each further version of the family."""
    monkeypatch.setattr(statistics, "MOST_LABELS", 10)
    many = ["".join(letters) for letters in product("aA", "bB", "cC", "dD")]
    for name, spelled in (("d1", many[:8]), ("d2", many[8:])):
        rows = [{"text": f"row {group}", "group": group} for group in spelled]
        made = make({"a.jsonl": "\n".join(map(json.dumps, rows)).encode()}, name, scope="family")
        kept = made.measured.get("known_groups", {})
        assert sum(map(len, kept.values())) == (8 if name == "d1" else 0)
    assert any("is not compared" in line for line in json.loads(store.get(made.files["card_json"]))["warnings"])


def test_groups_that_hold_nothing_together_or_too_much_are_told(make: Make, store: FolderStore) -> None:
    """As a sheet with merged cells has them, and as one has them that tells who got which of two treatments."""

    def told(name: str, group: Callable[[int], str]) -> list[str]:
        lines = [f"question number {n} of many,{n} it is,{group(n)}" for n in range(60)]
        made = make({"a.csv": "\n".join(["prompt,completion,group", *lines, ""]).encode()}, name)
        return [line for line in json.loads(store.get(made.files["card_json"]))["warnings"] if "phrases" not in line]

    assert told("d1", lambda n: "" if n % 6 else f"g{n}") == [
        "a.csv: 10 rows have each a group of its own, and 50 have none; if cells were merged, write the group in each "
        "row"
    ]
    assert told("d2", lambda n: f"arm {n % 2}") == [
        "evaluation: 30 of 60 rows, which are not trained on; `data.eval_fraction` asks for 5%, but rows of one group "
        "or conversation, or with one input, are on one side"
    ]
    assert told("d3", lambda n: f"g{n // 3}" if n % 2 else "") == []
