"""What Airflow sees of the package: provider information, stored trigger arguments, and the price of importing it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.fixture(scope="module")
def airflow(tmp_path_factory):
    """Runs Python with Airflow in a process of its own, because Airflow reads its home when it is first imported."""
    home = tmp_path_factory.mktemp("airflow")
    env = {key: value for key, value in os.environ.items() if not key.startswith("AIRFLOW")}

    def run(code: str):
        command = [sys.executable, "-c", code]
        done = subprocess.run(
            command, env={**env, "AIRFLOW_HOME": str(home)}, capture_output=True, text=True, timeout=120, check=False
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    return run


def test_airflow_discovers_the_provider(airflow):
    found = airflow(
        "import json; from airflow.providers_manager import ProvidersManager as P; m = P();"
        "m.initialize_providers_list();"
        "import kubeflow_training as k; name = k.get_provider_info()['package-name'];"
        "link = 'kubeflow_training.links.PyTorchJobLink';"
        "print(json.dumps([name in m.providers, link in m.extra_links_class_names]))"
    )
    assert found == [True, True]


def test_the_trigger_is_stored_as_this_and_nothing_else(airflow):
    path, arguments = airflow(
        "import json; from kubeflow_training.triggers import PyTorchJobTrigger as T;"
        "t = T(name='n', namespace='ns', uid='u', gang=2, backend='kubernetes', deadline=5.0);"
        "path, arguments = t.serialize(); assert T(**arguments).serialize() == (path, arguments);"
        "print(json.dumps([path, arguments]))"
    )
    assert path == "kubeflow_training.triggers.PyTorchJobTrigger"
    assert arguments == {
        "name": "n",
        "namespace": "ns",
        "uid": "u",
        "gang": 2,
        "kind": "PyTorchJob",
        "backend": "kubernetes",
        "kubernetes_conn_id": "kubernetes_default",
        "home": None,
        "poll_interval": 2.0,
        "log_ranks": "all",
        "log_limit": None,
        "deadline": 5.0,
        "queue_until": None,
        "queue_seconds": None,
        "run_seconds": None,
        "min_nodes": None,
        "place_seconds": None,
        "owned": True,
        "must_exist": True,
        "not_before": None,
    }


def test_parsing_a_dag_with_the_operator_imports_no_client(airflow):
    loaded = airflow(
        "import airflow.sdk, sys, json; from airflow.sdk import BaseOperator, BaseSensorOperator;"
        "before = set(sys.modules);"
        "import kubeflow_training.operators, kubeflow_training.sensors, kubeflow_training.triggers;"
        "print(json.dumps(sorted(m for m in set(sys.modules) - before if not m.startswith('kubeflow_training'))))"
    )
    heavy = ("kubernetes", "airflow.providers", "torch", "boto", "mlflow", "sqlalchemy", "aiohttp", "asyncpg")
    assert [module for module in loaded if module.startswith(heavy)] == []


def test_the_job_library_needs_no_airflow():
    code = (
        "import sys; sys.modules['airflow'] = None;"
        "import kubeflow_training.jobs.waiting.podlog, kubeflow_training.jobs.local, kubeflow_training.jobs.kubernetes;"
        "import kubeflow_training.jobs.local.supervisor; assert 'kubernetes' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_example_in_the_readme_is_python():
    import kubeflow_training

    text = (Path(kubeflow_training.__file__).parent / "README.md").read_text()
    blocks = [part.split("```")[0] for part in text.split("```python\n")[1:]]
    assert blocks
    for block in blocks:
        compile(block, "README.md", "exec")


def test_a_trigger_that_cannot_wait_says_so_in_an_event(airflow):
    events = airflow(
        "import asyncio, json; from kubeflow_training.triggers import PyTorchJobTrigger as T\n"
        "async def events(**more):\n"
        "    return [e.payload async for e in T(name='n', namespace='ns', uid='u', gang=2, **more).run()]\n"
        "print(json.dumps([asyncio.run(events(backend='none')), asyncio.run(events(kind='Job2')),"
        " asyncio.run(events(backend='local', home='/tmp', log_limit='lots'))]))"
    )
    for (event,), word in zip(events, ("backend 'none'", "kind 'Job2'", "log_limit 'lots'"), strict=True):
        assert (event["kind"], event["observation"]) == ("broken", None)
        assert event["job"] == {"name": "n", "namespace": "ns", "uid": "u", "gang": 2}
        assert word in event["why"]
