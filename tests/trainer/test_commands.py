"""`python -m trainer plan|run|evaluate|export|inspect` on a small run that was really trained."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dropforge.errors import RecipeError
from dropforge.layout import dataset_prefix
from dropforge.recipes import load_recipe
from dropforge.run import ExitCode, RunSpec
from dropforge.store import open_store
from trainer.__main__ import main, make_parser
from trainer.commands.run import write_run
from trainer.commands.segments import split
from trainer.commands.terminal import Paint, table
from trainer.data.tokenizer import CHAT_TEMPLATE
from trainer.rank import run as train
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .faults import fault
from .test_whole import bucket  # noqa: F401 - a fixture
from .toy import REPOSITORY, Toy, chat, sample_rows, write_dataset

ENTRY = [sys.executable, "-m", "trainer"]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, toy_rows: dict[str, Any]) -> Toy:
    """A bucket with the finished run `run`: 12 steps, evaluated at 4 and 8, checkpoints 8 and 12."""
    root = str(tmp_path_factory.mktemp("commands") / "bucket")
    toy = Toy(root, write_dataset(open_store(root), toy_rows))
    train(toy.run("run", train={"eval_every": 4}), StopSignal(), Console(quiet=True))
    return toy


def address(toy: Toy, name: str = "run") -> str:
    return f"{toy.root}/runs/{name}"


def dataset(toy: Toy) -> str:
    return f"{toy.root}/{dataset_prefix('toy', toy.digest)}"


def ask(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    """What a command prints with --json."""
    code = main([*words, "--json"])
    told = capsys.readouterr()
    assert code == 0, told.err
    return json.loads(told.out)


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    """How a command fails: the code, and a word of two lines without a traceback."""
    code = main(list(words))
    told = capsys.readouterr()
    assert "Traceback" not in told.err
    assert "error: " in told.err, told
    return code, told.err


# inspect


def test_inspect_shows_what_is_learned_and_what_is_read(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "inspect", address(trained), "--rows", "2")
    assert [sample["row"] for sample in found["samples"]] == [0, 1]
    for sample in found["samples"]:
        kinds = [part["kind"] for part in sample["segments"]]
        assert kinds == ["context", "target", "end", "context"]
        context, target, end, _ = (part["text"] for part in sample["segments"])
        question = context.removeprefix("<|bos|><|im_start|>user\n").removesuffix("<|im_end|>\n<|im_start|>assistant\n")
        assert target.split() == question.split()[::-1]
        assert end == "<|im_end|>"
        assert sample["targets"] == sum(part["tokens"] for part in sample["segments"][1:3])
        assert sample["tokens"] == sum(part["tokens"] for part in sample["segments"])


def test_inspect_tells_the_end_of_a_turn_from_its_beginning_where_all_is_learned(
    trained: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(capsys, "inspect", address(trained), "--rows", "1", "--loss-on", "all")
    parts = [(part["kind"], part["text"].replace("\n", " ").split(" ")[0]) for part in found["samples"][0]["segments"]]
    assert parts[0] == ("context", "<|bos|>")
    assert [kind for kind, _ in parts[1:]] == ["target", "end", "target", "end", "target"]
    assert parts[1][1] == "<|im_start|>user"
    assert {text for kind, text in parts if kind == "end"} == {"<|im_end|>"}


def test_inspect_takes_rows_from_the_middle_and_says_where_the_split_ends(
    trained: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [ask(capsys, "inspect", address(trained), "--start", str(n), "--rows", "1")["samples"][0] for n in (0, 1, 2)]
    assert ask(capsys, "inspect", address(trained), "--start", "1", "--rows", "2")["samples"] == rows[1:]
    found = ask(capsys, "inspect", address(trained), "--split", "eval", "--start", "23")
    assert found["samples"] == []
    assert found["notes"] == ["there is no row 23: the split has 23"]


def test_inspect_opens_only_the_shards_it_shows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "bucket")
    toy = Toy(root, write_dataset(open_store(root), {"train": sample_rows(5), "eval": sample_rows(2, seed=1)}))
    manifest = json.loads(open_store(root).get(f"{dataset_prefix('toy', toy.digest)}manifest.json"))
    for shard in manifest["shards"]:
        if shard["split"] == "eval":
            open_store(root).put(shard["key"], b"broken")
    assert len(ask(capsys, "inspect", dataset(toy))["samples"]) == 3
    code, told = refused(capsys, "inspect", dataset(toy), "--split", "eval")
    assert code == ExitCode.BAD_DATA
    assert "SHA-256" in told


def test_inspect_shows_the_packed_rows_of_a_step_as_the_run_trains_on_them(
    trained: Toy, capsys: pytest.CaptureFixture[str]
) -> None:
    found = ask(capsys, "inspect", address(trained), "--step", "4", "--rows", "100")
    assert len(found["packed"]) == found["rows_there"] == 8
    for pack in found["packed"]:
        assert pack["tokens"] == sum(sample["tokens"] for sample in pack["documents"]) <= pack["places"] == 64
    assert any(len(pack["documents"]) > 1 for pack in found["packed"])
    again = ask(capsys, "inspect", address(trained), "--step", "3", "--rows", "100")
    rows = [{sample["row"] for pack in part["packed"] for sample in pack["documents"]} for part in (found, again)]
    assert not rows[0] & rows[1]


def test_inspect_packs_the_rows_it_shows(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    model = f"{address(trained)}/model"
    found = ask(capsys, "inspect", dataset(trained), "--model", model, "--packed", "--rows", "9", "--length", "64")
    assert sorted(sample["row"] for pack in found["packed"] for sample in pack["documents"]) == list(range(9))
    assert len(found["packed"]) < 9
    assert main(["inspect", dataset(trained), "--model", model, "--packed", "--rows", "9"]) == 0
    assert "--- document 2 of" in capsys.readouterr().out


def test_inspect_without_a_tokenizer_shows_the_mask_by_turns(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "inspect", dataset(trained), "--rows", "1")
    targets = [part["text"] for part in found["samples"][0]["segments"] if part["kind"] == "target"]
    assert len(targets) == 1
    assert "give --model" in found["notes"][0]


def test_inspect_lets_nothing_steer_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = str(tmp_path / "bucket")
    rows = [chat("clear \x1b[2J\x9b and \u202eturn", "x" * 5000 + "end")]
    toy = Toy(root, write_dataset(open_store(root), {"train": rows, "eval": sample_rows(2)}))
    assert main(["inspect", dataset(toy)]) == 0
    told = capsys.readouterr().out
    assert r"clear \x1b[2J\x9b and \u202eturn" in told
    assert "\x1b" not in told
    assert len(told) < 2000
    assert "xend" in told
    assert main(["inspect", dataset(toy), "--full"]) == 0
    assert "x" * 5000 + "end" in capsys.readouterr().out
    assert main(["inspect", dataset(toy), "--json"]) == 0
    assert "\x9b" not in (told := capsys.readouterr().out)
    assert "\x9b" in json.loads(told)["samples"][0]["segments"][1]["text"]


def test_colour_is_only_where_it_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    class Terminal:
        def isatty(self) -> bool:
            return True

    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")
    terminal: Any = Terminal()
    assert Paint.of(terminal).colour
    assert not Paint.of(terminal, plain=True).colour
    monkeypatch.setenv("NO_COLOR", "1")
    assert not Paint.of(terminal).colour
    assert Paint(True)("a\nb", "green") == "\x1b[32ma\x1b[0m\n\x1b[32mb\x1b[0m"


def test_stretches_spell_the_whole_text(trained: Toy) -> None:
    tokenizer = AutoTokenizer.from_pretrained(f"{address(trained)}/model")
    ids = tokenizer("<|im_start|>aé b<|im_end|> c<|im_end|>", add_special_tokens=False)["input_ids"]
    trained_mask = [index % 3 > 0 for index in range(len(ids))]
    parts = list(split(ids, trained_mask, tokenizer.all_special_ids, tokenizer))
    assert sum(part.tokens for part in parts) == len(ids)
    assert {part.kind for part in parts} == {"context", "target", "end"}


# plan


def test_plan_says_what_the_run_then_does(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    before = {item.key: item.etag for item in trained.files().list()}
    found = ask(capsys, "plan", address(trained), "--ranks", "2")
    report = json.loads(trained.files().get("report.json"))
    assert found["refused"] == []
    assert found["steps"] == report["steps"]
    assert found["epochs"] == report["epochs"]
    assert found["tokens"] == report["tokens"]
    for split_name in ("train", "eval"):
        assert found[split_name] == {
            key: value for key, value in report["packing"][split_name].items() if isinstance(value, int)
        }
    assert found["packing"]["packs_per_epoch"] == report["packing"]["packs_per_epoch"]
    assert found["packing"]["filled"] == report["packing"]["filled"]
    proof = report["packing"]["proof"]
    assert proof["documents"] == report["packing"]["train"]["documents"]
    assert proof["epochs"] == proof["epochs_counted"] >= 1
    assert proof["steps_compared"] == report["steps"]
    assert found["step"] == {
        "rows": 8, "places": 64, "ranks": 2, "micro_batches": 2, "micro_batch": 2, "idle_ranks": 0,
        "rows_of_the_last": 8,
    }  # fmt: skip
    model = AutoModelForCausalLM.from_pretrained(f"{address(trained)}/model")
    assert found["model"]["parameters"] == sum(weight.numel() for weight in model.parameters())
    assert found["evaluations"] == 4
    assert found["checkpoints"] == {
        "every": "4 steps", "written": 3, "kept": 2, "best_kept": 1, "fast": None,
        "place": f"{address(trained)}/checkpoints",
    }  # fmt: skip
    assert [step for step, _ in found["learning_rate"]["curve"]] == list(range(1, 13))
    assert {item.key: item.etag for item in trained.files().list()} == before


def test_plan_of_a_recipe_and_a_dataset_needs_no_run(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    found = ask(capsys, "plan", "--recipe", "tiny", "--dataset", dataset(trained))
    assert found["run"] is None
    assert found["steps"] > 0
    assert main(["plan", "--recipe", "tiny"]) == ExitCode.BAD_RECIPE


def test_plan_names_all_that_the_run_is_refused_for(toy: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    toy.run("tight", compute={"memory_gb": 0.1})
    assert main(["plan", address(toy, "tight"), "--ranks", "9", "--json"]) == ExitCode.BAD_RECIPE
    found = json.loads(capsys.readouterr().out)
    assert "recipe key `train." in found["refused"][0]["thing"]
    assert "9 ranks" in found["refused"][0]["cause"]
    assert [item.key for item in toy.files("tight").list()] == ["run.json"]
    assert main(["plan", address(toy, "tight")]) == ExitCode.BAD_RECIPE
    told = capsys.readouterr().out
    assert re.search(r"refused +recipe key `compute\.memory_gb`: a pod of 0\.1 GB is too small .* Set it to 1", told)
    spec = json.loads(toy.files("tight").get("run.json"))
    spec["recipe"]["train"]["optimizer_of_tomorrow"] = 1
    toy.files("tight").put("run.json", json.dumps(spec).encode())
    assert main(["plan", address(toy, "tight")]) == ExitCode.BAD_RECIPE
    assert "train.optimizer_of_tomorrow" in capsys.readouterr().out


def test_plan_refuses_what_is_seen_only_with_the_steps_and_the_packages_that_there_are(
    toy: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.report.board.find_spec", lambda name: None)
    toy.run("warm", train={"warmup": 500, "max_steps": None, "epochs": 1, "tensorboard": True})
    assert main(["plan", address(toy, "warm"), "--json"]) == ExitCode.BAD_RECIPE
    found = json.loads(capsys.readouterr().out)
    assert [item["thing"] for item in found["refused"]] == [
        "recipe key `train.tensorboard`",
        "recipe key `train.warmup`",
    ]
    assert 0 < found["steps"] < 500


def test_plan_says_where_checkpoints_go_and_which_stay(
    toy: Toy, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    fast = {"folder": str(tmp_path / "fast"), "every": 2, "keep": 1}
    place = str(tmp_path / "durable")
    toy.run("tiers", train={"checkpoints": place, "fast_checkpoints": fast, "keep_best": 3})
    assert main(["plan", address(toy, "tiers")]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert (
        f"the newest 2 stay, and the 3 with the lowest evaluation loss in {place}/tiers/checkpoints every 2 steps"
        in told
    )
    assert f"every 2 steps in {fast['folder']} of each node; the newest 1 stay there" in told


def test_plan_goes_without_the_estimate_where_pydantic_is_not_installed(
    trained: Toy, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("dropforge.estimate", "dropforge.recipe", "dropforge.recipes.load"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    monkeypatch.setitem(sys.modules, "pydantic", None)
    found = ask(capsys, "plan", address(trained))
    assert found["steps"] == 12
    assert found["memory"] == {"text": "not estimated: the package pydantic is not installed"}


# evaluate and export


def test_evaluate_gives_the_figures_of_the_run_itself(trained: Toy, capsys: pytest.CaptureFixture[str]) -> None:
    report = json.loads(trained.files().get("report.json"))
    models = [address(trained), f"{address(trained)}/checkpoints/step-12", f"{address(trained)}/checkpoints/step-8"]
    found = ask(capsys, "evaluate", *models, "--run", address(trained))
    losses = {row["step"]: row["eval_loss"] for row in report["checkpoints"]}
    after = report["eval"]["after"]
    for figures in found[:2]:
        assert (figures["rows"], figures["target_tokens"]) == (after["rows"], after["target_tokens"])
        for key in ("eval/loss", "eval/perplexity", "eval/accuracy", "eval/bits_per_byte"):
            assert figures[key] == pytest.approx(after[key], rel=0, abs=1e-6)
    assert found[2]["eval/loss"] == pytest.approx(losses[8], rel=0, abs=1e-6)
    assert found[2]["eval/loss"] != pytest.approx(losses[12], rel=0, abs=1e-3)
    words = ["--dataset", dataset(trained), "--length", "64", "--rows", "30"]
    alone = ask(capsys, "evaluate", models[0], *words)
    assert alone[0]["eval/loss"] == pytest.approx(report["eval"]["after"]["eval/loss"], rel=0, abs=1e-6)
    assert ask(capsys, "evaluate", models[0], *words[:-1], "5")[0]["rows"] == 5


def test_evaluate_takes_a_registered_model(
    trained: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mlflow = pytest.importorskip("mlflow")
    server = f"sqlite:///{tmp_path}/mlflow.db"  # the real registry
    client = mlflow.MlflowClient(server, server)
    client.create_registered_model("toy")
    client.create_model_version("toy", source=f"{address(trained)}/model")
    client.set_registered_model_alias("toy", "champion", "1")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    found = ask(capsys, "evaluate", "models:/toy/1", "models:/toy@champion", "--run", address(trained))
    assert (
        found[0]["eval/loss"]
        == found[1]["eval/loss"]
        == pytest.approx(json.loads(trained.files().get("report.json"))["eval"]["after"]["eval/loss"], rel=0, abs=1e-6)
    )
    code, told = refused(capsys, "evaluate", "models:/toy/9", "--run", address(trained))
    assert (code, "models:/toy/9" in told) == (ExitCode.BAD_RECIPE, True)


def test_export_makes_a_model_that_transformers_alone_loads(
    trained: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    found = ask(capsys, "export", address(trained), "--to", str(tmp_path / "a" / "newest"))
    assert found["step"] == 12
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "a" / "newest")
    of_the_run = AutoModelForCausalLM.from_pretrained(f"{address(trained)}/model")
    for (name, mine), other in zip(ours.named_parameters(), of_the_run.parameters(), strict=True):
        assert torch.equal(mine, other), name
    assert AutoTokenizer.from_pretrained(tmp_path / "a" / "newest").chat_template == CHAT_TEMPLATE
    assert ours.generation_config.eos_token_id == of_the_run.generation_config.eos_token_id
    assert stat.S_IMODE((tmp_path / "a" / "newest" / "config.json").stat().st_mode) == 0o644
    checkpoint = f"{address(trained)}/checkpoints/step-8"
    older = ask(capsys, "export", checkpoint, "--to", str(tmp_path / "older"))
    assert older["step"] == 8
    assert older["files"]["model.safetensors"] != found["files"]["model.safetensors"]
    losses = {row["step"]: row["eval_loss"] for row in json.loads(trained.files().get("report.json"))["checkpoints"]}
    best = ask(capsys, "export", address(trained), "--best", "--to", str(tmp_path / "best"))
    assert best["step"] == min(losses, key=lambda step: losses[step])
    code, told = refused(capsys, "export", address(trained), "--to", str(tmp_path / "older"))
    assert (code, "there is something in it" in told) == (ExitCode.BAD_RECIPE, True)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "best", "older"]


def test_export_of_broken_bytes_leaves_nothing(
    trained: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    shutil.copytree(trained.root, tmp_path / "bucket")
    copy = Toy(str(tmp_path / "bucket"), trained.digest)
    spec = json.loads(copy.files().get("run.json"))
    copy.files().put("run.json", json.dumps({**spec, "root": address(copy)}).encode())
    weights = next(item.key for item in copy.files().list("checkpoints/step-12/") if item.key.endswith(".safetensors"))
    data = bytearray(copy.files().get(weights))
    data[len(data) // 2] ^= 1
    copy.files().put(weights, bytes(data))
    code, told = refused(capsys, "export", address(copy), "--to", str(tmp_path / "model"))
    assert code == ExitCode.BAD_DATA
    assert "checkpoints/step-12: it is broken" in told
    assert not (tmp_path / "model").exists()
    assert ask(capsys, "export", address(copy), "--step", "8", "--to", str(tmp_path / "model"))["step"] == 8


def test_export_inspect_and_evaluate_work_in_s3(
    trained: Toy,
    bucket: str,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = ask(capsys, "export", address(trained), "--to", f"{bucket}/models/ours")
    assert {item.key for item in open_store(f"{bucket}/models/ours").list()} == set(found["files"])
    code, told = refused(capsys, "export", address(trained), "--to", f"{bucket}/models/ours")
    assert (code, "there is something in it" in told) == (ExitCode.BAD_RECIPE, True)
    figures = ask(capsys, "evaluate", f"{bucket}/models/ours", "--run", address(trained))
    after = json.loads(trained.files().get("report.json"))["eval"]["after"]
    assert figures[0]["eval/loss"] == pytest.approx(after["eval/loss"], rel=0, abs=1e-6)
    cloud = Toy(bucket, write_dataset(open_store(bucket), {"train": sample_rows(5), "eval": sample_rows(2, seed=1)}))
    model = f"{bucket}/models/ours"
    assert ask(capsys, "inspect", dataset(cloud), "--model", model, "--rows", "1")["samples"][0]["tokens"] > 0
    code, told = refused(capsys, "plan", "s3://no-such-bucket/runs/a")
    assert "S3 at" in told or "there is no" in told
    code, told = refused(capsys, "plan", f"{bucket}/runs/nowhere")
    assert (code, "there is no" in told) == (ExitCode.BAD_RECIPE, True)


# run


def test_run_writes_a_run_of_a_recipe_and_a_dataset(toy: Toy, tmp_path: Path) -> None:
    folder = str(tmp_path / "first")
    uri = write_run("tiny", dataset(toy), folder)
    spec = RunSpec.from_json(Path(uri).read_bytes())
    assert (spec.root, spec.dataset_digest, spec.tracking) == (folder, toy.digest, None)
    assert spec.recipe == load_recipe("tiny").plain()
    assert write_run("tiny", dataset(toy), folder) == uri
    with pytest.raises(RecipeError, match="another recipe"):
        write_run("sample", dataset(toy), folder)
    assert RunSpec.from_json(Path(uri).read_bytes()) == spec


def test_two_runs_of_one_recipe_do_not_share_a_place_for_checkpoints(toy: Toy, tmp_path: Path) -> None:
    """`train.checkpoints/RUN` and the fast tier's folder are named after the run."""
    (tmp_path / "recipe.yaml").write_text(f"extends: tiny\ntrain: {{checkpoints: {tmp_path}/checkpoints}}\n")
    specs = [
        RunSpec.from_json(
            Path(write_run(str(tmp_path / "recipe.yaml"), dataset(toy), str(tmp_path / name))).read_bytes()
        )
        for name in "aba"
    ]
    assert specs[0] == specs[2]
    assert specs[0].recipe == specs[1].recipe
    assert specs[0].checkpoints_root != specs[1].checkpoints_root
    assert specs[0].run != specs[1].run


def test_run_does_what_the_launcher_does(trained: Toy) -> None:
    done = subprocess.run(
        [*ENTRY, "run", address(trained)], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "is already done" in done.stdout


@pytest.fixture
def interruptible() -> Iterator[None]:
    """What a shell starts in the background ignores SIGINT, and so do its children; those of this process hear it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_ctrl_c_ends_a_command_at_once_and_leaves_nothing(trained: Toy, tmp_path: Path) -> None:
    held = "def prepare(*arguments, **options):\n    hold()\n"
    process = subprocess.Popen(
        [*ENTRY, "plan", address(trained)],
        cwd=REPOSITORY,
        env={**os.environ, "TMPDIR": str(tmp_path), **fault(tmp_path, "trainer.commands.dry", held)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline().startswith("HOLD")
    assert list(tmp_path.glob("dropforge-*"))
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out, err.splitlines()[-1]) == (130, "", "stopped")
    assert list(tmp_path.glob("dropforge-*")) == []


# wrong input


def test_what_is_not_there_is_named_with_its_mend(
    trained: Toy, toy: Toy, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DROPFORGE_BUCKET", raising=False)
    nowhere, target = str(tmp_path / "nowhere"), str(tmp_path / "model")
    toy.run("fresh")
    cases: list[tuple[tuple[str, ...], int, str]] = [
        (("plan", nowhere), ExitCode.BAD_RECIPE, "there is no"),
        (("run", nowhere), ExitCode.BAD_RECIPE, "there is no"),
        (("run", "a", "--to", "b"), ExitCode.BAD_RECIPE, "command line"),
        (("run", "name"), ExitCode.BAD_RECIPE, "DROPFORGE_BUCKET"),
        (("plan", "ftp://a/runs/b"), ExitCode.BAD_RECIPE, "is no storage"),
        (("inspect", f"{nowhere}/datasets/a/b"), ExitCode.BAD_DATA, "there is no"),
        (("inspect", f"{trained.root}/datasets/toy"), ExitCode.BAD_DATA, "does not end as"),
        (("inspect", dataset(trained), "--step", "1"), ExitCode.BAD_RECIPE, "has no steps"),
        (("inspect", address(trained), "--step", "13"), ExitCode.BAD_RECIPE, "Give 1 to 12"),
        (("export", address(toy, "fresh"), "--to", target), ExitCode.BAD_DATA, "it has no checkpoint"),
        (("export", address(trained), "--step", "5", "--to", target), ExitCode.BAD_DATA, "It has: 8, 12"),
        (("evaluate", address(toy, "fresh"), "--run", address(trained)), ExitCode.BAD_RECIPE, "checkpoints/step-N"),
        (("evaluate", nowhere, "--run", address(trained)), ExitCode.BAD_RECIPE, "no config.json"),
        (("evaluate", "no/such/place", "--run", address(trained)), ExitCode.BAD_RECIPE, "no such folder"),
        (("evaluate", address(trained), "--dataset", nowhere), ExitCode.BAD_DATA, "datasets/FAMILY/DIGEST"),
    ]
    for words, code, told in cases:
        found = refused(capsys, *words)
        assert (found[0], told in found[1]) == (code, True), (words, found)
    assert not (tmp_path / "model").exists()


def test_each_command_explains_itself_with_an_example(capsys: pytest.CaptureFixture[str]) -> None:
    for command in ("plan", "tokenise", "run", "evaluate", "export", "inspect"):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args([command, "--help"])
        assert ended.value.code == 0
        assert f"python -m trainer {command} " in capsys.readouterr().out.partition("example")[2]
    for words in ([], ["pla"], ["export", "x"], ["inspect", "x", "--rows", "0"], ["evaluate", "x"]):
        with pytest.raises(SystemExit) as ended:
            make_parser().parse_args(words)
        assert ended.value.code == 2
    capsys.readouterr()


def test_help_and_a_wrong_address_need_no_heavy_import(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "class Block:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in {'torch', 'transformers', 'pydantic', 'yaml', 'mlflow', 'boto3', 'numpy'}:\n"
        "            raise ImportError(name)\n"
        "sys.meta_path.insert(0, Block())\n"
        "from trainer.__main__ import main, make_parser\n"
        "make_parser().format_help()\n"
        "sys.exit(main(['plan', 'nowhere/runs/a']))\n"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert found.returncode == ExitCode.BAD_RECIPE, found.stderr
    assert found.stderr.startswith("error: run nowhere/runs/a: there is no nowhere/runs/a/run.json.\n")


def test_what_steers_a_terminal_is_spelled_out_in_tables_and_colours_are_left() -> None:
    shown = table([("run", "\x1b]0;title\x07 toy"), ("loss", Paint(True)("1.5", "green"))])
    assert shown.split("\n") == ["run   \\x1b]0;title\\x07 toy", "loss  \x1b[32m1.5\x1b[0m"]
