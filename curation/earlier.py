"""The version of a family that came before, which a new one is compared with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from dropforge import layout
from dropforge.dataset import SPLITS, Manifest, read_card, read_manifest
from dropforge.errors import DropforgeError
from dropforge.store import Store


@dataclass(frozen=True)
class Earlier:
    """A published version. :param card: the facts of its card; None if they cannot be read."""

    digest: str
    card: Mapping[str, Any] | None


def mark(store: Store, manifest: Manifest) -> None:
    """Record that a version has passed the gate, by whatever rules it had then."""
    store.put_if_absent(layout.passed_key(manifest.family, manifest.digest), b"{}")


def newest(store: Store, family: str, fit: Callable[[Manifest], bool] = lambda _: True) -> Earlier | None:
    """The family's newest published version that the gate let pass, None if it has none.

    Nothing records the order of versions, so the times count at which their manifests were written. S3 tells whole
    seconds: of two within one second it is the one with the larger digest.

    :param fit: whether the gate lets a version pass of which it is not recorded.
    """
    folder = layout.datasets_prefix(family)
    times = store.times(folder)
    manifests = filter(layout.is_manifest, times)
    written = {key.removeprefix(folder).partition("/")[0]: times[key] for key in manifests}
    for digest in sorted(written, key=lambda name: (written[name], name), reverse=True):
        if layout.passed_key(family, digest) in times or _passes(store, family, digest, fit):
            return read_version(store, family, digest)
    return None


def before(store: Store, parent: Manifest) -> Earlier | None:
    """What a drop that is added to a version is compared with: the last drop that left a row, None if none did."""
    left = (step for step in reversed(parent.steps) if any(step.counts.get(split) for split in SPLITS))
    return next((read_version(store, parent.family, step.digest) for step in left), None)


def _passes(store: Store, family: str, digest: str, fit: Callable[[Manifest], bool]) -> bool:
    try:
        return fit(read_manifest(store, layout.manifest_key(family, digest)))
    except DropforgeError:  # nobody knows: the card says that it cannot be read
        return True


def read_version(store: Store, family: str, digest: str) -> Earlier:
    """A version that is known to be there."""
    return Earlier(digest, _card(store, family, digest))


def _card(store: Store, family: str, digest: str) -> Mapping[str, Any] | None:
    try:
        return read_card(store, read_manifest(store, layout.manifest_key(family, digest))) or None
    except DropforgeError:
        return None
