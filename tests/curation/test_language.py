"""Rows in languages that nobody asked for end, by name; what is too short to tell stays or ends, as asked."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from typing import Any

import pyarrow as pa
import pytest

from curation import language as module
from curation.columns import integers, strings
from curation.language import Language, identifier, make_language
from curation.stage import PASSAGES, Staged
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
    arrays = [integers(columns[0]), strings(columns[1]), strings(columns[2])]
    return make_language(Language(**{**settings, **values}))(pa.RecordBatch.from_arrays(arrays, schema=PASSAGES))


def test_languages_are_told_counted_and_kept() -> None:
    done = staged([[(None, text)] for text in [*SAID.values(), "ok 12345678901234567890"]])
    assert done.counts == {**{f"language_{code}": 1 for code in SAID}, "language_und": 1}
    assert done.refused.to_pylist() == [
        {"row": at, "reason": "other_language", "detail": f"it reads as {code}"}
        for at, code in [(2, "fr"), (3, "ja"), (4, "ru")]
    ]


def test_what_is_too_short_may_go() -> None:
    rows = [[(None, "Guten Tag auch")], [(None, SAID["de"])]]
    assert staged(rows).refused.num_rows == 0
    refused = staged(rows, unknown="drop").refused.to_pylist()
    assert refused == [{"row": 0, "reason": "unknown_language", "detail": "fewer than 20 letters"}]
    assert staged(rows, unknown="drop", min_letters=12).refused.num_rows == 0


def test_a_conversation_is_told_by_its_answers_or_by_all() -> None:
    rows = [[("user", SAID["fr"] * 3), ("assistant", SAID["en"])], [("user", "a question")]]
    assert staged(rows, of="answers").refused.num_rows == 0
    assert staged(rows, of="all").refused.to_pylist()[0]["detail"] == "it reads as fr"


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
    with pytest.raises(RecipeError, match="cannot tell xx"):
        make({"a.jsonl": data}, "d2", language={"keep": ["xx"]})
