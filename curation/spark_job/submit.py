"""The pod of a Job becomes a driver: `python -m curation.spark_job.submit ARGUMENTS` is `spark-submit` with what only
the pod knows: its name and address, and the executors' pod template as a file."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from curation.spark_job import api_server
from dropforge.curation_job import TEMPLATE
from dropforge.errors import DropforgeError


def command(arguments: Sequence[str], env: Mapping[str, str], template: Path) -> list[str]:
    """The command line. :raises DropforgeError: if this is no pod of `dropforge.curation_job.driver_job`."""
    missing = next((name for name in ("POD_NAME", "POD_IP", "SPARK_HOME") if not env.get(name)), None)
    if missing is not None:
        raise DropforgeError(f"environment variable {missing}", "it is not set", "Set it in the image or the pod")
    own = {
        "spark.driver.host": env["POD_IP"],
        "spark.driver.bindAddress": env["POD_IP"],
        "spark.kubernetes.driver.pod.name": env["POD_NAME"],  # executors end with it
        "spark.kubernetes.executor.podTemplateFile": str(template),
        "spark.kubernetes.executor.podNamePrefix": env["POD_NAME"][:47].rstrip("-"),
    }
    confs = [part for name, value in own.items() for part in ("--conf", f"{name}={value}")]
    return [
        str(Path(env["SPARK_HOME"], "bin", "spark-submit")),
        "--master",
        f"k8s://{api_server.address(env)}",
        *confs,
        *arguments,
    ]


def main() -> None:
    try:
        spec = json.loads(os.environ.get(TEMPLATE, ""))
    except ValueError:
        sys.exit(f"environment variable {TEMPLATE} holds no pod template")
    handle, path = tempfile.mkstemp(suffix=".json")  # JSON is YAML
    with os.fdopen(handle, "w") as file:
        json.dump({"apiVersion": "v1", "kind": "Pod", **spec}, file)
    try:
        line = command(sys.argv[1:], os.environ, Path(path))
    except DropforgeError as error:
        sys.exit(str(error))
    os.execv(line[0], line)  # noqa: S606 - the pod's own program, with signals


if __name__ == "__main__":
    main()
