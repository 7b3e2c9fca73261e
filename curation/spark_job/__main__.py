"""What `spark-submit` starts. A folder of its own, as Python puts the script's folder before the standard library."""

from __future__ import annotations

import json
import logging
import sys
from contextlib import suppress
from pathlib import Path
from typing import Final

from curation.spark_job import run
from dropforge.errors import DataError, DropforgeError, RecipeError

log = logging.getLogger("curation")

ANOTHER_TRY: Final = 1
BAD_RECIPE: Final = 10
BAD_DATA: Final = 11
TOLD: Final = Path("/dev/termination-log")


def exit_code(error: DropforgeError) -> int:
    """What the task reads: a hub, a disk or a Spark that failed may do better the next time."""
    if isinstance(error, DataError):
        return BAD_DATA
    return BAD_RECIPE if isinstance(error, RecipeError) else ANOTHER_TRY


def main() -> int:
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if len(sys.argv) != 2:
        log.error("give one argument, the address of the job file")
        return 2
    try:
        log.info("dataset %s", run(sys.argv[1]))
    except DropforgeError as error:
        log.error("%s", error)
        code = exit_code(error)
        with suppress(OSError):
            TOLD.write_text(json.dumps({"exit_code": code, "message": str(error)[:1500], "rank": 0}))
        return code
    return 0


if __name__ == "__main__":
    sys.exit(main())
