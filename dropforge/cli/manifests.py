"""`dropforge manifests`: what an installation has beside its charts, as manifests to read and to apply."""

from __future__ import annotations

import importlib.resources
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Any

import typer
import yaml

from dropforge import signatures
from dropforge.cli.job_manifests import runtime_of
from dropforge.errors import DropforgeError
from dropforge.images import Registry
from dropforge.install import exporter, keys, node_pools, policies, rights, storage, triggerer
from dropforge.install.cloudformation import check_namespace
from dropforge.install.steps import Size, size_named
from dropforge.placement.catalogue import find, read
from dropforge.recipes import load_recipe
from dropforge.watching.alerts import rules
from dropforge.watching.files import files


@dataclass(frozen=True)
class _Asked:
    training: tuple[str, ...]
    size: Size
    image: str
    cluster: str
    instances: tuple[str, ...]
    nodes: int
    zone: str
    capacity: str
    reservation: str
    subnet: str
    group: str
    file_system: str
    ports: tuple[int, ...]
    registry: str
    key: str
    recipe: str
    gigabytes: int
    node_path: str
    enforce: str


def manifests(
    names: Annotated[
        list[str],
        typer.Argument(
            help="namespaces, rights, runtime, keys, grafana-login, job-triggerer, watching, network-policies, "
            "storage-classes, claims, node-pools, image-policy"
        ),
    ],
    namespace: Annotated[
        list[str] | None, typer.Option(help="Namespace of trainings; may be repeated.", show_default="training")
    ] = None,
    size: Annotated[str, typer.Option(help="laptop, team or production.")] = "team",
    enforce: Annotated[
        str, typer.Option(help="namespaces: the Pod Security Standard that they enforce, baseline or restricted.")
    ] = rights.STANDARDS[0],
    image: Annotated[str, typer.Option(help="job-triggerer, watching: Airflow's image.")] = "",
    cluster: Annotated[str, typer.Option(help="node-pools: the EKS cluster.")] = "",
    instance: Annotated[
        list[str] | None, typer.Option(help="node-pools: a name from `dropforge instances`; may be repeated.")
    ] = None,
    nodes: Annotated[int, typer.Option(help="node-pools: largest number of each.")] = 2,
    zone: Annotated[str, typer.Option(help="node-pools: the only zone.")] = "",
    capacity: Annotated[str, typer.Option(help="node-pools: on-demand, spot or reserved.")] = "on-demand",
    reservation: Annotated[str, typer.Option(help="node-pools: id of a capacity reservation or block.")] = "",
    subnet: Annotated[str, typer.Option(help="storage-classes: of FSx.")] = "",
    security_group: Annotated[str, typer.Option(help="storage-classes: of FSx.")] = "",
    file_system: Annotated[str, typer.Option(help="storage-classes: of EFS.")] = "",
    recipe: Annotated[str, typer.Option(help="claims: the preset or file whose volumes are claimed.")] = "",
    gigabytes: Annotated[int, typer.Option(help="claims: of each, or the smallest size of its storage.")] = 100,
    node_path: Annotated[
        str, typer.Option(help="claims: the folder of each node's own disk; teams get folders of their own in it.")
    ] = "/mnt/dropforge",
    port: Annotated[
        list[int] | None,
        typer.Option(
            help="network-policies: of S3 or Kubernetes' API, besides 443; may be repeated.", min=1, max=65535
        ),
    ] = None,
    registry: Annotated[str, typer.Option(help="image-policy: HOST or HOST/PATH of the images.")] = "",
    key: Annotated[str, typer.Option(help="image-policy: the public key's file, or its address in a KMS.")] = "",
) -> None:
    """Print manifests: `dropforge manifests namespaces rights | kubectl apply -f -`. It changes nothing itself."""
    wanted, training = size_named(size), tuple(namespace or ("training",))
    for name in training:
        check_namespace(name)
    asked = _Asked(
        training=training,
        size=wanted,
        image=image,
        cluster=cluster,
        instances=tuple(instance or ()),
        nodes=nodes,
        zone=zone,
        capacity=capacity,
        reservation=reservation,
        subnet=subnet,
        group=security_group,
        file_system=file_system,
        ports=(443, *(one for one in port or () if one != 443)),
        registry=registry,
        key=key,
        recipe=recipe,
        gigabytes=gigabytes,
        node_path=node_path,
        enforce=enforce,
    )
    found: list[dict[str, Any]] = []
    for name in names:
        if name not in _KINDS:
            raise DropforgeError(f"manifests {name!r}", "there are none such", f"Give some of {', '.join(_KINDS)}")
        found += _KINDS[name](asked)
    if any(one["kind"] == "Secret" for one in found) and to_terminal():
        raise DropforgeError(
            "the secrets", "they would be shown on the terminal", "Pipe them: ... | kubectl create -f -"
        )
    typer.echo(yaml.safe_dump_all(found, sort_keys=False, width=120), nl=False)


def to_terminal() -> bool:
    return sys.stdout.isatty()


def _rights(asked: _Asked) -> list[dict[str, Any]]:
    folder = importlib.resources.files("kubeflow_training") / "manifests"
    roles = {name: (folder / name).read_text() for name in rights.ROLES}
    return rights.rights(asked.training, asked.size, roles)


def _triggerer(asked: _Asked) -> list[dict[str, Any]]:
    return triggerer.job_triggerer(asked.size, _image(asked))


def _watching(asked: _Asked) -> list[dict[str, Any]]:
    shown = {name: text for name, text in files().items() if name.endswith(".json")}
    return [*exporter.exporter(_image(asked)), exporter.alerts(rules()), exporter.dashboards(shown)]


def _image(asked: _Asked) -> str:
    if not asked.image:
        raise DropforgeError("option --image", "it is missing", "Give Airflow's image, by the digest of images.lock")
    return asked.image


def _storage(asked: _Asked) -> list[dict[str, Any]]:
    found = []
    if asked.subnet or asked.group:
        found.append(storage.lustre(asked.subnet, asked.group))
    if asked.file_system:
        found.append(storage.nfs(asked.file_system))
    if not found:
        mend = "Give --subnet and --security-group for FSx, --file-system for EFS, or all three"
        raise DropforgeError("storage classes", "no filesystem was named", mend)
    return found


def _claims(asked: _Asked) -> list[dict[str, Any]]:
    if not asked.recipe:
        raise DropforgeError("option --recipe", "it is missing", "Name the preset or file whose volumes are claimed")
    recipe = load_recipe(asked.recipe)
    sizes: dict[str, Any] = {"gigabytes": asked.gigabytes, "node_path": asked.node_path}
    mounted = {recipe.compute.namespace: recipe.compute.volumes}
    pods = recipe.curation.spark.cluster if recipe.curation and recipe.curation.spark else None
    if pods is not None:
        # Together: a claim of both is one, and its storage may be said in one place alone.
        mounted[pods.namespace] = (*mounted.get(pods.namespace, ()), *pods.volumes)
    found = [one for name, volumes in mounted.items() for one in storage.claims(volumes, name, **sizes)]
    if not found:
        raise DropforgeError(f"recipe {asked.recipe}", "it has no volumes", "Name another, or claim nothing")
    return found


def _image_policy(asked: _Asked) -> list[dict[str, Any]]:
    for option, value in (("--registry", asked.registry), ("--key", asked.key)):
        if not value:
            raise DropforgeError(f"option {option}", "it is missing", "Give both --registry and --key")
    return [signatures.policy(asked.key, Registry.parse(asked.registry))]


def _pools(asked: _Asked) -> list[dict[str, Any]]:
    if not asked.instances:
        raise DropforgeError("option --instance", "it is missing", "Name one or more of `dropforge instances`")
    capacity = next((one for one in node_pools.CAPACITIES if one == asked.capacity), None)
    if capacity is None:
        choices = ", ".join(node_pools.CAPACITIES)
        raise DropforgeError(f"capacity {asked.capacity!r}", "EC2 has none such", f"Give one of {choices}")
    among = read()
    found = []
    for name in asked.instances:
        found += node_pools.node_pool(
            find(name, among),
            cluster=asked.cluster,
            nodes=asked.nodes,
            zone=asked.zone,
            capacity=capacity,
            reservation=asked.reservation,
        )
    return found


_KINDS: dict[str, Callable[[_Asked], list[dict[str, Any]]]] = {
    "namespaces": lambda asked: rights.namespaces(asked.training, asked.enforce),
    "rights": _rights,
    "runtime": lambda asked: [runtime_of(name) for name in asked.training],
    "keys": lambda asked: keys.airflow_keys(asked.size),
    "grafana-login": lambda _: keys.grafana_login(),
    "job-triggerer": _triggerer,
    "watching": _watching,
    "network-policies": lambda asked: policies.policies(asked.training, asked.ports),
    "storage-classes": _storage,
    "claims": _claims,
    "node-pools": _pools,
    "image-policy": _image_policy,
}
