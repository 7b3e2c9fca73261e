"""`python -m kubeflow_training.jobs.local [HOME]`: the supervisor of the local cluster, in the foreground."""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path

from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.local.layout import HOME_VARIABLE
from kubeflow_training.jobs.local.supervisor import Supervisor


def main() -> int:
    """0 after SIGTERM, 1 if it cannot start."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stdout)
    home = sys.argv[1] if len(sys.argv) > 1 else os.environ.get(HOME_VARIABLE)
    if not home:
        print(f"Name the cluster's folder, as an argument or in {HOME_VARIABLE}.", file=sys.stderr)
        return 1
    try:
        Supervisor(Path(home).absolute()).run()
    except (JobError, ValueError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
