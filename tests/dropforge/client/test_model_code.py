"""A registered model's folder is written by pods: loading it runs none of what lies there."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from dropforge import json_objects
from dropforge.client import DropforgeError
from dropforge.client.model import Model
from dropforge.store import Store, read_bounded
from tests.dropforge.cli.conftest import airflow
from tests.dropforge.cli.test_result import Registry, registry

__all__ = ["airflow", "registry"]

READS = {"task": "causal-lm", "chat": False, "special": False, "begin": [], "ends": [2], "new_tokens": 3}


def registered(registry: Registry, server: str, folder: Path, loader: str, code: str) -> Model:
    """Register a folder with code beside its weights, as a run would."""
    column = {"type": "string", "name": "prompt", "required": True}
    about: dict[str, Any] = {
        "flavors": {"python_function": {"loader_module": loader, "code": "code", "python_version": "3.11.0"}},
        "signature": {"inputs": json.dumps([column]), "outputs": None, "params": None},
        "metadata": {"dropforge": READS},
    }
    (folder / "code").mkdir()
    (folder / "code" / f"{loader}.py").write_text(code)
    (folder / "MLmodel").write_text(json.dumps(about))
    run = registry.mlflow.create_run(registry.experiment).info
    registry.mlflow.log_artifacts(run.run_id, str(folder), "model")
    version = registry.mlflow.create_model_version(registry.family, f"{run.artifact_uri}/model", run.run_id).version
    return Model(registry.family, int(version), server)


def test_code_that_a_pod_left_beside_a_model_is_not_run(registry: Registry, mlflow_server: str, tmp_path: Path) -> None:
    from tests.trainer.ranks_loop import make_base

    marker, folder = tmp_path / "ran", tmp_path / "model"
    make_base(folder)
    found = registered(
        registry, mlflow_server, folder, "dropforge_pyfunc", f"open({str(marker)!r}, 'w')\nraise OSError"
    )
    answers: Any = found.load().predict([{"prompt": "the red cat"}])
    assert list(answers.columns) == ["answer"]
    assert not marker.exists()


def test_a_model_that_no_run_wrote_is_not_loaded(registry: Registry, mlflow_server: str, tmp_path: Path) -> None:
    marker, folder = tmp_path / "ran", tmp_path / "model"
    folder.mkdir()
    found = registered(registry, mlflow_server, folder, "of_strangers", f"open({str(marker)!r}, 'w')")
    with pytest.raises(DropforgeError, match=r"none that a run of Dropforge writes.*mlflow\.pyfunc\.load_model"):
        found.load()
    assert not marker.exists()


def test_what_a_pod_left_in_the_place_of_a_model_ends_in_words(
    registry: Registry, mlflow_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    found = registered(registry, mlflow_server, folder, "dropforge_pyfunc", "")
    monkeypatch.setattr(json_objects, "read_bounded", partial(bounded, most=10))
    with pytest.raises(DropforgeError, match="none that a run of Dropforge writes"):
        found.load()

    def lists_without_end(*_: object, **__: object) -> str:
        return lists_without_end()

    monkeypatch.setattr("mlflow.artifacts.download_artifacts", lists_without_end)
    for fetch in (found.load, found.download):
        with pytest.raises(DropforgeError, match="its files cannot be fetched"):
            fetch()


def bounded(store: Store, key: str, _: int, etag: str | None, *, most: int) -> bytes:
    return read_bounded(store, key, most, etag)
