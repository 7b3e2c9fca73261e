"""What the pages have typed at a cloud, given to a stand-in: moto for AWS, a script that answers as Nebius' command."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from moto.core import DEFAULT_ACCOUNT_ID as ACCOUNT_ID
from moto.eks.models import eks_backends

from dropforge.install.steps import STEPS
from tests.compose.server import page_commands
from tests.dropforge.install.test_plan import ROOT
from tests.moto_server import moto_server

CLUSTER, REGION = "training-1", "eu-west-1"


@pytest.fixture
def account(tmp_path: Path) -> Iterator[dict[str, str]]:
    """The environment of somebody with an account that has a cluster in a network like eksctl's."""
    if not shutil.which("aws"):
        pytest.skip("there is no `aws`")
    with moto_server() as address:
        keys = {"AWS_ACCESS_KEY_ID": "k", "AWS_SECRET_ACCESS_KEY": "s", "AWS_DEFAULT_REGION": REGION}
        env = {**os.environ, **keys, "AWS_ENDPOINT_URL": address, "AWS_PAGER": "", "AWS_CONFIG_FILE": "/dev/null"}
        with pytest.MonkeyPatch.context() as patched:
            for name in (*keys, "AWS_ENDPOINT_URL"):
                patched.setenv(name, env[name])
            ec2: Any = boto3.client("ec2")
            vpc = ec2.create_vpc(CidrBlock="192.168.0.0/16")["Vpc"]["VpcId"]
            tags = [{"Key": "kubernetes.io/role/internal-elb", "Value": "1"}]
            subnets = []
            for number, zone in enumerate("ab"):
                made = ec2.create_subnet(
                    VpcId=vpc, CidrBlock=f"192.168.{number}.0/24", AvailabilityZone=f"{REGION}{zone}"
                )
                subnets.append(made["Subnet"]["SubnetId"])
            ec2.create_tags(Resources=subnets, Tags=tags)
            eks: Any = boto3.client("eks")
            role = f"arn:aws:iam::123456789012:role/{CLUSTER}"
            eks.create_cluster(name=CLUSTER, roleArn=role, resourcesVpcConfig={"subnetIds": subnets})
            # What AWS answers and moto leaves out.
            eks_backends[ACCOUNT_ID][REGION].clusters[CLUSTER].resources_vpc_config["vpcId"] = vpc
            yield env
            eks.delete_cluster(name=CLUSTER)  # moto keeps it as long as the process


def stand_in(folder: Path, name: str, script: str) -> None:
    (folder / name).write_text(script)
    (folder / name).chmod(0o755)


def given(commands: str, folder: Path, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    """Commands typed in one shell, in a folder with a clone's files."""
    for name in ("docs", "helm-values"):
        if not (folder / name).exists():
            (folder / name).symlink_to(ROOT / name)
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", commands],
        cwd=folder,
        env={**env, "PATH": f"{folder}:{Path(sys.executable).parent}:{env['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    return done


def test_filesystem_and_database_are_made_and_removed_at_aws(account: dict[str, str], tmp_path: Path) -> None:
    stand_in(tmp_path, "kubectl", '#!/bin/sh\necho "$*" >>told\n')
    blocks = {name: page_commands("eks-services.md", name) for name in ("Network", "EFS", "PostgreSQL", "Removal")}
    database, second = blocks["PostgreSQL"]
    keep = '\nprintf "%s" "$(cat master-database.txt)" >kept\n'
    made = given("\n".join([*blocks["Network"], *blocks["EFS"], database, keep, second]), tmp_path, account)
    rds: Any = boto3.client("rds")
    (found,) = rds.describe_db_instances()["DBInstances"]
    assert (found["PubliclyAccessible"], found["StorageEncrypted"], found["MultiAZ"]) == (False, True, True)
    assert found["DeletionProtection"]
    word = (tmp_path / "kept").read_text()
    assert len(word) == 48
    for name in ("airflow", "mlflow"):
        path = tmp_path / f"{name}-database.txt"
        host = found["Endpoint"]["Address"]
        assert path.read_text() == f"postgresql+psycopg2://dropforge:{word}@{host}:5432/{name}"
        assert path.stat().st_mode & 0o077 == 0
    assert not (tmp_path / "master-database.txt").exists()
    assert word not in made.stdout + made.stderr + (tmp_path / "told").read_text()
    efs: Any = boto3.client("efs")
    (files,) = efs.describe_file_systems()["FileSystems"]
    assert f"FILE_SYSTEM={files['FileSystemId']}" in made.stdout
    assert files["Encrypted"]
    assert len(efs.describe_mount_targets(FileSystemId=files["FileSystemId"])["MountTargets"]) == 2
    ec2: Any = boto3.client("ec2")
    group = next(one for one in ec2.describe_security_groups()["SecurityGroups"] if one["GroupName"] != "default")
    ports = {(one["FromPort"], one["ToPort"]) for one in group["IpPermissions"]}
    assert ports == {(988, 988), (1018, 1023), (2049, 2049), (5432, 5432)}
    assert {each["CidrIp"] for one in group["IpPermissions"] for each in one["IpRanges"]} == {"192.168.0.0/16"}
    again = f"NAME={CLUSTER} FILE_SYSTEM={files['FileSystemId']} SECURITY_GROUP={group['GroupId']}\n"
    given(again + "\n".join(blocks["Removal"]), tmp_path, account)
    assert rds.describe_db_instances()["DBInstances"] == []
    assert efs.describe_file_systems()["FileSystems"] == []


HEAD = (
    f"#!{sys.executable} -SI"
    + """
import json, os, sys
words = sys.argv[1:]
with open("told", "a") as told:
    print(json.dumps(words), file=told)
"""
)
NEBIUS = (
    HEAD
    + """
# Answers as the command does.
def given(name):
    return words[words.index(name) + 1]
path = [word for word in words[:5] if not word.startswith("-")]
text = " ".join(path)
if text.startswith("config get parent-id"):
    print("project-1")
elif text.startswith("iam project get"):
    assert given("--id") == "project-1"
    print(json.dumps({"metadata": {"id": "project-1", "parent_id": "tenant-1"}}))
elif text.startswith("iam service-account create"):
    print(json.dumps({"metadata": {"id": "serviceaccount-1"}}))
elif text.startswith("iam group get-by-name"):
    assert given("--parent-id") == "tenant-1"
    print(json.dumps({"metadata": {"id": "group-1"}}))
elif text.startswith("iam group-membership create"):
    assert (given("--parent-id"), given("--member-id")) == ("group-1", "serviceaccount-1")
elif text.startswith("iam v2 access-key create"):
    assert given("--account-service-account-id") == "serviceaccount-1"
    print(json.dumps({"metadata": {"id": "accesskey-1"}}))
elif text.startswith("iam v2 access-key get"):
    print(json.dumps({"status": {"aws_access_key_id": "NAKI1", "secret": "a$b/c+d=="}}))
elif text.startswith("vpc network list"):
    print(json.dumps({"items": [{"metadata": {"id": "network-1"}}]}))
elif text.startswith("msp postgresql v1alpha1 cluster create"):
    with open(given("--file")) as file, open("database", "w") as kept:
        kept.write(file.read())
elif text.startswith("msp postgresql v1alpha1 cluster get-by-name"):
    ends = {"private_read_write": "db.example"}
    print(json.dumps({"metadata": {"id": "cluster-1"}, "status": {"connection_endpoints": ends}}))
elif text.startswith(("storage bucket create", "msp postgresql v1alpha1 cluster delete")):
    pass
elif text.startswith(("iam v2 access-key delete", "iam service-account delete")):
    pass
else:
    sys.exit(f"no such command: {words}")
"""
)
MAKES = (
    HEAD
    + """
# Makes what it is told to, and gives each thing an id.
kind, verb = words[1], words[2]
made = json.load(open("made")) if os.path.exists("made") else []
if verb == "create":
    made.append(f"{kind}-{1 + sum(one.startswith(kind + '-') and one[len(kind) + 1:].isdigit() for one in made)}")
    json.dump(made, open("made", "w"))
    print(json.dumps({"metadata": {"id": made[-1]}}))
elif verb == "list":
    found = [one for one in made if one.startswith(kind + "-")] or [kind + "-1"]
    print(json.dumps({"items": [{"metadata": {"id": one}} for one in found]}))
"""
)


def told(folder: Path) -> list[list[str]]:
    """The words of each command that a stand-in with `HEAD` was given."""
    return [json.loads(line) for line in (folder / "told").read_text().splitlines()]


def printed(text: str) -> list[str]:
    """Lines of variables, by which another shell goes on."""
    return [line for line in text.splitlines() if re.fullmatch(r"([A-Z_]+=\S+ ?)+", line)]


def test_cluster_and_nodes_are_made_and_removed_at_nebius(tmp_path: Path) -> None:
    """Each thing that is made has an id of its own, and is removed by it."""
    stand_in(tmp_path, "nebius", MAKES)
    names = ("1. Cluster", "2. A shared filesystem and the GPU nodes", "4. The first GPU pod, run, upgrade, removal")
    cluster, nodes, removal = (block for name in names for block in page_commands("nebius.md", name))
    made = given("\n".join([cluster, nodes]), tmp_path, dict(os.environ))
    groups = [words for words in told(tmp_path) if words[:3] == ["mk8s", "node-group", "create"]]
    assert {words[words.index("--parent-id") + 1] for words in groups} == {"cluster-1"}
    gpus = groups[-1]
    assert gpus[gpus.index("--template-gpu-cluster-id") + 1] == "gpu-cluster-1"
    mounted = json.loads(gpus[gpus.index("--template-filesystems") + 1])
    assert mounted[0]["existing_filesystem"] == {"id": "filesystem-1"}
    assert yaml.safe_load(gpus[gpus.index("--template-cloud-init-user-data") + 1])
    (tmp_path / "told").unlink()
    given("\n".join([*printed(made.stdout), removal]), tmp_path, dict(os.environ))
    gone = [words[-1] for words in told(tmp_path) if words[2] == "delete"]
    assert gone == ["node-group-1", "node-group-2", "cluster-1", "filesystem-1", "gpu-cluster-1"]


def test_the_clusters_commands_at_aws_name_the_versions_and_stacks_that_they_remove(tmp_path: Path) -> None:
    for name in ("curl", "eksctl", "aws"):
        stand_in(tmp_path, name, f'#!/bin/sh\necho "{name} $*" >>told\n')
    names = ("1. Karpenter's rights, then the cluster", "4. Removal")
    made, removal = (block for name in names for block in page_commands("eks.md", name))
    given("\n".join([made, removal]), tmp_path, dict(os.environ))
    typed = (tmp_path / "told").read_text()
    version = next(step.chart.version for step in STEPS if step.chart and step.name == "karpenter")
    assert f"/karpenter-provider-aws/v{version}/" in typed
    stacks = re.findall(r"aws cloudformation (deploy|delete-stack) --region eu-west-1 --stack-name (\S+)", typed)
    assert {name for verb, name in stacks if verb == "deploy"} <= {name for verb, name in stacks if verb != "deploy"}
    config = yaml.safe_load((ROOT / "docs/how-to/install/eks-cluster.yaml").read_text())
    assert config["metadata"]["name"] == "training-1"
    assert re.findall(r"eksctl (\w+) cluster -f (\S+)", typed) == [
        ("create", "docs/how-to/install/eks-cluster.yaml"),
        ("delete", "docs/how-to/install/eks-cluster.yaml"),
    ]


def test_bucket_keys_and_database_are_made_and_removed_at_nebius(tmp_path: Path) -> None:
    stand_in(tmp_path, "nebius", NEBIUS)
    names = ("Bucket and its keys", "PostgreSQL", "Removal")
    bucket, database, removal = (block for name in names for block in page_commands("nebius-services.md", name))
    made = given("\n".join([bucket, database]), tmp_path, dict(os.environ))
    given("\n".join([*printed(made.stdout), removal]), tmp_path, dict(os.environ))
    for name in ("connections", "trainer"):
        path = tmp_path / f"{name}.env"
        assert path.stat().st_mode & 0o077 == 0
        lines = path.read_text().splitlines()
        assert "AWS_SECRET_ACCESS_KEY=a$b/c+d==" in lines
        assert "AWS_ENDPOINT_URL=https://storage.eu-north1.nebius.cloud" in lines
        assert set((ROOT / "helm-values" / f"{name}.env").read_text().splitlines()) <= set(lines)
    asked = json.loads((tmp_path / "database").read_text())
    word = asked["spec"]["bootstrap"]["user_password"]
    assert (asked["metadata"]["parent_id"], asked["spec"]["network_id"]) == ("project-1", "network-1")
    for name in ("airflow", "mlflow"):
        path = tmp_path / f"{name}-database.txt"
        assert path.read_text() == f"postgresql+psycopg2://dropforge:{word}@db.example:5432/{name}"
        assert path.stat().st_mode & 0o077 == 0
    asked_for = told(tmp_path)
    assert not [words for words in asked_for if any(word in each or "a$b" in each for each in words)]
    assert ["msp", "postgresql", "v1alpha1", "cluster", "delete", "--id", "cluster-1"] in asked_for
    assert ["iam", "v2", "access-key", "delete", "--id", "accesskey-1"] in asked_for
    assert not (tmp_path / "keys.env").exists()


def test_the_template_is_deployed_by_the_page_s_commands(account: dict[str, str], tmp_path: Path) -> None:
    """moto makes no policies and no Pod Identity of it, and tells no outputs; `test_aws.py` holds those."""
    text = (ROOT / "docs/how-to/install/aws.md").read_text().partition("## What is made")[0]
    typed = [line.removeprefix("    ") for line in text.splitlines() if line.startswith("    ")]
    commands = "\n".join(line for line in typed if not line.startswith("dropforge doctor"))
    bucket = "acme-typed"  # moto's buckets are everybody's, and other tests have one of the page's name
    given(commands.replace("acme-dropforge", bucket), tmp_path, account)
    stack = boto3.client("cloudformation").describe_stacks(StackName="dropforge")["Stacks"][0]
    assert stack["StackStatus"] == "CREATE_COMPLETE"
    assert boto3.client("s3").get_bucket_encryption(Bucket=bucket)["ServerSideEncryptionConfiguration"]
    assert len(boto3.client("sqs").list_queues(QueueNamePrefix="dropforge")["QueueUrls"]) == 2
