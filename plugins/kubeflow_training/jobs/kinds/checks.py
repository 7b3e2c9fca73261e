"""What the checks of several kinds share. The PyTorchJob's own are in `jobs.checks`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Final

from kubeflow_training.jobs.checks import Problem
from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.shapes import mapping

_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")

__all__ = ["Problem", "name_problems", "require_none"]


def name_problems(metadata: Mapping[str, Any], longest: str) -> Iterator[Problem]:
    """What is wrong with name and namespace.

    :param longest: the longest ending that a pod's host name adds to the name.
    """
    name, namespace = metadata.get("name"), metadata.get("namespace")
    room = 63 - len(longest)
    if not isinstance(name, str) or not _DNS_1035.fullmatch(name):
        mend = "Use lower-case letters, digits and dashes, starting with a letter and not ending with a dash"
        yield Problem("metadata.name", f"{name!r} is not a DNS-1035 label", mend)
    elif len(name) > room:
        cause = f"it has {len(name)} characters, and a pod's host name of 63 leaves it {room}"
        yield Problem("metadata.name", cause, "Shorten it")
    if not isinstance(namespace, str) or len(namespace) > 63 or not _DNS_1123.fullmatch(namespace):
        yield Problem("metadata.namespace", f"{namespace!r} is not a namespace's name", "Name one, such as `default`")


def require_none(kind: str, manifest: Mapping[str, Any], problems: Iterable[Problem]) -> None:
    """:raises ManifestError: naming every problem and its mend."""
    if found := list(problems):
        name = mapping(mapping(manifest).get("metadata")).get("name")
        cause = "; ".join(f"`{problem.where}`: {problem.cause}" for problem in found)
        raise ManifestError(f"{kind} {name}", cause, " ".join(f"{problem.mend}." for problem in found))
