"""What each image starts can be imported by the packages that are in it, and by no other."""

from __future__ import annotations

import re
import subprocess
import sys
from importlib.metadata import packages_distributions

import pytest

from tests.images.dockerfile import REPOSITORY

pytestmark = pytest.mark.smoke

#: What runs in an image, by the name of its requirements; folders of ours that it has.
STARTED = {
    "airflow": ("dropforge_airflow.plugin", "dropforge.cli.app", "curation.pipeline"),
    "curation": ("curation.spark_job", "curation.pipeline"),
    "mlflow": ("dropforge.stack.tracking_server",),
    "objects": ("dropforge.stack.objects",),
    "trainer": ("trainer.__main__", "trainer.rank", "trainer.evaluate", "kubeflow_training.jobs.local"),
}
OWN = {"dropforge", "curation", "trainer", "kubeflow_training", "dropforge_airflow"}
IMPORTING = """
import importlib, sys

class Only:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in forbidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

forbidden = set(sys.argv[1].split(","))
sys.meta_path.insert(0, Only())
for name in sys.argv[2:]:
    importlib.import_module(name)
"""


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.mark.parametrize("image", STARTED)
def test_an_image_has_what_its_programs_import(image: str) -> None:
    listed = (REPOSITORY / "requirements" / f"image-{image}.txt").read_text()
    there = {normal(name) for name in re.findall(r"^([\w.-]+)(?:\[.*\])?==", listed, re.MULTILINE)}
    elsewhere = {
        top
        for top, names in packages_distributions().items()
        if top not in OWN and not there.intersection(map(normal, names))
    }
    done = subprocess.run(
        [sys.executable, "-c", IMPORTING, ",".join(sorted(elsewhere)), *STARTED[image]],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
