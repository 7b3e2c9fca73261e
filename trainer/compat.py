"""The only module that asks for versions: what differs between the supported releases of torch."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from dropforge.errors import DropforgeError, RecipeError

# Lowest release that works, and the first that was never tried.
SUPPORTED = {"torch": ((2, 11), (2, 16)), "transformers": ((5, 17), (6, 0)), "peft": ((0, 19), (1, 0))}
QUANTISING = ((0, 50), (1, 0))  # of bitsandbytes, which only some recipes need


def check_versions() -> None:
    """:raises DropforgeError: naming the package that is too old or missing, or the setting that breaks one."""
    if sys.flags.optimize > 1:
        cause = "with 2 Python leaves docstrings out, which transformers reads when it is loaded"
        raise DropforgeError("environment variable PYTHONOPTIMIZE", cause, "Unset it where the ranks run")
    for name, (lowest, beyond) in SUPPORTED.items():
        try:
            found = version(name)
        except PackageNotFoundError:
            raise DropforgeError(
                f"package {name}",
                "it is not installed",
                "Install the `trainer` extra: pip install 'dropforge[trainer]'",
            ) from None
        if not lowest <= _numbers(found) < beyond:
            span = _span(lowest, beyond)
            raise DropforgeError(f"package {name}", f"{found} is installed, this trainer needs {span}", "Install one")


def check_quantising(method: str, optimizer: str) -> None:
    """See whether bitsandbytes is here, if what a recipe names needs it.

    :raises RecipeError: if it is missing, or of a release that was never tried.
    """
    asked = {"method": method == "qlora", "optimizer": optimizer == "adamw-8bit"}
    key = next((name for name, needs in asked.items() if needs), None)
    if key is None:
        return
    thing = f"recipe key `train.{key}`"
    value = {"method": method, "optimizer": optimizer}[key]
    mend = f"Install the extra `dropforge[quantised]` there, or leave `{value}` out"
    try:
        found = version("bitsandbytes")
    except PackageNotFoundError:
        cause = f"`{value}` needs the package bitsandbytes, which is not installed where the ranks run"
        raise RecipeError(thing, cause, mend) from None
    if not QUANTISING[0] <= _numbers(found) < QUANTISING[1]:
        cause = f"`{value}` needs the package bitsandbytes from {_span(*QUANTISING)}, and {found} is installed"
        raise RecipeError(thing, cause, mend)


def _numbers(release: str) -> tuple[int, ...]:
    return tuple(int(part) for part in re.findall(r"\d+", release)[:2])


def _span(lowest: tuple[int, ...], beyond: tuple[int, ...]) -> str:
    return f"{'.'.join(map(str, lowest))} up to, not including, {'.'.join(map(str, beyond))}"


def quiet_libraries() -> None:
    """Have transformers say what is wrong and nothing else: no bars in a log."""
    from transformers.utils import logging

    logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def versions() -> dict[str, str]:
    """Installed releases, for the report."""
    names = ("torch", "transformers", "peft", "tokenizers", "safetensors", "numpy", "pyarrow")
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "absent"
    with suppress(PackageNotFoundError):  # few recipes need it
        found["bitsandbytes"] = version("bitsandbytes")
    return found


@cache
def fused_cross_entropy() -> Callable[..., Any] | None:
    """torch's own head and loss in chunks of `rows`: sum over rows of (N, H) against (V, H). None before 2.13."""
    import torch
    from torch.nn import functional

    options = getattr(torch.nn, "LinearCrossEntropyOptions", None)
    operation = getattr(functional, "linear_cross_entropy", None)
    if options is None or operation is None:
        return None

    def fused(hidden: Any, weight: Any, target: Any, bias: Any, rows: int) -> Any:
        return operation(
            hidden, weight, target, linear_bias=bias, reduction="sum", options=options(batch_chunk_size=rows)
        )

    return fused


def time_exchange(replica: Any) -> None:
    """Have `DistributedDataParallel` time each exchange of gradients; by default it does so once in 100 steps."""
    with suppress(AttributeError, RuntimeError):  # no public name: it may go
        replica._set_ddp_runtime_logging_sample_rate(1)


def exchange_seconds(replica: Any) -> float | None:
    """Seconds for which a backward pass had nothing left to do but wait for gradients: the last but one that
    exchanged any. None where this torch does not tell."""
    try:
        told = replica._get_ddp_logging_data()
        alone = int(told["backward_comm_time"]) - int(told["backward_compute_comm_overlap_time"])
    except (AttributeError, KeyError, RuntimeError, ValueError):
        return None
    return max(0, alone) / 1e9


def compiler_counts() -> tuple[int, int]:
    """Graphs that this process has compiled, and how many of them it found in the cache; forward and backward passes of
    the cache count apart."""
    if "torch._dynamo.utils" not in sys.modules:
        return 0, 0
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["inductor"]["fxgraph_cache_hit"]


def compiler_error() -> type[Exception]:
    """What is raised if a graph cannot be made or compiled."""
    from torch._dynamo.exc import TorchDynamoException

    return TorchDynamoException


def bound_group(group: Any, timeout: timedelta) -> None:
    """Set how long a collective of a group may take: one that was made of another has the library's own limit."""
    from torch import distributed
    from torch.distributed import distributed_c10d

    setter = getattr(distributed, "set_timeout", None) or distributed_c10d._set_pg_timeout  # before torch 2.15
    setter(timeout, group)


def flight_records() -> dict[str, bytes]:
    """The last collectives of this process by backend, as JSON; empty without a process group."""
    if "torch.distributed" not in sys.modules:
        return {}
    from torch._C import _distributed_c10d

    found = {}
    for backend, name in (("gloo", "_dump_fr_trace_json"), ("nccl", "_dump_nccl_trace_json")):
        with suppress(Exception):  # no such backend in this build
            dump = getattr(_distributed_c10d, name)
            try:
                data = dump(backend=backend) if backend == "gloo" else dump()
            except TypeError:  # one recorder for all backends, before torch 2.15
                data = dump()
            if data:
                found[backend] = data if isinstance(data, bytes) else str(data).encode()
    return found


def flight_recorder(folder: str) -> dict[str, str]:
    """Environment that has torch remember the last collectives, and NCCL write them where one takes too long."""
    return {
        "TORCH_FR_BUFFER_SIZE": "2000",
        "TORCH_FR_DUMP_ON_TIMEOUT": "1",
        "TORCH_FR_DUMP_TEMP_FILE": f"{folder}/flight-timeout-",
    }
