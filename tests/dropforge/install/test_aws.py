"""The template: AWS's own schemas accept it, and each role may do what its component does and nothing else."""

from __future__ import annotations

import ast
import json
import urllib.request
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import boto3
import cfnlint.api as cfnlint
import pytest
import yaml
from botocore.config import Config
from botocore.exceptions import ClientError
from dropforge_airflow.triggers.queue_settings import queue_troubles

from dropforge import layout
from dropforge.errors import DropforgeError
from dropforge.install.access import COMPONENTS, TASK_LOGS, Component
from dropforge.install.aws import Account, statements, template
from dropforge.install.logs import Logs, logs_template
from dropforge.install.steps import STEPS
from tests.dropforge.install.test_values import merged
from tests.moto_server import moto_server

PROVIDER = (
    "arn:aws:iam::111122223333:oidc-provider/oidc.eks.eu-west-1.amazonaws.com/id/EXAMPLED539D4633E53DE1B71EXAMPLE"
)
KEY = "arn:aws:kms:eu-west-1:111122223333:key/1234abcd-12ab-34cd-56ef-1234567890ab"
ACCOUNT = Account("acme-dropforge", "training-1")
VARIANTS = {
    "pod identity": ACCOUNT,
    "irsa, key, two namespaces": replace(
        ACCOUNT, identity="irsa", provider=PROVIDER, key=KEY, training=("team-a", "team-b")
    ),
    "a bucket that there is, and another": replace(ACCOUNT, make_bucket=False, drop_buckets=("acme-uploads",)),
}
# One key of each kind, and who may do what with it; what is not named here may do nothing.
DROP = "drops/support/one/questions.jsonl"
KEYS = {
    DROP: {"r": {"watcher", "tasks", "curation"}},
    layout.inbox_key("0" * 32): {
        "r": {"watcher", "tasks", "callbacks", "pages", "metrics"},
        "w": {"watcher", "tasks"},
        "d": {"tasks"},
    },
    layout.ledger_key("support", "1" * 32): {
        "r": {"watcher", "tasks", "callbacks", "pages", "metrics"},
        "w": {"tasks"},
        "d": {"tasks"},
    },
    layout.told_key("x"): {
        "r": {"watcher", "tasks", "callbacks", "pages", "metrics"},
        "w": {"watcher", "tasks", "callbacks"},
        "d": {"tasks"},
    },
    layout.manifest_key("support", "2" * 64): {
        "r": {"tasks", "curation", "trainer", "pages"},
        "w": {"tasks", "curation"},
        "d": {"tasks", "curation"},
    },
    "datasets/support/" + "2" * 64 + "/tokens/3/plan.json": {
        "r": {"tasks", "curation", "trainer", "pages"},
        "w": {"tasks", "curation", "trainer"},
        "d": {"tasks", "curation", "trainer"},
    },
    # No version's folder, though its name is that of one within a version.
    "datasets/support/tokens/manifest.json": {
        "r": {"tasks", "curation", "trainer", "pages"},
        "w": {"tasks", "curation"},
        "d": {"tasks", "curation"},
    },
    layout.run_key("support-1"): {
        "r": {"watcher", "tasks", "callbacks", "pages", "trainer", "mlflow", "metrics"},
        "w": {"tasks", "trainer"},
        "d": {"tasks", "trainer"},
    },
    "mlflow/1/2/artifacts/card.md": {
        "r": {"mlflow"},  # whose server passes on what tasks and trainers send
        "w": {"mlflow"},
        "d": {"mlflow"},
    },
    f"{TASK_LOGS}dag_id=x/1.log": {"r": {"watcher", "tasks", "pages"}, "w": {"watcher", "tasks"}},
    "somebody-elses/secret": {},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_schemas_of_aws_accept_the_template(variant: str) -> None:
    text = yaml.safe_dump(template(VARIANTS[variant]), sort_keys=False)
    assert len(text) < 51_200  # what CloudFormation takes without an upload
    assert cfnlint.lint(text, config=cfnlint.ManualArgs(regions=["eu-west-1"])) == []


def test_no_key_of_an_access_and_no_right_to_everything() -> None:
    for account in VARIANTS.values():
        text = json.dumps(template(account))
        assert "AccessKey" not in text
        for resource in template(account)["Resources"].values():
            if resource["Type"] == "AWS::IAM::Role":
                for policy in resource["Properties"]["Policies"]:
                    for one in policy["PolicyDocument"]["Statement"]:
                        assert "*" not in one["Resource"]
                        assert not any("*" in action for action in one["Action"])


def test_the_queue_satisfies_what_the_watcher_asks_of_queues() -> None:
    made = template(ACCOUNT)["Resources"]
    queue, dead = made["Queue"]["Properties"], made["DeadLetters"]["Properties"]
    told = {name: str(queue[name]) for name in ("VisibilityTimeout", "MessageRetentionPeriod")}
    told["RedrivePolicy"] = json.dumps(queue["RedrivePolicy"])
    letters = {"MessageRetentionPeriod": str(dead["MessageRetentionPeriod"])}
    assert queue_troubles(told, letters, 300) == ([], [])


def test_irsa_names_the_service_accounts_of_every_namespace() -> None:
    account = VARIANTS["irsa, key, two namespaces"]
    made = template(account)["Resources"]
    (trust,) = made["TrainerRole"]["Properties"]["AssumeRolePolicyDocument"]["Statement"]
    issuer = "oidc.eks.eu-west-1.amazonaws.com/id/EXAMPLED539D4633E53DE1B71EXAMPLE"
    assert trust["Condition"]["StringEquals"] == {
        f"{issuer}:aud": "sts.amazonaws.com",
        f"{issuer}:sub": [f"system:serviceaccount:{name}:dropforge-trainer" for name in ("team-a", "team-b")],
    }
    assert not [name for name, one in made.items() if one["Type"] == "AWS::EKS::PodIdentityAssociation"]


def test_other_buckets_are_read_for_drops_alone() -> None:
    account = VARIANTS["a bucket that there is, and another"]
    for component in COMPONENTS:
        other = [one for one in statements(account, component) if "acme-uploads" in json.dumps(one)]
        if component.name in ("watcher", "tasks", "curation"):
            assert {action for one in other for action in one["Action"]} == {
                "s3:ListBucket",
                "s3:GetObject",
                "s3:GetObjectVersion",
            }
        else:
            assert other == []


@pytest.mark.parametrize(
    ("change", "thing"),
    [
        ({"bucket": "Acme"}, "bucket 'Acme'"),
        ({"bucket": "a..b"}, "bucket 'a..b'"),
        ({"bucket": "x${AWS::AccountId}"}, "bucket 'x"),
        ({"queue": "a b"}, "queue 'a b'"),
        ({"cluster": "-x"}, "cluster '-x'"),
        ({"training": ("Team",)}, "namespace 'Team'"),
        ({"key": "alias/mine"}, "KMS key 'alias/mine'"),
        ({"identity": "irsa"}, "OIDC provider ''"),
        ({"provider": PROVIDER}, "OIDC provider"),
        ({"drop_buckets": ("acme-dropforge",)}, "bucket acme-dropforge"),
    ],
)
def test_names_that_cannot_be_are_refused(change: dict[str, Any], thing: str) -> None:
    with pytest.raises(DropforgeError) as refused:
        replace(ACCOUNT, **change)
    assert refused.value.thing.startswith(thing)
    assert refused.value.mend


@pytest.fixture(scope="module")
def roles() -> Iterator[dict[str, Any]]:
    """S3 as each component sees it, in an account where the stack was made and rights are held to."""
    with moto_server() as url:
        yield from _roles(url)


def _roles(url: str) -> Iterator[dict[str, Any]]:
    def client(service: str, key: str = "any", secret: str = "any") -> Any:
        config = Config(retries={"total_max_attempts": 1}, s3={"addressing_style": "path"})
        connect: Any = boto3.client
        return connect(
            service,
            endpoint_url=url,
            region_name="eu-west-1",
            aws_access_key_id=key,
            aws_secret_access_key=secret,
            config=config,
        )

    try:
        # moto reads no notification, takes no association, and holds a policy's conditions against everybody.
        account = replace(ACCOUNT, identity="irsa", provider=PROVIDER, make_bucket=False)
        client("s3").create_bucket(Bucket=account.bucket, CreateBucketConfiguration={"LocationConstraint": "eu-west-1"})
        for key in KEYS:
            client("s3").put_object(Bucket=account.bucket, Key=key, Body=b"x")
        formation = client("cloudformation")
        formation.create_stack(StackName="dropforge", TemplateBody=json.dumps(template(account)))
        (stack,) = formation.describe_stacks(StackName="dropforge")["Stacks"]
        assert stack["StackStatus"] == "CREATE_COMPLETE", stack
        made = {one["OutputKey"]: one["OutputValue"] for one in stack["Outputs"]}
        found = {}
        for component in COMPONENTS:
            arn = made[f"{component.name.capitalize()}RoleArn"]
            # moto holds to policies of users alone, so each role's is given to one; it tells it as Python prints it.
            iam, name = client("iam"), component.name
            policy = iam.get_role_policy(RoleName=arn.rpartition("/")[2], PolicyName="dropforge")["PolicyDocument"]
            iam.create_user(UserName=name)
            iam.put_user_policy(
                UserName=name, PolicyName="dropforge", PolicyDocument=json.dumps(ast.literal_eval(str(policy)))
            )
            key = iam.create_access_key(UserName=name)["AccessKey"]
            found[name] = client("s3", key["AccessKeyId"], key["SecretAccessKey"])
        _hold_to_rights(url, 0)
        yield found
    finally:
        _hold_to_rights(url, 10**9)


def _hold_to_rights(url: str, after: int) -> None:
    """From the call of this number on."""
    request = urllib.request.Request(
        f"{url}/moto-api/reset-auth", data=str(after).encode(), headers={"Content-Type": "text/plain"}
    )
    urllib.request.urlopen(request).close()


def _may(call: Any, **arguments: Any) -> bool:
    try:
        call(Bucket=ACCOUNT.bucket, **arguments)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("AccessDenied", "403"):
            raise
        return False
    return True


LOGS = Logs("acme-logs", "training-1")


@pytest.mark.parametrize("logs", [LOGS, replace(LOGS, identity="irsa", provider=PROVIDER, key=KEY)])
def test_the_schemas_of_aws_accept_the_bucket_of_logs_and_its_role_reaches_it_alone(logs: Logs) -> None:
    made = logs_template(logs)
    text = yaml.safe_dump(made, sort_keys=False)
    assert cfnlint.lint(text, config=cfnlint.ManualArgs(regions=["eu-west-1"])) == []
    bucket, role = made["Resources"]["Bucket"], made["Resources"]["LokiRole"]["Properties"]
    assert bucket["DeletionPolicy"] == "Retain"
    assert set(bucket["Properties"]["PublicAccessBlockConfiguration"].values()) == {True}
    (policy,) = role["Policies"]
    for one in policy["PolicyDocument"]["Statement"]:
        assert "acme-logs" in json.dumps(one["Resource"]) or one["Resource"] == [KEY]
        assert not any("*" in action for action in one["Action"])
    (trust,) = role["AssumeRolePolicyDocument"]["Statement"]
    pods = [one["Properties"] for one in made["Resources"].values() if one["Type"].startswith("AWS::EKS")]
    if logs.identity == "irsa":
        assert "system:serviceaccount:monitoring:loki" in json.dumps(trust["Condition"])
        assert pods == []
    else:
        assert [(one["Namespace"], one["ServiceAccount"]) for one in pods] == [("monitoring", "loki")]


def test_the_role_of_loki_is_for_the_account_that_its_chart_makes() -> None:
    account = merged("loki", "team", "eks")["serviceAccount"]["name"]
    (chart,) = (step.chart for step in STEPS if step.name == "loki")
    assert chart is not None
    assert (LOGS.namespace, LOGS.account) == (chart.namespace, account)


@pytest.mark.parametrize("component", COMPONENTS, ids=lambda one: one.name)
def test_a_role_may_do_what_its_component_does_and_nothing_else(roles: dict[str, Any], component: Component) -> None:
    s3, name = roles[component.name], component.name
    for key, who in KEYS.items():
        assert _may(s3.get_object, Key=key) == (name in who.get("r", ())), f"read {key}"
        assert _may(s3.put_object, Key=key, Body=b"y") == (name in who.get("w", ())), f"write {key}"
    for key, who in KEYS.items():
        assert _may(s3.delete_object, Key=key) == (name in who.get("d", ())), f"delete {key}"
        if name in who.get("d", ()):  # for the next one
            assert _may(s3.put_object, Key=key, Body=b"x") == (name in who.get("w", ()))
