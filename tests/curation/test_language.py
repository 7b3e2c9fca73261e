"""Rows in languages that nobody asked for end, by name; what is too short to tell stays or ends, as asked."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest

from curation import language as module
from curation.language import Language, identifier, looked_at, make_language
from curation.stage import Staged, passages_of
from dropforge.dataset import Manifest
from dropforge.errors import RecipeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

SAID = {
    "en": "The weather was so fine that the whole family went down to the river after lunch.",
    "de": "Das Wetter war so schön, dass die ganze Familie nach dem Essen an den Fluss ging.",
    "fr": "Il faisait si beau que toute la famille est descendue à la rivière après le déjeuner.",
    "ja": "天気がとても良かったので、昼食のあと家族みんなで川まで歩いて行きました。楽しかったです。",
    "ru": "Погода была такой хорошей, что вся семья после обеда пошла гулять к реке.",
}


def staged(rows: list[list[tuple[str | None, str]]], **values: Any) -> Staged:
    settings = {"keep": ("de", "en"), "of": "all", "min_letters": 20, "unknown": "keep", "identifier": identifier()}
    flat = [(at, role, text) for at, row in enumerate(rows) for role, text in row]
    columns = [list(part) for part in zip(*flat, strict=True)]
    return make_language(Language(**{**settings, **values}))(passages_of(*columns))


def test_languages_are_told_counted_and_kept() -> None:
    done = staged([[(None, text)] for text in [*SAID.values(), "ok 12345678901234567890"]])
    assert done.counts == {**{f"language_{code}": 1 for code in SAID}, "language_und": 1}
    assert done.refused.to_pylist() == [
        {"row": at, "reason": "other_language", "detail": f"it reads as {code} in the {size} characters looked at"}
        for at, code, size in [(2, "fr", 84), (3, "ja", 43), (4, "ru", 72)]
    ]


def test_what_is_too_short_may_go() -> None:
    rows = [[(None, "Guten Tag auch")], [(None, SAID["de"])]]
    assert staged(rows).refused.num_rows == 0
    refused = staged(rows, unknown="drop").refused.to_pylist()
    detail = "fewer than 20 letters in the 14 characters looked at"
    assert refused == [{"row": 0, "reason": "unknown_language", "detail": detail}]
    assert staged(rows, unknown="drop", min_letters=12).refused.num_rows == 0


def test_a_conversation_is_told_by_its_answers_or_by_all() -> None:
    rows = [[("user", SAID["fr"] * 3), ("assistant", SAID["en"])], [("user", "a question")]]
    assert staged(rows, of="answers").refused.num_rows == 0
    assert staged(rows, of="all").refused.to_pylist()[0]["detail"].startswith("it reads as fr in the ")


def test_system_messages_and_a_long_first_message_do_not_decide() -> None:
    prompt = ("You are a helpful assistant. " * 40)[:1120]
    talk = [("user", SAID["de"] * 2), ("assistant", SAID["de"] * 3)]
    pasted = [("user", SAID["en"] * 20), ("assistant", SAID["de"] * 20), ("user", SAID["de"] * 20)]
    assert staged([[("system", prompt), *talk], [*pasted], [("system", prompt)]]).counts == {"language_de": 2}


def test_what_is_no_letter_hides_no_language() -> None:
    table = "\n".join(f"{n:06d} | {n * 7:08d}" for n in range(60))
    assert len(table) > 1000
    done = staged([[(None, f"{table}\n{SAID['de'] * 3}")], [(None, table)]], unknown="drop")
    assert done.counts == {"language_de": 1, "language_und": 1}
    assert [item["row"] for item in done.refused.to_pylist()] == [1]


@pytest.mark.parametrize("text", ["a" * 3_000_000, "1" * 3_000_000, "a........" * 300_000, "²" * 3_000_000])
def test_hostile_text_is_looked_at_in_little_time(text: str) -> None:
    start = time.process_time()
    assert len(looked_at([text])) <= 2_000
    assert time.process_time() - start < 2


def test_what_is_looked_at_of_other_scripts_is_what_was_written() -> None:
    for text in [*SAID.values(), "मौसम इतना अच्छा था कि पूरा परिवार खाने के बाद नदी पर गया", "อากาศดีมากจนทั้งครอบครัวไปที่แม่น้ำ"]:
        assert text.startswith(looked_at([text])[:-1])
        assert len(looked_at([text])) >= len(text) - 2


def test_without_the_package_the_recipe_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "py3langid.langid", None)
    module._model.cache_clear()
    with pytest.raises(RecipeError, match=r"py3langid.*not installed.*dropforge\[text\]"):
        identifier()


def test_a_drop_keeps_its_languages(
    make: Callable[..., Manifest], recipe: Callable[..., Recipe], store: FolderStore
) -> None:
    texts = [f"{text} {n}" for n in range(10) for text in SAID.values()]
    data = b"\n".join(json.dumps({"text": text}).encode() for text in texts)
    manifest = make({"a.jsonl": data}, language={"keep": ["en", "de"]})
    assert manifest.counts["other_language"] == 30
    assert manifest.counts["train"] + manifest.counts["eval"] == 20
    assert manifest.rules["language"]["identifier"].startswith("py3langid 0.4.")
    assert json.loads(store.get(manifest.files["card_json"]))["statistics"]["touched"]["language_fr"] == 10
    assert b"Languages" in store.get(manifest.files["card_html"])
    with pytest.raises(RecipeError, match="cannot detect xx"):
        make({"a.jsonl": data}, "d2", language={"keep": ["xx"]})
