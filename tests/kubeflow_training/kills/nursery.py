"""Airflow's modules imported once; each of its processes is a fork, so that a killed one is back within a second.

One request per line on standard input: {"arguments", "log"} becomes `airflow ARGUMENTS`, in a session of its own; the
answer is its process number. When the input ends, everything that was started is killed.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import runpy
import sys

import psutil

MODULES = (
    "airflow.__main__",
    "airflow.cli.commands.api_server_command",
    "airflow.cli.commands.dag_processor_command",
    "airflow.cli.commands.scheduler_command",
    "airflow.cli.commands.triggerer_command",
    "airflow.api_fastapi.core_api.app",
    "airflow.api_fastapi.execution_api.app",
    "airflow.executors.local_executor",
    "airflow.providers.cncf.kubernetes.hooks.kubernetes",
    "airflow.sdk.execution_time.task_runner",
    "airflow.sdk.execution_time.xcom",
    "kubeflow_training.jobs.kubernetes.logs",
    "kubeflow_training.jobs.kubernetes.watching.sharing",
    "kubeflow_training.jobs.local",
    "kubeflow_training.jobs.waiting.polling",
    "kubeflow_training.operators",
    "kubeflow_training.triggers",
)


def main():
    for module in MODULES:
        importlib.import_module(module)
    make_apps()
    gc.collect()
    gc.freeze()
    answers = os.fdopen(os.dup(1), "w")
    print("ready", file=answers, flush=True)
    started = []
    while line := sys.stdin.readline():
        request = json.loads(line)
        if (pid := os.fork()) == 0:
            become(request["arguments"], request["log"])
        started.append(pid)
        print(pid, file=answers, flush=True)
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error, ProcessLookupError):
            if os.getsid(process.pid) in started:
                process.kill()


def make_apps():
    """The API's routes, which each API server and triggerer would take seconds to make at its first request."""
    from airflow.api_fastapi.app import cached_app
    from airflow.api_fastapi.execution_api.app import InProcessExecutionAPI
    from airflow.jobs import triggerer_job_runner

    for route in cached_app(apps="all").routes:
        if getattr(route, "path", None) == "/execution":
            route.app._cadwyn_initialize()
    inside = InProcessExecutionAPI()
    inside.app._cadwyn_initialize()
    triggerer_job_runner.in_process_api_server = lambda: inside


def become(arguments, log):
    os.setsid()
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((null, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    sys.stdin = open(0, closefd=False)  # noqa: SIM115 - what was read ahead is not ours
    sys.argv = ["airflow", *arguments]
    code = 1
    try:
        runpy.run_module("airflow", run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
    except BaseException:
        import traceback

        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    main()
