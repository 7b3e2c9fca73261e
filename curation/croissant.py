"""A dataset version in Croissant 1.1, MLCommons' metadata for search engines and for the loaders of other tools
(https://docs.mlcommons.org/croissant/docs/croissant-spec-1.1.html).

It names the shards relative to itself, so it holds wherever the version's folder lies, and tells no bucket or address.
What Dropforge does not know is left out: `creator`, `url`, and `license` unless the recipe names one.
"""

from __future__ import annotations

import posixpath
from collections.abc import Mapping, Sequence
from datetime import date
from typing import Any, Final

from dropforge import layout
from dropforge.dataset import SPLITS, Manifest, Shard

VERSION: Final = "http://mlcommons.org/croissant/1.1"

#: The specification's recommended context, of which readers know the short names.
CONTEXT: Final[Mapping[str, Any]] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "arrayShape": "cr:arrayShape",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "containedIn": "cr:containedIn",
    "cr": "http://mlcommons.org/croissant/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "description": {"@container": "@language"},
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileObject": "cr:fileObject",
    "fileProperty": "cr:fileProperty",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isArray": "cr:isArray",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "name": {"@container": "@language"},
    "parentField": "cr:parentField",
    "path": "cr:path",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
_PARQUET: Final = "application/x-parquet"
_FIELDS: Final = {
    "messages": "The turns of a conversation; a row has either these or a text.",
    "role": "Who speaks: system, user, assistant or tool.",
    "content": "What is said.",
    "text": "A text.",
    "label": "What the row is labelled with.",
    "source": "Where the row comes from.",
    "group": "Rows of one group are all on one side of the split.",
    "extras": "Other columns of the row, as a JSON object.",
}


def croissant(manifest: Manifest, drops: Sequence[str], terms: str | None, published: date) -> dict[str, Any]:
    """The version's metadata as JSON-LD.

    :param drops: names of those that the rows come from. :param terms: the rows' licence.
    :param published: the day, in UTC.
    """
    shards = {split: [shard for shard in manifest.shards if shard.split == split] for split in SPLITS}
    folder = layout.dataset_prefix(manifest.family, manifest.digest)
    columns = ("text", "label", "source", "group", *(["extras"] if "keep_columns" in manifest.rules else []))
    return {
        "@context": CONTEXT,
        "@type": "sc:Dataset",
        "conformsTo": VERSION,
        "name": manifest.family,
        "description": f"Rows that Dropforge made of {_drops(drops)} of the family {manifest.family}:"
        f" {manifest.rows('train'):,} to train on and {manifest.rows('eval'):,} to evaluate with.",
        # The content is the version; build metadata is where Semantic Versioning has room for it.
        "version": f"1.0.0+{manifest.digest}",
        "datePublished": published.isoformat(),
        **({"license": license_url(terms)} if terms else {}),
        "distribution": [_file(shard, folder) for shard in {shard.sha256: shard for shard in manifest.shards}.values()],
        "recordSet": [
            _rows(split if len(shards[split]) == 1 else f"{split}-{number:05d}", split, shard, columns)
            for split in SPLITS
            for number, shard in enumerate(shards[split])
        ],
    }


def _drops(names: Sequence[str]) -> str:
    return f"drop {names[0]}" if len(names) == 1 else f"{len(names):,} drops, the last one {names[-1]},"


def license_url(name: str) -> str:
    """The address of a licence that is named by its address or by its SPDX identifier."""
    return name if "://" in name else f"https://spdx.org/licenses/{name}.html"


def _file(shard: Shard, folder: str) -> dict[str, Any]:
    return {
        "@type": "cr:FileObject",
        "@id": f"{shard.sha256}.parquet",
        "name": f"{shard.sha256}.parquet",
        "contentUrl": posixpath.relpath(shard.key, folder),
        "contentSize": f"{shard.bytes} B",
        "encodingFormat": _PARQUET,
        "sha256": shard.sha256,
    }


def _rows(name: str, split: str, shard: Shard, columns: Sequence[str]) -> dict[str, Any]:
    """The rows of one shard: the reference loader takes the rows of a record set from one file."""

    def field(column: str, part: str = "") -> dict[str, Any]:
        transform = {"transform": {"jsonPath": part}} if part else {}
        return {
            "@type": "cr:Field",
            "@id": "/".join(filter(None, (name, column, part))),
            "name": part or column,
            "description": _FIELDS[part or column],
            "dataType": "sc:Text",
            "source": {"fileObject": {"@id": f"{shard.sha256}.parquet"}, "extract": {"column": column}, **transform},
        }

    messages = {
        "@type": "cr:Field",
        "@id": f"{name}/messages",
        "name": "messages",
        "description": _FIELDS["messages"],
        "isArray": True,
        "subField": [field("messages", "role"), field("messages", "content")],
    }
    return {
        "@type": "cr:RecordSet",
        "@id": name,
        "name": name,
        "description": f"{shard.rows:,} rows of the split {split}.",
        "field": [messages, *map(field, columns)],
    }
