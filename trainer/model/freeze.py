"""The part of a base model that keeps its weights, found by the model's structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from torch import nn

from dropforge.errors import RecipeError
from trainer.config import Freeze
from trainer.model.build import is_seq2seq

_BLOCKS: Final = "recipe key `train.freeze.blocks`"


def freeze_part(model: Any, freeze: Freeze) -> None:
    """Freeze the first blocks of a model, its embeddings, or both.

    A head that is tied to the embeddings is frozen with them, for it is the same weight.

    :raises RecipeError: if the model has not so many blocks, shows none, or nothing would be left to train.
    """
    blocks = text_blocks(model)
    if freeze.blocks and blocks is None:
        raise RecipeError(
            _BLOCKS,
            f"{type(model).__name__} has no one list of as many blocks as its config says",
            "Remove it; `train.freeze.embeddings` needs no blocks",
        )
    if blocks is not None and freeze.blocks > len(blocks):
        raise RecipeError(
            _BLOCKS, f"{freeze.blocks} are to be frozen, and the model has {len(blocks)}", f"Set it to {len(blocks)}"
        )
    for block in (blocks or ())[: freeze.blocks]:
        block.requires_grad_(False)
    if freeze.embeddings:
        model.get_input_embeddings().requires_grad_(False)
        for stack in (model.get_encoder(), model.get_decoder()) if is_seq2seq(model) else (model.get_decoder(),):
            for part in _outside(stack, blocks):
                if isinstance(part, nn.Embedding):  # of positions, where they are learned
                    part.requires_grad_(False)
    if not any(weight.requires_grad for weight in model.parameters()):
        raise RecipeError("recipe key `train.freeze`", "it leaves nothing to train", "Freeze fewer blocks")


def text_blocks(model: Any) -> list[nn.Module] | None:
    """All blocks that text passes, from the first on: those of an encoder, if there is one, before the decoder's."""
    if not is_seq2seq(model):
        found = decoder_blocks(model)
        return None if found is None else list(found)
    both = [list(_lists(stack)) for stack in (model.get_encoder(), model.get_decoder())]
    return None if any(len(lists) != 1 for lists in both) else [block for lists in both for block in lists[0]]


def decoder_blocks(model: Any) -> nn.ModuleList | None:
    """The blocks that text passes, from the first on; None where there is not exactly one list of them.

    The vision part of a model that sees pictures too has blocks of its own, which are not among them.
    """
    count = getattr(model.config.get_text_config(), "num_hidden_layers", None)
    found = [part for part in _lists(model.get_decoder()) if len(part) == count]
    return found[0] if len(found) == 1 else None


def _lists(module: nn.Module) -> Iterator[nn.ModuleList]:
    """The outermost lists of modules: a router's experts, within a block, are no blocks."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            yield child
        else:
            yield from _lists(child)


def _outside(module: nn.Module, blocks: Sequence[nn.Module] | None) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if not any(child is block for block in blocks or ()):
            yield from _outside(child, blocks)
