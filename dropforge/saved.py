"""Folders that `save_to_disk` of Hugging Face's datasets wrote: which of their files hold rows."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Final

from dropforge.errors import DataError
from dropforge.json_objects import UnreadableError, read_object
from dropforge.store import MissingObjectError, Store, written_by_others

STATE: Final = "state.json"
INFO: Final = "dataset_info.json"
DICT: Final = "dataset_dict.json"
_LARGEST: Final = 16 << 20  # bytes of a JSON file; the state of 100,000 shards has 6 MB


def saved_files(store: Store, root: str, found: Collection[str]) -> list[str] | None:
    """Keys below `root` of the Arrow files of a data set, or of all splits of a dictionary of them; None if none is
    there. What a data set that was saved there before has left behind is passed over, as `load_from_disk` does.

    :param found: all keys below `root`.
    :raises DataError: if a file is missing, or what should list them cannot be read.
    """
    if DICT in found:
        splits = _read(store, root, DICT).get("splits")
        if not isinstance(splits, list) or not splits or not all(isinstance(name, str) for name in splits):
            raise _broken(f"file {root}{DICT}", "it lists no splits")
        return [key for name in splits for key in _of_state(store, root, f"{name}/", found)]
    return _of_state(store, root, "", found) if {STATE, INFO} <= set(found) else None


def _of_state(store: Store, root: str, folder: str, found: Collection[str]) -> list[str]:
    for name in (STATE, INFO):
        if folder + name not in found:
            raise _broken(f"file {root}{folder}{name}", "it is not there")
    thing = f"file {root}{folder}{STATE}"
    within = {key.removeprefix(folder) for key in found if key.startswith(folder)}
    return [folder + name for name in shards(thing, _read(store, root, folder + STATE), within)]


def shards(thing: str, state: Mapping[str, Any], found: Collection[str]) -> list[str]:
    """Return the names of the Arrow files that hold a data set's rows.

    :param thing: the file with its state, for messages. :param state: what that holds. :param found: names beside it.
    :raises DataError: if a file is missing, or its rows are not those of its files.
    """
    listed = state.get("_data_files")
    if not isinstance(listed, list) or any(not isinstance(item, dict) for item in listed):
        raise _broken(thing, "it lists no files")
    if state.get("_indices_data_files"):
        raise _broken(thing, "rows were chosen from its files by indices")
    names = [item.get("filename") for item in listed]
    for name in names:
        # Only what was listed below the root can be named: no path leads out of it.
        if not isinstance(name, str) or "/" in name or name not in found:
            raise _broken(thing, f"it lists {name!r}, which is not there")
    return [str(name) for name in names]


def _read(store: Store, root: str, key: str) -> dict[str, Any]:
    thing = f"file {root}{key}"
    try:
        with written_by_others(thing):
            return read_object(store, root + key, most=_LARGEST)
    except MissingObjectError:
        raise _broken(thing, "it is not there") from None
    except UnreadableError as error:
        raise _broken(thing, error.cause) from None


def _broken(thing: str, cause: str) -> DataError:
    return DataError(thing, cause, "Save the data set again with `save_to_disk`, and upload the whole folder")
