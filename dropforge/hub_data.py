"""Data sets of the Hugging Face hub as data of a run: their files, pinned to a commit, and read from there.

Which files a configuration and split have is found by the library `datasets`, as `load_dataset` finds it; no code of a
data set runs. The files are then rows for the same reader as those of a drop.
https://huggingface.co/docs/datasets/repository_structure
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Final, Self

import yaml

from dropforge import hub
from dropforge.drop import DropFile
from dropforge.errors import RecipeError
from dropforge.hub_client import SECONDS, bound_requests, within
from dropforge.recipe_data import Source
from dropforge.recipes.load import read_mapping

ROOT: Final = "hf://datasets/"
_KEY: Final = "recipe key `data.source.{}`"
_ASKED_AT_ONCE: Final = 500
_CARDS: Final = ("README.md", ".huggingface.yaml")  # in which `datasets` reads what a data set says of its files
_LARGEST_CARD: Final = 8 << 20  # bytes
_LARGEST_YAML: Final = 1 << 20  # of that; cards of two thousand languages have half
#: What has `datasets` look elsewhere: an address or a chain of them, a drive, an absolute path, a home, a folder above.
_ELSEWHERE: Final = re.compile(r"\s*[a-z][\w+.-]*:|.*(://|::)|\s*[/\\~]|(.*[/\\])?\s*\.\.\s*([/\\]|$)", re.IGNORECASE)


def is_on_hub(prefix: str) -> bool:
    """Whether a drop's files lie on the hub."""
    return prefix.startswith(ROOT)


def files_of(source: Source) -> tuple[str, tuple[DropFile, ...]]:
    """The root, with the commit in it, and the files of a configuration's split.

    :raises RecipeError: if there is no such data set, revision, configuration or split, or it is not given to us.
    :raises UnreachableError: if the hub does not answer.
    """
    name = source.hub or ""
    title = hub.title(name, source.revision)
    if hub.is_offline():
        mend = "Unset it, or copy the files into the bucket and name them as `data.source.prefix`"
        raise RecipeError(_KEY.format("hub"), f"HF_HUB_OFFLINE forbids to ask for {title}", mend)
    with hub.asking(title, hub.DATA):
        from huggingface_hub import HfApi

        bound_requests()
        api = HfApi()
        commit = str(api.dataset_info(name, revision=source.revision, timeout=SECONDS).sha)
        if not hub.is_commit(commit):
            raise OSError(f"it names no commit of {name}, but {commit[:60]!r}")
        root = f"{ROOT}{name}@{commit}/"
        for card in _cards(api, name, commit):
            _check_card(card, title)
        keys = _keys(source, commit, root, title)
        return root, tuple(_described(api, name, commit, keys))


def _cards(api: Any, name: str, commit: str) -> Iterator[Path]:
    """What a data set says of its files, in the client's cache, where `datasets` finds it."""
    for item in api.get_paths_info(name, list(_CARDS), revision=commit, repo_type="dataset"):
        if item.path in _CARDS and hasattr(item, "blob_id"):
            with within(_LARGEST_CARD):
                found = Path(api.hf_hub_download(name, item.path, revision=commit, repo_type="dataset"))
            hub.check_place(found, hub.storage(name).parent)
            yield found


def _check_card(card: Path, title: str) -> None:
    """:raises RecipeError: if it cannot be read, or names files that are not the data set's own."""
    from huggingface_hub.repocard import REGEX_YAML_BLOCK

    try:
        with card.open(encoding="utf-8-sig", newline="") as stream:  # as the client does
            text = stream.read(_LARGEST_CARD + 1)
        if card.name == _CARDS[0]:
            block = REGEX_YAML_BLOCK.search(text)
            text = block[2] if block else ""
        values = read_mapping(text, _LARGEST_YAML)
    except (RecipeError, UnicodeDecodeError) as error:
        raise _unreadable(title, card.name, error.cause if isinstance(error, RecipeError) else _line(error)) from None
    if (other := next((name for name in named_files(values) if is_elsewhere(name)), None)) is not None:
        # `datasets` would look there before anybody sees what it found.
        cause = f"{title} names files that are not its own in {card.name}: {str(other)[:200]}"
        raise RecipeError(_KEY.format("hub"), cause, "Copy the files into the bucket, and name their prefix")


def named_files(values: Any) -> Iterator[Any]:
    """Each value that is no collection, below any `data_files` or `data_dir` of a data set's description."""
    rest = [(values, False)]
    while rest:
        value, named = rest.pop()
        if isinstance(value, dict):
            rest += [(inner, named or key in ("data_files", "data_dir")) for key, inner in value.items()]
        elif isinstance(value, list | tuple | set):
            rest += [(inner, named) for inner in value]
        elif named and value is not None:
            yield value


def is_elsewhere(name: object) -> bool:
    """Whether a name or pattern of files may lead out of the data set that names it."""
    return not isinstance(name, str) or not name.isprintable() or _ELSEWHERE.match(name) is not None


def _unreadable(title: str, file: str, why: str) -> RecipeError:
    mend = "Name a revision where it can, or copy the files into the bucket and name their prefix"
    return RecipeError(_KEY.format("hub"), f"what {title} says of itself in {file} cannot be read ({why})", mend)


def _keys(source: Source, commit: str, root: str, title: str) -> list[str]:
    try:
        from datasets import load_dataset_builder
        from datasets.exceptions import DatasetNotFoundError
    except ImportError:
        mend = 'Install the library where this task runs: pip install "dropforge[hub]"'
        raise RecipeError(_KEY.format("hub"), "the library `datasets` is not installed here", mend) from None
    name = source.hub or ""
    # The library looks into the working folder first, except where an address says what is meant.
    place = f"{ROOT}{name}" if Path(name).exists() else name
    try:
        found: Any = load_dataset_builder(place, source.config, revision=commit).config.data_files or {}
    except ValueError as error:
        cause = f"its files cannot be found in {title}: {_line(error)}"
        raise RecipeError(_KEY.format("config"), cause, "Name a configuration that it has") from error
    except (DatasetNotFoundError, FileNotFoundError) as error:
        cause = f"{title} has no files that can be read as rows ({_line(error)})"
        raise RecipeError(_KEY.format("hub"), cause, "Name another, or another revision") from error
    except ImportError as error:
        cause = f"{title} needs a library that is not installed here ({_line(error)})"
        raise RecipeError(_KEY.format("hub"), cause, "Install it where this task runs") from error
    except (yaml.YAMLError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise _unreadable(title, _CARDS[0], _line(error)) from error
    except RuntimeError as error:
        cause = f"{title} is made by a program, and no code of a data set runs ({_line(error)})"
        mend = "Name a revision with files, such as `refs/convert/parquet`, or copy the rows into the bucket"
        raise RecipeError(_KEY.format("hub"), cause, mend) from error
    if source.split not in found:
        cause = f"{title} has no split {source.split!r}, but {', '.join(sorted(map(str, found))) or 'none at all'}"
        raise RecipeError(_KEY.format("split"), cause, "Name one of them")
    names = [str(item) for item in found[source.split]]
    if other := next((item for item in names if not item.startswith(root)), None):
        # A repository may name files of anywhere in its own description.
        cause = f"{title} names a file that is not its own: {other[:200]}"
        raise RecipeError(_KEY.format("hub"), cause, "Copy the files into the bucket, and name their prefix")
    return sorted({item.removeprefix(root) for item in names})


def _line(error: Exception) -> str:
    return " ".join(str(error).split())[:300]


def _described(api: Any, name: str, commit: str, keys: Sequence[str]) -> Iterator[DropFile]:
    """Each file with what the hub knows its bytes by: SHA-256 of large files, git's SHA-1 of the others."""
    told: dict[str, Any] = {}
    for start in range(0, len(keys), _ASKED_AT_ONCE):
        some = list(keys[start : start + _ASKED_AT_ONCE])
        told |= {item.path: item for item in api.get_paths_info(name, some, revision=commit, repo_type="dataset")}
    for key in keys:
        item = told.get(key)
        if item is None or getattr(item, "blob_id", None) is None:
            raise OSError(f"it does not say what {key} is")
        content = f"sha256:{item.lfs.sha256}" if item.lfs else f"git:{item.blob_id}"
        yield DropFile(key=key, size=item.size, content=content, etag=commit)


class HubFile:
    """The bytes of a file of the hub, as they come; a context manager.

    :param address: below `ROOT`, with the commit. :param size: bytes that it has.
    """

    def __init__(self, address: str, size: int) -> None:
        self._name, self._missing, self._size = address.removeprefix(ROOT), size, size
        with hub.asking(self._name, hub.DATA, most=size):
            from huggingface_hub import HfFileSystem

            bound_requests()
            # No listing that an earlier run of this process saw; one stream, not a request for each block.
            system = HfFileSystem(use_listings_cache=False, skip_instance_cache=True)
            self._stream: Any = system.open(address, "rb", block_size=0)

    def read(self, size: int = -1) -> bytes:
        """:raises DropforgeError: if the hub does not give the bytes, or ends before the last one."""
        with hub.asking(self._name, hub.DATA, most=self._size):
            piece = bytes(self._stream.read(size))
            self._missing -= len(piece)
            if self._missing > 0 and not piece and size:
                raise OSError(f"it ended {self._missing:,} bytes too early")
            return piece

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stream.close()
