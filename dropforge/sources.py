"""Data that a recipe names instead of an upload: listed and pinned before anything is read.

What comes of it is a drop of the ledger whose files lie elsewhere, so claims, reruns, the digest and the card are those
of a drop. Its identity is that of an upload of the same files.
"""

from __future__ import annotations

from dropforge import layout, ledger
from dropforge.dataset import read_manifest
from dropforge.drop import MAX_FILES, MAX_KEYS, Drop, DropFile, Part, drop_file, identity, listed_keys, too_many
from dropforge.errors import DataError, RecipeError
from dropforge.hub_data import files_of
from dropforge.recipe import Recipe
from dropforge.recipe_data import Source
from dropforge.saved import saved_files
from dropforge.store import MissingObjectError, Store


def pin(store: Store, source: Source, family: str, bucket: str = "") -> Drop:
    """The source's files as they are now, each with its size and content.

    :param family: of the model that is trained.
    :raises RecipeError, UnreachableError: of a data set of the hub, as `dropforge.hub_data.files_of`.
    :raises DataError: if there is nothing, a shard is not what its manifest says, or the files are not those of
        `source.id`.
    """
    layout.check_family(family)
    parts: tuple[Part, ...] = ()
    if source.hub is not None:
        thing, bucket = f"data set {source.hub}", ""
        root, files = files_of(source)
    elif source.drops is not None:
        thing = f"drops of family {family}"
        root, parts, files = _drops(store, source.drops, family)
    elif source.prefix is not None:
        thing, root = f"source {source.prefix!r}", source.prefix.rstrip("/") + "/"
        files = _below(store, root)
    else:
        thing = f"dataset version {source.dataset}"
        root, files = _shards(store, source.dataset or "", thing)
    if not files:
        raise DataError(thing, "it holds no files", "Look at the prefix in the bucket")
    found = identity(files)
    if source.id is not None and source.id != found:
        raise DataError(
            thing,
            f"its files have the id {found}, the recipe asks for {source.id}",
            "Bring the old files back, or change `data.source.id` if the new ones are meant",
        )
    return Drop(
        family=family, drop=f"source-{found[:12]}", id=found, bucket=bucket, files=files, root=root, parts=parts
    )


def _below(store: Store, root: str) -> tuple[DropFile, ...]:
    # A recipe in the prefix would come into force unasked: only drops bring one.
    passed = {layout.SUCCESS, layout.RECIPE}
    listed = list(listed_keys(store, root))
    if len(listed) > MAX_KEYS + 1:
        raise too_many(f"source {root!r}", f"it has more than {MAX_KEYS:,} keys")
    found = {info.key.removeprefix(root): info for info in listed if not info.key.endswith("/")}
    saved = saved_files(store, root, found)
    keys = sorted((set(found) if saved is None else set(saved)) - passed)
    if len(keys) > MAX_FILES:
        raise too_many(f"source {root!r}", f"it has {len(keys):,} files")
    return tuple(drop_file(store, root, found[key], key, None) for key in keys)


def _drops(store: Store, ids: tuple[str, ...], family: str) -> tuple[str, tuple[Part, ...], tuple[DropFile, ...]]:
    """Where the drops lie, what they are, and their data files as they were entered, each below its drop's name."""
    found: dict[str, Drop] = {}
    for one in ids:
        try:
            drop = ledger.read(store, family, one)
        except MissingObjectError:
            raise DataError(f"drop id {one}", f"family {family} has no such drop", "Look under ledger/drops/") from None
        if not drop.uploaded:
            raise DataError(f"drop id {one}", "it was not uploaded but named by a recipe", "Name uploaded drops only")
        if drop.drop in found:
            cause = f"it was uploaded under the name {drop.drop}, as {found[drop.drop].id} was"
            raise DataError(f"drop id {one}", cause, "Name the one whose files are there")
        found[drop.drop] = drop
    roots = {drop.prefix.removesuffix(f"{name}/"): drop.bucket for name, drop in found.items()}
    if len(roots) > 1:
        cause = f"the drops are in several buckets ({', '.join(sorted(roots.values()))}), and a run reads from one"
        raise DataError(f"drops of family {family}", cause, "Name drops of one bucket, or upload them to one")
    files = (file.model_copy(update={"key": f"{name}/{file.key}"}) for name in found for file in found[name].data_files)
    return next(iter(roots)), tuple(Part(drop=name, id=drop.id) for name, drop in found.items()), tuple(files)


def _shards(store: Store, name: str, thing: str) -> tuple[str, tuple[DropFile, ...]]:
    family, _, digest = name.partition("/")
    try:
        manifest = read_manifest(store, layout.manifest_key(layout.check_family(family), digest))
    except MissingObjectError:
        raise DataError(thing, "there is no such version", "Look under `datasets/` in the bucket") from None
    if (manifest.family, manifest.digest) != (family, digest):
        raise DataError(thing, f"its manifest is of {manifest.family}/{manifest.digest}", "Curate its drop again")
    files = []
    for shard in manifest.shards:
        key = layout.shard_key(family, shard.sha256)
        info = store.stat(key)
        if shard.key != key or info is None or info.size != shard.bytes:
            raise DataError(
                thing, f"shard {shard.key} is missing or not what its manifest says", "Curate its drop again"
            )
        content = f"sha256:{shard.sha256}"
        files.append(
            DropFile(
                key=key.rpartition("/")[2], size=info.size, content=content, etag=info.etag, version_id=info.version_id
            )
        )
    return layout.shard_key(family, "").rpartition("/")[0] + "/", tuple(files)


def check_uploaded(recipe: Recipe, what: str) -> None:
    """:raises RecipeError: if the recipe names data although `what` brings some."""
    if recipe.data.source is not None:
        raise RecipeError(
            "recipe key `data.source`",
            f"{what} brings the data already",
            "Leave the key out, or start a run from the form without a drop",
        )
