"""Peers on transformers' Trainer: its flattening and padding collators, and TRL's trainer for fine-tuning."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from tempfile import TemporaryDirectory
from typing import Any

from bench.speed.cells import LENGTH, ROWS
from bench.speed.work import BETAS, CLIP, RATE, Work
from bench.training import Prepared


def train(work: Work, variant: str) -> dict[str, Any]:
    """Seconds of CPU in the steps that count, their tokens, and the last loss."""
    with TemporaryDirectory() as folder, silence():
        return {
            "flat": lambda: {"tokens": work.timed, **flattened(work, folder)},
            "padded": lambda: {
                "tokens": work.timed,
                **_trainer(work, folder, _pad(work), ordered=not work.cell.labelled),
            },
            "bucketed": lambda: {"tokens": work.timed, **_trainer(work, folder, _pad(work))},
            "trl-padded": lambda: _trl(work, folder, packing=False),
            "trl-packed": lambda: _trl(work, folder, packing=True),
        }[variant]()


def _arguments(work: Prepared, folder: str) -> dict[str, Any]:
    """What all of them are told; one micro-batch of ours is one of theirs."""
    return {
        "output_dir": folder,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": len(work.micro_batches(0)),
        "max_steps": work.plan.steps,
        "learning_rate": RATE,
        "lr_scheduler_type": "constant",
        "weight_decay": 0.0,
        "adam_beta1": BETAS[0],
        "adam_beta2": BETAS[1],
        "optim": "adamw_torch_fused",
        "max_grad_norm": CLIP,
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "disable_tqdm": True,
        "remove_unused_columns": False,
        "dataloader_pin_memory": False,
        "gradient_checkpointing": work.cell.recompute,
        "gradient_checkpointing_kwargs": {"use_reentrant": False} if work.cell.recompute else None,
    }


def _groups(work: Prepared, ordered: bool) -> list[list[dict[str, Any]]]:
    """The documents of each forward pass.

    :param ordered: of like length, as ours; else as they come, which is Trainer's way.
    """
    groups = []
    for step in range(work.plan.steps):
        packs = work.micro_batches(step)
        if not ordered:
            flat = work.plan.step(step)
            packs = [flat[start : start + work.cell.micro] for start in range(0, len(flat), work.cell.micro)]
        groups += [work.documents(part) for part in packs]
    return groups


def _clock(work: Prepared, now: Callable[[], float] = time.process_time) -> Any:
    from transformers import TrainerCallback

    class Clock(TrainerCallback):
        began, loss = 0.0, float("nan")

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step == work.cell.warm:
                self.began = now()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **rest: Any) -> None:
            self.loss = float((logs or {}).get("loss", self.loss))

    return Clock()


def flattened(work: Prepared, folder: str, now: Callable[[], float] = time.process_time, **more: Any) -> dict[str, Any]:
    """With the collator that lays documents end to end. :param now: the clock. :param more: of Trainer's arguments."""
    from transformers import DataCollatorWithFlattening

    collate = DataCollatorWithFlattening()  # type: ignore[no-untyped-call]
    return _trainer(work, folder, collate, now=now, **more)


def _trainer(
    work: Prepared,
    folder: str,
    collate: Callable[[Any], Any],
    *,
    ordered: bool = True,
    now: Callable[[], float] = time.process_time,
    **more: Any,
) -> dict[str, Any]:
    import torch
    from transformers import Trainer, TrainingArguments

    groups = _groups(work, ordered)

    class Ordered(Trainer):
        def _get_train_sampler(self, *rest: Any) -> Any:
            return torch.utils.data.SequentialSampler(groups)

    clock = _clock(work, now)
    peer = Ordered(
        model=work.built.whole or work.built.model,
        args=TrainingArguments(**{**_arguments(work, folder), **more}),
        train_dataset=groups,
        data_collator=lambda items: collate(items[0]),
        callbacks=[clock],
    )
    peer.train()
    return {"seconds": now() - clock.began, "loss": clock.loss}


def _pad(work: Work) -> Callable[[Any], Any]:
    """To the longest document of a forward pass, as Trainer's collators do."""
    import torch

    def collate(documents: list[dict[str, Any]]) -> dict[str, Any]:
        width = -(-max(len(item["input_ids"]) for item in documents) // 8) * 8
        rows = [item["input_ids"] for item in documents]
        found = {
            "input_ids": torch.tensor([row + [0] * (width - len(row)) for row in rows]),
            "attention_mask": torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows]),
        }
        labels = [item["labels"] for item in documents]
        if not work.cell.labelled:
            labels = [row + [-100] * (width - len(row)) for row in labels]
        return {**found, "labels": torch.tensor(labels)}

    return collate


def _trl(work: Work, folder: str, packing: bool) -> dict[str, Any]:
    """Padded it gets the documents of our forward passes; packing it makes rows of its own, and they are counted."""
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer
    from trl.trainer.sft_trainer import DataCollatorForLanguageModeling

    groups = _groups(work, True)
    inner = DataCollatorForLanguageModeling(pad_token_id=0)
    counts: list[int] = []

    def collate(items: list[Any]) -> Any:
        rows = items if packing else items[0]
        counts.append(sum(len(row["input_ids"]) for row in rows))
        return inner(rows)

    class Ordered(SFTTrainer):  # type: ignore[misc]
        def get_train_dataloader(self) -> Any:
            if packing:
                return super().get_train_dataloader()
            return torch.utils.data.DataLoader(groups, batch_size=1, collate_fn=collate)  # type: ignore[arg-type]

    arguments = _arguments(work, folder)
    documents = work.documents([range(len(work.tokens))])
    if packing:
        micro = ROWS // len(work.micro_batches(0))
        arguments |= {"per_device_train_batch_size": micro}
    clock = _clock(work)
    peer = Ordered(
        model=work.built.whole or work.built.model,
        args=SFTConfig(**arguments, max_length=LENGTH, packing=packing, pad_token="<|pad|>", dataset_num_proc=None),
        train_dataset=Dataset.from_list(documents if packing else documents[:8]),
        processing_class=_tokenizer(work),
        callbacks=[clock],
    )
    if packing:  # its own collator, which it makes itself
        inner = peer.data_collator
        peer.data_collator = collate
    peer.train()
    ahead = work.cell.warm * len(work.micro_batches(0))
    total = work.plan.steps * len(work.micro_batches(0))
    return {"tokens": sum(counts[ahead:total]), "seconds": time.process_time() - clock.began, "loss": clock.loss}


def _tokenizer(work: Work) -> Any:
    """TRL wants one, though all rows are token ids already."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{index}": index for index in range(1, work.cell.vocabulary)} | {"<|pad|>": 0}
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=Tokenizer(models.WordLevel(words, unk_token="w1")),
        pad_token="<|pad|>",
        eos_token="w2",
    )


@contextmanager
def silence() -> Iterator[None]:
    """Trainers print each log."""
    before = sys.stdout
    with open(os.devnull, "w") as null:  # noqa: PTH123 - no file of ours
        sys.stdout = null
        try:
            yield
        finally:
            sys.stdout = before
