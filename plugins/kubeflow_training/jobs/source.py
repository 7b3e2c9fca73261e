"""From what a user gives (a manifest, its text, or a spec) to the manifest of the job. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from kubeflow_training.jobs.errors import ManifestError
from kubeflow_training.jobs.kinds import TRAIN_JOB, kind_named, kind_of
from kubeflow_training.jobs.kinds.compile import compiled
from kubeflow_training.jobs.manifest.canonical import without_nulls
from kubeflow_training.jobs.manifest.naming import longest_name, made_name, renamed
from kubeflow_training.jobs.manifest.ownership import Owner
from kubeflow_training.jobs.manifest.text import manifest_from_text
from kubeflow_training.jobs.spec import TrainingJobSpec


def job_of(manifest: Any, spec: Any, kind: str | None, owner: Owner) -> dict[str, Any]:
    """The named manifest of a task's job.

    :param kind: what a spec is compiled to; of a manifest it only may be the manifest's own.
    :raises ManifestError: if there is none.
    """
    runtime: dict[str, str] = {}
    if spec is not None and kind and kind_named(kind) is TRAIN_JOB:
        spec = spec_of(spec)
        if spec.runtime is not None:
            runtime = {"runtime": spec.runtime, "runtime_kind": spec.runtime_kind}
            spec = replace(spec, runtime=None)
    found = named(manifest_of(manifest, spec), owner)
    wanted = kind_named(kind) if kind else kind_of(found)
    if wanted is kind_of(found):
        return found
    if spec is None:
        cause = f"its manifest is a {found['kind']}, and `kind` is {wanted.name}"
        raise ManifestError("the job", cause, "Leave out `kind`, or give a `spec`, which can be compiled to any")
    return compiled(found, wanted, **runtime)


def spec_of(spec: Any) -> TrainingJobSpec:
    """The spec that is given as itself, as a mapping, or as its YAML text.

    :raises ManifestError: if it is none.
    """
    spec = manifest_from_text(spec, "the job's spec") if isinstance(spec, str) else spec
    return spec if isinstance(spec, TrainingJobSpec) else TrainingJobSpec.from_dict(spec)


def manifest_of(manifest: Any = None, spec: Any = None) -> dict[str, Any]:
    """The manifest, of which kind soever; whether it is valid is another question.

    :param manifest: a mapping, or YAML text.
    :param spec: a `TrainingJobSpec`, or the mapping that `to_dict` makes of it.
    :raises ManifestError: if it is none, or of an unknown kind, or not exactly one of the two is given.
    """
    if (manifest is None) == (spec is None):
        raise ManifestError("the job", "it needs a manifest or a spec, and not both", "Give `manifest` or `spec`")
    if spec is not None:
        found = spec_of(spec).manifest()
    elif isinstance(manifest, str):
        found = manifest_from_text(manifest)
    elif isinstance(manifest, Mapping):
        try:
            # A copy of plain values: what a template or another task gave may share parts, or hold what is no JSON.
            found = json.loads(json.dumps(manifest, allow_nan=False))
        except (TypeError, ValueError, RecursionError) as error:
            raise ManifestError("the manifest", f"it holds what is no JSON: {error}", "Use plain values") from error
    else:
        cause = f"it is {type(manifest).__name__} instead of a mapping or YAML text"
        raise ManifestError("the manifest", cause, "Give what TrainingJobSpec.manifest() or a YAML file holds")
    kind_of(found)
    found = dict(without_nulls(found))
    if not isinstance(found.get("metadata", {}), Mapping):
        raise ManifestError("the manifest", f"`metadata` is {found['metadata']!r}", "Give it a name, as a mapping")
    return found


def named(manifest: Mapping[str, Any], owner: Owner, namespace: str = "default") -> dict[str, Any]:
    """The manifest with a name and a namespace: its own, else a name that is always the same for this owner.

    `generateName` is kept as the made name's beginning; a random ending could not be found again after a crash.
    """
    metadata = dict(manifest.get("metadata") or {})
    metadata.setdefault("namespace", namespace)
    found = {**manifest, "metadata": metadata}
    if metadata.get("name"):
        return found
    prefix = str(metadata.get("generateName") or f"{owner.dag_id}-{owner.task_id}")
    return renamed(found, made_name(prefix, str(owner), longest_name(found)))
