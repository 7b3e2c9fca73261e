"""A run that goes on from another one's weights: the champion's, or those of a checkpoint; and from nothing else."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from dropforge import layout
from dropforge.errors import RecipeError
from dropforge.recipes.load import build_recipe
from dropforge.run import RunSpec, Start
from dropforge.start import settle
from dropforge.tracking import Champion
from trainer.commands.dry import rehearse
from trainer.commands.run import write_run
from trainer.config import read_settings
from trainer.data.labels import choose_labels
from trainer.restore import bring_start, open_checkpoints

from .ranks_loop import make_base
from .test_whole import train
from .toy import Toy


def begin(toy: Toy, name: str, asked: str, champion: str = "", **overrides: Any) -> str:
    """`run.json` of a run that goes on, as the task that plans settles it. :param champion: the run that made it."""
    spec = RunSpec.from_json(Path(toy.run(name, **overrides)).read_bytes())
    recipe = build_recipe({**spec.recipe, "base": {**spec.recipe["base"], "start": asked}})
    model = json.loads(toy.files(champion).get("report.json"))["model"] if champion else {}
    found = Champion("7", str(model["uri"]), "", champion, str(model["digest"])) if champion else None
    recipe, start = settle(recipe, toy.store, "toy", lambda *_: found)
    toy.store.put(layout.run_key(name), replace(spec, recipe=recipe.plain(), start=start).to_json())
    return f"{toy.root}/{layout.run_key(name)}"


def read(uri: str) -> RunSpec:
    return RunSpec.from_json(Path(uri).read_bytes())


def report(toy: Toy, run: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(toy.files(run).get("report.json"))
    return found


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(folder / "model.safetensors")


SHORT = {"max_steps": 4, "checkpoint_every": 2, "eval_every": 2}


def test_a_checkpoint_gives_its_weights_and_nothing_else_and_is_not_needed_again(toy: Toy) -> None:
    source = toy.run("one", train=SHORT)
    train(source)
    seal = open_checkpoints(read(source), print).seals()[0]
    assert seal.step == 2
    uri = begin(toy, "two", "runs/one/step-2", train={**SHORT, "seed": 18})
    start = read(uri).start
    assert start is not None
    assert start.digest == seal.digest

    # A rehearsal writes nothing.
    made = rehearse(read(uri), read_settings(read(uri).recipe), Path(toy.root) / "dry", lambda _: None)
    assert made.plan.steps == 4
    assert not list(toy.store.list("runs/one/exports/"))

    train(uri)
    found = report(toy, "two")
    assert found["eval"]["before"]["eval/loss"] == pytest.approx(seal.eval_loss, abs=1e-6)
    assert (found["steps"], found["resumed_from"]) == (4, None)
    assert found["start"]["digest"] == seal.digest
    card = toy.files("two").get("model/README.md").decode()
    assert f"checkpoint step-2 of run one, digest {seal.digest[:12]}, which goes back to a new model" in card
    exported = weights(Path(start.model))
    state = open_checkpoints(read(source), print).read(seal).weights
    assert all(torch.equal(state[name], exported[name]) for name in exported)

    with pytest.raises(RecipeError, match=r"`base.start`: runs/one/step-2 cannot be used .*other bytes"):
        bring_start(replace(read(uri), start=replace(start, digest="0" * 64)), print)

    # Retention may take the checkpoint now: another attempt, on another machine, begins with the same model.
    shutil.rmtree(Path(toy.root) / "runs/one/checkpoints")
    first = weights(Path(toy.root) / "runs/two/model")
    for gone in ("checkpoints", "model", "plan"):
        shutil.rmtree(Path(toy.root) / "runs/two" / gone)
    toy.files("two").delete("report.json")
    train(uri)
    again = weights(Path(toy.root) / "runs/two/model")
    assert all(torch.equal(first[name], again[name]) for name in first)


def sealed(toy: Toy, run: str, step: int) -> None:
    """A checkpoint as far as whoever plans looks at it."""
    seal = {"run": run, "step": step, "schema": 2, "digest": "d" * 64}
    toy.files(run).put(f"checkpoints/step-{step}/manifest.json", json.dumps(seal).encode())


def test_a_checkpoint_that_is_gone_by_the_time_of_the_run_is_refused(toy: Toy) -> None:
    toy.run("one")
    sealed(toy, "one", 2)
    spec = read(begin(toy, "two", "runs/one/step-2"))
    shutil.rmtree(Path(toy.root) / "runs/one/checkpoints")
    with pytest.raises(RecipeError, match=r"`base.start`: runs/one/step-2 cannot be used .*it has no checkpoint"):
        bring_start(spec, print)


def test_adapters_go_on_from_a_champion_that_adapters_made(toy: Toy, tmp_path: Path) -> None:
    base = {"model": make_base(tmp_path / "base"), "scratch": None}
    lora = {**SHORT, "method": "lora", "learning_rate": 2e-2}
    train(toy.run("one", base=base, train=lora))
    uri = begin(toy, "two", "champion", "one", base=base, train=lora)
    train(uri)
    one, two = report(toy, "one"), report(toy, "two")
    assert two["eval"]["before"]["eval/loss"] == pytest.approx(one["eval"]["after"]["eval/loss"], rel=1e-5)
    assert one["eval"]["after"]["eval/loss"] < one["eval"]["before"]["eval/loss"]
    assert two["eval"]["after"]["eval/loss"] < two["eval"]["before"]["eval/loss"]
    adapter = json.loads(toy.files("two").get("model/adapter/adapter_config.json"))
    assert adapter["base_model_name_or_path"] == f"{toy.root}/runs/one/model"
    card = toy.files("two").get("model/README.md").decode()
    assert f"version 7, run one, digest {one['model']['digest'][:12]}, which goes back to `{base['model']}`" in card

    # Its bytes are those that were registered, or nothing begins.
    path = Path(toy.root) / "runs/one/model/model.safetensors"
    changed = bytearray(path.read_bytes())
    changed[-1] ^= 1
    path.write_bytes(changed)
    with pytest.raises(RecipeError, match=r"`base.start`: .*model.safetensors has other bytes than when the run was"):
        train(begin(toy, "three", "champion", "one", base=base, train=lora))


def test_a_start_that_nobody_settled_is_refused(toy: Toy) -> None:
    spec = read(toy.run("one"))
    loose = replace(spec, recipe={**spec.recipe, "base": {**spec.recipe["base"], "start": "champion"}})
    toy.store.put("runs/one/run.json", loose.to_json())
    with pytest.raises(RecipeError, match=r"`base.start`: it says 'champion', and run.json does not hold"):
        train(f"{toy.root}/runs/one/run.json")
    settled = Start(asked="champion", kind="champion", model="/elsewhere")
    toy.store.put("runs/one/run.json", replace(loose, start=settled).to_json())
    with pytest.raises(RecipeError, match=r"`base.start`: it was resolved to /elsewhere, and the recipe names None"):
        train(f"{toy.root}/runs/one/run.json")
    toy.store.put("runs/one/run.json", replace(loose, start=Start(asked="champion")).to_json())
    assert read(f"{toy.root}/runs/one/run.json").start == Start(asked="champion")


def test_the_command_line_settles_it_once(toy: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    toy.run("one")
    sealed(toy, "one", 2)
    recipe = tmp_path / "recipe.yaml"
    plain = {**read(f"{toy.root}/runs/one/run.json").recipe}
    recipe.write_text(json.dumps({**plain, "base": {**plain["base"], "start": "runs/one/step-2"}}))
    dataset = f"{toy.root}/datasets/toy/{toy.digest}"
    uri = write_run(str(recipe), dataset, str(tmp_path / "two"))
    shutil.rmtree(Path(toy.root) / "runs/one/checkpoints")
    assert write_run(str(recipe), dataset, str(tmp_path / "two")) == uri  # where it began, it stays
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    recipe.write_text(json.dumps({**plain, "base": {**plain["base"], "start": "champion"}}))
    with pytest.raises(RecipeError, match=r"`base.start`: .*no MLflow server is named. Set MLFLOW_TRACKING_URI"):
        write_run(str(recipe), dataset, str(tmp_path / "three"))


def test_labels_that_a_champion_does_not_know_are_refused() -> None:
    head = ("no", "yes")
    assert choose_labels(("yes", "no"), head, goes_on=True) == head
    with pytest.raises(RecipeError, match=r"`base.start`: .*labels 'no', 'yes', .*'maybe'.*`base.start: base`"):
        choose_labels(("maybe", "yes"), head, goes_on=True)
