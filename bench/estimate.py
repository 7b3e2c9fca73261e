"""The estimate of a rank's memory against the peak of a whole training: start, steps, checkpoint, evaluation, export.

    python -m bench.estimate [--cells "full, fp32" ...]

Each cell is `python -m trainer run` of a recipe on the CPU, in fresh processes, over the text that `make demo` trains
on; padded rows are cut from long texts, so that they are full. What is seen is the largest resident memory that the
kernel tells of any rank. Beside the whole stands what is left of both without the runtime: the part that a model makes.

Ends with 1 if an estimate of the whole is further than 10 % from what was seen.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatch
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, Literal, get_args

import yaml

BAR = 0.1
LENGTH, STEPS = 512, 3
Rows = Literal["chats", "long", "labelled", "pairs"]
_SIDE: Final = 180  # words of a prompt and of its completion
_SIZES = {"hidden_size": 512, "layers": 6, "heads": 8, "vocab_size": 4096, "context": LENGTH}


@dataclass(frozen=True)
class Cell:
    """A training to look at.

    :param sizes: of `base.scratch`. :param base: the cell whose model it starts from. :param rows: kind of its
        rows: `long` ones are cut from long texts.
    """

    ranks: int = 1
    train: Mapping[str, Any] = field(default_factory=dict)
    parallel: str = "auto"
    sizes: Mapping[str, Any] = field(default_factory=dict)
    base: str | None = None
    rows: Rows = "chats"

    @property
    def task(self) -> str:
        return {"labelled": "classification", "pairs": "sequence-to-sequence"}.get(self.rows, "causal-lm")


_DECODER: Final = "full, fp32"
_SMALLER: Final = "full, fp32, small"
_SMALL: Final = {"hidden_size": 256}  # arithmetic in 16 bits is slow where the CPU has none
_PAIRS: Final = "full, fp32, encoder-decoder"
_BF16: Final = {"precision": "bf16"}
_T5: Final = {
    "model_type": "t5",
    "d_model": 384,
    "d_kv": 64,
    "d_ff": 1536,
    "num_layers": 4,
    "num_heads": 6,
    "vocab_size": 4096,
    "dropout_rate": 0.0,
}
_MIXTRAL: Final = {
    "model_type": "mixtral",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 4096,
    "max_position_embeddings": LENGTH,
    "tie_word_embeddings": True,
}

# The formulas and constants of the estimate were chosen by these.
CELLS: dict[str, Cell] = {
    "full, fp32": Cell(),
    "full, fp32, padded": Cell(train={"packing": "off"}, rows="long"),
    "full, fp32, gpt2": Cell(sizes={"architecture": "gpt2"}),
    "full, fp32, vocabulary of 32,000": Cell(sizes={"vocab_size": 32_000, "layers": 2}),
    "full, fp32, mixture": Cell(sizes=_MIXTRAL),
    "full, fp32, small": Cell(sizes=_SMALL),
    "full, bf16": Cell(train=_BF16, sizes=_SMALL),
    "full, fp16": Cell(train={"precision": "fp16"}, sizes=_SMALL),
    "full, fp32, from a folder": Cell(base=_DECODER),
    "full, fp32, half of it frozen": Cell(base=_DECODER, train={"freeze": {"blocks": 3, "embeddings": True}}),
    "full, fp32, adamw-8bit": Cell(train={"optimizer": "adamw-8bit"}),
    "full, fp32, adamw-bf16": Cell(train={"optimizer": "adamw-bf16"}),
    "full, fp32, sgd": Cell(train={"optimizer": "sgd"}),
    "full, fp32, sgd without momentum": Cell(train={"optimizer": "sgd", "momentum": 0.0}),
    "full, fp32, selective checkpointing": Cell(train={"activation_checkpointing": "selective"}),
    "full, fp32, full checkpointing": Cell(train={"activation_checkpointing": "full"}),
    "full, fp32, classification": Cell(sizes={"architecture": "distilbert"}, rows="labelled"),
    "full, fp32, encoder-decoder": Cell(sizes=_T5, rows="pairs"),
    "lora, fp32": Cell(base=_DECODER, train={"method": "lora"}),
    "lora, bf16": Cell(base=_SMALLER, train={"method": "lora", **_BF16}),
    "lora, fp32, classification": Cell(base=_DECODER, train={"method": "lora"}, rows="labelled"),
    "dora, fp32": Cell(base=_DECODER, train={"method": "dora"}),
    "qlora, fp32": Cell(base=_DECODER, train={"method": "qlora"}),
    "qlora, bf16": Cell(base=_SMALLER, train={"method": "qlora", **_BF16}),
    "prefix, fp32": Cell(base=_DECODER, train={"method": "prefix", "sequence_length": 448}, rows="long"),
    "full, fp32, ddp": Cell(2, parallel="ddp"),
    "full, fp32, fsdp": Cell(2, parallel="fsdp"),
    "full, fp32, fsdp-no-reshard": Cell(2, parallel="fsdp-no-reshard"),
    "full, fp32, hybrid": Cell(4, parallel="hybrid"),
    "full, bf16, fsdp": Cell(2, _BF16, "fsdp", sizes=_SMALL),
    "lora, fp32, fsdp": Cell(2, {"method": "lora"}, "fsdp", base=_DECODER),
    "qlora, fp32, fsdp": Cell(2, {"method": "qlora"}, "fsdp", base=_DECODER),
}

# By these nothing was chosen: other sizes, and methods with another arithmetic.
HELD_OUT: dict[str, Cell] = {
    "held out: full, fp32, wide": Cell(sizes={"hidden_size": 896, "layers": 4}, train={"micro_batch": 2}),
    "held out: full, bf16, deep": Cell(sizes={"hidden_size": 200, "layers": 12, "heads": 5}, train=_BF16),
    "held out: full, bf16, gpt2": Cell(sizes={"architecture": "gpt2", "hidden_size": 240, "heads": 6}, train=_BF16),
    "held out: full, fp32, vocabulary of 16,000": Cell(sizes={"vocab_size": 16_000, "hidden_size": 640}),
    "held out: full, bf16, classification": Cell(
        sizes={"architecture": "distilbert", "hidden_size": 320}, train=_BF16, rows="labelled"
    ),
    "held out: lora, fp32, encoder-decoder": Cell(base=_PAIRS, train={"method": "lora"}, rows="pairs"),
    "held out: lora of rank 64, fp32": Cell(base=_DECODER, train={"method": "lora", "lora": {"r": 64}}),
    "held out: dora, bf16": Cell(base=_SMALLER, train={"method": "dora", **_BF16}),
    "held out: prefix, bf16": Cell(
        base=_SMALLER,
        train={"method": "prefix", "prefix": {"tokens": 64}, "sequence_length": 448, **_BF16},
        rows="long",
    ),
    "held out: qlora, bf16, two rows": Cell(base=_SMALLER, train={"method": "qlora", "micro_batch": 2, **_BF16}),
    "held out: full, bf16, full checkpointing, sgd": Cell(
        train={"optimizer": "sgd", "activation_checkpointing": "full", **_BF16}, sizes=_SMALL
    ),
    "held out: full, bf16, fsdp-no-reshard, adamw-bf16": Cell(
        2, {"optimizer": "adamw-bf16", **_BF16}, "fsdp-no-reshard", sizes={"hidden_size": 320}
    ),
}
ALL: Final = {**CELLS, **HELD_OUT}


def recipe_of(cell: Cell, base: Path) -> dict[str, Any]:
    """The recipe of a cell. :param base: folder of a model of the usual sizes."""
    sizes = {"config": dict(cell.sizes)} if "model_type" in cell.sizes else {**_SIZES, **cell.sizes}
    found: dict[str, Any] = {
        "task": cell.task,
        "base": {"scratch": sizes} if cell.base is None else {"model": str(base)},
        "train": {
            "sequence_length": LENGTH,
            "rows_per_step": 4 * cell.ranks,
            "micro_batch": 4,
            "max_steps": STEPS,
            "checkpoint_every": 2,
            **cell.train,
        },
        "evaluate": {"max_rows": 20},
        "compute": {"processes_per_node": cell.ranks, "parallel": cell.parallel, "memory_gb": 6 * cell.ranks},
    }
    if cell.parallel == "hybrid":
        found["compute"]["shard_group"] = cell.ranks // 2
    return found


def peak(recipe: Mapping[str, Any], ranks: int, dataset: str, folder: Path) -> int:
    """Largest resident memory of any rank, in bytes."""
    folder.mkdir(parents=True)
    (folder / "recipe.yaml").write_text(yaml.safe_dump(dict(recipe)))
    command = [sys.executable, "-m", "trainer", "run", "--recipe", str(folder / "recipe.yaml"), "--dataset", dataset]
    command += ["--to", str(folder / "run"), "--ranks", str(ranks)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "DROPFORGE_HANG_SECONDS": "3000"}
    most = 0
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=env, stdout=log, stderr=log)
        while process.poll() is None:  # the peak may be begun anew, so it is looked at often
            most = max(most, max((_resident(child) for child in _below(process.pid)), default=0))
            time.sleep(0.02)
    if process.returncode:
        said = (folder / "log").read_text()[-3000:]
        raise SystemExit(f"{' '.join(command)} ended with {process.returncode}:\n{said}")
    return most


def datasets(folder: Path) -> dict[Rows, str]:
    """Dataset versions of each kind of rows; the folders of their manifests."""
    from dropforge.samples import write_sample

    generator = random.Random(7)
    words = ["".join(generator.choices("abcdefghijklmnop", k=generator.randint(2, 9))) for _ in range(3000)]

    def text(count: int) -> str:
        return " ".join(generator.choices(words, k=count))

    made: dict[Rows, list[dict[str, str]]] = {
        "long": [{"text": text(1800)} for _ in range(120)],
        "labelled": [{"text": text(1800), "label": generator.choice(("no", "yes"))} for _ in range(120)],
        "pairs": [{"prompt": text(_SIDE), "completion": text(_SIDE)} for _ in range(120)],
    }
    found: dict[Rows, str] = {}
    for kind in get_args(Rows):
        drop = folder / kind
        drop.mkdir()
        if kind == "chats":
            write_sample(drop)
        else:
            (drop / "rows.jsonl").write_text("".join(f"{json.dumps(row)}\n" for row in made[kind]))
        out = folder / f"bucket-{kind}"
        command = [sys.executable, "-m", "curation", str(drop), "--out", str(out), "--recipe", "tiny"]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)} ended with {done.returncode}:\n{done.stderr}")
        found[kind] = str(next(out.glob("datasets/*/*/manifest.json")).parent)
    return found


def _below(pid: int) -> list[int]:
    """Ranks among the processes below one."""
    found: list[int] = []
    for path in Path(f"/proc/{pid}/task").glob("*/children"):
        for child in _read(path).split():
            found += [int(child), *_below(int(child))]
    return [child for child in found if "trainer.rank" in _read(Path(f"/proc/{child}/cmdline"))]


def _resident(pid: int) -> int:
    lines = _read(Path(f"/proc/{pid}/status")).splitlines()
    return next((int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM:")), 0)


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has just ended
        return ""


def _folder(cell: str) -> str:
    return re.sub(r"\W+", "-", cell)


def main() -> int:
    """Run the cells; 1 if an estimate is too far off."""
    from dropforge.estimate import RUNTIME_BYTES, estimate, size_text
    from dropforge.recipes.load import build_recipe

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", nargs="+", default=["*"], help=f"of {', '.join(ALL)}; patterns with * too")
    parser.add_argument("--parts", action="store_true", help="tell what the estimate is made of")
    options = parser.parse_args()
    names = [name for name in ALL if any(fnmatch(name, pattern) for pattern in options.cells)]
    if not names:
        parser.error(f"--cells names none of {', '.join(ALL)}")
    missed = []
    print(f"{'training':50} {'seen':>9} {'estimate':>9} {'off':>7}   without the runtime")
    with TemporaryDirectory(prefix="dropforge-estimate-") as name:
        folder = Path(name)
        rows = datasets(folder)
        for base in sorted({found for name in names if (found := ALL[name].base) is not None}):
            peak(recipe_of(ALL[base], folder), 1, rows[ALL[base].rows], folder / _folder(f"base {base}"))
        for cell in names:
            chosen = ALL[cell]
            recipe = recipe_of(chosen, folder / _folder(f"base {chosen.base}") / "run" / "model")
            seen = peak(recipe, chosen.ranks, rows[chosen.rows], folder / _folder(cell))
            figures = estimate(build_recipe(recipe))
            said = figures.rank_bytes
            assert said is not None
            assert figures.parts is not None
            off = said / seen - 1
            part = (said - RUNTIME_BYTES) / max(1, seen - RUNTIME_BYTES) - 1
            print(f"{cell:50} {seen / 1e6:6.0f} MB {said / 1e6:6.0f} MB {off:+7.1%}   {part:+7.1%}", flush=True)
            if options.parts:
                print(
                    "    " + ", ".join(f"{name} {size_text(size)}" for name, size in figures.parts.items()), flush=True
                )
            if abs(off) > BAR:
                missed.append(cell)
    if missed:
        print(f"further off than {BAR:.0%}: {'; '.join(missed)}")
    return 1 if missed else 0


if __name__ == "__main__":
    raise SystemExit(main())
