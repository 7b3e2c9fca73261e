"""`python -m kubeflow_training.jobs.render FILE`: the checked manifest of a spec or a manifest, for kubectl."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from kubeflow_training.jobs.errors import JobError
from kubeflow_training.jobs.kinds import kind_of
from kubeflow_training.jobs.manifest.text import manifest_from_text, manifest_to_text
from kubeflow_training.jobs.source import manifest_of


def render(text: str, what: str = "the manifest") -> str:
    """YAML of the job that the text describes: a manifest, or the fields of a `TrainingJobSpec`.

    :param text: YAML or JSON.
    :param what: what to call it in an error.
    :raises ManifestError: if nothing could come of it.
    """
    found = manifest_from_text(text, what)
    manifest = manifest_of(found) if "kind" in found or "apiVersion" in found else manifest_of(spec=found)
    kind_of(manifest).require_valid(manifest)
    return manifest_to_text(manifest)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser("python -m kubeflow_training.jobs.render", description=__doc__)
    parser.add_argument(
        "file", help="YAML or JSON: a manifest, or the fields of a TrainingJobSpec; - for standard input"
    )
    file = parser.parse_args(arguments).file
    try:
        text = sys.stdin.read() if file == "-" else Path(file).read_text()
        sys.stdout.write(render(text, file))
    except (JobError, OSError, UnicodeDecodeError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
