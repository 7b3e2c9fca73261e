"""Which rows of a family's drops a run learns and measures, where its recipe limits them."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import curation
from dropforge.dataset import Manifest
from dropforge.drop import read_drop
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec
from dropforge.store import FolderStore, open_store
from trainer.config import read_settings
from trainer.data.rows import read_rows
from trainer.prepare import await_prepared, prepare

from .toy import Toy, chat, recipe

MOST = 40
ASKED = 12


@pytest.fixture(scope="module")
def family(tmp_path_factory: pytest.TempPathFactory) -> tuple[Toy, Manifest]:
    """A dataset version of three drops, each with rows enough for all that a run may take."""
    folder = tmp_path_factory.mktemp("family")
    store = FolderStore(folder / "bucket")
    wanted = build_recipe(recipe(data={"eval_fraction": 0.4}, curation={"scope": "family"}))
    manifest = None
    for number in range(3):
        name = f"d{number}"
        rows = [{**chat(f"Of {name}, what is {at}?", f"It is {at}."), "source": name} for at in range(300)]
        store.put(f"drops/toy/{name}/rows.jsonl", "\n".join(map(json.dumps, rows)).encode())
        store.put(f"drops/toy/{name}/_SUCCESS", b"")
        manifest = curation.curate(store, read_drop(store, "toy", name), wanted, workdir=folder / name)
    assert manifest is not None
    assert len(manifest.steps) == 3
    return Toy(str(folder / "bucket"), manifest.digest), manifest


def test_they_are_those_with_the_lowest_keys_of_all_drops(family: tuple[Toy, Manifest], tmp_path: Path) -> None:
    toy, manifest = family
    generation = {"rows": ASKED, "max_new_tokens": 8}
    scratch = {"hidden_size": 32, "layers": 2, "heads": 2, "vocab_size": 320, "context": 512}
    uri = toy.run(
        "limited",
        base={"scratch": scratch},
        train={"max_rows": MOST, "sequence_length": 512},
        evaluate={"max_rows": MOST, "generation": generation},
    )
    spec = RunSpec.from_json(Path(uri).read_bytes())
    settings = read_settings(spec.recipe)
    prepare(spec, settings, tmp_path, lambda: None, lambda _: None)
    found = await_prepared(settings, spec, tmp_path, lambda: None)
    store = open_store(toy.root)
    for split, tokens in (("train", found.train), ("eval", found.eval)):
        rows = sorted(read_rows(store, manifest, split), key=lambda row: row.key)
        assert len(rows) > 3 * MOST
        first = rows[:MOST]
        assert {row.source for row in first} == {"d0", "d1", "d2"}
        assert len(tokens) == MOST
        said = [
            found.tokenizer.decode(tokens.ids[low:high])
            for low, high in zip(tokens.offsets, tokens.offsets[1:], strict=False)
        ]
        for row in first:
            assert row.messages is not None
            assert sum(all(content in text for _, content in row.messages) for text in said) == 1
        if split == "train":
            assert sorted(bytes(found.row_keys[row]) for row in tokens.rows) == [row.key for row in first]
        else:
            assert [prompt.row for prompt in found.prompts] == [row.key.hex() for row in first[:ASKED]]
