"""Head and loss in chunks are the plain ones, with torch's operation and with ours, whatever is trained."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional

from trainer.model import chunks
from trainer.model.chunks import chunk_rows, linear_cross_entropy

pytestmark = pytest.mark.compat
WORDS = 30_000  # 150 rows are no whole number of chunks, and more than one


@pytest.fixture(params=["torch", "ours"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    if request.param == "ours":
        monkeypatch.setattr(chunks, "fused_cross_entropy", lambda: None)
    elif chunks.fused_cross_entropy() is None:
        pytest.skip("this torch has no such operation")
    monkeypatch.setattr(chunks, "chunk_rows", lambda *_: 64)
    return str(request.param)


def tensors(bias: bool) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    torch.manual_seed(0)
    found = {"hidden": torch.randn(150, 16), "weight": torch.randn(WORDS, 16) / 4}
    if bias:
        found["bias"] = torch.randn(WORDS) / 4
    return found, torch.randint(0, WORDS, (150,))


def gradients(loss: Any, values: dict[str, torch.Tensor], trained: tuple[str, ...]) -> dict[str, torch.Tensor]:
    """Of twice the loss, so that what comes from above counts."""
    leaves = {name: value.clone().requires_grad_(name in trained) for name, value in values.items()}
    nats = loss(leaves)
    (2 * nats).backward()
    return {"loss": nats.detach().float(), **{name: leaves[name].grad.float() for name in trained}}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("trained", [("hidden", "weight"), ("hidden",)], ids=["full", "adapters"])
def test_chunks_are_the_whole(way: str, bias: bool, trained: tuple[str, ...]) -> None:
    values, targets = tensors(bias)
    trained += ("bias",) if bias and "weight" in trained else ()
    mine = gradients(
        lambda its: linear_cross_entropy(its["hidden"], its["weight"], targets, its.get("bias")), values, trained
    )
    plain = gradients(
        lambda its: functional.cross_entropy(
            functional.linear(its["hidden"], its["weight"], its.get("bias")), targets, reduction="sum"
        ),
        values,
        trained,
    )
    for name, found in plain.items():
        torch.testing.assert_close(mine[name], found, rtol=1e-5, atol=1e-5)


def test_in_16_bits_the_sum_is_in_32() -> None:
    values, targets = tensors(False)
    narrow = {name: value.bfloat16() for name, value in values.items()}
    loss = lambda its: linear_cross_entropy(its["hidden"], its["weight"], targets, None)  # noqa: E731
    mine, exact = gradients(loss, narrow, tuple(narrow)), gradients(loss, values, tuple(values))
    assert linear_cross_entropy(narrow["hidden"], narrow["weight"], targets, None).dtype == torch.float32
    assert mine["loss"].item() == pytest.approx(exact["loss"].item(), rel=1e-3)
    for name in values:
        assert (mine[name] - exact[name]).norm() / exact[name].norm() < 1e-2


def test_without_gradients_none_are_made() -> None:
    values, targets = tensors(False)
    with torch.no_grad():
        found = linear_cross_entropy(values["hidden"].bfloat16(), values["weight"].bfloat16(), targets, None)
    assert not found.requires_grad


@pytest.mark.parametrize(
    ("vocabulary", "device", "rows"),
    [(2_048, "cpu", 1024), (32_768, "cpu", 256), (131_072, "cpu", 64), (1_000_000, "cpu", 64), (131_072, "cuda", 1024)],
)
def test_a_chunk_is_neither_a_row_nor_gigabytes(vocabulary: int, device: str, rows: int) -> None:
    assert chunk_rows(vocabulary, device) == rows
