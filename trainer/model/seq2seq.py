"""The loss of an encoder-decoder: rows are cut at the border between sources and targets.

The encoder reads the sources with a mask over their padding. The decoder reads the targets moved on by one place
behind its start token; padding stands behind them, where nothing that counts can see it, so it needs no mask.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from dropforge.errors import RecipeError
from trainer.model.build import load_pretrained
from trainer.model.loss import TOLERANCE, LossModel, Way


def load_seq2seq(folder: str | Path, revision: str | None = None) -> Any:
    """An encoder-decoder in fp32, whatever the files hold.

    :raises RecipeError: if it cannot be loaded as one.
    """
    from transformers import AutoModelForSeq2SeqLM

    model, missing = load_pretrained(
        AutoModelForSeq2SeqLM,
        folder,
        revision,
        "as an encoder-decoder",
        "Name one, such as a T5 or a BART, or leave out `task: sequence-to-sequence`",
    )
    if missing:
        raise RecipeError(
            "recipe key `base.model`",
            f"{folder} lacks {len(missing)} of its weights, as {missing[0]}",
            "Name a model whose files are whole",
        )
    return model


def decoder_start(config: Any) -> int:
    """The id of the token that the decoder begins with.

    :raises RecipeError: if the config does not tell it, or has no padding, which the library puts behind it.
    """
    for name in ("decoder_start_token_id", "pad_token_id"):
        if getattr(config, name, None) is None:
            raise RecipeError(
                "recipe key `base.model`",
                f"its config names no `{name}`, so it is not known what its decoder begins with",
                f"Set `{name}` in its config.json",
            )
    return int(config.decoder_start_token_id)


class Seq2SeqLoss(LossModel):
    """An encoder-decoder and its loss.

    :param scale: of the decoder's states before the head, where that is tied as in T5; see `choose_way`.
    :raises RecipeError: see `decoder_start`.
    """

    def __init__(self, model: Any, bf16: bool = False, way: Way = "own", scale: float = 1.0) -> None:
        super().__init__(model, False, bf16, way)
        self.scale = scale
        self.scales = (1.0, float(model.config.hidden_size) ** -0.5)
        self.start = decoder_start(model.config)

    def like(self, model: Any) -> LossModel:
        return Seq2SeqLoss(model, False, self.way, self.scale)

    def has_states(self) -> bool:
        return True

    def check(self, own: float, logits: torch.Tensor, targets: torch.Tensor) -> None:
        """See that the model's own loss, with its own way to move targets on, is the cross entropy of its logits here.

        :param own: nats, by the model. :raises RecipeError: if it is not: it begins otherwise, or learns another loss.
        """
        mine = float(torch.nn.functional.cross_entropy(logits, targets, reduction="sum"))
        if not abs(mine - own) <= TOLERANCE * max(1.0, abs(own)):
            raise RecipeError(
                "recipe key `base.model`",
                f"its own loss is not the cross entropy of its targets behind token {self.start} ({own:.6g}, and that "
                f"is {mine:.6g})",
                "Choose another model",
            )

    def alone(self, ids: torch.Tensor) -> torch.Tensor:
        """(L, V) fp32 logits of a document that is its own target."""
        length = ids.shape[1]
        positions = torch.arange(length, device=ids.device)[None]
        return self.logits(torch.cat([ids, ids], 1), positions, length - 1 + positions[0])

    def _parts(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
    ) -> tuple[dict[str, Any], torch.Tensor, torch.Tensor]:
        """The encoder's inputs, the decoder's, and the places of targets in them; nothing asks the device."""
        border, width = positions.shape[1], ids.shape[1]
        longest = getattr(self.model.config, "max_position_embeddings", None) or width
        heads, tails = min(border, longest), min(width - border, longest)  # widths are rounded up beyond the context
        mask = ((positions == 0).cumsum(-1) == 1).long()  # padding begins with another 0
        read = {
            "input_ids": ids[:, :heads].contiguous(),
            "attention_mask": mask[:, :heads].contiguous(),
        }
        begin = ids.new_full((len(ids), 1), self.start)
        written = torch.cat([begin, ids[:, border : border + tails - 1]], 1)
        return read, written, places // width * tails + places % width - (border - 1)

    def _hidden(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """(N, H) states below the head at `places`."""
        read, written, places = self._parts(ids, positions, places)
        memory = self.model.get_encoder()(**read)[0]
        states = self.model.get_decoder()(
            input_ids=written,
            encoder_hidden_states=memory,
            encoder_attention_mask=read["attention_mask"],
            use_cache=False,
        )[0]
        found = states.reshape(-1, states.shape[-1])[places]
        return found if self.scale == 1 else found * self.scale  # type: ignore[no-any-return]

    def _rows(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return ids, positions, places

    def _logits(self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        with self._arithmetic(ids):
            if self.way != "own":
                found = self.model.get_output_embeddings()(self._hidden(ids, positions, places))
            else:
                read, written, places = self._parts(ids, positions, places)
                whole = self.model(**read, decoder_input_ids=written, use_cache=False).logits
                found = whole.reshape(-1, whole.shape[-1])[places]
        return found.float()  # type: ignore[no-any-return]

    def _own(
        self, ids: torch.Tensor, positions: torch.Tensor, places: torch.Tensor, targets: torch.Tensor
    ) -> torch.Tensor:
        read, written, places = self._parts(ids, positions, places)
        labels = torch.full_like(written, -100)
        labels.view(-1)[places] = targets
        return self.model(**read, labels=labels, use_cache=False).loss  # type: ignore[no-any-return]

    def next_logits(
        self, ids: torch.Tensor, positions: torch.Tensor, mask: torch.Tensor, cache: Any
    ) -> tuple[torch.Tensor, Any]:
        """(B, V) fp32 logits of the next token of each target, and what goes on from there.

        :param ids: (B, S) sources at first, then (B, 1) the tokens that were written last. :param positions: not used.
        :param mask: (B, S) int64, 0 where a source's padding stands.
        :param cache: what the call before returned, None at first: the encoder's states and the decoder's cache. With
            the states alone the decoder begins anew.
        """
        del positions
        known: dict[str, Any] = {"attention_mask": mask, "use_cache": True}
        if cache is None:
            known |= {"input_ids": ids, "decoder_input_ids": ids.new_full((len(ids), 1), self.start)}
        else:
            known |= {"encoder_outputs": (cache[0],), "past_key_values": cache[1], "decoder_input_ids": ids}
        with self._arithmetic(ids):
            found = self.model(**known)
        return found.logits[:, -1].float(), (found.encoder_last_hidden_state, found.past_key_values)
