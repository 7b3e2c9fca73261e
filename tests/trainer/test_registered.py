"""A registered model is loaded by its alias, from where it stands in S3, and MLflow's pages know what it is."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace

import pytest
import requests

from dropforge import tracking
from dropforge.promotion import Policy, decide
from dropforge.run import DATASET_DIGEST, RunSpec
from tests.dropforge.conftest import mlflow_server  # noqa: F401 - a fixture
from trainer.rank import run
from trainer.report.console import Console
from trainer.state.stop import StopSignal

from .test_whole import bucket, cloud  # noqa: F401 - fixtures
from .toy import Toy

LOAD = """
import json, sys, mlflow
model = mlflow.pyfunc.load_model(sys.argv[1])
answers = model.predict(model.input_example, params={"max_new_tokens": 4}).to_dict("records")
written = mlflow.transformers.load_model(sys.argv[1])("hello")[0]["generated_text"]
about = model.metadata
print(json.dumps([answers, about.signature.inputs.input_names(), about.run_id, written]))
"""


def test_a_champion_is_loaded_by_its_alias(cloud: Toy, request: pytest.FixtureRequest) -> None:  # noqa: F811
    server: str = request.getfixturevalue("mlflow_server")  # after the bucket, whose keys it is to have
    uri = cloud.run("r", train={"max_steps": 1})
    files = cloud.files("r")
    spec = RunSpec.from_json(files.get("run.json"))
    spec = replace(spec, tracking=tracking.open_run(server, spec, {}, {}))
    assert spec.tracking is not None
    files.put("run.json", spec.to_json())
    run(uri, StopSignal(), Console(quiet=True))
    verdict = decide({"eval/loss": 1.0}, None, None, Policy())
    report = json.loads(files.get("report.json"))
    tracking.register(server, spec, report, verdict, alias="champion", compared_with=None)

    env = {**os.environ, "MLFLOW_TRACKING_URI": server}
    command = [sys.executable, "-c", LOAD, "models:/toy@champion"]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    answers, inputs, made_by, written = json.loads(done.stdout.splitlines()[-1])
    assert [set(row) for row in answers] == [{"answer"}]
    assert (inputs, made_by) == (["prompt", "system"], spec.tracking.run_id)
    assert written.startswith("hello")

    # What MLflow's page of the version shows its schema by, and what leads there from the checkpoint.
    page = f"{server}/model-versions/get-artifact?name=toy&version=1&path=MLmodel"
    login = (os.environ["MLFLOW_TRACKING_USERNAME"], os.environ["MLFLOW_TRACKING_PASSWORD"])
    assert requests.get(page, auth=login, timeout=60).json()["signature"]["inputs"]
    (model,) = tracking.client(server).search_logged_models([spec.tracking.experiment_id])
    assert json.loads(model.tags["mlflow.modelVersions"]) == [{"name": "toy", "version": "1"}]
    measured_on = {(metric.dataset_name, metric.dataset_digest) for metric in model.metrics or ()}
    assert measured_on == {("toy", spec.dataset_digest[:DATASET_DIGEST])}
