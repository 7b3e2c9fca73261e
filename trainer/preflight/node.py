"""Whether the GPUs of this node are there and whole, as the driver tells it: a launcher's first look."""

from __future__ import annotations

from collections.abc import Sequence

from trainer.node.nvml import Health, Nvml
from trainer.node.system import Gpus
from trainer.preflight.verdict import PreflightError


def check_node(asked: int, gpus: Gpus | None, visible: str | None = None) -> str:
    """What was looked at, as a sentence.

    :param asked: GPUs of this pod. :param gpus: the driver's, if there is a driver.
    :param visible: CUDA_VISIBLE_DEVICES, which chooses by indices.
    :raises PreflightError: if a GPU is missing or broken: another node may do.
    """
    if not asked:
        return "no GPUs are asked for, so none are looked at"
    if not isinstance(gpus, Nvml):
        return "the GPUs' driver does not answer, so they were not checked"
    found = chosen(gpus.health(), visible)
    problems = faults(found, asked)
    if problems:
        raise PreflightError("node", f"preflight: {'; '.join(problems)}. Look at the node, or reset its GPUs")
    direct = all(peer is not False for gpu in found for peer in gpu.peers)
    return (
        f"{len(found)} x {found[0].name}, no memory errors, {found[0].nvlinks} NVLinks each, "
        f"{'all' if direct else 'not all'} reach each other directly"
    )


def chosen(gpus: Sequence[Health], visible: str | None) -> list[Health]:
    """Those that CUDA_VISIBLE_DEVICES names; all, if it names none by index."""
    indices = [part.strip() for part in (visible or "").split(",") if part.strip()]
    if not indices or not all(part.isdecimal() for part in indices):
        return list(gpus)
    return [gpus[int(part)] for part in indices if int(part) < len(gpus)]


def faults(gpus: Sequence[Health], asked: int) -> list[str]:
    """What is wrong with them, each in a few words; a pure function."""
    found = []
    if len(gpus) < asked:
        found.append(f"{asked} GPUs are asked for, and the driver finds {len(gpus)}")
    most = max((gpu.nvlinks for gpu in gpus), default=0)
    for index, gpu in enumerate(gpus):
        name = f"GPU {index} ({gpu.name})"
        if gpu.ecc:
            found.append(f"{name} has had {gpu.ecc} uncorrectable memory errors since its driver was loaded")
        if gpu.failed:
            found.append(f"{name} could not replace broken rows of its memory")
        elif gpu.pending:
            found.append(f"{name} waits for a reset to replace broken rows of its memory")
        if gpu.nvlinks < most:
            found.append(f"{name} has {gpu.nvlinks} NVLinks up, and others have {most}")
    return found
