"""Is there what Spark needs: Java 17 or later, and PySpark 4."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Final

from dropforge.errors import DropforgeError

JAVA_FROM: Final = 17  # what Spark 4 runs on
_MEND: Final = "Install {what}, or take `curation.engine: embedded`"


def find_spark() -> str:
    """The releases found, such as `PySpark 4.3.0, Java 17.0.15`; neither is started.

    :raises DropforgeError: if one is missing or too old.
    """
    try:
        pyspark = importlib.metadata.version("pyspark")
    except importlib.metadata.PackageNotFoundError:
        raise _missing("PySpark is not installed", "`dropforge[spark]`") from None
    if not pyspark.startswith("4."):
        raise _missing(f"PySpark {pyspark} is there, and only 4 is supported", "`dropforge[spark]`")
    return f"PySpark {pyspark}, Java {_java()}"


def _java() -> str:
    wanted, home = f"Java {JAVA_FROM} or later", os.environ.get("JAVA_HOME")
    java = str(Path(home, "bin", "java")) if home else shutil.which("java")
    if java is None:
        raise _missing("there is no `java` on the path, and JAVA_HOME is not set", wanted)
    try:
        told = subprocess.run([java, "-version"], capture_output=True, text=True, timeout=60, check=True).stderr
    except (OSError, subprocess.SubprocessError) as error:
        raise _missing(f"{java} does not start: {error}", wanted) from error
    found = re.search(r'version "(?:1\.)?(\d+)([^"]*)"', told)
    if found is None or int(found[1]) < JAVA_FROM:
        release = found[0] if found else "of an unknown version"
        raise _missing(f"{java} is Java {release}", wanted)
    return found[1] + found[2]


def _missing(cause: str, what: str) -> DropforgeError:
    return DropforgeError("Spark", cause, _MEND.format(what=what))
