"""Signatures of images by a key of one's own: cosign's commands, as plain values.

Nothing goes to a public log: it would tell everybody the names of a team's images. A password is never among the words
of a command: cosign reads it from COSIGN_PASSWORD.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from dropforge.errors import DropforgeError
from dropforge.images import Registry

PASSWORD: Final = "COSIGN_PASSWORD"  # noqa: S105 - the variable's name
_STORES: Final = ("awskms://", "gcpkms://", "azurekms://", "hashivault://", "k8s://", "env://")
_KMS: Final = _STORES[:4]
_PUBLIC: Final = "-----BEGIN PUBLIC KEY-----"


def sign(key: str, address: str) -> list[str]:
    """The command that signs an image by its digest, and those of its platforms. :param key: as `check_key` has it."""
    return ["cosign", "sign", "--yes", "--tlog-upload=false", "--recursive", "--key", key, address]


def verify(key: str, address: str) -> list[str]:
    """The command that ends with 0 if an image has a signature by that key."""
    return ["cosign", "verify", "--private-infrastructure=true", "--key", key, address]


def in_store(key: str) -> bool:
    """Whether the key stays where it is, in a key store or a variable; else it is a file."""
    return key.startswith(_STORES)


def check_key(key: str) -> None:
    """:raises DropforgeError: if it is neither a key store's address nor a file; what it is instead is not repeated."""
    if in_store(key):
        return
    if "-----BEGIN" in key or key.startswith("-") or "://" in key or not Path(key).is_file():
        mend = f"Name a file of `cosign generate-key-pair`, or an address that begins with {', '.join(_STORES)}"
        raise DropforgeError("the key", "it is neither a file nor the address of a key store", mend)


def check_password(key: str, environ: Mapping[str, str], terminal: bool) -> None:
    """:raises DropforgeError: if nobody could say the key's password. :param terminal: whether one may be asked."""
    if not in_store(key) and PASSWORD not in environ and not terminal:
        raise DropforgeError(
            f"environment variable {PASSWORD}",
            "it is not set, and there is no terminal to ask",
            "Set it to the key's password",
        )


def policy(key: str, registry: Registry) -> dict[str, Any]:
    """A ClusterImagePolicy of Sigstore's policy controller: our images run only if that key has signed them.

    :param key: a file with the public key, or the address of one in a KMS.
    :raises DropforgeError: if it is none, as where a private key was named.
    """
    images = f"{registry.host}/{registry.repository('*')}"
    return {
        "apiVersion": "policy.sigstore.dev/v1beta1",
        "kind": "ClusterImagePolicy",
        "metadata": {"name": "dropforge-images"},
        # Without `ctlog` no public log is asked.
        "spec": {"images": [{"glob": images}], "authorities": [{"name": "dropforge", "key": _authority(key)}]},
    }


def _authority(key: str) -> dict[str, str]:
    if key.startswith(_KMS):
        return {"kms": key}
    try:
        text = Path(key).read_text().strip()
    except (OSError, UnicodeDecodeError, ValueError):
        text = ""
    if not text.startswith(_PUBLIC) or text.count("-----BEGIN") != 1:
        mend = f"Name the .pub of `cosign generate-key-pair`, or an address that begins with {', '.join(_KMS)}"
        raise DropforgeError("the public key", "it is no file that holds one", mend)
    return {"data": f"{text}\n"}
