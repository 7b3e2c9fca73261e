"""A family's own evaluation rows: measured as any others are, without those that the candidate was trained on."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from dropforge.errors import DataError
from dropforge.layout import manifest_key
from dropforge.promotion import decide, policy_of
from dropforge.store import open_store
from trainer import evaluate
from trainer.data.rows import read_rows
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .classes import classifier_base, labelled_rows, labelled_toy
from .test_whole import train
from .toy import Toy, chat, sample_rows, write_dataset

MOST = 12


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Toy:
    """Runs `less` and `more` on one dataset."""
    root = str(tmp_path_factory.mktemp("bucket"))
    toy = Toy(root, write_dataset(open_store(root), {"train": sample_rows(60), "eval": sample_rows(20, seed=1)}))
    for name, steps in (("less", 1), ("more", 8)):
        train(toy.run(name, train={"max_steps": steps}))
    return toy


def compared(toy: Toy, name: str, **asked: Any) -> dict[str, Any]:
    """`more` against `less`, as a recipe with this evaluation has it."""
    uri = toy.run(name, evaluate={"max_rows": MOST, **asked})
    files, models = toy.files(name), {which: f"{toy.files(which).uri}/model" for which in ("less", "more")}
    champion = {"version": "3", "model": models["less"]}
    files.put("evaluate.json", json.dumps({"run": uri, "candidate": models["more"], "champion": champion}).encode())
    result = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    assert json.loads(files.get("evaluation.json")) == result
    return result


def held(toy: Toy, rows: list[dict[str, Any]], family: str = "own") -> str:
    """A dataset version of these rows, half of them as its evaluation rows."""
    half = len(rows) // 2
    return f"{family}/{write_dataset(toy.store, {'train': rows[:half], 'eval': rows[half:]}, family)}"


def keys(toy: Toy, named: str) -> list[bytes]:
    manifest = evaluate.find_holdout(toy.store, named)
    return sorted(row.key for split in ("train", "eval") for row in read_rows(toy.store, manifest, split))


def figures(side: dict[str, Any], group: str) -> dict[str, Any]:
    return {name.partition("/")[2]: value for name, value in side.items() if name.startswith(f"{group}/")}


def test_its_rows_are_measured_as_if_they_were_the_drop_s_own(trained: Toy) -> None:
    named = held(trained, sample_rows(30, seed=2))
    found = compared(trained, "both", holdout=named)
    assert found["holdout"] == {"named": named, "rows": MOST, "trained_on": 0}
    assert found["rows"] == MOST
    chosen = set(keys(trained, named)[:MOST])
    manifest = evaluate.find_holdout(trained.store, named)
    there = [row for split in ("train", "eval") for row in read_rows(trained.store, manifest, split)]
    own = [
        {"key": row.key, "messages": [{"role": role, "content": text} for role, text in row.messages or ()]}
        for row in there
        if row.key in chosen
    ]
    alone = Toy(trained.root, write_dataset(trained.store, {"train": sample_rows(4, seed=3), "eval": own}))
    other = compared(alone, "alone")
    for side in ("candidate", "champion"):
        assert figures(found[side], "holdout") == pytest.approx(figures(other[side], "eval"), abs=1e-5)
        assert figures(found[side], "holdout").keys() == {"loss", "perplexity", "accuracy", "bits_per_byte"}
    assert other["holdout"] is None
    assert figures(other["candidate"], "holdout") == {}


def test_rows_that_the_candidate_was_trained_on_are_left_out_for_both(trained: Toy) -> None:
    known = list(read_rows(trained.store, evaluate.find_holdout(trained.store, f"toy/{trained.digest}"), "train"))[:5]
    low = [{**row, "key": one.key} for row, one in zip(sample_rows(5), known, strict=True)]
    high = [{**row, "key": b"\xff" * 15 + bytes([n])} for n, row in enumerate(sample_rows(9, seed=2))]
    found = compared(trained, "known", holdout=held(trained, low + high))
    assert (found["holdout"]["rows"], found["holdout"]["trained_on"]) == (MOST - 5, 5)
    alone = compared(trained, "unknown", holdout=held(trained, high[: MOST - 5]))
    assert figures(found["candidate"], "holdout") == pytest.approx(figures(alone["candidate"], "holdout"), abs=1e-5)


def test_rows_that_a_shorter_context_cuts_are_compared_by_none(
    trained: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The same weights have the same figures, also where all rows of the drop are read alike."""
    shorter, model = tmp_path / "shorter", f"{trained.files('more').uri}/model"
    shutil.copytree(model.removeprefix("file://"), shorter)
    config = json.loads((shorter / "config.json").read_text())
    (shorter / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 58}))
    brief = [
        {"messages": [{"role": "user", "content": f"{n}"}, {"role": "assistant", "content": "yes"}]} for n in range(9)
    ]
    small = Toy(trained.root, write_dataset(trained.store, {"train": brief[:4], "eval": brief[4:]}))
    named = held(trained, [*sample_rows(30, seed=2), *brief])
    uri, files = small.run("cut", evaluate={"max_rows": 60, "holdout": named}), small.files("cut")
    order = {"run": uri, "candidate": model, "champion": {"version": "3", "model": str(shorter)}}
    files.put("evaluate.json", json.dumps(order).encode())
    result = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console())
    assert "rows of the holdout, the champion 39: they are compared on the" in capsys.readouterr().out
    for metric in ("holdout/loss", "eval/loss"):
        assert result["champion"][metric] == pytest.approx(result["shared"][metric], rel=1e-6)
    assert result["candidate"]["holdout/loss"] != pytest.approx(result["shared"]["holdout/loss"], rel=1e-4)


def test_a_set_that_says_nothing_is_refused(trained: Toy) -> None:
    everything = f"toy/{trained.digest}"
    most = len(keys(trained, everything))
    assert compared(trained, "most", holdout=everything, max_rows=most)["holdout"]["rows"] == 20  # its evaluation rows
    known = list(read_rows(trained.store, evaluate.find_holdout(trained.store, everything), "train"))[:4]
    only = held(trained, [{**row, "key": one.key} for row, one in zip(sample_rows(4), known, strict=True)])
    with pytest.raises(DataError, match=r"`evaluate.holdout`.*all its 4 rows are among the training rows"):
        compared(trained, "only", holdout=only)
    with pytest.raises(DataError, match=r"`evaluate.holdout`.*it is not there"):
        compared(trained, "gone", holdout=f"own/{'0' * 64}")
    moved = f"own/{'1' * 64}"
    trained.store.put(manifest_key(*moved.split("/")), trained.store.get(manifest_key(*only.split("/"))))
    with pytest.raises(DataError, match=r"`evaluate.holdout`.*its manifest is that of own/"):
        compared(trained, "moved", holdout=moved)
    family, _, digest = held(trained, sample_rows(6, seed=4)).partition("/")
    values = json.loads(trained.store.get(manifest_key(family, digest)))
    values["shards"] = values["shards"][:1]
    trained.store.put(manifest_key(family, digest), json.dumps(values).encode())
    with pytest.raises(DataError, match="rows are missing"):
        compared(trained, "torn", holdout=f"{family}/{digest}")


def test_a_promotion_that_its_own_rows_would_buy_is_refused_by_the_family_s(trained: Toy) -> None:
    """The rows of the drop are all alike, and what the model knew before is lost over them."""
    same = [{**chat("#" * 8, "@" * 40), "key": bytes([n]) * 16} for n in range(70)]
    bought = Toy(trained.root, write_dataset(trained.store, {"train": same[:60], "eval": same[60:]}))
    more = f"{trained.files('more').uri}/model"
    uri = bought.run(
        "bought",
        base={"model": more, "scratch": None},
        train={"max_steps": 40, "learning_rate": 2e-2},
        evaluate={"max_rows": MOST, "holdout": held(trained, sample_rows(30, seed=2))},
    )
    train(uri)
    files = bought.files("bought")
    order = {"run": uri, "candidate": f"{files.uri}/model", "champion": {"version": "4", "model": more}}
    files.put("evaluate.json", json.dumps(order).encode())
    found = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    promote = {"metric": "eval/loss", "min_improvement": 0.05, "better_than_base": False}
    policies = [policy_of(promote, same_tokenizer=True, held_out=held_out) for held_out in (False, True)]
    bought_it, verdict = (decide(found["candidate"], found["champion"], None, policy) for policy in policies)
    assert bought_it.promote
    assert not verdict.promote
    assert "holdout/loss is worse than the champion's by" in verdict.reason


def test_classifiers_are_measured_on_the_labels_that_they_know(tmp_path: Path) -> None:
    toy = labelled_toy(str(tmp_path / "bucket"), held=20)
    rows = labelled_rows(20, 1)
    strange = {**rows[0], "label": "never seen"}
    named = held(toy, [strange, *rows])
    base = {"model": classifier_base(tmp_path / "base", "distilbert"), "scratch": None}
    asked: dict[str, Any] = {"task": "classification", "base": base, "promote": {"metric": "eval/macro_f1"}}
    steps = {"rows_per_step": 8, "tokens_per_step": None, "max_steps": 2}
    uri = toy.run("classes", train=steps, evaluate={"max_rows": 21, "holdout": named}, **asked)
    train(uri)
    files = toy.files("classes")
    model = f"{files.uri}/model"
    order = {"run": uri, "candidate": model, "champion": {"version": "1", "model": model}}
    files.put("evaluate.json", json.dumps(order).encode())
    found = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    told = figures(found["candidate"], "holdout")
    assert told.pop("unseen_labels") == 1
    assert told == pytest.approx(figures(found["candidate"], "eval"), abs=1e-5)
    assert told.keys() == {"loss", "accuracy", "macro_f1"}
    assert figures(found["champion"], "holdout") == {**told, "unseen_labels": 0}


def test_labels_that_one_of_both_does_not_know_buy_no_promotion(tmp_path: Path) -> None:
    """A drop with a label that is new made the champion a model without figures, and every rule let that pass; one with
    few labels left the rows of the others out of the family's own."""
    toy = labelled_toy(str(tmp_path / "bucket"), held=20)
    named = held(toy, labelled_rows(20, 1))
    base = {"model": classifier_base(tmp_path / "base", "distilbert"), "scratch": None}
    promote = {"metric": "eval/accuracy", "min_improvement": 0.05, "better_than_base": False}
    asked: dict[str, Any] = {"task": "classification", "base": base, "promote": promote}
    steps = {"rows_per_step": 8, "tokens_per_step": None, "max_steps": 2}

    def trained_on(toy: Toy, name: str) -> str:
        uri = toy.run(name, train=steps, evaluate={"max_rows": 30, "holdout": named}, **asked)
        train(uri)
        return uri

    champion = {"version": "1", "model": trained_on(toy, "sound").replace("run.json", "model")}

    def judged(name: str, rows: list[dict[str, Any]]) -> tuple[dict[str, Any], str]:
        for number, row in enumerate(rows):
            row["key"] = b"evil" + number.to_bytes(12, "big")
        evil = Toy(toy.root, write_dataset(toy.store, {"train": rows[:-20], "eval": rows[-20:]}))
        uri = trained_on(evil, name)
        files = evil.files(name)
        order = {"run": uri, "candidate": f"{files.uri}/model", "champion": champion}
        files.put("evaluate.json", json.dumps(order).encode())
        found = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
        policy = policy_of(promote, same_tokenizer=True, task="classification", held_out=True)
        verdict = decide(found["candidate"], found["champion"], None, policy, shared=found["shared"])
        assert not verdict.promote
        return found, verdict.reason

    labels = sorted({row["label"] for row in labelled_rows(20, 1)})
    turn = dict(zip(labels, [*labels[1:], labels[0]], strict=True))
    rows = [{**row, "label": turn[row["label"]]} for row in labelled_rows(60, 7)]
    for row in (rows[0], rows[-1]):
        row["label"] = "zzz"
    found, _ = judged("new", rows)
    assert found["shared"]["eval/accuracy"] == pytest.approx(found["candidate"]["eval/accuracy"], abs=0.1)
    assert figures(found["champion"], "holdout").keys() >= {"loss", "accuracy"}
    found, reason = judged("few", [row for row in labelled_rows(120, 8) if row["label"] in labels[:2]])
    lost = sum(row["label"] not in labels[:2] for row in labelled_rows(20, 1))
    assert found["candidate"]["holdout/lost_labels"] == lost > 0
    assert f"the champion knows the labels of {lost} rows of the holdout" in reason
    limit = {"guards": [{"metric": "holdout/accuracy", "at_least": 0.0}]}
    policy = policy_of({**promote, **limit}, same_tokenizer=True, task="classification", held_out=True)
    first = decide(found["candidate"], None, None, policy)
    assert f"the candidate does not know the labels of {lost} rows of the holdout" in first.reason
    found, reason = judged("none", [*rows[:-20], *({**row, "label": "zzz"} for row in rows[-20:])])
    assert "the champion has no finite eval/accuracy to beat" in reason
    assert "no evaluation row has a target for it" in reason


def test_a_champion_that_lacks_labels_and_reads_fewer_rows_is_compared_on_what_both_read(tmp_path: Path) -> None:
    """Its template takes no system messages, as Gemma's."""
    toy = labelled_toy(str(tmp_path / "bucket"), held=20)
    asked: dict[str, Any] = {
        "task": "classification",
        "base": {"model": classifier_base(tmp_path / "base", "distilbert"), "scratch": None},
        "promote": {"metric": "eval/accuracy", "better_than_base": False},
    }
    steps = {"rows_per_step": 8, "tokens_per_step": None, "max_steps": 3}
    train(toy.run("before", train=steps, evaluate={"max_rows": 60}, **asked))
    champion = tmp_path / "champion"
    shutil.copytree(f"{toy.files('before').uri}/model".removeprefix("file://"), champion)
    (champion / "chat_template.jinja").write_text(
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no') }}{% endif %}{{ messages[0]['content'] }}"
    )
    config = json.loads((champion / "tokenizer_config.json").read_text())
    config.pop("chat_template", None)
    (champion / "tokenizer_config.json").write_text(json.dumps(config))
    rows = []
    for number, row in enumerate(labelled_rows(100, 8)):
        text = row["text"] if "text" in row else row["messages"][0]["content"]
        said = [{"role": "system", "content": "Classify."}, {"role": "user", "content": text}]
        label = "new" if number in {0, 2, 62, 64} else row["label"]
        rows.append({"messages": said, "label": label} if number % 2 else {"text": text, "label": label})
    after = Toy(toy.root, write_dataset(toy.store, {"train": rows[:60], "eval": rows[60:]}))
    uri, files = after.run("after", train=steps, evaluate={"max_rows": 60}, **asked), after.files("after")
    train(uri)
    order = {"run": uri, "candidate": f"{files.uri}/model", "champion": {"version": "1", "model": str(champion)}}
    files.put("evaluate.json", json.dumps(order).encode())
    found = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    each = json.loads(files.get("evaluation-rows.json"))
    places = [place for place, nats in enumerate(each["champion"]["nats"]) if nats is not None]
    assert len(places) == 18  # 20 texts, of which two have the new label
    for side, told in (("candidate", found["shared"]), ("champion", found["champion"])):
        right, nats = ([each[side][name][place] for place in places] for name in ("right", "nats"))
        assert told["eval/accuracy"] == pytest.approx(sum(right) / 18)
        assert told["eval/loss"] == pytest.approx(sum(nats) / 18, rel=1e-5)
