"""Several drops of a family read as one, and what the bucket knows of a family's retrains."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from dropforge import layout, ledger, retrains, sources
from dropforge.dataset import Manifest
from dropforge.drop import Drop, DropFile, drop_file, read_drop
from dropforge.errors import DataError, DropforgeError
from dropforge.recipe_data import Source
from dropforge.retraining import Ended, Trained
from dropforge.run import RunSpec
from dropforge.sources import pin
from dropforge.store import Store
from dropforge.tracking import Champion


def uploaded(store: Store, name: str, text: str, family: str = "fam") -> Drop:
    prefix = layout.drop_prefix(family, name)
    store.put(prefix + "rows.jsonl", f'{{"text": "{text}"}}\n'.encode())
    store.put(prefix + "recipe.yaml", b"extends: tiny")
    store.put(prefix + "_SUCCESS", b"")
    drop = read_drop(store, family, name, "b")
    ledger.record(store, drop)
    return drop


def test_several_drops_are_one_with_each_file_below_its_drop_s_name(store: Store) -> None:
    one, two = uploaded(store, "one", "a"), uploaded(store, "two", "b")
    both = pin(store, Source(drops=(one.id, two.id)), "fam", "b")
    assert [part.drop for part in both.parts] == ["one", "two"]
    assert [part.id for part in both.parts] == [one.id, two.id]
    assert [file.key for file in both.files] == ["one/rows.jsonl", "two/rows.jsonl"]  # what the recipes say is not data
    assert store.get(both.prefix + both.files[1].key) == b'{"text": "b"}\n'
    assert pin(store, Source(drops=(one.id,)), "fam", "b").id != both.id
    assert Drop.from_json(both.to_json()) == both


@pytest.mark.parametrize(("name", "bound"), [("rows-{}.jsonl", "MAX_FILES"), ("{}/", "MAX_KEYS")])
def test_a_prefix_has_no_more_files_and_keys_than_a_drop(
    store: Store, monkeypatch: pytest.MonkeyPatch, name: str, bound: str
) -> None:
    monkeypatch.setattr(sources, bound, 5)
    listed = []
    for number in range(9):
        store.put(f"lake/{name.format(number)}" + ("x" if bound == "MAX_KEYS" else ""), b'{"text": "a"}\n')

    def look(*values: object) -> DropFile:
        listed.append(values)
        return drop_file(*values)  # type: ignore[arg-type]

    monkeypatch.setattr(sources, "drop_file", look)
    monkeypatch.setattr("dropforge.drop.MAX_KEYS", 5)
    with pytest.raises(DataError, match=r"source 'lake/': it has .* a drop has at most"):
        pin(store, Source(prefix="lake/"), "fam", "b")
    assert not listed


def test_a_drop_that_is_not_the_family_s_or_is_replaced_is_named(store: Store) -> None:
    one, foreign = uploaded(store, "one", "a"), uploaded(store, "one", "b", "other")
    with pytest.raises(DropforgeError, match=f"drop id {foreign.id}: family fam has no such drop"):
        pin(store, Source(drops=(one.id, foreign.id)), "fam", "b")
    newer = uploaded(store, "one", "c")
    with pytest.raises(
        DropforgeError, match=f"drop id {newer.id}: it was uploaded under the name one, as {one.id} was"
    ):
        pin(store, Source(drops=(one.id, newer.id)), "fam", "b")


def test_drops_arrive_in_their_order(store: Store) -> None:
    made = [uploaded(store, name, name) for name in ("a", "b", "c")]
    assert [drop.id for drop in ledger.arrived(store, "fam")] == [drop.id for drop in made]
    assert ledger.arrived(store, "nobody") == ()


def test_what_a_champion_knows_is_what_airflow_said_of_it_and_no_run_json_that_a_pod_wrote(store: Store) -> None:
    one, two = uploaded(store, "one", "a"), uploaded(store, "two", "b")
    made = Manifest("fam", "ab" * 32, {}, {}, ())
    store.put(layout.manifest_key("fam", made.digest), made.to_json())
    base = {"model": "org/base", "revision": "r1"}
    spec = RunSpec(
        "fam-1", "fam", 1, "r", "d", "m", made.digest, {"base": base, "train": {}}, "code", drop={"id": one.id}
    )
    champion = Champion("4", "m", "r", "fam-1", "", None, made.digest, one.id, spec.digest)
    key = layout.run_key("fam-1")
    store.put(key, spec.to_json())
    known = Trained("4", frozenset({one.id}), base)
    assert retrains.trained(store, "fam", champion) == known
    assert retrains.trained(store, "fam", replace(champion, dataset="", drop="", run_digest=None)) == known  # once
    for other in (
        {"drop": {"id": two.id}},
        {"dataset_digest": "e" * 64},
        {"recipe": {"base": {"model": "org/other"}, "train": {}}},
    ):
        store.put(key, replace(spec, **other).to_json())  # type: ignore[arg-type]
        assert retrains.trained(store, "fam", champion) == Trained("4", frozenset({one.id}), {}, None)
    store.delete(key)
    assert retrains.trained(store, "fam", champion).drops == {one.id}


def test_a_retrain_that_ended_is_known_once_and_rubbish_is_passed_over(store: Store) -> None:
    ended = Ended("retrain__fam__1", "w", 12.5, "2026-11-24T05:00:00+00:00")
    for _ in range(2):
        retrains.end(store, "fam", ended)
    store.put(f"{layout.retrains_prefix('fam')}x.json", b"{")
    store.put(f"{layout.retrains_prefix('fam')}y.json", json.dumps({"run": 1}).encode())
    assert retrains.ended(store, "fam") == (ended,)
    assert retrains.begun(store, "fam") is None
    retrains.begin(store, "fam", ended.run)
    assert retrains.begun(store, "fam") == ended.run
    assert retrains.ended(store, "fam") == (ended,)
