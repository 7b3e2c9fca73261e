"""flash-attn's functions on a CPU, which know 16 bits only as it does. The library's code around them is what runs."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as library

from trainer.model import attention

NAME = "flash_attention_2"


@contextmanager
def flash_attention() -> Iterator[list[torch.dtype]]:
    """Within it, `flash_attention_2` is chosen as on a GPU that has it; gives the types that it was called with."""
    called: list[torch.dtype] = []
    refusal = attention._refusal

    def dense(query: Any, key: Any, value: Any, *, causal: bool = False, **_: Any) -> torch.Tensor:
        called.append(query.dtype)
        return _attend(query, key, value, causal)

    def varlen(
        query: Any, key: Any, value: Any, *, cu_seqlens_q: Any, cu_seqlens_k: Any, causal: bool = False, **_: Any
    ) -> torch.Tensor:
        called.append(query.dtype)
        parts = zip(itertools.pairwise(cu_seqlens_q.tolist()), itertools.pairwise(cu_seqlens_k.tolist()), strict=True)
        return torch.cat(
            [_attend(query[None, a:b], key[None, c:d], value[None, c:d], causal)[0] for (a, b), (c, d) in parts]
        )

    with pytest.MonkeyPatch.context() as patch:
        functions = (dense, varlen, None, library._pad_input, library._unpad_input)
        patch.setattr(library, "_lazy_imports", lambda *_, **__: functions)
        for name in ("_loaded_implementation", "_flash_fn", "_flash_varlen_fn", "_flash_with_kvcache_fn", "_pad_fn",
                     "_unpad_fn", "_process_flash_kwargs_fn", "_process_with_kvcache_kwargs_fn"):  # fmt: skip
            patch.setattr(library, name, None)
        there = library.FLASH_ATTENTION_COMPATIBILITY_MATRIX[2]
        patch.setitem(there, "general_availability_check", lambda: True)
        patch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *_, **__: True)
        patch.setattr(
            attention,
            "_refusal",
            lambda name, precision, *more: (
                ("" if precision == "bf16" else "16 bits only") if name == NAME else refusal(name, precision, *more)
            ),
        )
        yield called


def _attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool) -> torch.Tensor:
    """(B, L, heads, D) as flash-attn takes and gives it. :raises RuntimeError: as it does."""
    if query.dtype not in (torch.float16, torch.bfloat16):
        raise RuntimeError("FlashAttention only support fp16 and bf16 data type")
    query, key, value = (part.transpose(1, 2) for part in (query, key, value))
    mask = None
    if causal:  # the last query sees the last key
        rows, columns = query.shape[2], key.shape[2]
        mask = torch.ones(rows, columns, dtype=torch.bool).tril(columns - rows)
    found = functional.scaled_dot_product_attention(query, key, value, attn_mask=mask, enable_gqa=True)
    return found.transpose(1, 2)
