"""A comparison page of 50 runs: seconds to read them from MLflow and to write it, beside scripts as people write them.

    python -m bench.compare [--runs 50] [--rounds 5] [--keep FOLDER]

A real MLflow server with SQLite is filled with runs of 60 params, 20 metrics of 200 points, a verdict and 64 answers
each. Told are medians (ranges) of rounds in fresh processes that take turns:

- `page`: finding the runs, reading them and their files, comparing, and writing the page; the bar is 2 s;
- `command`: the whole of `dropforge compare --html` with Python's start and imports;
- `search_runs + get_metric_history`: mlflow's client, one question for each run and metric, no page and no files; with
  all 20 metrics, and with those alone that the page shows.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dropforge.stack import mlflow_accounts
from dropforge.stack.secrets import read_secrets

BAR = 2.0  # seconds
FAMILY = "bench"
PARAMS, POINTS, ANSWERS = 60, 200, 64
CURVES = (
    *(f"eval/{name}" for name in ("loss", "perplexity", "accuracy", "bits_per_byte")),
    *(f"gen/{name}" for name in ("exact-match", "rouge-l", "tokens")),
    *(f"train/{name}" for name in ("loss", "tokens_per_second", "learning_rate", "grad_norm", "tokens")),
    *(f"system/{name}" for name in ("cpu", "memory", "disk", "network", "gpu_0", "gpu_1", "gpu_2", "gpu_3")),
)
WAYS = ("page", "command", "all 20 metrics", "the page's metrics")


@contextmanager
def server(folder: Path) -> Iterator[str]:
    """Address of MLflow's server, as the stack starts it; this process and its children are logged in."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, "-m", "dropforge.stack.tracking_server", "--state", str(folder), "--port", str(port)]
    command += ["--artifacts", str(folder / "artifacts")]
    env = {**os.environ, "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{folder}/mlflow.db"}
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log, cwd=folder, env=env)
    try:
        while True:
            assert process.poll() is None, (folder / "log").read_text()
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1).close()
                break
            except OSError:
                time.sleep(0.1)
        os.environ.update(mlflow_accounts.login(mlflow_accounts.PERSON, read_secrets(folder)))
        yield f"http://127.0.0.1:{port}"
    finally:
        process.kill()
        process.wait()


def names(runs: int) -> list[str]:
    return [f"{FAMILY}-{number}" for number in range(runs)]


def fill(uri: str, runs: int) -> None:
    from mlflow.entities import Metric, Param, RunTag

    from dropforge import tracking
    from dropforge.promotion import Policy, decide

    mlflow, rng = tracking.client(uri), random.Random(7)
    experiment = mlflow.create_experiment(FAMILY)
    verdict = decide({"eval/loss": 2.0}, {"eval/loss": 2.5}, {"eval/loss": 9.0}, Policy())
    columns = ["row", "prompt", "reference", "answer", "ended", "exact-match", "rouge-l"]
    for number, name in enumerate(names(runs)):
        tags = {tracking.TAG_RUN: name, tracking.TAG_FAMILY: FAMILY, tracking.TAG_VERDICT: f"promote: {verdict.reason}"}
        run = mlflow.create_run(experiment, run_name=name, tags=tags).info.run_id
        # A sweep: most of the recipe is the same.
        params = [Param(f"train.key_{key}", str(key if key % 10 else number)) for key in range(PARAMS)]
        mlflow.log_batch(run, params=params, tags=[RunTag("dropforge.git", "0" * 40)])
        for start in range(0, len(CURVES), 5):
            points = [
                Metric(curve, rng.random() + 8 / (1 + step), 1_700_000_000_000 + step, step)
                for curve in CURVES[start : start + 5]
                for step in range(POINTS)
            ]
            mlflow.log_batch(run, metrics=points)
        # The comparison with the champion, as the DAG logs it.
        ends = {"candidate/loss": 2.0, "candidate/gen/rouge-l": 0.25, "champion/loss": 2.5, "champion/gen/rouge-l": 0.2}
        mlflow.log_batch(run, metrics=[Metric(key, value, 1_700_000_001_000, POINTS) for key, value in ends.items()])
        rows = [
            ["0" * 32, f"What is {row} and {row}?", str(2 * row), f"{number} " * 20, True, 0.0, 0.25]
            for row in range(ANSWERS)
        ]
        mlflow.log_text(run, json.dumps({"columns": columns, "data": rows}), "answers/candidate.json")
        mlflow.log_text(run, verdict.as_markdown(), "verdict.md")
        mlflow.set_terminated(run)


def child(way: str, uri: str, runs: int, page: Path) -> None:
    """Do it once; print the seconds."""
    if way == "page":
        from dropforge.cli import compare as command
        from dropforge.cli.comparing.page import render
        from dropforge.client.comparing import fetch
        from dropforge.comparison import compare

        began = time.perf_counter()
        found = fetch.collect(uri, names(runs), verdicts=True, answers=True)
        command.write(page, render(compare(found.runs), found.answers, uri, time.time()))
    else:
        import mlflow

        from dropforge import tracking

        client = tracking.client(uri)
        wanted = CURVES if way == WAYS[2] else ("train/loss", "eval/loss", "eval/accuracy", "train/tokens_per_second")
        mlflow.set_tracking_uri(uri)
        began = time.perf_counter()
        table = mlflow.search_runs(experiment_names=[FAMILY])
        for run in table["run_id"]:
            for name in wanted:
                client.get_metric_history(run, name)
    print(time.perf_counter() - began)


def once(way: str, uri: str, runs: int, folder: Path) -> float:
    page = folder / "page.html"
    if way == "command":
        command = [sys.executable, "-c", "from dropforge.cli.app import main; main()", "compare", *names(runs)]
        env = {**os.environ, "MLFLOW_TRACKING_URI": uri, "DROPFORGE_BUCKET": "b"}
        command += ["--html", str(page), "--state", str(folder / "no-stack")]
        began = time.perf_counter()
        subprocess.run(command, env=env, check=True, stdout=subprocess.DEVNULL)
        return time.perf_counter() - began
    command = [sys.executable, "-m", "bench.compare", "--child", way, uri, str(page), "--runs", str(runs)]
    done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
    return float(done.stdout.split()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--runs", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--keep", type=Path, help="where the page goes")
    parser.add_argument("--child", nargs=3, metavar=("WAY", "URI", "PAGE"))
    asked = parser.parse_args()
    if asked.child:
        child(asked.child[0], asked.child[1], asked.runs, Path(asked.child[2]))
        return
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(temporary)
        with server(folder) as uri:
            fill(uri, asked.runs)
            for number in range(asked.rounds + 1):
                for way in WAYS:
                    took = once(way, uri, asked.runs, folder)
                    if number:  # the first round warms the server
                        seconds[way].append(took)
        size = (folder / "page.html").stat().st_size
        if asked.keep:
            shutil.copy(folder / "page.html", asked.keep)
    print(f"{asked.runs} runs, a page of {size / 1e6:.1f} MB")
    for way, times in seconds.items():
        label = way if way in WAYS[:2] else f"search_runs + get_metric_history, {way}"
        print(f"{label:58} {statistics.median(times):6.2f} s ({min(times):.2f} to {max(times):.2f})")
    print(f"page: bar {BAR:g} s")
    sys.exit(statistics.median(seconds["page"]) >= BAR)


if __name__ == "__main__":
    main()
