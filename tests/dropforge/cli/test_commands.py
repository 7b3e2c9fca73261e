"""The commands that start nothing, as a user types them."""

from __future__ import annotations

import io
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.main import get_command
from typer.testing import CliRunner

from dropforge.__main__ import main as run_command
from dropforge.cli.app import app
from dropforge.cli.watch import draw, sparkline
from dropforge.client.airflow import last_error
from dropforge.client.progress import Stage, View
from dropforge.errors import RecipeError
from dropforge.estimate import check_memory, estimate, shape_of, unknown_memory
from dropforge.proxies import spare_this_machine, spared
from dropforge.recipes import load_recipe
from dropforge.recipes.load import build_recipe
from dropforge.stack.doctor import Level, gpus, loopback
from dropforge.stages import STAGES
from dropforge.terminal import Console


def dropforge(*words: str, cwd: Path | None = None, **more: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dropforge", *words]
    env = {"PATH": "/usr/bin:/bin", "COLUMNS": "160", "TERM": "dumb", "HOME": "/nonexistent", **more}
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=env, timeout=120)


def test_ctrl_c_while_the_command_loads_is_no_traceback(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Interrupted:
        @staticmethod
        def find_spec(name: str, *_: object) -> None:
            if name == "dropforge.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "dropforge.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted, *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        run_command()
    assert (ended.value.code, capsys.readouterr()) == (130, ("", "Aborted.\n"))


@pytest.mark.parametrize("preset", ["full", "lora", "sample", "tiny"])  # the others: test_presets
def test_render_prints_a_job(preset: str) -> None:
    done = dropforge("render", preset, "--family", "fam")
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    assert (job["kind"], job["apiVersion"]) == ("PyTorchJob", "kubeflow.org/v1")
    master = job["spec"]["pytorchReplicaSpecs"]["Master"]["template"]["spec"]["containers"][0]
    assert master["command"][:3] == ["python", "-m", "trainer.launch"]
    run = master["command"][3].removesuffix("/run.json")
    assert job["metadata"]["annotations"]["kubeflow-training/log"] == f"{run}/logs/"


def test_render_prints_the_job_that_curates(tmp_path: Path) -> None:
    cluster = (
        "{image: r/c:1, image_pull_secrets: [login], tolerations: [{key: spot}], "
        "volumes: [{claim: w, path: /work, read_only: false}]}"
    )
    (tmp_path / "r.yaml").write_text(f"extends: tiny\ncuration: {{engine: spark, spark: {{cluster: {cluster}}}}}\n")
    done = dropforge("render", str(tmp_path / "r.yaml"), "--job", "curate", "--bucket", "b")
    assert done.returncode == 0, done.stderr
    job = yaml.safe_load(done.stdout)
    assert job["kind"] == "SparkApplication"
    assert job["spec"]["arguments"][0].startswith("s3://b/curation/example/")
    for role in ("driver", "executor"):
        pod = job["spec"][role]["template"]["spec"]
        assert pod["imagePullSecrets"] == [{"name": "login"}]
        assert pod["tolerations"] == [{"key": "spot", "operator": "Exists"}]
    refused = dropforge("render", "tiny", "--job", "curate")
    assert refused.returncode == 2
    assert "`curation.spark.cluster`" in refused.stderr


def test_plan_shows_what_pods_are_given(tmp_path: Path) -> None:
    given = "queue: team-a, priority: low, service_account: trainer, tolerations: [{key: spot}], env: {A: b}"
    (tmp_path / "r.yaml").write_text(f"extends: tiny\ncompute: {{backend: kubernetes, {given}}}\n")
    done = dropforge("plan", str(tmp_path / "r.yaml"), COLUMNS="300")
    assert done.returncode == 0, done.stderr
    (line,) = [line for line in done.stdout.splitlines() if line.split()[:1] == ["given"]]
    for words in ("account trainer", "user 10001", "queue team-a", "priority low", "tolerates spot", "variables A"):
        assert words in line


def test_plan_shows_what_would_happen(tmp_path: Path) -> None:
    done = dropforge("plan", "sample")
    assert done.returncode == 0, done.stderr
    for word in ("1,328,256", "120", "for each rank", "fits", "checkpoint"):
        assert word in done.stdout
    assert "fewer than 10" not in done.stdout


def test_plan_holds_to_the_limits_of_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "r.yaml").write_text("extends: tiny\ncompute: {backend: kubernetes, nodes: 5}\n")
    (tmp_path / "rows.jsonl").write_text('{"text": "a"}\n' * 20)

    def plan(limits: str) -> str:
        words = ["plan", "r.yaml", "--data", "rows.jsonl"]
        return str(CliRunner().invoke(app, words, env={"DROPFORGE_LIMITS": limits}).exception)

    for limits, told in (
        ("nodes=4", "nodes come to 5"),
        ("bytes=100", "rows.jsonl: bytes come to 280"),
        ("node=4", "no limit"),
    ):
        refused = plan(limits)
        assert told in refused
        assert "DROPFORGE_LIMITS" in refused
    assert plan("nodes=5 bytes=280 rows=1") == "None"


def test_plan_reads_a_recipe_as_its_drop_would(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("train: {max_steps: 10}\n")
    done = dropforge("plan", "recipe.yaml", cwd=tmp_path)
    assert (done.returncode, "`base`: it is missing" in done.stderr) == (2, True)
    assert "dropforge init --base MODEL" in done.stderr
    done = dropforge("plan", "recipe.yaml", cwd=tmp_path, DROPFORGE_PRESET="sample")
    assert (done.returncode, "1,328,256" in done.stdout) == (0, True), done.stderr
    done = dropforge("plan", "recipe.yaml", cwd=tmp_path, DROPFORGE_PRESET="lora")
    assert (done.returncode, "`base.model`" in done.stderr) == (2, True)  # it could never start


def test_plan_tells_hours_cost_and_what_the_limits_make_of_them(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    limits = "{ask_above: {gpu_hours: 1, cost: 2}, stop_above: {gpu_hours: 1.2}}"
    known = f"gpu_tflops: 400, price: {{gpu_hour: 2.5, currency: EUR}}, limits: {limits}"
    recipe.write_text(f"extends: llama-3.1-8b\ntrain: {{max_steps: 1000}}\ncompute: {{{known}}}\n")
    done = dropforge("plan", str(recipe))
    assert done.returncode == 0, done.stderr
    told = " ".join(done.stdout.split())
    assert "FLOPs a token at 400 teraFLOPs a second, which `compute.gpu_tflops` says" in told
    assert re.search(r"takes GPU-hours [\d.]+, core-hours [\d.]+, cost [\d.]+ EUR", told)
    assert "it needs approval first: GPU-hours" in told
    assert "it would be ended before it is done: GPU-hours" in told


def test_an_error_names_the_mend_without_a_traceback(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: tiny\ntrain: {max_step: 3}\n")
    done = dropforge("plan", str(recipe))
    assert done.returncode == 2
    assert "Did you mean `train.max_steps`?" in done.stderr
    assert "Traceback" not in done.stderr


def test_the_plan_refuses_a_base_that_is_quantised(tmp_path: Path) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text('{"quantization_config": {"quant_method": "awq"}}')
    recipe = tmp_path / "r.yaml"
    for method in ("full", "lora", "qlora"):
        recipe.write_text(f"extends: lora\nbase: {{model: {tmp_path / 'base'}}}\ntrain: {{method: {method}}}\n")
        done = dropforge("plan", str(recipe))
        assert done.returncode == 2
        assert "are quantised already (awq)" in done.stderr
        assert "in 16 or 32 bits" in done.stderr


def test_without_a_stack_the_mend_is_said(tmp_path: Path) -> None:
    done = dropforge("runs", "--state", str(tmp_path), cwd=tmp_path)
    assert done.returncode == 2
    assert "dropforge up" in done.stderr


@pytest.mark.parametrize(("bucket", "said"), [(None, "does not answer"), ("none-of-ours", "NoSuchBucket")])
def test_an_upload_that_s3_does_not_take_is_told(aws: str, tmp_path: Path, bucket: str | None, said: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    env = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    where = {"AWS_ENDPOINT_URL": aws if bucket else "http://127.0.0.1:9", "DROPFORGE_BUCKET": bucket or "any"}
    services = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "DROPFORGE_STATE": str(tmp_path / "none")}
    done = dropforge(
        "drop", "rows.jsonl", "--family", "fam", cwd=tmp_path, AWS_MAX_ATTEMPTS="2", **(env | where | services)
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert where["AWS_ENDPOINT_URL"] in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize("name", ["http_proxy", "HTTP_PROXY", "all_proxy"])
def test_a_proxy_is_not_asked_for_this_machine(aws: str, tmp_path: Path, name: str) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "one"}\n')
    env = {key: value for key, value in os.environ.items() if key.startswith("AWS_")}
    where = {"AWS_ENDPOINT_URL": aws, "DROPFORGE_BUCKET": "none-of-ours", name: "http://127.0.0.1:9"}
    services = {"MLFLOW_TRACKING_URI": "http://127.0.0.1:9", "DROPFORGE_STATE": str(tmp_path / "none")}
    done = dropforge("drop", "rows.jsonl", "--family", "fam", cwd=tmp_path, **(env | where | services))
    assert "NoSuchBucket" in done.stderr


def test_hosts_that_a_shell_leaves_out_are_left_out_still() -> None:
    assert spared({"no_proxy": "a.example, localhost", "NO_PROXY": ".b"}) == {
        "NO_PROXY": "127.0.0.1,localhost,.b,a.example",
        "no_proxy": "127.0.0.1,localhost,.b,a.example",
    }
    untouched: dict[str, str] = {"PATH": "/bin"}
    spare_this_machine(untouched)
    assert untouched == {"PATH": "/bin"}


def test_the_doctor_tells_of_a_proxy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("https_proxy", "http://user:secret@proxy.example:3128")
    [_, told] = loopback(tmp_path)
    assert (told.level, told.found) == (Level.OK, "https_proxy set; requests to this machine go past it")


@pytest.mark.parametrize(
    ("says", "level", "found"),
    [
        (
            "echo 'NVIDIA H200, 143771 MiB, 570.1'; echo 'NVIDIA H200, 143771 MiB, 570.1'",
            Level.OK,
            "2 x NVIDIA H200, 143",
        ),
        (
            "echo 'Failed to initialize NVML' >&2; exit 9",
            Level.WARN,
            "lists none that works: Failed to initialize NVML",
        ),
        ("exit 0", Level.WARN, "none is listed"),
        ("echo 'No devices were found'", Level.WARN, "none that works: No devices were found"),
        ("printf '\\377, a, b\\n'", Level.OK, "1 x \ufffd, a, driver b"),
    ],
)
def test_the_doctor_tells_of_gpus(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, says: str, level: Level, found: str
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text(f"#!/bin/sh\n{says}\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    told = next(gpus(tmp_path))
    assert told.level is level
    assert found in told.found
    monkeypatch.setenv("PATH", "")
    assert [one.found for one in gpus(tmp_path)] == ["none: trainings run on CPUs"]


def test_every_command_has_help() -> None:
    text = CliRunner().invoke(app, ["--help"]).output
    for words in commands(get_command(app)):
        shown = CliRunner().invoke(app, [*words, "--help"])
        assert shown.exit_code == 0, (words, shown.exception)
        assert not words or re.search(rf"\b{words[0]}\b", text), words


def commands(group: Any, words: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Every command below a group, by its words."""
    yield words
    for name, command in getattr(group, "commands", {}).items():
        if not command.hidden:  # another name
            yield from commands(command, (*words, name))


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "mistral", "gpt2"])
def test_the_estimate_counts_what_the_trainer_makes(architecture: str) -> None:
    shape = shape_of(load_recipe("tiny", {"base": {"scratch": {"architecture": architecture}}}))
    assert shape is not None
    transformers = pytest.importorskip("transformers")
    from trainer.config import Scratch
    from trainer.data.tokenizer import SPECIAL
    from trainer.model.scratch import scratch_config

    scratch = Scratch(architecture, 64, 2, 2, 1024, 128)  # type: ignore[arg-type]
    config = scratch_config(scratch, dict(zip(SPECIAL, range(5), strict=True)))
    model = transformers.AutoModelForCausalLM.from_config(config)
    assert shape.parameters == sum(weight.numel() for weight in model.parameters())


def test_what_looks_like_markup_is_told_as_it_is() -> None:
    done = dropforge("plan", "[/red]x")
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "[/red]x" in done.stderr


def test_a_broken_config_beside_the_base_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{bad")
    recipe = tmp_path / "r.yaml"
    recipe.write_text(f"extends: full\nbase: {{model: {tmp_path}}}\n")
    done = dropforge("plan", str(recipe))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "config.json cannot be read" in done.stderr


def test_plan_fails_where_the_model_does_not_fit(tmp_path: Path) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("extends: sample\nbase: {scratch: {hidden_size: 2048, layers: 16, heads: 16}}\n")
    done = dropforge("plan", str(recipe))
    assert (done.returncode, "Traceback" in done.stderr) == (2, False)
    assert "DOES NOT FIT" in done.stdout
    assert "`compute.memory_gb`" in done.stderr
    told = " ".join(done.stderr.split())
    assert "2 ranks" in told
    fits = int(told.split("Set it to ")[1].split(",")[0])
    recipe.write_text(recipe.read_text() + f"compute: {{memory_gb: {fits}}}\n")
    assert dropforge("plan", str(recipe)).returncode == 0


@pytest.mark.parametrize("preset", ["sample", "tiny"])
def test_the_presets_fit(preset: str) -> None:
    recipe = load_recipe(preset)
    check_memory(recipe, estimate(recipe))


def _with_config(folder: Path, config: dict[str, Any], **compute: Any) -> Any:
    (folder / "config.json").write_text(json.dumps(config))
    return load_recipe("full", {"base": {"model": str(folder)}, "compute": compute})


CONFIG = {"hidden_size": 4096, "num_attention_heads": 32, "num_hidden_layers": 32, "vocab_size": 32000}


def test_what_is_not_known_is_not_refused(tmp_path: Path) -> None:
    refused = _with_config(tmp_path, CONFIG)
    with pytest.raises(RecipeError, match="memory_gb"):
        check_memory(refused, estimate(refused))
    on_gpu = _with_config(tmp_path, CONFIG, gpus=1, memory_gb=128.0)
    check_memory(on_gpu, estimate(on_gpu))
    assert "GPU" in str(unknown_memory(on_gpu, estimate(on_gpu)))
    odd = _with_config(tmp_path, {"model_type": "odd"})
    check_memory(odd, estimate(odd))
    assert "unknown" in str(unknown_memory(odd, estimate(odd)))


@pytest.mark.parametrize(
    ("compute", "share"),
    [({}, 1), ({"parallel": "ddp"}, 1), ({"parallel": "fsdp"}, 4), ({"parallel": "hybrid", "shard_group": 2}, 2)],
)
def test_shards_divide_gradients_and_moments(tmp_path: Path, compute: dict[str, Any], share: int) -> None:
    found = estimate(_with_config(tmp_path, CONFIG, nodes=4, **compute))
    assert found.parameters
    assert found.memory
    assert found.memory.gradients + found.memory.moments == 12 * found.parameters // share
    assert found.memory.weights == 4 * found.parameters // share
    assert found.memory.total > 4 * found.parameters  # whole while it is loaded


def test_what_is_computed_again_takes_less_memory_and_so_fits(tmp_path: Path) -> None:
    long = {"sequence_length": 8192, "tokens_per_step": 8192, "micro_batch": 1}
    recipe = _with_config(tmp_path, CONFIG, memory_gb=170).model_dump(mode="json")
    found = {}
    for mode in ("none", "selective", "full"):
        one = build_recipe({**recipe, "train": {**recipe["train"], **long, "activation_checkpointing": mode}})
        found[mode] = estimate(one)
        if mode == "none":
            with pytest.raises(RecipeError, match="memory_gb"):
                check_memory(one, found[mode])
        else:
            check_memory(one, found[mode])
    sizes = [memory.activations for memory in (found[mode].memory for mode in found) if memory]
    assert sizes[0] > 1.5 * sizes[1] > 6 * sizes[2] > 0


def test_what_waits_on_the_host_is_counted_there_and_not_on_the_gpu(tmp_path: Path) -> None:
    more = {"gpus": 2, "processes_per_node": 2, "parallel": "fsdp", "memory_gb": 900, "gpu_memory_gb": 80}
    recipe = _with_config(tmp_path, CONFIG, **more).model_dump(mode="json")
    found = {
        offload: estimate(build_recipe({**recipe, "train": {**recipe["train"], "offload": offload}}))
        for offload in ("none", "activations", "states", "all")
    }
    none, activations, states, both = (one.memory for one in found.values())
    assert none
    assert activations
    assert states
    assert both
    assert activations.activations == both.activations < none.activations / 4
    assert states.activations == none.activations
    assert (
        (states.weights, states.gradients, states.moments) == (0, 0, 0) == (both.weights, both.gradients, both.moments)
    )
    hosts = {offload: (one.host or 0) - (found["none"].host or 0) for offload, one in found.items()}
    assert hosts["activations"] == none.activations - activations.activations
    assert hosts["states"] == none.weights + none.gradients + none.moments
    assert hosts["all"] == hosts["activations"] + hosts["states"]


@pytest.mark.parametrize(
    ("train", "kept"), [({}, 8), ({"optimizer": "adamw-bf16"}, 4), ({"optimizer": "adamw-8bit"}, 2),
                        ({"optimizer": "sgd"}, 4), ({"optimizer": "sgd", "momentum": 0.0}, 0)],
)  # fmt: skip
def test_optimizers_keep_what_is_estimated(tmp_path: Path, train: dict[str, Any], kept: int) -> None:
    recipe = _with_config(tmp_path, CONFIG).model_dump(mode="json")
    found = estimate(build_recipe({**recipe, "train": {**recipe["train"], **train}}))
    assert found.parameters
    assert found.memory
    assert found.memory.gradients + found.memory.moments == found.checkpoint_bytes == (4 + kept) * found.parameters


@pytest.mark.parametrize("size", [10**12, 10**4000, -1, 1e308])
@pytest.mark.parametrize("key", ["num_hidden_layers", "num_key_value_heads", "hidden_size"])
def test_sizes_that_no_model_has_are_refused(tmp_path: Path, key: str, size: float) -> None:
    with pytest.raises(RecipeError, match=r"`base.model`.*those of no model"):
        estimate(_with_config(tmp_path, {**CONFIG, key: size}))


@pytest.mark.parametrize("size", [0, float("inf"), float("nan"), None, "x", []])
def test_what_is_no_size_leaves_the_estimate_unknown(tmp_path: Path, size: Any) -> None:
    assert estimate(_with_config(tmp_path, {**CONFIG, "num_hidden_layers": size})).rank_bytes is None


def test_a_config_without_end_is_not_read(tmp_path: Path) -> None:
    recipe = _with_config(tmp_path, {**CONFIG, "padding": "x" * (1 << 20)})
    with pytest.raises(RecipeError, match="more than 1048576 bytes"):
        estimate(recipe)


def test_a_recipe_of_a_billion_layers_is_answered_and_one_of_more_is_none() -> None:
    sizes = {"layers": 10**9, "hidden_size": 10**9 - 8, "heads": 2, "vocab_size": 10**9}
    recipe = load_recipe("tiny", {"base": {"scratch": sizes}})
    with pytest.raises(RecipeError, match="memory_gb"):
        check_memory(recipe, estimate(recipe, 10**15))
    with pytest.raises(RecipeError, match=r"base\.scratch\.layers"):
        load_recipe("tiny", {"base": {"scratch": {"layers": 10**9 + 1}}})


def test_a_drop_whose_recipe_is_none_is_refused_before_the_upload(tmp_path: Path) -> None:
    (tmp_path / "recipe.yaml").write_text("train: {learning_rat: 1}\n")
    (tmp_path / "a.txt").write_text("x\n")
    for files in (("a.txt", "--recipe", "recipe.yaml"), (".",)):
        done = dropforge("drop", *files, "--family", "f", cwd=tmp_path)
        assert done.returncode == 2
        assert "Did you mean `train.learning_rate`" in done.stderr


def test_steps_follow_from_the_data() -> None:
    recipe = load_recipe("sample")
    open_end = recipe.model_copy(update={"train": recipe.train.model_copy(update={"max_steps": None, "epochs": 2.0})})
    figures = estimate(open_end, 4_000_000)
    assert figures.steps is not None
    assert 400 <= figures.steps <= 500
    assert estimate(open_end).steps is None


def test_the_view_shows_stages_and_training() -> None:
    view = View("fam/d", "running", tuple(Stage(name) for name in STAGES))
    view = replace(
        view,
        stages=(
            Stage("plan", "success", 1.0, 1),
            *view.stages[1:6],
            Stage("train", "deferred", 9.0, 2),
            view.stages[7],
            Stage("evaluate", "up_for_retry", 9.0, 1, "m: S3 is away"),
            *view.stages[9:],
        ),
        step=30,
        steps=120,
        losses=(4.0, 3.0, 2.0),
        tokens_per_second=5120.0,
        evals=(8.3, 2.5),
        note="resumed from step 20",
    )
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(draw(view))
    text = console.export_text()
    for word in ("30/120", "loss 2.000", "5,120 tok/s", "eval 8.300 → 2.500", "try 2", "resumed from step 20"):
        assert word in text
    assert "evaluate will be tried again: m: S3 is away" in text


def test_the_end_of_a_failed_run_is_the_error_of_its_log() -> None:
    failed = {
        "event": "Task failed",
        "error_detail": [{"exc_type": "E", "exc_value": "x failed\nLast lines of m:\n a"}],
    }
    assert last_error([{"event": "begin"}, failed, {"event": "end"}, "plain"]) == "x failed"
    assert last_error([{"event": "begin"}, "plain"]) is None
    caused = [{"exc_value": "base model m: the hub does not answer"}, {"exc_value": "[Errno -2] Name not known"}]
    assert last_error([{"error_detail": caused}]) == "base model m: the hub does not answer"


def test_sparklines() -> None:
    assert sparkline([1, 2, 3], 3) == "▁▅█"
    assert sparkline([], 5) == ""
    assert sparkline([float("nan"), 1.0], 5) == "▁"
    assert len(sparkline(list(range(1000)), 24)) == 24
    assert sparkline([-1.7e308, 1.7e308], 2) == "▁█"
    assert sparkline([1.7e308, 1.7e308, -1.7e308, -1.7e308], 2) == "█▁"
