"""A base model from the Hugging Face hub: fetched once per node, checked against the hub's digests, and then at rest.

The hub's client holds a lock for each file, so that pods which share a cache fetch it once, and goes on within a file
whose connection was cut. What was checked is noted beside it; from then on neither hub nor network is needed. With a
cache of the node (`trainer.data.model_cache`) the files lie there instead, within its bound.
"""

from __future__ import annotations

import errno
import hashlib
import json
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple

from dropforge import hub
from dropforge.errors import FULL, DropforgeError
from dropforge.hub import StrangeError, UnreachableError
from dropforge.hub_client import SECONDS, StrangeAnswerError, bound_requests
from dropforge.json_objects import UNREADABLE
from trainer.data.model_cache import Filling, Wanted, fetch_through, takes
from trainer.data.node_cache import NodeCache

__all__ = ["UnreachableError", "fetch_from_hub"]

TRIES: Final = 5  # of a file, when its connection breaks or its bytes are wrong
PAUSE: Final = 2.0  # seconds before the next one
_NEEDED: Final = (".json", ".model", ".txt", ".jinja", "README.md")  # the last names the licence
_ADAPTER: Final = "adapter_config.json"  # beside a model, it would have the libraries load another one
_UNWRITABLE: Final = FULL | {errno.EROFS, errno.EACCES, errno.EPERM}
_SHA256: Final = 64  # hex digits
_STALE: Final = 3600.0  # seconds without a byte, after which a file that is half there belongs to nobody


class File(NamedTuple):
    """A file of a commit. :param digest: SHA-256, or git's SHA-1 of a small file; empty where the hub tells none."""

    size: int | None
    digest: str


class _SpoiltError(Exception):
    """Bytes that are not those of the hub."""


@dataclass(frozen=True)
class Through:
    """A node's cache to fetch through.

    :param folder: for links into it. :param check: called while another pod fetches the same; it may raise to stop.
    """

    node: NodeCache
    folder: Path
    check: Callable[[], None] = lambda: None


def fetch_from_hub(
    model: str,
    revision: str | None,
    endpoint: str | None = None,
    *,
    weights: bool = True,
    through: Through | None = None,
) -> Path:
    """The folder of a model's files in the cache of this machine; the hub is asked only for what is not there.

    :param revision: a commit; what else names one is resolved now, which a run must not do twice.
    :param endpoint: address of the hub, else the environment's (`HF_ENDPOINT`).
    :param weights: whether they are needed too, beside config and tokenizer.
    :param through: the node's cache, which is used where the client's own does not hold the model.
    :raises RecipeError: if the hub has no such model or revision, or does not give it to us.
    :raises UnreachableError: if the hub does not answer and the cache does not hold the model.
    :raises DropforgeError: if what the hub sends is not what it says, or nothing can be written here.
    """
    commit = revision if revision is not None and hub.is_commit(revision) else hub.pin(model, revision, endpoint).commit
    folder = hub.storage(model) / "snapshots" / commit
    if _sealed(model, commit):
        return folder
    if through is not None and hub.cached(model, commit) is None:

        def fill(filling: Filling) -> None:
            if hub.is_offline():
                raise hub.not_cached(hub.title(model, commit))
            _fetch(model, commit, endpoint, weights, filling)

        name = f"{model}@{commit}"
        if fetch_through(through.node, name, through.folder, fill, weights=weights, check=through.check):
            return through.folder
    if hub.is_offline():
        if hub.cached(model, commit) is None:
            raise hub.not_cached(hub.title(model, commit))
        return _check_cache(model, commit)
    try:
        return _fetch(model, commit, endpoint, weights)
    except UnreachableError:
        if hub.cached(model, commit) is None:
            raise
        return _check_cache(model, commit)


def _fetch(model: str, commit: str, endpoint: str | None, weights: bool, into: Filling | None = None) -> Path:
    """:param into: the node's cache, else it is the client's own."""
    from huggingface_hub import HfApi
    from huggingface_hub.utils import logging
    from huggingface_hub.utils.tqdm import disable_progress_bars

    disable_progress_bars()  # a log has no use for them
    logging.set_verbosity_error()  # type: ignore[no-untyped-call]  # a warning would show the signed address of a file
    name = hub.title(model, commit)
    with hub.asking(name):
        bound_requests(endpoint)
        info = HfApi(endpoint=endpoint).model_info(model, revision=commit, timeout=SECONDS, files_metadata=True)
        listed = {item.rfilename: _described(item) for item in info.siblings or ()}
        hub.check_listing({file: known.size for file, known in listed.items()}, name)
    if into is None:
        _sweep(hub.storage(model) / "blobs")
    folder = hub.storage(model) / "snapshots" / commit if into is None else into.folder

    def bring(file: str, work: Path | None = None) -> Path:
        return _download(model, commit, file, listed[file], endpoint, work)

    def add(files: list[str]) -> None:
        if into is not None:
            into.add([_wanted(file, listed[file]) for file in files], bring)
            return
        for file in files:
            bring(file)

    # Weights come last: where they are, all is.
    wanted = [file for file in sorted(listed) if takes(file) and file.endswith(_NEEDED) and file != _ADAPTER]
    add(wanted)
    shards = _weights(folder, listed, name)
    if not weights:
        return folder
    add(shards)
    if into is None:
        _seal(model, commit, [*wanted, *shards])
    return folder


def _described(item: Any) -> File:
    size, digest = (item.size, item.blob_id or "") if item.lfs is None else (item.lfs.size, item.lfs.sha256)
    if not isinstance(digest, str):
        raise StrangeAnswerError(f"it names a digest that is none: {str(digest)[:60]!r}")
    return File(size, digest)


def _wanted(file: str, known: File) -> Wanted:
    return Wanted(file, known.size or 0, known.digest if len(known.digest) == _SHA256 else None)


def _weights(folder: Path, listed: Mapping[str, File], name: str) -> list[str]:
    """The files of weights that transformers loads; others in a repository are the same once more."""
    if hub.WEIGHTS in listed:
        return [hub.WEIGHTS]
    try:
        found = list(hub.shards((folder / hub.INDEX).read_bytes()))
        missing = next((file for file in found if file not in listed), None)
        if missing is not None:
            raise ValueError(f"{missing} is not there")
    except ValueError as error:
        raise DropforgeError(f"base model {name}", f"its {hub.INDEX} is wrong ({error})", "Name another") from error
    return found


def _download(model: str, commit: str, file: str, known: File, endpoint: str | None, work: Path | None = None) -> Path:
    """Bring a file into the client's cache, and see that it is the one that the hub speaks of.

    :param work: a folder to put it into instead. :raises OSError: if that does not take it.
    """
    from huggingface_hub import hf_hub_download

    name, home = hub.title(model, commit), work or hub.storage(model).parent
    for left in reversed(range(TRIES)):
        try:
            with hub.asking(name, most=known.size or 0):
                bound_requests(endpoint)
                found = hf_hub_download(
                    model, file, revision=commit, etag_timeout=SECONDS, endpoint=endpoint, local_dir=work
                )
                path = Path(found)
                hub.check_place(path, home)
            _check(path, known)
            return path
        except StrangeError:
            raise
        except _SpoiltError as error:
            _remove(path)
            if not left:
                raise DropforgeError(
                    f"base model {name}",
                    f"{file} came {TRIES} times with other bytes than the hub says ({error})",
                    "See what is between this machine and the hub, such as a proxy that keeps copies",
                ) from None
        except UnreachableError as error:
            cause = error.__cause__
            if isinstance(cause, OSError) and cause.errno in _UNWRITABLE:
                if work is not None:
                    raise cause from None
                raise DropforgeError(
                    f"base model {name}",
                    f"{file} cannot be written to {hub.storage(model)} ({cause.strerror})",
                    "Make room there, or have HF_HOME name another folder",
                ) from error
            if not left:
                raise
        time.sleep(PAUSE)
    raise AssertionError("the last try returns or raises")


def _check(path: Path, known: File) -> None:
    """:raises _SpoiltError: if a file is not the one that is known."""
    size = path.stat().st_size
    if known.size is not None and size != known.size:
        raise _SpoiltError(f"{size:,} bytes, not {known.size:,}")
    found = _digests(path, size, len(known.digest))
    if found and known.digest not in found:
        raise _SpoiltError(f"its digest is {found[0][:12]}, not {known.digest[:12]}")


def _digests(path: Path, size: int, length: int) -> tuple[str, ...]:
    """What a file's digest of this many hex digits may be: SHA-256, or SHA-1 as git writes it, or plain; () for others.

    Small files have git's (https://git-scm.com/book/en/v2/Git-Internals-Git-Objects), some mirrors tell the plain one.
    """
    if length == 64:
        states = [hashlib.sha256()]
    elif length == 40:
        states = [hashlib.sha1(f"blob {size}\0".encode(), usedforsecurity=False), hashlib.sha1(usedforsecurity=False)]
    else:
        return ()
    with path.open("rb") as stream:
        while piece := stream.read(1 << 20):
            for state in states:
                state.update(piece)
    return tuple(state.hexdigest() for state in states)


def _check_cache(model: str, commit: str) -> Path:
    """Look through what somebody else put into the cache: a file there is named by its digest.

    :raises DropforgeError: if one is another.
    """
    folder = hub.storage(model) / "snapshots" / commit
    files = [path for path in sorted(folder.iterdir()) if path.name.endswith((*_NEEDED, ".safetensors"))]
    for path in files:
        named = path.readlink().name if path.is_symlink() else ""
        try:
            hub.check_place(path, hub.storage(model).parent)
            _check(path, File(None, named))
        except (StrangeAnswerError, _SpoiltError, OSError) as error:
            raise DropforgeError(
                f"base model {hub.title(model, commit)}",
                f"{path.name} in this machine's cache is not what its name says ({error})",
                f"Remove {hub.storage(model)} and fetch the model again",
            ) from None
    _seal(model, commit, [path.name for path in files])
    return folder


def _note(model: str, commit: str) -> Path:
    return hub.storage(model) / ".dropforge" / f"{commit}.json"


def _seal(model: str, commit: str, files: list[str]) -> None:
    """Note that a commit's files were checked; a cache that cannot be written to is looked through each time."""
    folder, note = hub.storage(model) / "snapshots" / commit, _note(model, commit)
    sizes = {file: (folder / file).stat().st_size for file in files}
    with suppress(OSError):
        note.parent.mkdir(exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=note.parent, delete=False) as stream:
            json.dump(sizes, stream)
        Path(stream.name).chmod(0o644)
        Path(stream.name).replace(note)


def _sealed(model: str, commit: str) -> bool:
    """Whether a commit's files were checked, and are there as they were."""
    folder = hub.storage(model) / "snapshots" / commit
    try:
        sizes = json.loads(_note(model, commit).read_text())
        return hub.is_whole(folder) and all((folder / file).stat().st_size == size for file, size in sizes.items())
    except (OSError, *UNREADABLE):
        return False


def _remove(path: Path) -> None:
    """Take a file out of the cache, with the blob that its link names."""
    with suppress(OSError):
        (path.parent / path.readlink()).unlink()
    path.unlink(missing_ok=True)


def _sweep(blobs: Path) -> None:
    """Remove what a client that was killed left half fetched; it would never go on with it."""
    now = time.time()
    for path in blobs.glob("*.incomplete"):
        with suppress(OSError):
            if now - path.stat().st_mtime > _STALE:
                path.unlink()
