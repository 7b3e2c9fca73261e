"""The stack's secrets are made once, completed by a newer version, and never replaced without a word."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from dropforge.errors import DropforgeError
from dropforge.stack.secrets import Secrets, of_mlflow, read_secrets, secrets_path


def test_secrets_of_an_older_version_stay_and_get_what_they_lack(tmp_path: Path) -> None:
    """Several processes may find that at once: all have the same afterwards."""
    older = {name: value for name, value in vars(Secrets()).items() if not name.startswith("mlflow")}
    secrets_path(tmp_path).write_text(json.dumps(older | {"of_a_newer_version": "x"}))
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: read_secrets(tmp_path), range(8)))
    assert len(found) == 1
    (secrets,) = found
    assert vars(secrets).items() >= older.items()
    assert len({value for value in vars(secrets).values() if len(value) >= 12}) == len(vars(secrets))
    assert secrets_path(tmp_path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "text", ["", '{"access_key": "DFsecretsecret', "[]", '{"access_key": 1}', '{"secret_key": ""}']
)
def test_a_torn_file_is_told_with_the_mend_and_stays(tmp_path: Path, text: str) -> None:
    secrets_path(tmp_path).write_text(text)
    with pytest.raises(DropforgeError, match=r"secrets\.json.*cannot be read.*delete it") as error:
        read_secrets(tmp_path)
    assert "DFsecret" not in str(error.value)
    assert secrets_path(tmp_path).read_text() == text


def test_a_server_of_its_own_takes_the_passwords_out_of_the_environment() -> None:
    names = ("MLFLOW_ADMIN_PASSWORD", "MLFLOW_AIRFLOW_PASSWORD", "MLFLOW_TRAINER_PASSWORD", "MLFLOW_SECRET_KEY")
    env = {name: name.lower() for name in names} | {"PATH": "/bin"}
    found = of_mlflow(env)
    assert (found.mlflow_password, found.mlflow_trainer_password) == (
        "mlflow_admin_password",
        "mlflow_trainer_password",
    )
    assert env == {"PATH": "/bin"}
    with pytest.raises(DropforgeError, match="MLFLOW_ADMIN_PASSWORD: it is not set"):
        of_mlflow(dict.fromkeys(names, ""))
