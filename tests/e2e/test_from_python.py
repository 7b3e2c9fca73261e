"""The notebook of `examples/`, run on the stack: two drops become two versions, which are compared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from dropforge.source_root import source_root
from tests.e2e.harness import Stack
from trainer.data.tokenizer import train_tokenizer, wrap_tokenizer

pytestmark = [pytest.mark.e2e, pytest.mark.timeout(1200)]


@pytest.fixture
def base(stack: Stack, tmp_path: Path) -> str:
    """A small chat model in the stack's bucket."""
    folder = tmp_path / "base"
    tokenizer = wrap_tokenizer(train_tokenizer([f"What is {n} plus {n}? It is {2 * n}." for n in range(300)], 320), 128)
    tokenizer.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=320, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    for path in folder.iterdir():
        stack.connection.store.upload(path, f"models/small/{path.name}")
    return f"s3://{stack.connection.settings.bucket}/models/small"


def test_the_notebook_runs(
    stack: Stack, base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("BASE_MODEL", base)
    monkeypatch.setenv("DROPFORGE_STATE", str(stack.folder))
    monkeypatch.chdir(tmp_path)
    notebook = json.loads((source_root() / "examples" / "from_python.ipynb").read_text())
    names: dict[str, Any] = {}
    for cell in notebook["cells"]:
        assert not cell.get("outputs")
        if cell["cell_type"] == "code":
            exec(compile("".join(cell["source"]), cell["id"], "exec"), names)
    run, second = names["run"], names["second"]
    assert "promote: " in capsys.readouterr().out
    assert run.promoted
    assert (run.model.version, second.model.version) == (1, 2)
    assert run.state == second.state == "success"
    (answer,) = names["model"].predict([{"prompt": "What is 130 plus 130?"}])
    assert isinstance(answer, str)
    assert [column.version for column in names["comparison"].runs] == ["1", "2"]
