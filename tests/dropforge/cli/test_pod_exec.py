"""What the cluster tells of a command's end becomes an exit code, or an error."""

from __future__ import annotations

import pytest

from dropforge.cli.pod_exec import _exit_code
from dropforge.errors import DropforgeError


def test_the_exit_code_is_the_command_s() -> None:
    failed = '{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "7"}]}}'
    assert (_exit_code('{"status": "Success"}', "pod a/b"), _exit_code(failed, "pod a/b")) == (0, 7)


@pytest.mark.parametrize(
    ("told", "said"),
    [
        ("", "the connection broke"),
        ("null", "the connection broke"),
        ('{"status": "Failure", "message": "exec: no such file"}', "exec: no such file"),
        ('{"status": "Failure", "details": {"causes": [{"reason": "ExitCode", "message": "x"}]}}', "was not run"),
    ],
)
def test_what_was_not_run_to_its_end_is_an_error(told: str, said: str) -> None:
    with pytest.raises(DropforgeError, match=said):
        _exit_code(told, "pod a/b")
