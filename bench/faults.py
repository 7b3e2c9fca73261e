"""Thirty seeded faults over two ranks: ours beside transformers' Trainer, each against its own undisturbed run.

    python -m bench.faults [--seed 5] [--kind SIGKILL ...] [--each 1] [--trainer 1] [--folder DIR]

The scenarios, and the driver that strikes, starts again and judges, are those of `make test-chaos`. Trainer runs under
torchrun as its manual says: `save_steps`, its newest checkpoint, `enable_jit_checkpoint` for SIGTERM, and `ddp_timeout`
for hangs (30 seconds here, 30 minutes by default; ours has 8, 120 by default). Both are started again up to 5 times.
`--each 2` takes two faults of each kind, `--trainer 2` gives Trainer no more than two. Ends with 1 if ours fails one.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Mapping
from itertools import zip_longest
from pathlib import Path
from typing import Any, Final

from tests.trainer.faults import inside
from tests.trainer.faults.driver import Driver, Verdict, digests
from tests.trainer.faults.ours import Ours
from tests.trainer.faults.scenarios import EVERY, KINDS, Damage, Scenario, scenarios
from tests.trainer.toy import sample_rows

TIMEOUT: Final = 30  # seconds of a collective
SHUFFLE: Final = 7


class Peer:
    """`torchrun` and `transformers.Trainer` on the same rows, padded and not packed: eight a step, in as many steps."""

    steps = Ours.steps
    bound = 180.0
    grace = 30.0
    impatient: Mapping[str, str] = {}
    skips = False
    tells_away = r"Retrying|refused"
    tells_full = ""  # it ends at once

    def make(self, case: Path, mlflow: str) -> Path:
        del mlflow
        folder = case / "out"
        folder.mkdir()
        return folder

    def command(self, case: Path) -> list[str]:
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return [*torchrun, "--module", "bench.faults", "--train", str(case)]

    def env(self, case: Path, mlflow: str) -> Mapping[str, str]:
        del case
        there = {"MLFLOW_TRACKING_URI": mlflow} if mlflow else {}
        return {"OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error", "GLOO_SOCKET_IFNAME": "lo", **there}

    def retried(self, code: int) -> bool:
        del code  # it has no codes of its own, and 0 also after a stop
        return True

    def done(self, case: Path) -> bool:
        return (case / "out" / "done").exists()

    def complete(self, case: Path, step: int) -> bool:
        return (case / "out" / f"checkpoint-{step}" / "trainer_state.json").exists()

    def newest(self, case: Path) -> Path:
        return max((case / "out").glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))

    def file(self, damage: Damage) -> str:
        return {
            "weights": "model.safetensors",
            "state": "optimizer.pt",
            "progress": "trainer_state.json",
            "seal": "trainer_state.json",
        }[damage.role]

    def model(self, case: Path) -> Path:
        return case / "out" / "final" / "model.safetensors"

    def weights(self, case: Path) -> dict[str, str]:
        return digests({"model": self.model(case)})


def fits(scenario: Scenario) -> bool:
    """Whether Trainer can meet the fault: its rows are in memory, so a full scratch disk is none."""
    return scenario.room != "scratch"


def some(found: list[Scenario], most: int) -> list[Scenario]:
    """At most so many of the scenarios, from all over the list."""
    count = min(most, len(found))
    return [found[index * len(found) // count] for index in range(count)]


def train(case: Path) -> None:
    """What each rank of torchrun does: the script of a careful user of Trainer."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments
    from transformers.trainer_utils import get_last_checkpoint

    inside.here()
    inside.reach("prepare")
    items, words = [], {"": 0}
    for number, row in enumerate(sample_rows(160)):
        text = " ".join(message["content"] for message in row["messages"]).split()
        ids = [words.setdefault(word, len(words)) for word in text]
        items.append({"ids": ids, "row": number})

    def collate(found: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        width = max(len(item["ids"]) for item in found)
        padded = [[*item["ids"], *[0] * (width - len(item["ids"]))] for item in found]
        labels = [[*item["ids"], *[-100] * (width - len(item["ids"]))] for item in found]
        rows = torch.tensor([item["row"] for item in found])
        return {"input_ids": torch.tensor(padded), "labels": torch.tensor(labels), "rows": rows}

    class Points(TrainerCallback):
        def on_step_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            inside.reach("step", state.global_step)

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            inside.seen(state.global_step, trainer.rows, True)

        def on_prediction_step(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            inside.reach("evaluation", state.global_step)

    class Traced(Trainer):
        rows: list[str]

        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **more: Any) -> Any:
            rows = [f"row {int(row)}" for row in inputs.pop("rows")]
            loss: Any = super().compute_loss(model, inputs, *arguments, **more)
            if model.training:
                self.rows = rows
                harm = inside.act("loss", self.state.global_step)
                if harm == "nan-loss":
                    loss = loss * float("nan")
                elif harm:
                    loss.register_hook(lambda gradient: gradient * float("nan"))
            return loss

        def _save_optimizer_and_scheduler(self, *arguments: Any) -> None:
            inside.reach("save", self.state.global_step)
            super()._save_optimizer_and_scheduler(*arguments)

        def _save_rng_state(self, *arguments: Any) -> None:
            super()._save_rng_state(*arguments)
            inside.reach("seal", self.state.global_step)

    torch.manual_seed(1)
    model = LlamaForCausalLM(
        LlamaConfig(
            hidden_size=32,
            intermediate_size=96,
            num_hidden_layers=2,
            num_attention_heads=2,
            vocab_size=320,
            max_position_embeddings=64,
        )
    )
    out = case / "out"
    arguments = TrainingArguments(
        output_dir=str(out),
        per_device_train_batch_size=4,
        max_steps=Ours.steps,
        learning_rate=5e-3,
        lr_scheduler_type="cosine",
        save_strategy="steps",
        save_steps=EVERY,
        save_total_limit=2,
        eval_strategy="steps",
        eval_steps=EVERY,
        logging_steps=1,
        enable_jit_checkpoint=True,
        ddp_timeout=TIMEOUT,
        ddp_backend="gloo",
        use_cpu=True,
        seed=SHUFFLE,
        report_to=["mlflow"] if os.environ.get("MLFLOW_TRACKING_URI") else [],
        remove_unused_columns=False,
        dataloader_pin_memory=False,
        disable_tqdm=True,
    )
    trainer = Traced(
        model=model,
        args=arguments,
        train_dataset=items,
        eval_dataset=items[:20],
        data_collator=collate,
        callbacks=[Points()],
    )
    newest: str | None = get_last_checkpoint(str(out))  # type: ignore[no-untyped-call]
    trainer.train(resume_from_checkpoint=newest)
    if trainer.state.global_step < trainer.state.max_steps:
        return  # stopped by a SIGTERM, after a checkpoint
    inside.reach("export")
    trainer.save_model(str(out / "final"))
    if inside.rank() == 0:
        (out / "done").touch()


def cell(verdict: Verdict | None) -> list[str]:
    if verdict is None:
        return ["not run"] + [""] * 3
    if not verdict.ended:
        attempt = verdict.codes.index(None) + 1 if None in verdict.codes else len(verdict.codes)
        ended = f"no, killed in attempt {attempt}" if None in verdict.codes else "no, ranks were left behind"
    else:
        ended = "yes" if verdict.finished else f"yes, without a model ({len(verdict.codes)} attempts)"
    if not verdict.finished or verdict.lost is None:
        return [ended, "-", "-", "-"]
    return [
        ended,
        f"{verdict.lost} / {verdict.repeated}",
        "yes" if verdict.equal else "no" if verdict.finite else "no: NaN",
        f"{max(0.0, verdict.seconds):.0f}",
    ]


def table(found: list[tuple[Scenario, Verdict, Verdict | None]]) -> str:
    columns = ("lost / repeated", "equal", "seconds lost")
    head = ["fault", "ours: ended", *columns, "Trainer: ended", *columns]
    lines = [head, ["---"] * len(head)]
    for scenario, ours, peer in found:
        lines.append([f"{scenario.kind}: {scenario.name}", *cell(ours), *cell(peer)])
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def summary(name: str, verdicts: list[Verdict]) -> str:
    finished = [verdict for verdict in verdicts if verdict.finished]
    whole = [verdict for verdict in finished if verdict.lost == 0 and verdict.repeated == 0]
    equal = [verdict for verdict in finished if verdict.equal]
    return (
        f"{name}: of {len(verdicts)} faults, {sum(verdict.ended for verdict in verdicts)} ended by themselves, "
        f"{len(finished)} with a model, {len(whole)} of these without a row lost or repeated, {len(equal)} equal to "
        f"the bit; {sum(max(0.0, verdict.seconds) for verdict in finished):.0f} seconds lost by these"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--kind", nargs="+", choices=KINDS, default=list(KINDS))
    parser.add_argument("--each", type=int, default=30, help="faults of each kind; all unless given")
    parser.add_argument(
        "--trainer", type=int, default=30, help="faults of each kind that Trainer gets; all unless given"
    )
    parser.add_argument("--folder", type=Path, help="where the runs lie; a temporary folder unless given")
    parser.add_argument("--train", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.train:
        train(options.train)
        return
    with tempfile.TemporaryDirectory(prefix="dropforge-bench-") as name:
        folder = options.folder or Path(name)
        ours, peer = Driver(Ours(), folder / "ours"), Driver(Peer(), folder / "trainer")
        every = [item for item in scenarios(Ours.steps, options.seed) if item.kind in options.kind]
        own = [item for kind in KINDS for item in some([one for one in every if one.kind == kind], options.each)]
        found: list[tuple[Scenario, Verdict, Verdict | None]] = []
        chosen = [some([one for one in own if one.kind == kind and fits(one)], options.trainer) for kind in KINDS]
        # One of each kind after the other, so that a bench that is ended early has seen something of all.
        beside_ours = [item for turn in zip_longest(*chosen) for item in turn if item is not None]
        try:
            for scenario in [*beside_ours, *(item for item in own if item not in beside_ours)]:
                began = time.monotonic()
                verdict, beside = ours.run(scenario), None
                if scenario in beside_ours:
                    beside = peer.run(scenario)
                found.append((scenario, verdict, beside))
                said = "; ".join(verdict.faults) or "as designed"
                print(f"{time.monotonic() - began:4.0f} s  {scenario.kind}: {scenario.name}: {said}", flush=True)
                if beside is not None:
                    print(f"        Trainer: {' | '.join(cell(beside))}, codes {beside.codes}", flush=True)
        finally:  # what was found before somebody ended it
            found.sort(key=lambda item: own.index(item[0]))
            print(f"\n{table(found)}\n\n{summary('ours', [verdict for _, verdict, _ in found])}")
            print(summary("Trainer", [verdict for _, _, verdict in found if verdict is not None]), flush=True)
        failed = [verdict for _, verdict, _ in found if verdict.faults]
    if failed:
        print(f"\nours failed {len(failed)} scenarios", file=sys.stderr)
        raise SystemExit(1)


if __name__ == "__main__":
    main()
