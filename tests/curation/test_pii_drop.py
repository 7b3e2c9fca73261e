"""A drop with personal data: nothing of them is left anywhere, and copies with the same value are still copies."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import curation
from curation.plan import make_rules
from dropforge.dataset import Manifest
from dropforge.drop import Drop
from dropforge.errors import DataError, RecipeError
from dropforge.recipe import Recipe
from dropforge.store import FolderStore

Make = Callable[..., Manifest]
Rows = Callable[..., list[dict[str, Any]]]

EMAIL, CARD, PHONE = "bob.smith@northwind.com", "4111 1111 1111 1111", "+44 20 7946 0958"
TOKEN = "gh" + "p_" + "a1B2c3D4" * 5
KEY = "k" * 40


@pytest.fixture
def keyed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    monkeypatch.setenv("DROPFORGE_PII_KEY", KEY)
    return {"key_env": "DROPFORGE_PII_KEY"}


def files() -> dict[str, bytes]:
    rows: list[dict[str, Any]] = [{"text": f"row number {n} of the test"} for n in range(40)]
    rows += [{"text": f"write to {EMAIL} soon"}, {"text": f"write to {EMAIL.upper()} soon"}]
    rows += [{"text": f"paid with {CARD} and call {PHONE}", "source": EMAIL, "group": EMAIL, "label": EMAIL}]
    rows += [{"messages": [{"role": "user", "content": f"use {TOKEN}"}, {"role": "assistant", "content": "done"}]}]
    bad = [f'{{"text": "{EMAIL} {CARD}'.encode(), json.dumps({EMAIL: CARD}).encode()]
    bad += [json.dumps({"messages": [{"role": EMAIL, "content": CARD}]}).encode()]
    lines = [json.dumps(row).encode() for row in rows]
    return {"a.jsonl": b"\n".join([*lines, *bad]) + b"\n", "b.csv": f"{EMAIL},{TOKEN}\nx,y\n".encode()}


def everything(root: Path) -> bytes:
    """All that was written, but for the drop; what Parquet compresses, as it reads."""
    import pyarrow.parquet as pq

    said = b""
    for path in sorted(path for path in root.rglob("*") if path.is_file() and "drops" not in path.parts):
        table = path.suffix == ".parquet"
        said += repr(pq.read_table(path).to_pylist()).encode() if table else path.read_bytes()
    return said


def test_nothing_personal_is_left_in_shards_ledger_quarantine_or_card(
    make: Make, rows: Rows, store: FolderStore, quarantine: Any, keyed: dict[str, str]
) -> None:
    manifest = make(files(), pii=keyed)
    said = everything(store.root)
    for value in (EMAIL, EMAIL.upper(), CARD, PHONE, TOKEN, KEY, "bob.smith", "7946"):
        assert value.encode() not in said, value
    # Two rows that differ in how they write an address are copies once it is masked.
    assert manifest.counts["duplicate"] == 1
    texts = [row["text"] or row["messages"][0]["content"] for row in rows(manifest)]
    assert sum("<EMAIL:" in text for text in texts) == 1
    assert sum("<SECRET:" in text for text in texts) == 1
    (labelled,) = [row for row in rows(manifest) if row["label"]]
    assert labelled["label"] == labelled["source"] == labelled["group"]
    assert labelled["label"].startswith("<EMAIL:")
    assert len(quarantine(manifest)) == 4
    assert not any(item["head"] for item in quarantine(manifest))
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["pii"]["found"] == {
        **dict.fromkeys(["iban", "national_id", "ip"], 0),
        **{"email": 2, "card": 1, "phone": 1, "secret": 1},
    }
    assert card["pii"]["rows"] == 4
    assert card["pii"]["planted"]["iban"]["recall"] >= 990
    page = store.get(manifest.files["card_html"]).decode()
    assert "Personal data and secrets" in page
    assert "5 values masked in 4 rows" in page


def test_the_digest_depends_on_the_key_and_not_on_workers_or_the_order_of_files(
    make: Make, upload: Callable[..., Drop], store: FolderStore, tmp_path: Path, recipe: Callable[..., Recipe],
    keyed: dict[str, str], monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    first = make(files(), pii=keyed)
    swapped = {"a.csv": files()["b.csv"], "b.jsonl": files()["a.jsonl"]}
    drop = upload(swapped, "d2")
    again = curation.curate(store, drop, recipe(pii=keyed, workers=2), workdir=tmp_path / "again")
    assert again.digest == first.digest
    assert "DROPFORGE_PII_KEY" not in first.to_json().decode()
    monkeypatch.setenv("DROPFORGE_PII_KEY", "j" * 40)
    assert make(files(), "d3", pii=keyed).digest != first.digest
    assert make(files(), "d4", pii={}).digest != first.digest
    assert "pii" not in make(files(), "d5").rules


def test_without_a_key_groups_that_share_a_mask_stay_apart(make: Make, rows: Rows) -> None:
    data = [{"text": f"row number {n} of the test", "group": f"anna{n}@northwind.com"} for n in range(60)]
    lines = b"\n".join(json.dumps(row).encode() for row in data)
    manifest = make({"a.jsonl": lines}, pii={}, data={"eval_fraction": 0.3})
    assert {row["group"] for row in rows(manifest)} == {"<EMAIL>"}
    assert manifest.counts["eval"] > 5


def test_rows_are_dropped_on_demand_and_are_no_quarantine(
    make: Make, store: FolderStore, recipe: Callable[..., Recipe], ledger: Any
) -> None:
    manifest = make(files(), pii={"action": "drop-row"})
    assert manifest.counts["personal_data"] == 4
    assert sum(entry["end"] == "personal_data" for entry in ledger(manifest)) == 4
    assert "personal_data" not in curation.quarantined(manifest.counts)
    assert EMAIL.encode() not in everything(store.root)
    rules = curation.check(manifest, recipe(pii={"action": "drop-row"}, gate={"override": "a file without a row"}))
    assert [rule.name for rule in rules if not rule.ok] == ["every file gives rows"]
    assert "4 filtered" in store.get(manifest.files["card_html"]).decode()


def broken() -> bytes:
    """Rows with values in which marks of citations stand, so that taking these out puts the values together."""
    five = " One is one. Two is two. Three is three. Four is four."
    split = "bob.smith[1]@northwind.com", "4111 1111 1111[2] 1111"
    texts = [f"Row number {n} of the test.{five}" for n in range(40)]
    texts += [f"Write to {split[0]} about it.{five}", f"Paid with {split[1]}, ask {EMAIL} for it.{five}"]
    texts += [f"Write to {EMAIL} again.[3]{five}"]
    return b"\n".join(json.dumps({"text": text}).encode() for text in texts)


def test_what_c4_puts_together_is_masked_too(make: Make, rows: Rows, store: FolderStore) -> None:
    manifest = make({"a.jsonl": broken()}, pii={}, quality={"c4": {}})
    said = everything(store.root)
    assert not any(value.encode() in said for value in (EMAIL, CARD))
    masked = [row["text"].split(". ")[0].removesuffix(" One is one") for row in rows(manifest) if "<" in row["text"]]
    assert sorted(masked) == [
        "Paid with <CARD>, ask <EMAIL> for it",
        "Write to <EMAIL> about it",
        "Write to <EMAIL> again",
    ]
    card = json.loads(store.get(manifest.files["card_json"]))
    assert {kind: number for kind, number in card["pii"]["found"].items() if number} == {"email": 3, "card": 1}
    assert card["pii"]["rows"] == 3  # the row with both values was found twice


def test_rows_that_c4_puts_together_are_dropped_on_demand(make: Make, store: FolderStore) -> None:
    manifest = make({"a.jsonl": broken()}, pii={"action": "drop-row"}, quality={"c4": {}})
    assert manifest.counts["personal_data"] == 3
    assert json.loads(store.get(manifest.files["card_json"]))["pii"]["rows"] == 3
    assert not any(value.encode() in everything(store.root) for value in (EMAIL, CARD))


def test_a_drop_of_which_nothing_is_left_says_why(make: Make) -> None:
    data = b"\n".join(json.dumps({"text": f"{n} {EMAIL}"}).encode() for n in range(30))
    with pytest.raises(DataError, match=r"personal_data \(30 rows\).*curation.pii.action` to mask"):
        make({"a.jsonl": data}, pii={"action": "drop-row"})


@pytest.mark.parametrize("value", [None, "short", " " * 40])
def test_a_key_that_is_not_there_is_refused_with_the_mend(
    recipe: Callable[..., Recipe], monkeypatch: pytest.MonkeyPatch, value: str | None
) -> None:
    monkeypatch.delenv("OUR_KEY", raising=False)
    if value is not None:
        monkeypatch.setenv("OUR_KEY", value)
    with pytest.raises(RecipeError, match=r"OUR_KEY.*openssl rand -hex 32"):
        make_rules(recipe(pii={"key_env": "OUR_KEY"}))


def grouped(name: str) -> bytes:
    """The same texts, each of a person of its own."""
    rows = [{"text": f"a text with the number {n} {n * 3}", "group": f"{name}{n}@example.com"} for n in range(60)]
    return b"\n".join(json.dumps({**row, "source": f"{name}@example.com"}).encode() for row in rows)


@pytest.mark.parametrize("more", [{}, {"dedup": {}}])
def test_masked_groups_do_not_make_the_order_of_files_matter(make: Make, more: dict[str, Any]) -> None:
    data = {"eval_fraction": 0.3}
    first = make({"a.jsonl": grouped("alice"), "b.jsonl": grouped("bob")}, "d1", data, pii={}, **more)
    second = make({"a.jsonl": grouped("bob"), "b.jsonl": grouped("alice")}, "d2", data, pii={}, **more)
    assert (first.digest, first.counts) == (second.digest, second.counts)


def test_who_is_preferred_is_asked_before_the_mask(make: Make, store: FolderStore, ledger: Any) -> None:
    files = {"a.jsonl": grouped("alice"), "b.jsonl": grouped("carol")}
    manifest = make(files, pii={}, prefer=["carol@example.com"])
    assert {entry["file"] for entry in ledger(manifest) if entry["end"] in {"train", "eval"}} == {"b.jsonl"}
    card = json.loads(store.get(manifest.files["card_json"]))
    assert card["statistics"]["groups"] == 60
    assert card["pii"]["names"] == 120


def test_no_part_of_a_value_is_shown_where_details_are_cut(make: Make, store: FolderStore) -> None:
    names = [f"{name}.{'very' * 10}long@example-company.org" for name in ("anna", "berta", "clara", "dorothea", "emma")]
    files = {"a.jsonl": grouped("x"), "b.csv": (",".join(names) + "\n1,2,3,4,5\n").encode()}
    make(files, pii={})
    assert not [name for name in ("anna", "dorothea", "emma", "veryvery") if name.encode() in everything(store.root)]
