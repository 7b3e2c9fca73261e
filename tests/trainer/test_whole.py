"""Whole runs in one process: adapters and full fine-tuning of a model in S3, evaluation, MLflow's picture of a run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dropforge.placement.fabrics import Preflight
from dropforge.run import Tracking
from dropforge.store import open_store, s3_client
from trainer import evaluate
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer
from trainer.evaluate import read_order
from trainer.preflight.verdict import Figures
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.checkpoint import Checkpoints
from trainer.state.stop import StopSignal

from .test_data import NO_MARKERS, TEXTS
from .test_model import small
from .toy import Toy, write_dataset


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    from tests.moto_server import moto_server

    with moto_server() as url, pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ENDPOINT_URL", url)
        patch.setenv("AWS_ACCESS_KEY_ID", "test")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "test")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        s3_client().create_bucket(Bucket="forge")
        yield "s3://forge"


@pytest.fixture(scope="module")
def cloud(bucket: str, toy_rows: dict[str, Any]) -> Toy:
    return Toy(bucket, write_dataset(open_store(bucket), toy_rows))


@pytest.fixture(scope="module")
def base(cloud: Toy, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A small model with its tokenizer in S3, as somebody else would have put it there."""
    folder = tmp_path_factory.mktemp("base")
    small("llama", vocab_size=320, tie_word_embeddings=True).save_pretrained(folder)
    tokenizer = wrap_tokenizer(train_tokenizer(TEXTS, 320), 128)
    tokenizer.chat_template = NO_MARKERS
    tokenizer.save_pretrained(folder)
    store = open_store(f"{cloud.root}/models/base")
    for path in folder.iterdir():
        store.upload(path, path.name)
    return f"{cloud.root}/models/base"


def train(uri: str) -> list[str]:
    said: list[str] = []
    console = Console()
    console.say = said.append  # type: ignore[method-assign]
    run(uri, StopSignal(), console)
    return said


@pytest.mark.parametrize("method", ["lora", "full"])
def test_a_model_in_s3_is_tuned_and_evaluated_against_its_base(
    cloud: Toy, base: str, method: str, tmp_path: Path
) -> None:
    uri = cloud.run(method, base={"model": base}, train={"method": method, "max_steps": 6, "learning_rate": 2e-2})
    train(uri)
    files = cloud.files(method)
    report = json.loads(files.get("report.json"))
    assert report["eval"]["after"]["eval/loss"] < report["eval"]["before"]["eval/loss"]
    assert ("adapter/adapter_model.safetensors" in report["model"]["files"]) is (method == "lora")
    for name in report["model"]["files"]:
        files.download(f"model/{name}", tmp_path / name)
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert model.dtype == torch.float32
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert AutoTokenizer.from_pretrained(tmp_path).chat_template == NO_MARKERS
    if method == "lora":
        adapter = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
        assert adapter["base_model_name_or_path"] == base
        newest = Checkpoints(files, method, "", {}).seals()[-1]
        weights = safetensors.torch.load(files.get(f"checkpoints/step-{newest.step}/rank-0.safetensors"))
        kinds = {name.partition("/")[0] for name in weights}
        assert kinds == {"weights", "moments", "random"}
        assert all("lora_" in name for name in weights if not name.startswith("random/"))  # the adapters alone

    order = f"{files.uri}/evaluate.json"
    champion = {"version": 3, "model": base}
    files.put(
        "evaluate.json", json.dumps({"run": uri, "candidate": f"{files.uri}/model", "champion": champion}).encode()
    )
    evaluate.evaluate(order, StopSignal(), Console(quiet=True))
    result = json.loads(files.get("evaluation.json"))
    assert result["rows"] == 23
    assert result["champion_version"] == "3"
    assert result["same_tokenizer"] is True
    for name, where in (("candidate", "after"), ("champion", "before")):
        for key in ("eval/loss", "eval/accuracy", "eval/bits_per_byte"):
            assert result[name][key] == pytest.approx(report["eval"][where][key], rel=1e-4)


def test_models_with_different_tokenizers_are_marked_and_compared_by_bytes(cloud: Toy, base: str) -> None:
    uri = cloud.run("scratch", train={"max_steps": 2})
    train(uri)
    files = cloud.files("scratch")
    folder = f"{files.uri}/model"
    store = open_store(f"{cloud.root}/models/other")
    source = open_store(base)
    for item in source.list():
        store.put(item.key, source.get(item.key))
    tokenizer = json.loads(store.get("tokenizer.json"))
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:20]
    store.put("tokenizer.json", json.dumps(tokenizer).encode())
    champion = {"version": "1", "model": f"{cloud.root}/models/other"}
    files.put("evaluate.json", json.dumps({"run": uri, "candidate": folder, "champion": champion}).encode())
    result = evaluate.evaluate(f"{files.uri}/evaluate.json", StopSignal(), Console(quiet=True))
    assert result["same_tokenizer"] is False
    assert "bits_per_byte" in result["metric_note"]
    assert result["champion"]["eval/bits_per_byte"] > 0


def test_bits_per_byte_follow_from_loss_and_text(cloud: Toy, toy_rows: dict[str, Any]) -> None:
    uri = cloud.run("bytes", train={"max_steps": 1}, evaluate={"max_rows": 1000})
    train(uri)
    after = json.loads(cloud.files("bytes").get("report.json"))["eval"]["after"]
    counts = json.loads(cloud.files("bytes").get("report.json"))["packing"]["eval"]
    spelled = sum(len(row["messages"][1]["content"].encode()) for row in toy_rows["eval"])
    if not counts["cut_conversations"]:
        assert counts["target_bytes"] == spelled
    nats = after["eval/loss"] * after["target_tokens"]
    assert after["eval/bits_per_byte"] == pytest.approx(nats / math.log(2) / counts["target_bytes"])


def test_mlflow_sees_metrics_checkpoints_and_the_attempt(
    cloud: Toy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.rank.preflight_from_env", lambda env: Preflight("gloo", 0, 0, 60))
    monkeypatch.setattr("trainer.rank.hold", lambda *_: Figures(2, 2, 1.5, 0.25, 4.5, "gloo"))  # one rank has none
    mlflow = pytest.importorskip("mlflow")
    address = f"sqlite:///{tmp_path}/mlflow.db"
    client = mlflow.MlflowClient(address)
    made = client.create_run(client.create_experiment("toy", artifact_location=str(tmp_path / "artifacts")))
    tracking = Tracking(address, made.info.run_id, made.info.experiment_id)
    train(cloud.run("tracked", tracking=tracking, train={"max_steps": 6, "checkpoint_every": 3, "eval_every": 3}))
    found = client.get_run(made.info.run_id)
    assert found.info.status == "RUNNING"  # the DAG closes it
    assert {"train/loss", "train/tokens_per_second", "train/learning_rate", "train/grad_norm", "train/tokens"} <= set(
        found.data.metrics
    )
    assert [point.step for point in client.get_metric_history(made.info.run_id, "eval/loss")] == [0, 3, 6]
    assert [point.step for point in client.get_metric_history(made.info.run_id, "train/loss")] == [1, 2, 3, 4, 5, 6]
    told = {key: value for key, value in found.data.metrics.items() if key.startswith("preflight/")}
    assert told == {"preflight/bus_gb_per_second": 1.5, "preflight/latency_ms": 0.25, "preflight/seconds": 4.5}
    assert found.data.tags["dropforge.attempt"] == "1"
    assert found.data.tags["dropforge.steps"] == "6"
    assert "dropforge.resumed_from" not in found.data.tags
    rows = json.loads(found.data.tags["dropforge.checkpoints"])
    assert [row["step"] for row in rows] == [3, 6]
    assert rows[1]["eval_loss"] == found.data.metrics["eval/loss"]
    assert rows[0]["uri"] == "s3://forge/runs/tracked/checkpoints/step-3"
    assert {"digest", "bytes"} <= set(rows[0])


@pytest.mark.parametrize(
    "body", ["", "[]", '{"run": 1}', '{"run": "a", "candidate": "b", "champion": {"version": "1"}}']
)
def test_an_order_that_is_none_is_refused(tmp_path: Path, body: str) -> None:
    (tmp_path / "evaluate.json").write_text(body)
    with pytest.raises(evaluate.RecipeError, match=r"evaluate\.json"):
        read_order(f"{tmp_path}/evaluate.json")
