"""Tokens beside the dataset: the first run makes them, every other run that needs the same ones takes them over.

::

    datasets/FAMILY/DIGEST/tokens/IDENTITY/NAME.npy, NAME.json   tokens of both splits, row keys, sources, prompts
    datasets/FAMILY/DIGEST/tokens/IDENTITY/plan.json             what they were made from, sizes, SHA-256; written last

The identity is that of a run's plan, less what only packs follow from, and with the bytes of the shards, because a
dataset's digest leaves the order of rows open. It is a cache: a run that cannot read or write it makes its own tokens.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from dropforge.dataset import Manifest
from dropforge.errors import DropforgeError
from dropforge.run import RunSpec
from dropforge.store import open_store, out_of_reach, split_uri
from trainer.data.node_cache import NodeCache
from trainer.data.plan_store import PlanStore, UnusableError

FOLDER: Final = "tokens/"
_OF_PACKS: Final = ("packing", "mix")  # parts of a plan's identity that no token follows from
_HERE: Final = Path(__file__).parent
_CODE: Final = ("data/rows.py", "tokenise.py")  # what reads rows and puts them in order; a plan's identity has the rest


@dataclass(frozen=True)
class TokenCache:
    """The shared tokens of one identity."""

    stored: PlanStore

    @classmethod
    def of(
        cls, spec: RunSpec, manifest: Manifest, parts: Mapping[str, Any], node: NodeCache | None = None
    ) -> TokenCache:
        """:param parts: the identity of the run's plan. :param node: what this machine keeps."""
        shards = [[shard.split, shard.sha256, shard.rows] for shard in manifest.shards]
        own = {key: value for key, value in parts.items() if key not in _OF_PACKS} | {
            "shards": hashlib.sha256(json.dumps(shards).encode()).hexdigest(),
            "reading": hashlib.sha256(b"".join((_HERE / name).read_bytes() for name in _CODE)).hexdigest(),
        }
        return cls(PlanStore(open_store(split_uri(spec.dataset)[0]), own, FOLDER, node))

    def take(self, folder: Path, check: Callable[[], None], say: Callable[[str], None]) -> bool:
        """Copy the tokens into a folder, each file held to its SHA-256; False, and the reason said, if it cannot be."""
        try:
            found = self.stored.fetch(folder, check)
        except UnusableError as error:
            say(f"the tokens {self.stored.uri} are not used: {error}")
            return False
        except Exception as error:
            if not out_of_reach(error):
                raise
            say(f"the tokens {self.stored.uri} are not used: they cannot be read ({error})")
            return False
        if found:
            say(f"tokens are those of {self.stored.uri}")
        return found

    def give(self, folder: Path, say: Callable[[str], None]) -> None:
        """Store what was made. The run has its own tokens either way, so nothing here ends it."""
        try:
            self.stored.keep(folder)
        except DropforgeError as error:
            say(f"tokens are not shared: {error}")
        except Exception as error:
            if not out_of_reach(error):
                raise
            say(f"tokens are not shared: {self.stored.uri} cannot be written ({error})")
