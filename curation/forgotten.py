"""Rows that are to be forgotten, as the rules name them: by content key, or by a hash of their group's name.

With a key of pseudonyms a group's hash is keyed as these are: HMAC-SHA-256 (RFC 2104), so that nobody without the key
can try names. A hash without a key, of a family that has none or had none then, still counts.
"""

from __future__ import annotations

import hmac
import os
from collections.abc import Mapping, Sequence
from typing import Any

from curation.canonical import group_of
from curation.identity import KEY_BYTES, document
from curation.mapping import Columns
from curation.pii import Pii, read_key
from curation.spellings import names_so_far


def group_names(group: str, pii: Pii | None, env: Mapping[str, str] = os.environ) -> tuple[bytes, ...]:
    """What a group is called in the rules (16 bytes each): as it is written now, and as it may have been before.

    :raises DropforgeError: if the key of pseudonyms is not in the environment.
    """
    spelled = names_so_far(group)
    plain = [document(one) for one in spelled]
    if pii is None or pii.key_env is None:
        return tuple(plain)
    key = read_key(pii.key_env, env)
    keyed = [hmac.digest(key, b"forgotten group\0" + one.encode(), "sha256")[:KEY_BYTES] for one in spelled]
    return (*keyed, *plain)


class Forgotten:
    """
    :param names: as `Rules.forgotten`. :param columns: the recipe's own names of columns.
    """

    def __init__(self, names: Sequence[str], pii: Pii | None, columns: Columns) -> None:
        self.names = frozenset(map(bytes.fromhex, names))
        self._pii, self._columns = pii, columns

    def group(self, name: str | None) -> bool:
        """Whether all rows of a group are."""
        return bool(self.names) and name is not None and not self.names.isdisjoint(group_names(name, self._pii))

    def fields(self, fields: Mapping[str, Any]) -> bool:
        """The same of a row that cannot be read as one, of which the quarantine would show the beginning."""
        if not self.names:
            return False
        known = self._columns.known(fields)
        # Nobody can tell whether a usable row of these fields would have had its names compared without case.
        folded = {name.strip().lower(): value for name, value in known.items() if isinstance(name, str)}
        found = {group_of(known), group_of({**folded, **known})}
        return any(self.group(name.encode(errors="replace").decode()) for name in found if name is not None)
