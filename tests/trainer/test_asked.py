"""What somebody asked for with a checkpoint, as the job does it: figures, a model folder, or the reason why not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from dropforge.run import ExitCode
from dropforge.store import FolderStore, open_store
from tests.trainer.test_whole import train
from tests.trainer.toy import Toy
from trainer.asked import main
from trainer.commands.addresses import open_run
from trainer.evaluate import MeasuredModel
from trainer.restore import open_checkpoints
from trainer.state.checkpoint import WEIGHT, Checkpoints


@pytest.fixture
def run(toy: Toy) -> str:
    """A run with checkpoints of steps 2 and 4, and an evaluation at each."""
    uri = toy.run("asked", train={"max_steps": 4, "checkpoint_every": 2, "eval_every": 2})
    train(uri)
    return uri


def order(toy: Toy, run: str, verb: str, step: int = 2, digest: str | None = None) -> str:
    """The address of an order."""
    seals = {seal.step: seal for seal in open_checkpoints(open_run(run), print).seals()}
    body = {
        "run": run,
        "step": step,
        "digest": digest or seals[min(step, 4)].digest,
        "verb": verb,
        "to": f"{toy.root}/runs/asked/exports/step-{step}",
    }
    toy.files("asked").put(f"asked/{verb}/order.json", json.dumps(body).encode())
    return f"{toy.root}/runs/asked/asked/{verb}/order.json"


def result(toy: Toy, verb: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(toy.files("asked").get(f"asked/{verb}/result.json"))
    return found


def word(tmp_path: Path) -> dict[str, str]:
    return {"TERMINATION_LOG": str(tmp_path / "word")}


def test_figures_of_a_checkpoint_are_those_of_the_training_and_its_model_is_whole(
    toy: Toy, run: str, tmp_path: Path
) -> None:
    assert main([order(toy, run, "evaluate")], word(tmp_path)) == ExitCode.DONE
    (seal,) = [seal for seal in open_checkpoints(open_run(run), print).seals() if seal.step == 2]
    figures = result(toy, "evaluate")["figures"]
    assert figures["eval/loss"] == pytest.approx(seal.eval_loss, abs=1e-4)
    assert figures["rows"] > 0

    assert main([order(toy, run, "export")], word(tmp_path)) == ExitCode.DONE
    model = result(toy, "export")["model"]
    store = open_store(model["uri"])
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= {item.key for item in store.list()}
    # Again is the same model, and not written again; half of one is.
    before = store.stat("model.safetensors")
    assert main([order(toy, run, "export")], word(tmp_path)) == ExitCode.DONE
    assert result(toy, "export")["model"] == model
    assert store.stat("model.safetensors") == before
    store.delete("dropforge-export.json")
    store.delete("config.json")
    assert main([order(toy, run, "export")], word(tmp_path)) == ExitCode.DONE
    assert store.stat("config.json") is not None
    assert result(toy, "export")["model"]["digest"] == model["digest"]
    # What was torn or lost since is made again.
    whole = store.get("model.safetensors")
    store.put("model.safetensors", whole[:1000])
    store.delete("tokenizer.json")
    assert main([order(toy, run, "export")], word(tmp_path)) == ExitCode.DONE
    assert store.get("model.safetensors") == whole
    assert store.stat("tokenizer.json") is not None

    # Another one by now, one that is gone, and no order at all: the reason is the result.
    assert main([order(toy, run, "export", digest="other", step=4)], word(tmp_path)) == ExitCode.BAD_DATA
    assert "other bytes" in result(toy, "export")["error"]
    assert main([order(toy, run, "evaluate", step=9)], word(tmp_path)) == ExitCode.BAD_DATA
    assert "no checkpoint of step 9" in result(toy, "evaluate")["error"]
    assert main([order(toy, run, "bake")], word(tmp_path)) == ExitCode.BAD_RECIPE
    assert "it is no order" in result(toy, "bake")["error"]
    assert "it is no order" in json.loads((tmp_path / "word").read_text())["message"]


def test_an_export_holds_weights_of_a_checkpoint_and_nothing_else_of_it(
    toy: Toy, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    get, visit = FolderStore.get, Checkpoints.visit
    taken: set[str] = set()

    def no_whole_file(store: FolderStore, key: str) -> bytes:
        assert not key.startswith("checkpoints/") or key.endswith(".json"), f"{key} is read whole"
        return get(store, key)

    def seen(self: Checkpoints, seal: Any, name: str, header: Any, wanted: Any, take: Any) -> None:
        taken.update(wanted)
        visit(self, seal, name, header, wanted, take)

    uri = order(toy, run, "export")
    monkeypatch.setattr(FolderStore, "get", no_whole_file)
    monkeypatch.setattr(Checkpoints, "visit", seen)
    assert main([uri], word(tmp_path)) == ExitCode.DONE, result(toy, "export")
    assert taken
    assert {name for name in taken if not name.startswith(WEIGHT)} == set()


def test_a_checkpoint_without_a_finite_loss_is_told_as_that(
    toy: Toy, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = MeasuredModel({"rows": 3, "problem": "its loss is nan"}, "")
    monkeypatch.setattr("trainer.evaluate.measure_model", lambda *_: broken)
    assert main([order(toy, run, "evaluate")], word(tmp_path)) == ExitCode.BAD_DATA
    assert result(toy, "evaluate")["error"].startswith("checkpoint step-2 of asked: its loss is nan")
