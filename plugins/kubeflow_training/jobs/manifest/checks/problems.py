"""What a check finds: a problem, with its place and its mend; and the refusal that names them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.shapes import mapping


@dataclass(frozen=True)
class Problem:
    """
    :param where: path into the manifest, like `spec.pytorchReplicaSpecs.Master`.
    :param cause: what is wrong there.
    :param mend: what to do about it.
    """

    where: str
    cause: str
    mend: str


def require_none(kind: str, manifest: Mapping[str, Any], problems: Iterable[Problem]) -> None:
    """:raises ManifestError: naming every problem and its mend."""
    if found := list(problems):
        name = mapping(mapping(manifest).get("metadata")).get("name")
        cause = "; ".join(f"`{problem.where}`: {problem.cause}" for problem in found)
        raise ManifestError(f"{kind} {name}", cause, " ".join(f"{problem.mend}." for problem in found))
