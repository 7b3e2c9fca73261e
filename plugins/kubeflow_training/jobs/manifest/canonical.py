"""The one form of a manifest that counts: without nulls, and its fingerprint. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any


def without_nulls(value: Any) -> Any:
    """As the API reads it: a field that is null is a field that is not there."""
    if isinstance(value, Mapping):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list | tuple) else value


def fingerprint(manifest: Mapping[str, Any]) -> str:
    """SHA-256 over what makes this job this job: name, namespace and spec; labels and annotations do not count."""
    metadata = manifest.get("metadata") or {}
    content = [metadata.get("name"), metadata.get("namespace"), manifest.get("spec")]
    return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()
