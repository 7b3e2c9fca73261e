"""What the checks of several kinds share. The PyTorchJob's own are in `jobs.checks`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from kubeflow_training.jobs.checks import Problem
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.manifest import LONGEST_HOST_NAME
from kubeflow_training.jobs.namechecks import metadata_problems
from kubeflow_training.jobs.podchecks import secret_problems
from kubeflow_training.jobs.shapes import mapping

__all__ = ["Problem", "name_problems", "require_none", "secret_problems"]


def name_problems(metadata: Mapping[str, Any], longest: str) -> Iterator[Problem]:
    """What is wrong with name and namespace.

    :param longest: the longest ending that a pod's host name adds to the name.
    """
    yield from metadata_problems(metadata, LONGEST_HOST_NAME - len(longest))


def require_none(kind: str, manifest: Mapping[str, Any], problems: Iterable[Problem]) -> None:
    """:raises ManifestError: naming every problem and its mend."""
    if found := list(problems):
        name = mapping(mapping(manifest).get("metadata")).get("name")
        cause = "; ".join(f"`{problem.where}`: {problem.cause}" for problem in found)
        raise ManifestError(f"{kind} {name}", cause, " ".join(f"{problem.mend}." for problem in found))
