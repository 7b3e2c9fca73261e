"""The driver of a curation on a cluster: `spark-submit .../curation/spark_job/__main__.py URI`.

The one argument names a job file in S3; addresses and credentials come from the environment, never from arguments. A
second driver of the same job goes on from the finished splits in the same folder.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from pathlib import Path
from urllib.parse import urlsplit

from curation.pace import Lines
from curation.pipeline import curate
from dropforge import ledger
from dropforge.curation_job import CurationJob
from dropforge.errors import DataError, DropforgeError, RecipeError
from dropforge.recipes.load import build_recipe
from dropforge.store import open_store

log = logging.getLogger(__name__)


def run(uri: str) -> str:
    """Curate what the job file at `uri` names, and write the outcome.

    The work folder stays for another try, unless that would end the same way.

    :returns: the dataset's digest.
    :raises DropforgeError: if the job, the drop or its recipe cannot be used, or Spark stops.
    """
    from curation.engines.spark import SparkEngine, submitted  # PySpark is an extra
    from curation.spark_job import api_server

    parts = urlsplit(uri)
    if parts.scheme != "s3" or not parts.netloc or not parts.path.strip("/"):
        raise DropforgeError(f"curation job {uri}", "it is no address of an object", "Give s3://BUCKET/KEY")
    store = open_store(f"s3://{parts.netloc}")
    job = CurationJob.from_json(store.get(parts.path.strip("/")))
    drop = ledger.read(store, job.family, job.drop_id)
    workdir = Path(job.workdir)
    try:
        recipe = build_recipe(job.recipe)
        settings = {"spark.kubernetes.driver.master": api_server.address(os.environ)}
        with submitted(workdir / "engine", settings) as session:
            made = curate(
                store,
                drop,
                recipe,
                workdir=workdir,
                engine=SparkEngine(session),
                progress=Lines(log.info),
                say=log.info,
            )
    except (RecipeError, DataError):
        shutil.rmtree(workdir, ignore_errors=True)
        raise
    store.put(job.result, json.dumps({"digest": made.digest}).encode())
    shutil.rmtree(workdir, ignore_errors=True)
    return made.digest
