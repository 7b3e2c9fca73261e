"""Rows of the embedding, and of the head, for tokens that the base model does not know."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from trainer.model.build import check_vocabulary


@torch.no_grad()
def add_rows(model: Any, new: Sequence[int]) -> None:
    """Give the model a row for each new token, the mean of the rows of all tokens before them.

    A row at random has a norm of its own, and its logit would compete with all others from the first step on
    (https://www.cs.columbia.edu/~johnhew/vocab-expansion.html). The model grows only if it has no spare rows.

    :param model: on the CPU, or on torch's meta device. :param new: ids, above those of all other tokens; may be empty.
    :raises RecipeError: if the tokenizer had tokens before that the model has no row for.
    """
    if not new:
        return
    known = min(new)
    check_vocabulary(model, known - 1)
    if max(new) >= model.get_input_embeddings().weight.shape[0]:
        model.resize_token_embeddings(max(new) + 1, mean_resizing=False)
    head = model.get_output_embeddings()
    parts = (model.get_input_embeddings().weight, getattr(head, "weight", None), getattr(head, "bias", None))
    for weight in parts:
        if weight is not None and not weight.is_meta:  # a tied one comes twice, to the same end
            # NumPy adds row after row, so that the bits do not depend on the number of threads.
            mean = weight[:known].float().numpy().mean(axis=0, dtype=np.float64)
            weight[list(new)] = torch.as_tensor(mean).to(weight.dtype)
