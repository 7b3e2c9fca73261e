"""NVIDIA's Xid errors: what each means, and what a training does about it. Data, of the standard library alone.

Sources. `CATALOG` has codes, meanings and NVIDIA's own first step (`Xid.resolution`, its word). `MEMORY` says that a
GPU which cannot remap a broken row is to be exchanged (64). `EKS` has the codes that Amazon's agent calls an error of
the node: the same as here but for 63, which NVIDIA says to ignore, 142, an encoder that no training uses, and 144 to
150, whose lines have "Fatal" or "Nonfatal" and are told apart by that.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Final

CATALOG: Final = "https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html"
MEMORY: Final = "https://docs.nvidia.com/deploy/a100-gpu-mem-error-mgmt/index.html"
EKS: Final = "https://github.com/aws/eks-node-monitoring-agent/blob/main/monitors/nvidia/dcgm/classify.go"


class Action(StrEnum):
    """What a training does after an error."""

    RETRY = "retry"
    """Again, on the same nodes as well: the fault is the program's, or has ended with it."""
    AVOID = "avoid"
    """Again, on other nodes, until somebody has reset the GPU or its links."""
    REPLACE = "replace"
    """Again, on other nodes, until the machine has been restarted or exchanged."""


class Condition(StrEnum):
    """A condition of a Kubernetes node that stays true until it is mended."""

    NEEDS_RESET = "GPUNeedsReset"
    NEEDS_REPLACEMENT = "GPUNeedsReplacement"
    NVLINK_BROKEN = "NVLinkBroken"

    @property
    def action(self) -> Action:
        return Action.REPLACE if self is Condition.NEEDS_REPLACEMENT else Action.AVOID


@dataclass(frozen=True)
class Xid:
    """
    :param resolution: NVIDIA's first step, in the catalogue's word.
    :param condition: what the node gets; None where nothing is wrong with it.
    :param severe: a word that the line must have for that, where the code alone says too little.
    """

    code: int
    meaning: str
    resolution: str
    condition: Condition | None = None
    severe: str = ""

    @property
    def action(self) -> Action:
        return self.condition.action if self.condition else Action.RETRY


_RESET, _REPLACE, _NVLINK = Condition.NEEDS_RESET, Condition.NEEDS_REPLACEMENT, Condition.NVLINK_BROKEN

XIDS: Final[tuple[Xid, ...]] = (
    Xid(8, "GPU stopped processing", "RESTART_APP"),
    Xid(13, "exception in a kernel of the program", "RESTART_APP"),
    Xid(31, "the program reached for memory that is not its own", "RESTART_APP"),
    Xid(32, "corrupted commands from the program", "RESTART_APP"),
    Xid(43, "the program made the GPU stop", "IGNORE"),
    Xid(45, "cleaning up after another error, or after a killed program", "WORKFLOW_XID_45"),
    Xid(46, "GPU stopped processing, and its channel too", "RESET_GPU", _RESET),
    Xid(48, "double-bit ECC error", "WORKFLOW_XID_48", _RESET),
    Xid(54, "auxiliary power is not connected", "CHECK_MECHANICALS", _REPLACE),
    Xid(62, "internal micro-controller halted", "RESET_GPU", _RESET),
    Xid(63, "a row of memory will be remapped at the next reset", "IGNORE"),
    Xid(64, "a row of memory could not be remapped", "RESET_GPU", _REPLACE),
    Xid(69, "class error in a kernel of the program", "RESTART_APP"),
    Xid(74, "NVLink error", "WORKFLOW_NVLINK_ERR", _NVLINK),
    Xid(79, "GPU has fallen off the bus", "RESTART_BM", _REPLACE),
    Xid(92, "many single-bit ECC errors", "IGNORE"),
    Xid(94, "memory error that only the program which met it has felt", "RESTART_APP"),
    Xid(95, "memory error that may have reached other programs", "RESET_GPU", _RESET),
    Xid(109, "timeout of a context switch", "RESET_GPU", _RESET),
    Xid(110, "security fault", "RESET_GPU", _RESET),
    Xid(119, "the GPU's system processor does not answer", "RESET_GPU", _RESET),
    Xid(120, "error of the GPU's system processor", "RESET_GPU", _RESET),
    Xid(121, "error of the link between chips, corrected", "IGNORE"),
    Xid(136, "training of an NVLink failed", "RESET_GPU", _NVLINK),
    Xid(137, "a peer's access over NVLink was refused", "IGNORE"),
    Xid(140, "ECC error that was not recovered from", "RESET_GPU", _RESET),
    Xid(143, "the GPU could not be initialised", "RESET_GPU", _RESET),
    Xid(144, "NVLink 5: SAW", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(145, "NVLink 5: RLW", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(146, "NVLink 5: TLW", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(147, "NVLink 5: TREX", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(148, "NVLink 5: NVLPW_CTRL", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(149, "NVLink 5: NETIR", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(150, "NVLink 5: MSE", "WORKFLOW_NVLINK5_ERR", _NVLINK, "Fatal"),
    Xid(151, "rotation of keys failed", "RESTART_VM", _REPLACE),
    Xid(155, "NVLink error that software reports", "RESET_GPU", _NVLINK),
    Xid(156, "a part of the GPU is retired at the next reset", "RESET_GPU", _RESET),
    Xid(158, "the GPU does not answer in time", "RESET_GPU", _RESET),
)
"""Without 154, with which newer drivers say themselves what the GPU needs (`RECOVERIES`). A code that is not here sets
no condition."""

RECOVERY: Final = 154
RECOVERIES: Final[dict[Condition, str]] = {
    _RESET: "Reset|Drain|FLR",
    _REPLACE: "[Rr]eboot",
}
"""Words of the recovery action that an Xid 154 announces: "GPU Reset Required", "Drain and Reset", "OS Reboot", ..."""


def of(condition: Condition | None) -> tuple[Xid, ...]:
    """The codes that set this condition; with None those that set none."""
    return tuple(xid for xid in XIDS if xid.condition is condition)
