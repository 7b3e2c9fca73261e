"""What differs between the supported releases of torch and transformers is in one module, and is what it says."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib

import pytest
import torch
from torch.nn import functional

from dropforge.errors import DropforgeError
from trainer import compat
from trainer.gang import Gang

from .ranks import Ranks
from .toy import REPOSITORY

pytestmark = pytest.mark.compat


def pinned() -> dict[str, str]:
    """Versions of the environment with the lowest releases."""
    lines = (REPOSITORY / "requirements" / "compat-2.11.txt").read_text().splitlines()
    return dict(line.partition(" ")[0].split("==") for line in lines if "==" in line)


def test_the_lowest_releases_are_those_that_are_tried() -> None:
    """Three places name them, and say the same."""
    extras = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"]["trainer"]
    for name in ("torch", "transformers"):
        (lowest, beyond), tried = compat.SUPPORTED[name], pinned()[name]
        assert tried.startswith(f"{lowest[0]}.{lowest[1]}.")
        [asked] = [item for item in extras if re.match(rf"{name}\b", item)]
        assert f">={lowest[0]}.{lowest[1]}," in asked
        assert asked.split("<")[1] in (f"{beyond[0]}.{beyond[1]}", str(beyond[0]))


def test_this_environment_is_supported_and_others_are_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    compat.check_versions()
    found = compat.versions()
    for wrong in ("2.10.1", "2.16.0"):
        monkeypatch.setattr(compat, "version", lambda name, wrong=wrong: wrong if name == "torch" else found[name])
        with pytest.raises(DropforgeError, match=rf"package torch: {wrong} is installed, .* 2\.11 up to"):
            compat.check_versions()


def test_a_python_without_docstrings_is_refused_before_transformers_is_loaded() -> None:
    command = [sys.executable, "-OO", "-c", "from trainer.compat import check_versions; check_versions()"]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert "environment variable PYTHONOPTIMIZE: with 2 Python leaves docstrings out" in ended.stderr
    assert ended.returncode == 1


def test_the_fused_loss_is_the_plain_one_wherever_torch_has_it() -> None:
    fused = compat.fused_cross_entropy()
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    assert (fused is not None) is (release >= (2, 13))
    if fused is None:
        return
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16, requires_grad=True), torch.randn(50, 16, requires_grad=True)
    targets = torch.randint(50, (7,))
    plain = functional.cross_entropy(hidden @ weight.T, targets, reduction="sum")
    wanted = torch.autograd.grad(plain, (hidden, weight))
    value = fused(hidden, weight, targets, None, 4)
    assert value.item() == pytest.approx(plain.item(), rel=1e-6)
    for found, own in zip(torch.autograd.grad(value, (hidden, weight)), wanted, strict=True):
        assert torch.allclose(found, own, atol=1e-5)


def recorded(gang: Gang) -> str:
    gang.sum([1.0])
    return json.dumps(json.loads(compat.flight_records()["gloo"]))


@pytest.mark.dist
def test_the_last_collectives_can_be_read_while_ranks_live(ranks: Ranks) -> None:
    """What the watchdog keeps of a rank that hangs; torch moved it between backends and changed how it is asked."""
    assert all("all_reduce" in text for text in ranks(recorded, 2))
