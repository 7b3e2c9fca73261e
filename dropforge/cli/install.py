"""`dropforge install`: an installation's manifests and steps, and what it needs around it, to read and to apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, TypedDict

import boto3
import typer
import yaml

from dropforge.cli import manifests
from dropforge.errors import DropforgeError
from dropforge.images import LOCK, pinned, read_lock
from dropforge.install.aws import Account, template
from dropforge.install.cloudformation import Identity, check_bucket, check_namespace
from dropforge.install.logs import Logs, logs_template
from dropforge.install.notifying import merged
from dropforge.install.plan import text
from dropforge.install.rights import STANDARDS
from dropforge.install.steps import PLACES, Size, size_named
from dropforge.placement.queues import render
from dropforge.placement.teams import FILE, Teams
from dropforge.placement.teams_file import parse_teams, read_teams
from dropforge.source_root import source_root
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

#: Kinds of `dropforge manifests` that a size decides alone, in an order in which they can be applied; last those that
#: hold objects of a chart. A laptop has the first three.
BY_SIZE: Final = ("namespaces", "rights", "job-triggerer", "network-policies", "watching", "runtime")
#: All others: Secrets with new values, and what takes options of its own.
OTHERS: Final = ("keys", "grafana-login", "storage-classes", "claims", "node-pools", "image-policy")

_SIZE = "The manifests (--size)"
_PLAN = "The order (--plan)"
_AWS = "The template (--aws)"
_NOTE = "A bucket that there is (--notify)"


def install(  # one option per name that an account may choose
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print the steps in their order: why, with which commands, how to check."),
    ] = False,
    size: Annotated[
        str | None,
        typer.Option(
            help="laptop (not on eks), team or production. Without --plan it prints the manifests of what is in no "
            "chart, for `| kubectl apply -f -`.",
            show_default="team, with --plan",
        ),
    ] = None,
    enforce: Annotated[
        str,
        typer.Option(
            help="The Pod Security Standard that namespaces enforce, baseline or restricted.", rich_help_panel=_SIZE
        ),
    ] = STANDARDS[0],
    subnet: Annotated[str, typer.Option(help="Of FSx, for its StorageClass.", rich_help_panel=_SIZE)] = "",
    security_group: Annotated[str, typer.Option(help="Of FSx, for its StorageClass.", rich_help_panel=_SIZE)] = "",
    file_system: Annotated[str, typer.Option(help="Of EFS, for its StorageClass.", rich_help_panel=_SIZE)] = "",
    recipe: Annotated[
        str, typer.Option(help="The preset or file whose volumes are claimed.", rich_help_panel=_SIZE)
    ] = "",
    gigabytes: Annotated[
        int, typer.Option(help="Of each claim, or the smallest size of its storage.", rich_help_panel=_SIZE)
    ] = 100,
    on: Annotated[str, typer.Option(help="eks, nebius or any.", rich_help_panel=_PLAN)] = "any",
    aws: Annotated[
        bool, typer.Option("--aws", help="Print a CloudFormation template: bucket, queues, a role per component.")
    ] = False,
    notify: Annotated[
        str | None,
        typer.Option(
            metavar="QUEUE_ARN",
            help="Let --bucket notify this queue too of finished drops, besides others; shown unless --apply.",
            rich_help_panel=_NOTE,
        ),
    ] = None,
    bucket: Annotated[str, typer.Option(help="Bucket of drops, datasets and runs.")] = "",
    cluster: Annotated[str, typer.Option(help="The EKS cluster.", rich_help_panel=_AWS)] = "",
    queue: Annotated[str, typer.Option(help="The queue; its dead letters are QUEUE-dead.", rich_help_panel=_AWS)] = (
        Account.queue
    ),
    identity: Annotated[
        str, typer.Option(help="How pods get their roles: pod-identity or irsa.", rich_help_panel=_AWS)
    ] = Account.identity,
    oidc_provider: Annotated[
        str, typer.Option(help="ARN of the cluster's OIDC provider, with irsa.", rich_help_panel=_AWS)
    ] = "",
    airflow_namespace: Annotated[
        str, typer.Option(help="Namespace of Airflow and MLflow.", rich_help_panel=_AWS)
    ] = Account.airflow,
    namespace: Annotated[
        list[str] | None,
        typer.Option(help="Namespace of trainings; may be repeated without --plan.", show_default="training"),
    ] = None,
    existing_bucket: Annotated[
        bool,
        typer.Option("--existing-bucket", help="The bucket exists: do not change it.", rich_help_panel=_AWS),
    ] = False,
    drop_bucket: Annotated[
        list[str] | None,
        typer.Option(help="Another bucket that drops come from; may be repeated.", rich_help_panel=_AWS),
    ] = None,
    kms_key: Annotated[
        str, typer.Option(help="ARN of a KMS key for the bucket; S3's own key by default.", rich_help_panel=_AWS)
    ] = "",
    logs_bucket: Annotated[
        str,
        typer.Option(
            help="Instead of all this: the bucket of Loki, with the role of its account.", rich_help_panel=_AWS
        ),
    ] = "",
    apply: Annotated[bool, typer.Option("--apply", help="Set the notification.", rich_help_panel=_NOTE)] = False,
) -> None:
    """Print an installation's manifests, its steps, or what an AWS account needs; or let a bucket notify the queue.

    Apply the template with `aws cloudformation deploy --template-file FILE --capabilities CAPABILITY_IAM`.
    """
    orders = [plan, aws, notify is not None].count(True)
    if orders > 1 or (orders == 0 and size is None):
        mend = "Give --size, --plan, --aws or --notify QUEUE_ARN"
        raise DropforgeError("`dropforge install`", "it needs one order", mend)
    storage: _Storage = {
        "subnet": subnet,
        "security_group": security_group,
        "file_system": file_system,
        "recipe": recipe,
        "gigabytes": gigabytes,
    }
    if orders and (enforce != STANDARDS[0] or storage != _NO_STORAGE):
        mend = "Give them to `dropforge install --size SIZE` alone, or to `dropforge manifests`"
        raise DropforgeError(f"options of {_SIZE!r}", "they are for the manifests of a size", mend)
    if plan or not orders:
        account_options = {
            "--airflow-namespace": airflow_namespace != Account.airflow,
            "--identity": identity != Account.identity,
            "--oidc-provider": bool(oidc_provider),
            "--existing-bucket": existing_bucket,
            "--drop-bucket": bool(drop_bucket),
            "--kms-key": bool(kms_key),
        }
        if given := [name for name, is_given in account_options.items() if is_given]:
            cause = "it is for the template (--aws), and changes no manifest or step"
            mend = "Leave it out; docs/how-to/install/existing-airflow.md says what other names take"
            raise DropforgeError(f"option {given[0]}", cause, mend)
        for name in namespace or ():
            check_namespace(name)
        if bucket:
            check_bucket(bucket)
    if plan:
        known = {"BUCKET": bucket, "CLUSTER": cluster, "TRAINING": _only(namespace), "LOGS_BUCKET": logs_bucket}
        typer.echo(_plan(size_named(size or "team"), on, known), nl=False)
        return
    if size is not None and orders == 0:
        _manifests(size_named(size), namespace or ["training"], enforce, storage)
        return
    if logs_bucket and (bucket or notify is not None):
        raise DropforgeError("option --logs-bucket", "it is a template of its own", "Leave --bucket and --notify out")
    if not bucket and not logs_bucket:
        raise DropforgeError("option --bucket", "it is missing", "Name the bucket of drops, datasets and runs")
    if notify is not None:
        _notify(bucket, notify, apply)
        return
    if identity not in ("pod-identity", "irsa"):
        raise DropforgeError(f"identity {identity!r}", "pods get no roles that way", "Give pod-identity or irsa")
    if not cluster:
        raise DropforgeError("option --cluster", "it is missing", "Name the EKS cluster whose pods get the roles")
    way: Identity = "irsa" if identity == "irsa" else "pod-identity"
    if logs_bucket:
        logs = Logs(logs_bucket, cluster, identity=way, provider=oidc_provider, key=kms_key)
        typer.echo(yaml.safe_dump(logs_template(logs), sort_keys=False, width=120), nl=False)
        return
    account = Account(
        bucket=bucket,
        cluster=cluster,
        queue=queue,
        identity=way,
        provider=oidc_provider,
        airflow=airflow_namespace,
        training=tuple(namespace or ("training",)),
        make_bucket=not existing_bucket,
        key=kms_key,
        drop_buckets=tuple(drop_bucket or ()),
    )
    typer.echo(yaml.safe_dump(template(account), sort_keys=False, width=120), nl=False)
    told = account.buckets[existing_bucket is False :]
    for name in told:
        text = f"Once the stack is there: dropforge install --notify QUEUE_ARN --bucket {name} --apply"
        Console(stderr=True, soft_wrap=True).print(Text(text))


def _only(namespaces: list[str] | None) -> str:
    """The plan's namespace of trainings; empty for that of the example. :raises DropforgeError: for several."""
    first, *others = namespaces or [""]
    if others:
        mend = f"Give one; docs/how-to/install/kubernetes-special-cases.md says what {others[0]} needs then"
        raise DropforgeError("option --namespace", "a plan is for one namespace of trainings", mend)
    return first


class _Storage(TypedDict):
    subnet: str
    security_group: str
    file_system: str
    recipe: str
    gigabytes: int


_NO_STORAGE: Final = _Storage(subnet="", security_group="", file_system="", recipe="", gigabytes=100)


def _manifests(size: Size, training: list[str], enforce: str, storage: _Storage) -> None:
    """Print what is in no chart: the kinds of `BY_SIZE`, the queues where there are some, and the storage asked for."""
    large = size != "laptop"
    queues = f"---\n{yaml.safe_dump_all(render(_teams(training)), sort_keys=False, width=120)}" if large else ""
    classes = storage["subnet"] or storage["security_group"] or storage["file_system"]
    asked = [*(["storage-classes"] if classes else []), *(["claims"] if storage["recipe"] else [])]
    # Storage needs kinds of Kubernetes alone, so it comes before those that a chart has to bring.
    kinds = [*BY_SIZE[:2], *asked, *(BY_SIZE[2:] if large else BY_SIZE[2:3])]
    manifests.manifests(
        kinds,
        namespace=training,
        size=size,
        enforce=enforce,
        image=_airflow_image(),
        port=[443, 6443],  # of S3 and of Kubernetes' API, as in the plan
        **storage,
    )
    typer.echo(queues, nl=False)
    told = Console(stderr=True, soft_wrap=True)
    left = ", ".join(kind for kind in OTHERS if kind not in asked)
    told.print(Text(f"`dropforge manifests` prints what is not among them: {left}."))


def _airflow_image() -> str:
    """:raises DropforgeError: if `images push` wrote none in this folder."""
    address = read_lock(Path(LOCK)).get("airflow")
    if address is None:
        mend = "Give `dropforge images push --registry REGISTRY` first, or come to the folder where it was given"
        raise DropforgeError(LOCK, "it names no image of Airflow", mend)
    return pinned(address)


def _teams(training: list[str]) -> Teams:
    """Those of `teams.yaml`, or the one team that the plan begins with.

    :raises DropforgeError: where neither is to be had.
    """
    if Path(FILE).exists():
        return read_teams(Path(FILE))
    example = source_root() / "helm-values" / "one-team.yaml"
    (namespace, *others) = training
    if others or not example.is_file():
        cause = "it is missing, and helm-values/one-team.yaml of a clone is for one namespace alone"
        raise DropforgeError(FILE, cause, "Write it: docs/how-to/team-queues.md says how")
    return parse_teams(example.read_text().replace("namespace: training\n", f"namespace: {namespace}\n"))


def _plan(size: Size, on: str, known: dict[str, str]) -> str:
    where = next((one for one in PLACES if one == on), None)
    if where is None:
        raise DropforgeError(f"place {on!r}", "no plan is for such", f"Give {', '.join(PLACES)}")
    root = source_root()
    if not (root / "helm-values").is_dir():
        raise DropforgeError("option --plan", "its commands use files of a clone", "Run it in a clone of Dropforge")
    files = {str(path.relative_to(root)) for path in (root / "helm-values").rglob("*.yaml")}
    for name, address in read_lock(Path(LOCK)).items():
        known[f"{name.upper()}_IMAGE"] = pinned(address)
    return text(size, where, files, known)


def _notify(bucket: str, queue_arn: str, apply: bool) -> None:
    client: S3Client = boto3.client("s3")
    there: Any = client.get_bucket_notification_configuration(Bucket=bucket)
    there.pop("ResponseMetadata", None)
    whole = merged(bucket, there, queue_arn)
    typer.echo(json.dumps(whole, indent=2))
    told = Console(stderr=True, soft_wrap=True)
    if whole == there:
        told.print(Text(f"Bucket {bucket} already notifies the queue of finished drops."))
    elif not apply:
        told.print(Text(f"Nothing was changed. With --apply this becomes the configuration of bucket {bucket}."))
    else:
        client.put_bucket_notification_configuration(Bucket=bucket, NotificationConfiguration=whole)  # type: ignore[arg-type]
        told.print(Text(f"Bucket {bucket} now notifies the queue of finished drops."))
