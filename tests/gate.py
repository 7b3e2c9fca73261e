"""Run a tier of tests, and each of its few failing tests once more, alone, in a fresh process.

The Makefile puts `run` before pytest's command where `GATE` names a file, as `.ci/run` does. Each tier adds a row to
that file, and `table` prints all rows at the end. A test that fails and then passes alone is printed as FLAKY with the
last lines of its first failure, and the tier is green. More than five failing tests, or one that fails again, is red.

    python -m tests.gate run TIER -- PYTEST ARGUMENT...
    python -m tests.gate left-out TIER REASON
    python -m tests.gate table
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

RERUNS = 5  # failing tests that get a second run; more of them are no accident
LAST_LINES = 15


@dataclass(frozen=True)
class Results:
    """What the tests of one pytest run came to, by node id. `failed` has the text of the first failure."""

    passed: frozenset[str]
    skipped: frozenset[str]
    failed: dict[str, str]
    collected: bool = True


@dataclass(frozen=True)
class Tier:
    """A row of the table."""

    name: str
    passed: int = 0
    flaky: int = 0
    failed: int = 0
    skipped: int = 0
    minutes: float = 0.0
    left_out: str = ""


def read_results(lines: Iterable[str]) -> Results:
    """Read a log of pytest-reportlog. A test that a worker's crash ended counts as failed."""
    passed: set[str] = set()
    skipped: set[str] = set()
    failed: dict[str, str] = {}
    collected = True
    for line in lines:
        report: dict[str, Any] = json.loads(line)
        if report.get("$report_type") == "CollectReport" and report["outcome"] == "failed":
            collected = False
        if report.get("$report_type") != "TestReport":
            continue
        test, outcome = report["nodeid"], report["outcome"]
        if outcome == "failed":
            failed.setdefault(test, failure_text(report))
        elif outcome == "skipped":
            skipped.add(test)
        elif report["when"] == "call":
            passed.add(test)
    return Results(frozenset(passed - failed.keys()), frozenset(skipped), failed, collected)


def failure_text(report: dict[str, Any]) -> str:
    """Return the last lines of a report's traceback."""
    found = report.get("longrepr")
    if isinstance(found, dict):
        crash = found.get("reprcrash") or {}
        entries = (found.get("reprtraceback") or {}).get("reprentries") or []
        lines = [line for entry in entries for line in entry["data"].get("lines", [])]
        found = "\n".join([*lines, f"{crash.get('path')}:{crash.get('lineno')}"])
    return "\n".join(str(found or "").splitlines()[-LAST_LINES:])


def run_pytest(command: list[str]) -> tuple[int, Results]:
    """Run pytest with its output passed through; return its exit code and the results."""
    with tempfile.TemporaryDirectory(prefix="dropforge-gate-") as folder:
        log = Path(folder) / "reports.jsonl"
        code = subprocess.run([*command, f"--report-log={log}"], check=False).returncode
        lines = log.read_text().splitlines() if log.exists() else []
    return code, read_results(lines)


def run_tier(name: str, command: list[str]) -> tuple[int, Tier]:
    """Run a tier; return 0 where it is green, and its row.

    :param command: pytest's command; the failing tests run again with its first word and the same environment.
    """
    begun = time.monotonic()
    code, results = run_pytest(command)
    still = dict(results.failed)
    if code == 1 and results.collected and 0 < len(still) <= RERUNS:
        for test in results.failed:
            print(f"\nonce more, alone: {test}", flush=True)
            again, alone = run_pytest([command[0], "-n0", test])
            if again == 0 and test in alone.passed:
                del still[test]
    elif len(still) > RERUNS:
        print(f"\n{len(still)} tests of {name} failed, more than the {RERUNS} that would run once more", flush=True)
    flaky = results.failed.keys() - still.keys()
    for test in sorted(flaky):
        print(f"\nFLAKY {test}\n{results.failed[test]}", flush=True)
    green = code == 0 or (code == 1 and not still and bool(flaky))
    if not green and not still:
        print(f"\n{name} ended with pytest's exit code {code} and no failing test", flush=True)
    row = Tier(
        name,
        passed=len(results.passed),
        flaky=len(flaky),
        failed=len(still) or int(not green),
        skipped=len(results.skipped),
        minutes=(time.monotonic() - begun) / 60,
    )
    return int(not green), row


def table(rows: list[Tier]) -> str:
    """Return all tiers as a table, and as the last line `N passed, N failed`, which CI reads."""
    lines = [f"{'tier':<20}{'tests':>7}{'passed':>8}{'flaky':>7}{'failed':>8}{'skipped':>9}{'minutes':>9}"]
    for row in rows:
        if row.left_out:
            lines.append(f"{row.name:<20}LEFT OUT: {row.left_out}")
            continue
        tests = row.passed + row.flaky + row.failed + row.skipped
        lines.append(
            f"{row.name:<20}{tests:>7}{row.passed:>8}{row.flaky:>7}{row.failed:>8}{row.skipped:>9}{row.minutes:>9.1f}"
        )
    passed = sum(row.passed + row.flaky for row in rows)
    return "\n".join([*lines, f"{passed} passed, {sum(row.failed for row in rows)} failed"])


def add(row: Tier) -> None:
    with Path(os.environ["GATE"]).open("a") as file:
        file.write(json.dumps(asdict(row)) + "\n")


def main(words: list[str]) -> int:
    match words:
        case ["run", name, "--", *command] if command:
            code, row = run_tier(name, command)
            add(row)
            return code
        case ["left-out", name, reason]:
            print(f"LEFT OUT: {name}, because {reason}", flush=True)
            add(Tier(name, left_out=reason))
            return 0
        case ["table"]:
            rows = [Tier(**json.loads(line)) for line in Path(os.environ["GATE"]).read_text().splitlines()]
            print(table(rows), flush=True)
            return int(any(row.failed for row in rows))
    print(__doc__, file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
