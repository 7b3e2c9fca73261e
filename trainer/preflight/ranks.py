"""A rank's part of the preflight: a process of its own measures, so that nothing that hangs or breaks there is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from dropforge.errors import RecipeError
from dropforge.placement.fabrics import PREFLIGHT, Preflight
from dropforge.signals import signal_name
from trainer.preflight.transport import DEBUG
from trainer.preflight.verdict import Figures, PreflightError, of_child

OWN: Final = 0.8  # share of the time after which a rank that has not come to the others is itself the cause
_START: Final = 300.0  # seconds that starting Python and importing torch may take; they say nothing of the network
_MARGIN: Final = 5.0  # seconds that the measuring process has to say what it waited for
_LOOK: Final = 0.05


def preflight_from_env(env: Mapping[str, str]) -> Preflight | None:
    """What the job asks of its ranks; None if nothing, or if there is one rank.

    :raises RecipeError: if the variable cannot be read.
    """
    text = env.get(PREFLIGHT)
    if not text or int(env.get("WORLD_SIZE", 1)) == 1:
        return None
    try:
        return Preflight.from_json(text)
    except ValueError as error:
        raise RecipeError(f"variable {PREFLIGHT}", str(error), "Leave it to the job to set it") from error


def hold(
    held: Preflight,
    gpus: int,
    folder: Path,
    env: Mapping[str, str],
    check: Callable[[], Any],
    meanwhile: Callable[[], Any] = lambda: None,
) -> Figures:
    """Hold the preflight together with all ranks; what they measured.

    :param folder: for what the measuring process leaves. :param check: called now and then; raises at a stop signal.
    :param meanwhile: what this process has to do anyway, while the other one starts.
    :raises PreflightError: if the run cannot begin here.
    """
    rank, ranks = int(env["RANK"]), int(env.get("LOCAL_WORLD_SIZE", 1))
    result, log = folder / f"preflight-{rank}.json", folder / f"preflight-nccl-{rank}.log"
    order = {**json.loads(held.to_json()), "gpus": gpus, "result": str(result), "log": str(log)}
    debug = {**DEBUG, "NCCL_DEBUG_FILE": str(log)} if gpus else {}
    child = subprocess.Popen(
        [sys.executable, "-m", "trainer.preflight.measure", json.dumps(order), str(os.getpid())],
        env={**env, **debug},
        stdin=subprocess.DEVNULL,
    )
    began = time.monotonic()
    ready: float | None = None
    try:
        meanwhile()
        while child.poll() is None:
            check()
            said, now = _read(result), time.monotonic()
            stage = str(said.get("stage") or "starting Python")
            if ready is None and said.get("ready"):
                ready = now
            waited = now - (ready or began)
            if waited > (_START if ready is None else OWN * held.seconds) and not said.get("came"):
                raise PreflightError(
                    "node",
                    f"preflight, {held.fabric}: after {waited:.0f} s rank {rank} was still {stage}, and the others "
                    f"wait. Look at node {rank // ranks}, or raise `compute.preflight.seconds`",
                )
            if ready is not None and waited > held.seconds + _MARGIN:
                raise PreflightError(
                    "peers",
                    f"preflight, {held.fabric}: after {waited:.0f} s rank {rank} was still {stage}. Look at the "
                    "network between the nodes (security groups, policies), or raise `compute.preflight.seconds`",
                )
            time.sleep(_LOOK)
    finally:
        if child.poll() is None:
            child.kill()
        child.wait()
    left = _read(result)
    if "figures" not in left and "failure" not in left:
        code = child.returncode
        how = f"by {signal_name(-code)}" if code < 0 else f"with code {code}"
        stage = left.get("stage") or "starting Python"
        raise PreflightError(
            "node", f"preflight, {held.fabric}: the process of rank {rank} was ended {how} while {stage}"
        )
    return of_child(left, held)


def _read(path: Path) -> dict[str, Any]:
    try:
        return dict(json.loads(path.read_text()))
    except (OSError, ValueError):
        return {}
