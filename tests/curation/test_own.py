"""Kernels of a user's own: what they may do to a row, and what becomes of those that do something else."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import curation
from curation.reasons import Filtered, Reason
from dropforge.code import look_at
from dropforge.dataset import Manifest
from dropforge.errors import DropforgeError, RecipeError
from dropforge.recipes import load_recipe
from dropforge.store import FolderStore
from tests.wheels import make_wheel

Curate = Callable[..., Manifest]

ROWS = [{"text": f"Row {number} tells of a {'cat' if number % 2 else 'dog'}."} for number in range(60)]
LINES = [json.dumps(row).encode() for row in ROWS]


@pytest.fixture
def curate(store: FolderStore, upload: Any, tmp_path: Path) -> Curate:
    """Curate `ROWS` with kernels; `module` keeps those of one test process apart."""

    wheels: dict[str, dict[str, str]] = {}

    def curate(module: str = "", body: str = "", workers: int = 1, **values: Any) -> Manifest:
        asked = {"kernels": ["tidy"]} if module else {}
        values = {"task": "causal-lm", "curation": {"workers": workers, "max_quarantined": 1, **asked, **values}}
        if module:
            names = re.findall(r"def (\w+)\(passages\)", body) or ["tidy"]
            groups = {"dropforge.kernels": {name: f"{module}:{name}" for name in names}}
            if module not in wheels:  # a wheel made again has another digest
                wheels[module] = make_wheel(tmp_path / f"wheel-{module}", {f"{module}.py": body}, groups)
            values["code"] = wheels[module]
        drop = upload({"a.jsonl": b"\n".join(LINES)})
        return curation.curate(store, drop, load_recipe("tiny", values), workdir=tmp_path / f"work-{module}-{workers}")

    return curate


def test_a_kernel_changes_texts_and_ends_rows(curate: Curate, store: FolderStore, rows: Any, quarantine: Any) -> None:
    body = """
        def tidy(passages):
            (role, text), = passages
            assert role is None
            return "too_early" if text.startswith("Row 7 ") else [text.replace("cat", "lion")]
    """
    manifest = curate("own_changes", body)
    texts = [row["text"] for row in rows(manifest)]
    assert len(texts) == 59
    assert sum("lion" in text for text in texts) == 29
    assert not any("cat" in text or text.startswith("Row 7 ") for text in texts)
    assert manifest.counts[Filtered.OWN_KERNEL] == 1
    place = sum(len(line) + 1 for line in LINES[:7])
    (ended,) = quarantine(manifest)
    assert (ended["file"], ended["position"], ended["detail"]) == ("a.jsonl", place, "tidy: too_early")
    card = store.get(manifest.files["card_html"]).decode()
    assert "29 rows changed by the kernel tidy" in card


def test_the_wheel_is_part_of_the_version_and_workers_are_not(curate: Curate) -> None:
    body = "def tidy(passages): return [text for _, text in passages]\n"
    plain, one = curate(), curate("own_same", body)
    assert "own" not in plain.rules
    assert one.rules["own"]["kernels"] == [["tidy", "own_same:tidy"]]
    assert one.digest != plain.digest
    assert curate("own_same", body, workers=2).digest == one.digest
    assert curate("own_other", body + "# another wheel\n").digest != one.digest


@pytest.mark.parametrize(
    ("name", "answer", "said"),
    [
        ("raises", "1 / 0", "tidy raised ZeroDivisionError"),
        ("exits", "exit(3)", "tidy raised SystemExit"),
        ("nothing", "None", "tidy gave NoneType, not a list of texts"),
        ("number", "[3]", "tidy gave list, not a list of texts"),
        ("more", "[text, text]", "tidy gave 2 texts for 1"),
        ("fewer", "[]", "tidy gave 0 texts for 1"),
        ("half", "['\\ud800']", "tidy gave half of a surrogate pair"),
        ("quotes", "text", "tidy gave a text, which is no word of lower-case letters and `_`"),
    ],
)
def test_what_a_kernel_may_not_do_ends_the_row_alone(
    curate: Curate, quarantine: Any, name: str, answer: str, said: str
) -> None:
    body = f"""
        def tidy(passages):
            (_, text), = passages
            return {answer} if text.startswith("Row 7 ") else [text]
    """
    manifest = curate(f"own_{name}", body)
    assert (manifest.counts["input"], manifest.counts[Reason.OWN_KERNEL]) == (60, 1)
    (ended,) = quarantine(manifest)
    assert (ended["reason"], ended["detail"]) == (Reason.OWN_KERNEL, said)


def test_a_kernel_that_always_fails_fails_the_drop_with_its_name(curate: Curate) -> None:
    with pytest.raises(DropforgeError, match=r"own_kernel_failed"):
        curate("own_never", "def tidy(passages): raise KeyError('x')\n")


@pytest.mark.parametrize(
    ("module", "body", "said"),
    [
        ("own_broken", "import no_such_module\n", "cannot be loaded"),
        ("own_constant", "tidy = 3\n", "no function"),
        ("json", "def tidy(passages): return []\n", "cannot be loaded|another module"),
    ],
)
def test_a_kernel_that_cannot_be_loaded_is_told_first(curate: Curate, module: str, body: str, said: str) -> None:
    with pytest.raises(RecipeError, match=said):
        curate(module, body)


def test_kernels_run_in_the_recipe_s_order_and_others_of_the_wheel_do_not(curate: Curate, rows: Any) -> None:
    body = """
        def a(passages): return [text + " a" for _, text in passages]
        def b(passages): return [text + " b" for _, text in passages]
        def c(passages): raise OSError
    """
    ends = {tuple(row["text"].split()[-2:]) for row in rows(curate("own_order", body, kernels=["b", "a"]))}
    assert ends == {("b", "a")}
    with pytest.raises(RecipeError, match=r"`curation.kernels`: .* has no kernel 'd'. There are a, b, c"):
        curate("own_order", body, kernels=["d"])
    with pytest.raises(RecipeError, match=r"`curation.kernels`: one of them is listed twice"):
        curate("own_order", body, kernels=["a", "a"])
    with pytest.raises(RecipeError, match=r"`curation.kernels`: `code` names no wheel that has them"):
        curate(kernels=["a"])


def test_a_wheel_that_only_pods_see_is_not_looked_for_without_kernels(
    store: FolderStore, upload: Any, tmp_path: Path
) -> None:
    code = {"wheel": "/mnt/only/pods/own-1.0-py3-none-any.whl", "sha256": "0" * 64}
    values: dict[str, Any] = {"code": code, "compute": {"backend": "kubernetes"}, "curation": {"workers": 1}}
    drop = upload({"a.jsonl": b"\n".join(LINES)})
    recipe = load_recipe("tiny", values)
    assert look_at(recipe) is None
    assert curation.curate(store, drop, recipe, workdir=tmp_path / "work").counts["input"] == 60
    asked = load_recipe("tiny", {**values, "curation": {"workers": 1, "kernels": ["tidy"]}})
    for way in (look_at, lambda recipe: curation.curate(store, drop, recipe, workdir=tmp_path / "work")):
        with pytest.raises(RecipeError, match=r"`code.wheel`: there is no /mnt/only/pods"):
            way(asked)


def test_what_a_kernel_writes_is_masked(curate: Curate, rows: Any) -> None:
    body = "def tidy(passages): return [text + ' Ask jo@example.com' for _, text in passages]\n"
    manifest = curate("own_personal", body, pii={})
    texts = [row["text"] for row in rows(manifest)]
    assert len(texts) == 60
    assert all(text.endswith("Ask <EMAIL>") for text in texts)
