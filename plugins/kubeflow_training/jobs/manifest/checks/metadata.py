"""Checks of a job's metadata before it exists: pure, with the mend; the same for all kinds."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from typing import Any, Final

from kubeflow_training.jobs.manifest.checks.problems import Problem
from kubeflow_training.jobs.manifest.words import LONGEST_HOST_NAME

_DNS_1035: Final = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_DNS_1123: Final = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")


def metadata_problems(metadata: Mapping[str, Any], room: int) -> Iterator[Problem]:
    """What is wrong with name, namespace, labels and annotations.

    :param room: how many characters the pods' host names leave to the job's name.
    """
    name, namespace = metadata.get("name"), metadata.get("namespace")
    if not isinstance(name, str) or not _DNS_1035.fullmatch(name):
        mend = "Use lower-case letters, digits and dashes, starting with a letter and not ending with a dash"
        yield Problem("metadata.name", f"{name!r} is not a DNS-1035 label", mend)
    elif len(name) > room:
        cause = f"it has {len(name)} characters, and a pod's host name of 63 leaves it {room}"
        yield Problem("metadata.name", cause, "Shorten it")
    if not isinstance(namespace, str) or len(namespace) > 63 or not _DNS_1123.fullmatch(namespace):
        yield Problem("metadata.namespace", f"{namespace!r} is not a namespace's name", "Name one, such as `default`")
    for key in ("labels", "annotations"):
        values = metadata.get(key)
        if values is not None and not (
            isinstance(values, Mapping) and all(isinstance(item, str) for item in values.values())
        ):
            yield Problem(f"metadata.{key}", "it is no mapping from text to text", "Write every value as text")


def name_problems(metadata: Mapping[str, Any], longest: str) -> Iterator[Problem]:
    """What is wrong with name and namespace.

    :param longest: the longest ending that a pod's host name adds to the name.
    """
    yield from metadata_problems(metadata, LONGEST_HOST_NAME - len(longest))
