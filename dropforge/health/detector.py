"""Values of the node-problem-detector's chart: kernel lines of GPUs and NVSwitches become conditions of their node.

`python -m dropforge.health.detector >helm-values/node-problem-detector.yaml`

The detector joins the last lines of the kernel log with line feeds, and a pattern must match up to their end: each ends
with `.*`, and begins where a line does, so that no program's name inside a line counts. Go and Python read them alike.
"""

from __future__ import annotations

import json
import textwrap
from typing import Any, Final

from dropforge.health.xids import RECOVERIES, RECOVERY, Condition, Xid, of

_XID: Final = r"(?m)^NVRM: Xid \((?:PCI:)?[0-9a-fA-F:.]+\): "
_SXID: Final = r"(?m)^nvidia-nvswitch[0-9]+: SXid \(PCI:[0-9a-fA-F:.]+\): [0-9]+, Fatal,.*"
_FILE: Final = "gpu-monitor.json"
_WELL: Final = {
    Condition.NEEDS_RESET: ("GPUsNeedNoReset", "no GPU of the node has to be reset"),
    Condition.NEEDS_REPLACEMENT: ("GPUsNeedNoReplacement", "no GPU of the node has to be exchanged"),
    Condition.NVLINK_BROKEN: ("NVLinksAreWell", "no NVLink of the node is broken"),
}
_HEAD: Final = """\
# Conditions of nodes whose GPUs or NVLinks are broken: docs/how-to/node-health.md.
# For the chart oci://ghcr.io/deliveryhero/helm-charts/node-problem-detector.
# Written by `python -m dropforge.health.detector` from dropforge/health/xids.py: change it there.
settings:
  log_monitors:
    - /config/kernel-monitor.json
    - /custom-config/{file}
  custom_monitor_definitions:
    {file}: |
{monitor}
resources:
  requests: {{cpu: 20m, memory: 40Mi}}
  limits: {{memory: 100Mi}}
"""


def rules() -> list[dict[str, str]]:
    """What the detector looks for, and what it makes of it: a condition that stays, or an event of the node."""
    found = []
    for condition in Condition:
        xids = of(condition)
        plain, severe = [xid for xid in xids if not xid.severe], [xid for xid in xids if xid.severe]
        found.append(_permanent(condition, "Xid", f"{_XID}{_codes(plain)},.*"))
        for word in sorted({xid.severe for xid in severe}):
            these = [xid for xid in severe if xid.severe == word]
            found.append(_permanent(condition, f"{word}Xid", rf"{_XID}{_codes(these)},.*\b{word}\b.*"))
    for condition, words in RECOVERIES.items():
        told = rf"{_XID}{RECOVERY},.* to 0x[0-9a-f]+ \([^)]*(?:{words})[^)]*\).*"
        found.append(_permanent(condition, "RecoveryAction", told))
    found.append(_permanent(Condition.NVLINK_BROKEN, "FatalSXid", _SXID))
    found.append({"type": "temporary", "reason": "XidWithoutCondition", "pattern": f"{_XID}{_codes(of(None))},.*"})
    return found


def monitor() -> dict[str, Any]:
    """The definition of the monitor, as the detector reads it."""
    conditions = [{"type": str(key), "reason": reason, "message": text} for key, (reason, text) in _WELL.items()]
    return {
        "plugin": "kmsg",
        "logPath": "/dev/kmsg",
        "lookback": "5m",
        "bufferSize": 10,
        "source": "gpu-monitor",
        "metricsReporting": True,
        "conditions": conditions,
        "rules": rules(),
    }


def values() -> str:
    """The values file."""
    text = textwrap.indent(json.dumps(monitor(), indent=2), " " * 6)
    return _HEAD.format(file=_FILE, monitor=text)


def _permanent(condition: Condition, reason: str, pattern: str) -> dict[str, str]:
    return {"type": "permanent", "condition": str(condition), "reason": f"{condition}By{reason}", "pattern": pattern}


def _codes(xids: tuple[Xid, ...] | list[Xid]) -> str:
    return f"(?:{'|'.join(str(xid.code) for xid in xids)})"


if __name__ == "__main__":
    print(values(), end="")
