"""The DAG files as Airflow's own processes see them: in fresh processes, offline, with a home of their own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

# Parsing happens every half minute: nothing heavy may be imported by it.
HEAVY = {
    "torch", "transformers", "mlflow", "pyspark", "pandas", "duckdb", "pyarrow", "numpy", "boto3", "botocore",
    "kubernetes", "kubernetes_asyncio", "curation", "trainer", "kubeflow",
}  # fmt: skip

PARSE = """
import json, runpy, sys
from pathlib import Path
import airflow.sdk
for path in sorted(Path(sys.argv[1]).glob("*.py")):
    runpy.run_path(str(path))
imported = sorted({name.partition(".")[0] for name in sys.modules})

from airflow.dag_processing.dagbag import DagBag
from airflow.models.serialized_dag import SerializedDagModel
from airflow.serialization.serialized_objects import DagSerialization
bag = DagBag(sys.argv[1])
limits = {task.task_id: task.log_limit for task in bag.dags["dropforge_finetune"].tasks if hasattr(task, "log_limit")}
dags = {name: DagSerialization.to_dict(dag) for name, dag in sorted(bag.dags.items())}
# Another hash is another DAG version to Airflow.
hashes = {name: SerializedDagModel.hash(dag) for name, dag in dags.items()}
print(json.dumps({"errors": bag.import_errors, "imported": imported, "dags": dags, "hashes": hashes, "limits": limits}))
"""


def fresh(home: Path, code: str, *arguments: str, **env: str) -> Any:
    """What a fresh process prints last, as JSON."""
    known = {key: value for key, value in os.environ.items() if not key.startswith(("AIRFLOW", "DROPFORGE", "AWS"))}
    settings = {
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__PLUGINS_FOLDER": str(ROOT / "plugins"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(ROOT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        # Nothing answers there: parsing that asked the network would fail.
        "HTTP_PROXY": "http://127.0.0.1:1",
        "HTTPS_PROXY": "http://127.0.0.1:1",
        **env,
    }
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        env=known | settings,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.fixture(scope="module")
def parsed(tmp_path_factory: pytest.TempPathFactory) -> Any:
    home = tmp_path_factory.mktemp("airflow")
    return fresh(home, PARSE, str(ROOT / "dags"), PYTHONHASHSEED="1")


@pytest.mark.parametrize(("places", "curations"), [("4", 2), ("2", 1), ("0", None)])
def test_curations_leave_places_for_other_tasks(tmp_path: Path, places: str, curations: int | None) -> None:
    found = fresh(tmp_path, PARSE, str(ROOT / "dags"), AIRFLOW__CORE__PARALLELISM=places)
    tasks = [task["__var"] for task in found["dags"]["dropforge_finetune"]["dag"]["tasks"]]
    most = {task["task_id"]: task.get("max_active_tis_per_dag") for task in tasks}
    assert most == {**dict.fromkeys(most), "curate": curations}


def test_all_dags_are_there_without_errors(parsed: Any) -> None:
    assert parsed["errors"] == {}
    assert list(parsed["dags"]) == [
        "dropforge_alerts",
        "dropforge_checkpoints",
        "dropforge_finetune",
        "dropforge_intake",
        "dropforge_reap",
        "dropforge_rollback",
        "dropforge_sweep",
    ]


def test_parsing_imports_nothing_heavy(parsed: Any) -> None:
    assert not HEAVY & set(parsed["imported"])


def test_a_dag_is_the_same_in_every_process_and_at_every_address(parsed: Any, tmp_path: Path) -> None:
    elsewhere = {
        "PYTHONHASHSEED": "2",
        "TZ": "Asia/Tokyo",
        "DROPFORGE_BUCKET": "other",
        "DROPFORGE_QUEUE_URL": "http://127.0.0.1:9/1/q",
        "DROPFORGE_STATE": "/nowhere",
        "AWS_ENDPOINT_URL": "http://127.0.0.1:9",
    }
    assert fresh(tmp_path, PARSE, str(ROOT / "dags"), **elsewhere)["hashes"] == parsed["hashes"]


def test_each_family_has_a_calendar_and_a_broken_file_is_told(parsed: Any, tmp_path: Path) -> None:
    folder = tmp_path / "families"
    folder.mkdir()
    (folder / "one.yaml").write_text("cron: 0 3 * * *\nrecipe: {extends: tiny}\n")
    (folder / "two.yaml").write_text("cron: 0 4 * * *\ntimezone: Asia/Tokyo\nrecipe: {extends: tiny}\n")
    (folder / "rules-only.yaml").write_text("intake: {rate: 4 per day}\n")
    (folder / "bad.yaml").write_text("cron: never\nrecipe: {extends: tiny}\n")
    code = PARSE.replace("    runpy.run_path(str(path))", "    path.stem == 'families' or runpy.run_path(str(path))")
    found = fresh(tmp_path, code, str(ROOT / "dags"), DROPFORGE_FAMILIES=str(folder), PYTHONHASHSEED="1")
    more = [name for name in found["dags"] if name not in parsed["dags"]]
    assert more == ["dropforge_retrain_one", "dropforge_retrain_two"]
    ((file, told),) = found["errors"].items()
    assert file.endswith("families.py")
    assert "family file 'bad.yaml', key `cron`: it is no cron expression of five fields, not 'never'" in told
    assert not HEAVY & set(found["imported"])
    again = fresh(
        tmp_path, code, str(ROOT / "dags"), DROPFORGE_FAMILIES=str(folder), PYTHONHASHSEED="2", TZ="Asia/Tokyo"
    )
    assert again["hashes"] == found["hashes"]


def test_the_environment_chooses_the_default_preset(tmp_path: Path) -> None:
    tiny = fresh(tmp_path, PARSE, str(ROOT / "dags"), DROPFORGE_PRESET="tiny")
    params = dict(tiny["dags"]["dropforge_finetune"]["dag"]["params"])
    assert params["preset"]["default"] is None
    assert "that of the family, else tiny" in str(params["preset"])


def test_the_chain_of_tasks(parsed: Any) -> None:
    tasks = {item["__var"]["task_id"]: item["__var"] for item in parsed["dags"]["dropforge_finetune"]["dag"]["tasks"]}
    chain = "plan curate check_data open_run confirm tokenise train champion evaluate decide approve register report"
    order = [*chain.split(), "close_run"]
    assert sorted(tasks) == sorted([*order, "watcher"])
    drawn = {name: set(task.get("downstream_task_ids") or ()) for name, task in tasks.items()}
    # Arguments of early tasks would draw an edge to each task that reads them.
    assert drawn == {name: set() for name in tasks} | {before: {after} for before, after in pairwise(order)} | {
        "open_run": {"confirm", "close_run"},
        "report": {"close_run", "watcher"},
    }
    assert tasks["open_run"]["is_setup"]
    assert tasks["close_run"]["is_teardown"]
    # The run's state is its teardown's: a run that a person ends has only skipped tasks before that.
    assert tasks["close_run"]["on_failure_fail_dagrun"]
    # Which is skipped with its setup where a person ends the run before that.
    assert tasks["watcher"]["is_teardown"]
    assert tasks["watcher"]["on_failure_fail_dagrun"]


def test_the_log_of_the_training_has_a_limit(parsed: Any) -> None:
    """Behind it lies what the trainer keeps; the evaluation keeps nothing and is shown whole."""
    assert parsed["limits"] == {"curate": None, "tokenise": None, "train": "20 MB", "evaluate": None}


REAPED = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
task = DagBag(sys.argv[1]).dags["dropforge_reap"].get_task("kubernetes")
reaper = task._reaper()
print(json.dumps([list(reaper.namespaces), {name: name in reaper.optional for name in reaper.backends}]))
"""


def test_the_reaper_looks_for_curations_too(tmp_path: Path) -> None:
    namespaces, kinds = fresh(tmp_path, REAPED, str(ROOT / "dags"), KUBEFLOW_TRAINING_NAMESPACES="team-a, team-b")
    assert namespaces == ["team-a", "team-b"]
    # Of each kind a cluster may have none, so that none of them has to be there.
    named = ("PyTorchJob", "TrainJob", "Job", "SparkApplication")
    assert kinds == {f"{kind} on kubernetes_default": True for kind in named}


LOAD_PLUGINS = """
import json, sys
from airflow import plugins_manager
plugins, errors = plugins_manager._get_plugins()
ours = [str(getattr(plugin.source, "path", plugin.source)) for plugin in plugins if plugin.name == "dropforge"]
import kubernetes
shadow = sorted(
    name for name, module in list(sys.modules.items())
    if "." not in name and sys.argv[1] in str(getattr(module, "__file__", "") or "")
)
pages = sorted(name for name in sys.modules if name.startswith("dropforge_airflow.pages"))
told = {"ours": ours, "errors": errors, "kubernetes": kubernetes.__file__, "top": shadow, "pages": pages}
print(json.dumps(told))
"""


def test_airflow_executes_one_file_of_the_plugins_folder_and_shadows_no_package(tmp_path: Path) -> None:
    found = fresh(tmp_path, LOAD_PLUGINS, str(ROOT / "plugins"))
    # The environment of a developer has an entry point too.
    assert [why for why in found["errors"].values() if "already registered" not in why] == []
    assert found["ours"] == ["dropforge_airflow/plugin.py"]
    assert found["pages"] == []  # only the API server needs them
    assert set(found["top"]) <= {"plugin", "dropforge_airflow", "kubeflow_training"}
    assert "site-packages" in found["kubernetes"]


@pytest.mark.parametrize("name", ["dropforge_finetune", "dropforge_intake"])
def test_no_task_fails_while_a_service_is_away_for_five_minutes(parsed: Any, name: str) -> None:
    """An S3 that refuses connections fails a try within seconds: the pauses alone must be longer."""

    def seconds(of: Any) -> float:
        return float(of["__var"] if isinstance(of, dict) else of)

    dag = parsed["dags"][name]["dag"]
    assert len(dag["tasks"]) == {"dropforge_finetune": 15, "dropforge_intake": 1}[name]
    for task in (item["__var"] for item in dag["tasks"]):
        delay, most = seconds(task["retry_delay"]), seconds(task.get("max_retry_delay", 1e9))
        factor = task.get("retry_exponential_backoff") or 1
        assert sum(min(most, delay * factor**number) for number in range(task["retries"])) >= 300, task["task_id"]
