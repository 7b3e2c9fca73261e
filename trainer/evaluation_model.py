"""A model that is evaluated: brought to this machine once for all of its ranks, whole on each of them or in shards.

Ranks that trained in shards evaluate so too: a model that fits no GPU whole is measured as it was trained. Its weights
are read as the training's are (`trainer.model.hollow`): how it attends is decided on its first blocks, the shards are
held against its files, and its loss against the whole model's, which the first rank reads block after block.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from trainer.assembly import look_at_all, same_loss
from trainer.config import Settings
from trainer.data.batch import Batch
from trainer.data.hub import Through
from trainer.data.labels import for_labels
from trainer.data.seq2seq import for_seq2seq
from trainer.data.tokenizer import load_tokenizer
from trainer.gang import Gang
from trainer.model.build import CONFIG, Built, fetch_folder, head_labels, load_classifier, task_of
from trainer.model.hollow import few_blocks, make_hollow, to_device
from trainer.model.loss import LossModel, Precision
from trainer.model.prefix import open_model
from trainer.model.seq2seq import load_seq2seq
from trainer.model.shard import Sharded
from trainer.model.slices import UnsliceableError
from trainer.prepare import node_cache, scratch_folder
from trainer.unmeasurable import NoTargetError, OtherTaskError

_KINDS: Final = {
    "causal-lm": "a causal language model",
    "classification": "a classifier",
    "sequence-to-sequence": "an encoder-decoder",
}


@dataclass
class EvaluationModel:
    """A model on this rank.

    :param built: what is measured. :param look: on which is decided how: itself, or its first blocks.
    :param labels: of a classifier. :param stored: bytes of its files of weights.
    """

    built: Built
    look: Built
    tokenizer: Any
    labels: tuple[str, ...] | None
    stored: int
    gang: Gang

    def shared(self, loss: LossModel, probe: Batch, length: int, precision: Precision) -> LossModel:
        """The loss to measure with; all ranks take part.

        :param loss: as it was chosen on `look`. :param probe: a short batch, the same on every rank.
        :param length: longest row in tokens. :param precision: of the evaluation.
        :raises ShardingError: on every rank, if the shards are not the model.
        """
        if self.look is self.built:
            return loss
        whole = same_loss(self.built, loss)
        expected, _ = look_at_all(self.built, whole, probe, self.gang)
        whole.precision = precision
        ranks = Sharded(self.gang, self.built, whole, "fsdp", self.gang.world)
        ranks.prove(probe, expected)
        ranks.prove_isolation(length)
        return ranks.loss


@contextmanager
def evaluation_model(
    name: str, uri: str, settings: Settings, gang: Gang, check: Callable[[], None], say: Callable[[str], Any]
) -> Iterator[EvaluationModel]:
    """A model of the task of `settings`. Its files are there until the block ends; all ranks take part.

    :param name: what it is called in messages. :param uri: its folder. :param check: may raise to stop.
    :raises OtherTaskError: on every rank, if it was made for another task. :raises RecipeError: if it cannot be loaded.
    """
    gc.collect()  # the model before this one has cycles, and there may be room for one
    if gang.device.type == "cuda":
        torch.cuda.empty_cache()
    with _place(gang) as place, node_cache(settings, say) as node:
        through = Through(node, place, check) if node is not None else None
        fetched = str(fetch_folder(uri, place, prefix=True, through=through)) if gang.leader else ""
        gang.follow(f"the files in {place}")
        folder = Path(gang.gather(fetched)[0])
        try:
            yield _load(f"{name} {uri}", folder, settings, gang, lambda: open_model(folder, node=node, check=check))
        except (OtherTaskError, NoTargetError):
            gang.barrier()  # all ranks come to the same: none may still read what another one removes
            raise
        gang.barrier()


@contextmanager
def _place(gang: Gang) -> Iterator[Path]:
    """A new folder that all ranks know; the first one removes it."""
    where = scratch_folder()
    with TemporaryDirectory(prefix="dropforge-model-", dir=where) if gang.leader else nullcontext("") as own:
        yield Path(gang.gather(own)[0])


def _load(what: str, folder: Path, settings: Settings, gang: Gang, open_whole: Callable[[], Any]) -> EvaluationModel:
    """:param what: the model, for errors. :param open_whole: reads it, if it writes text, or a prefix with its base."""
    task = task_of(folder)
    if task != settings.task:
        kind = f"{_KINDS[task]}, and no {_KINDS[settings.task].partition(' ')[2]}"
        raise OtherTaskError(what, f"it is {kind}", "Measure it on rows of its own task")
    stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    labels = head_labels(folder)
    tokenizer = load_tokenizer(folder, ends=labels is None)
    if labels is not None:
        model, tokenizer = load_classifier(folder), for_labels(tokenizer)
    elif task == "sequence-to-sequence":
        model, tokenizer = load_seq2seq(folder), for_seq2seq(tokenizer)
    elif (hollow := _hollow(folder, settings, gang)) is not None:
        return EvaluationModel(*hollow, tokenizer, labels, stored, gang)
    else:
        model = open_whole()
    built = Built(model.to(gang.device).eval())
    return EvaluationModel(built, built, tokenizer, labels, stored, gang)


def _hollow(folder: Path, settings: Settings, gang: Gang) -> tuple[Built, Built] | None:
    """A model whose weights are read by shards, and its first blocks; None where each rank has to read the whole."""
    if gang.world == 1 or not settings.sharded or not (folder / CONFIG).is_file():
        return None
    base = replace(settings.base, model=str(folder), revision=None, scratch=None, start="base", new_tokens=None)
    train = replace(settings.train, method="full", freeze=None, offload="none", router_loss=0.0)
    plain = replace(settings, base=base, train=train)
    try:
        built = make_hollow(folder, plain)
        look = few_blocks(built, plain)
    except UnsliceableError:
        return None
    to_device(built, gang.device)
    look.model.to(gang.device)
    return Built(built.model.eval(), slices=built.slices), Built(look.model.eval())
