"""Stages look at all that is learned of a message, its thoughts and its calls too."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from dropforge.dataset import Manifest
from dropforge.store import FolderStore

Rows = Callable[..., list[dict[str, Any]]]
Make = Callable[..., Manifest]
PLACES = ("thoughts", "call", "content")


def chat(number: int, place: str, text: str) -> dict[str, Any]:
    answer: dict[str, Any] = {"role": "assistant", "content": f"Answer {number}."}
    if place == "thoughts":
        answer["reasoning_content"] = text
    elif place == "call":
        arguments = json.dumps({"query": text, "more": [number, True, None]})
        call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": arguments}}
        answer = {"role": "assistant", "content": None, "tool_calls": [call]}
    else:
        answer["content"] += f" {text}"
    return {"messages": [{"role": "user", "content": f"Question {number}?"}, answer]}


def drop(text: str, plain: int = 20) -> dict[str, bytes]:
    rows = [chat(number, place, text) for number, place in enumerate(PLACES)]
    rows += [chat(number, PLACES[number % 3], "nothing of note") for number in range(len(PLACES), plain)]
    return {"a.jsonl": "\n".join(json.dumps(row, ensure_ascii=False) for row in rows).encode()}


def card(store: FolderStore, manifest: Manifest) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(store.get(manifest.files["card_json"]))
    return found


def said(rows: list[dict[str, Any]]) -> str:
    return json.dumps([(row["messages"], json.loads(row["chat"] or "null")) for row in rows], ensure_ascii=False)


@pytest.mark.parametrize("action", ["mask", "drop-row"])
def test_personal_data(make: Make, rows: Rows, store: FolderStore, action: str) -> None:
    manifest = make(drop("Write to ann@firma.de or bob@firma.de"), pii={"action": action})
    kept = rows(manifest)
    assert "@firma" not in said(kept)
    assert (said(kept).count("<EMAIL>"), len(kept)) == ((6, 20) if action == "mask" else (0, 17))
    assert manifest.counts.get("personal_data", 0) == (0 if action == "mask" else 3)
    found = card(store, manifest)["pii"]
    assert (found["rows"], found["found"]["email"], found["names"]) == (3, 6, 0)
    calls = [
        one["tool_calls"]
        for row in kept
        for one in json.loads(row["chat"] or '{"messages": []}')["messages"][1:]
        if "tool_calls" in one
    ]
    assert {call["function"]["name"] for (call,) in calls} == {"look"}


def test_evaluation_items(make: Make, rows: Rows, store: FolderStore) -> None:
    item = "how many legs have three spiders and two beetles in a box of ants"
    store.put("eval-sets/g.jsonl", json.dumps({"text": item}).encode())
    manifest = make(drop(f'They ask: "{item.upper()}"'), decontaminate={"sets": {"g": "eval-sets/g.jsonl"}})
    assert manifest.counts["contaminated"] == 3
    assert len(rows(manifest)) == 17


def test_misread_text(make: Make, rows: Rows, store: FolderStore) -> None:
    manifest = make(drop("ein schÃ¶nes CafÃ©"), unicode="repair")
    assert said(rows(manifest)).count("ein schönes Café") == 3
    assert "Ã" not in said(rows(manifest))
    assert card(store, manifest)["statistics"]["touched"]["unicode_mojibake"] == 3


def test_what_is_mended_into_a_control_token_is_made_harmless(make: Make, rows: Rows) -> None:
    manifest = make(drop("<|im_\u200bend|>"), unicode="repair")
    assert "<|im_end|>" not in said(rows(manifest))
    assert said(rows(manifest)).count("< |im_end|>") == 3
