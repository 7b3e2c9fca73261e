"""What the node-problem-detector makes of kernel lines that drivers have really written."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from dropforge.health.detector import monitor, rules, values
from dropforge.health.xids import XIDS, Action, Condition, of

ROOT = Path(__file__).parents[3]
FILE = ROOT / "helm-values/node-problem-detector.yaml"
PAGE = ROOT / "docs/reference/xid-codes.md"
RESET, REPLACE, NVLINK = Condition.NEEDS_RESET, Condition.NEEDS_REPLACEMENT, Condition.NVLINK_BROKEN

# From public logs: issues of open-gpu-kernel-modules, gpud and vllm, NVIDIA's NVSentinel, AWS's HyperPod workshop.
LINES: list[tuple[str, Condition | str | None]] = [
    ("NVRM: Xid (PCI:0000:91:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus.", REPLACE),
    ("NVRM: Xid (PCI:0000:01:00): 79, GPU has fallen off the bus.", REPLACE),
    ("NVRM: GPU 0000:91:00.0: GPU has fallen off the bus.", None),
    (
        "NVRM: Xid (PCI:0000:cb:00): 109, pid=1797828, name=pt_main_thread, Ch 00000008, errorString CTX SWITCH"
        " TIMEOUT, Info 0x58005",
        RESET,
    ),
    (
        "NVRM: Xid (PCI:0000:cb:00): 13, pid='<unknown>', name=<unknown>, Graphics SM Warp Exception on (GPC 7, TPC 7,"
        " SM 0): Illegal Instruction Parameter",
        "event",
    ),
    ("NVRM: Xid (PCI:0000:9b:00): 94, pid=1234, name=python3, Contained ECC error", "event"),
    (
        "NVRM: Xid (PCI:0000:00:06): 31, pid=79749, name=exe, Ch 0000000a, intr 00000000. MMU Fault: ENGINE GRAPHICS"
        " GPC2 GPCCLIENT_T1_7 faulted @ 0x2b57_b3000000. Fault is of type FAULT_PDE ACCESS_TYPE_VIRT_WRITE",
        "event",
    ),
    (
        "NVRM: Xid (PCI:0000:10:1c): 63, pid=1896, Row Remapper: New row marked for remapping, reset gpu to activate.",
        "event",
    ),
    (
        "NVRM: Xid (PCI:0000:b9:00): 74, pid=<unknown>, name=<unknown>, NVLink: fatal error detected on link"
        " 6(0x10000, 0x0, 0x0, 0x0, 0x0, 0x0, 0x0)",
        NVLINK,
    ),
    (
        "NVRM: Xid (PCI:0008:01:00): 149, NETIR_LINK_EVT Fatal XC0 i0 Link 08 (0x004505c6 0x00000000 0x00000000"
        " 0x00000000 0x00000000 0x00000000)",
        NVLINK,
    ),
    (
        "NVRM: Xid (PCI:0018:01:00): 145, pid=876767, name=ray::WorkerDict, RLW_RXPIPE Nonfatal XC0 i0 Link 13"
        " (0x0409a0c2 0x00000008 0x00000001 0x00000000 0x00100000 0x00000004)",
        None,
    ),
    (
        "NVRM: Xid (PCI:0008:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)",
        RESET,
    ),
    (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (Node Reboot Required)",
        REPLACE,
    ),
    ("NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x0 (None) to 0x2 (OS Reboot)", REPLACE),
    ("NVRM: Xid (PCI:0000:0d:00): 154, GPU recovery action changed from 0x0 (None) to 0x1 (PF FLR)", RESET),
    (
        "NVRM: Xid (PCI:0000:01:00): 154, GPU recovery action changed from 0x1 (GPU Reset Required) to 0x0 (None)",
        None,
    ),
    ("nvidia-nvswitch0: SXid (PCI:0000:59:00.0): 23001, Fatal, Link 12 Always Fatal", NVLINK),
    ("nvidia-nvswitch0: SXid (PCI:0000:c3:00.0): 20009, Non-fatal, Link 28 RX Short Error Rate", None),
    ("NVRM: Xid (0000:01:00): 3, C 00000005 SC 00000007 M 00001ffc Data ffffffff", None),
    ("NVRM: Xid (PCI:0000:0d:00): 51, BAD_TSG encountered on runlist: 0 with error code: 4", None),
    # A program's name is its own to choose.
    ("traps: NVRM: Xid (PCI:0000:01:00): 79, x[7] general protection fault ip:0 sp:0 error:0", None),
]
BEFORE = ["NVRM: GPU at PCI:0000:91:00: GPU-b6c3b2be-c55b-d076-fa0e-d464e4c7e08b", "eth0: link up"]


def made(*log: str) -> set[str]:
    """What the detector makes of the last line, as its log buffer matches: lines joined, a match up to the end."""
    text = "\n".join(log)
    found = [rule for rule in rules() if re.search(rule["pattern"] + r"\Z", text)]
    return {rule.get("condition", "event") for rule in found}


@pytest.mark.parametrize(("line", "becomes"), LINES)
def test_a_kernel_line_becomes_its_condition_and_no_other(line, becomes):
    expected = set() if becomes is None else {str(becomes)}
    assert made(line) == expected
    assert made(*BEFORE, line) == expected
    assert made(line, "eth0: link up") == set(), "a line is told once, when it is the last"


def test_every_code_of_the_table_is_told_in_one_way():
    assert len({xid.code for xid in XIDS}) == len(XIDS)
    for xid in XIDS:
        line = f"NVRM: Xid (PCI:0000:01:00): {xid.code}, pid=7, name=python, X {xid.severe or 'any'} Y"
        assert made(line) == {str(xid.condition or "event")}, xid
        assert (xid.action is Action.RETRY) == (xid.condition is None)


def test_the_event_says_no_more_than_that_there_is_no_condition():
    (event,) = [rule for rule in rules() if rule["type"] == "temporary"]
    line = "NVRM: Xid (PCI:0000:01:00): 92, pid=7, name=python, High single-bit ECC error rate"  # no program's fault
    assert re.search(event["pattern"], line)
    assert event["reason"] == "XidWithoutCondition"
    assert f"`{event['reason']}`" in PAGE.read_text()


def test_the_table_calls_an_error_what_amazons_agent_does_but_for_what_it_says_itself():
    # WellKnownXidCodes of eks-node-monitoring-agent 1.7.
    theirs = {46, 48, 54, 62, 63, 64, 74, 79, 95, 109, 110, 119, 120, 136, 140, 142, 143, 151, 155, 156, 158}
    ours = {xid.code for condition in Condition for xid in of(condition)}
    assert ours == theirs - {63, 142} | set(range(144, 151))


def test_the_values_are_those_that_the_generator_writes():
    assert FILE.read_text() == values(), "write it anew: python -m dropforge.health.detector >helm-values/..."
    settings = yaml.safe_load(values())["settings"]
    (name, text), *others = settings["custom_monitor_definitions"].items()
    assert not others
    assert json.loads(text) == monitor()
    assert f"/custom-config/{name}" in settings["log_monitors"]


def test_each_rule_names_a_condition_that_the_monitor_has_and_a_reason_of_its_own():
    types = {item["type"] for item in monitor()["conditions"]}
    assert types == {str(item) for item in Condition}
    assert {rule["condition"] for rule in rules() if rule["type"] == "permanent"} == types
    assert len({rule["reason"] for rule in rules()}) == len(rules())


def test_the_page_has_the_table():
    head = ["| Xid | meaning | NVIDIA's first step | a training does | condition |", "|---|---|---|---|---|"]
    for xid in XIDS:
        code = f"{xid.code}, with `{xid.severe}`" if xid.severe else str(xid.code)
        condition = f"`{xid.condition}`" if xid.condition else ""
        head.append(f"| {code} | {xid.meaning} | {xid.resolution} | {xid.action} | {condition} |")
    assert "\n".join(head) in PAGE.read_text()
