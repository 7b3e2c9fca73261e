"""The caller's own cloud credentials for a kubeconfig's plugins, where the stack's environment has its own.

A kubeconfig of EKS calls `aws eks get-token` for a token. In the stack's processes `AWS_*` is the embedded S3, so that
the plugin would ask AWS with its keys, or at its address. A file before the caller's says for the same users that the
plugin gets the caller's variables; everything else stays the caller's file's.
https://kubernetes.io/docs/concepts/configuration/organize-cluster-access-kubeconfig/#merging-kubeconfig-files
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import yaml

from dropforge.stack.secrets import write_private

VARIABLE: Final = "KUBECONFIG"
_DEFAULT: Final = "~/.kube/config"
_CLOUD: Final = "AWS_"


def kubeconfig_env(file: Path, caller: Mapping[str, str], own: Mapping[str, str]) -> dict[str, str]:
    """What to add to an environment that has `own` of the stack, after the file for it was written; nothing if the
    caller's kubeconfig calls no plugin.

    :param file: where to write it, readable by its owner alone. :param caller: the environment without `own`.
    """
    named = (caller.get(VARIABLE) or _DEFAULT).split(os.pathsep)
    paths = [Path(os.path.expanduser(part)) for part in named if part]  # noqa: PTH111 - Path's raises without a home
    users = [] if file in paths else list(_users(paths, caller, own))
    if not users:
        return {}
    made = {"apiVersion": "v1", "kind": "Config", "users": users}
    write_private(file, yaml.safe_dump(made, sort_keys=False))
    return {VARIABLE: os.pathsep.join(map(str, [file, *paths]))}


def _users(paths: list[Path], caller: Mapping[str, str], own: Mapping[str, str]) -> Iterator[dict[str, Any]]:
    """Users whose token a plugin brings; what cannot be read is left to the clients, which say so."""
    known: set[str] = set()
    for path in paths:
        try:
            found = yaml.safe_load(path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError, yaml.YAMLError):
            continue
        users = found.get("users") if isinstance(found, dict) else None
        for item in users if isinstance(users, list) else []:
            user = item.get("user") if isinstance(item, dict) else None
            plugin = user.get("exec") if isinstance(user, dict) else None
            name = item.get("name") if isinstance(item, dict) else None
            if not isinstance(name, str) or name in known:  # the first file that has a user counts
                continue
            known.add(name)
            if isinstance(user, dict) and isinstance(plugin, dict) and isinstance(plugin.get("command"), str):
                yield {"name": name, "user": {**user, "exec": of_the_caller(plugin, path.parent, caller, own)}}


def of_the_caller(
    plugin: Mapping[str, Any], folder: Path, caller: Mapping[str, str], own: Mapping[str, str]
) -> dict[str, Any]:
    """A user's `exec` that runs with the caller's cloud variables in an environment that has `own`.

    :param folder: of the kubeconfig, from which a command with a slash counts.
    """
    command = str(plugin["command"])
    if "/" in command:
        command = str(folder.absolute() / command)
    theirs = {name: text for name, text in caller.items() if name.startswith(_CLOUD) and own.get(name) != text}
    asked = [item for item in plugin.get("env") or [] if isinstance(item, dict)]
    said = {item.get("name") for item in asked}
    taken = sorted(name for name in own if name.startswith(_CLOUD) and name not in theirs and name not in said)
    return {
        **plugin,
        "command": "env",
        "args": [*(word for name in taken for word in ("-u", name)), command, *(plugin.get("args") or [])],
        "env": [*asked, *({"name": name, "value": text} for name, text in sorted(theirs.items()) if name not in said)],
    }
