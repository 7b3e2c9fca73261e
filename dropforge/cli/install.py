"""`dropforge install`: the order of an installation, and what it needs around it, to read and to apply."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import boto3
import typer
import yaml

from dropforge.errors import DropforgeError
from dropforge.images import LOCK, addresses
from dropforge.install.aws import Account, template
from dropforge.install.cloudformation import Identity
from dropforge.install.logs import Logs, logs_template
from dropforge.install.notifying import merged
from dropforge.install.plan import text
from dropforge.install.steps import PLACES, SIZES
from dropforge.source_root import source_root
from dropforge.terminal import Console, Text

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

_PLAN = "The order (--plan)"
_AWS = "The template (--aws)"
_NOTE = "A bucket that there is (--notify)"


def install(  # one option per name that an account may choose
    plan: Annotated[
        bool,
        typer.Option("--plan", help="Print the steps in their order: why, with which commands, how to check."),
    ] = False,
    size: Annotated[str, typer.Option(help="laptop (not on eks), team or production.", rich_help_panel=_PLAN)] = "team",
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
        typer.Option(
            help="Namespace of trainings; may be repeated with --aws.", show_default="training", rich_help_panel=_AWS
        ),
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
    """Print the steps of an installation, or what an AWS account needs; or let a bucket notify the queue.

    Apply the template with `aws cloudformation deploy --template-file FILE --capabilities CAPABILITY_IAM`.
    """
    if [plan, aws, notify is not None].count(True) != 1:
        raise DropforgeError("`dropforge install`", "it needs one order", "Give --plan, --aws or --notify QUEUE_ARN")
    if plan:
        known = {"BUCKET": bucket, "CLUSTER": cluster, "TRAINING": _only(namespace), "LOGS_BUCKET": logs_bucket}
        typer.echo(_plan(size, on, known), nl=False)
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


def _plan(size: str, on: str, known: dict[str, str]) -> str:
    wanted = next((one for one in SIZES if one == size), None)
    where = next((one for one in PLACES if one == on), None)
    if wanted is None or where is None:
        thing = f"size {size!r}" if wanted is None else f"place {on!r}"
        choices = ", ".join(SIZES if wanted is None else PLACES)
        raise DropforgeError(thing, "no plan is for such", f"Give {choices}")
    root = source_root()
    if not (root / "helm-values").is_dir():
        raise DropforgeError("option --plan", "its commands use files of a clone", "Run it in a clone of Dropforge")
    files = {str(path.relative_to(root)) for path in (root / "helm-values").rglob("*.yaml")}
    lock = Path(LOCK)
    for name, address in addresses(lock.read_text() if lock.exists() else "").items():
        known[f"{name.upper()}_IMAGE"] = address
    return text(wanted, where, files, known)


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
