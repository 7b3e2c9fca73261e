"""`dropforge`: the one command and its subcommands."""

from __future__ import annotations

import errno
import os
import sys

import typer
from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from dropforge.cli import (
    approve,
    bench,
    checkpoints,
    compare,
    curate,
    demo,
    drops,
    env,
    explain,
    family,
    forget,
    images,
    install,
    instances,
    letters,
    logs,
    manifests,
    metrics,
    profile,
    queue,
    queues,
    recipes,
    resume,
    rollback,
    runs,
    secret,
    services,
    shell,
    stop,
    submit,
    sweep,
    top,
)
from dropforge.errors import DropforgeError
from dropforge.proxies import spare_this_machine
from dropforge.terminal import Console, Text

app = typer.Typer(
    name="dropforge",
    help="Drop data into S3; get back a fine-tuned, evaluated, registered model.",
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
)
app.command("demo")(demo.demo)
app.command("up")(services.up)
app.command("down")(services.down)
app.command("doctor")(services.doctor)
app.command("drop")(drops.drop_command)
app.command("follow")(drops.follow_command)
app.command("submit")(submit.submit)
app.command("sweep")(sweep.sweep)
app.command("stop")(stop.stop)
app.command("resume")(resume.resume)
app.command("runs")(runs.runs)
app.command("compare")(compare.compare)
app.command("approve")(approve.approve)
app.command("rollback")(rollback.rollback)
app.add_typer(family.app, name="family")
app.command("letters")(letters.letters)
app.command("checkpoints")(checkpoints.checkpoints)
app.command("logs")(logs.logs)
app.add_typer(queue.app, name="queue")
app.add_typer(queues.app, name="queues")
app.command("top")(top.top)
app.command("shell")(shell.shell)
app.command("curate")(curate.curate)
app.command("explain")(explain.explain)
app.command("forget")(forget.forget)
app.command("rebuild")(forget.rebuild)
app.command("profile")(profile.profile)
app.command("metrics")(metrics.metrics)
app.command("install")(install.install)
app.command("manifests")(manifests.manifests)
app.add_typer(bench.app, name="bench")
app.add_typer(images.app, name="images")
app.command("env")(env.env)
app.command("secret")(secret.secret)
app.command("instances")(instances.instances)
app.command("render")(recipes.render)
app.command("plan")(recipes.plan)


def main() -> None:
    """Run the command; an error that a person can mend is told in one paragraph, without a traceback."""
    spare_this_machine(os.environ)
    try:
        try:
            app()
        except (BotoCoreError, Boto3Error, ClientError) as error:
            raise _of_s3(error) from error
        except OSError as error:
            if error.filename is None:
                raise
            raise _of_a_file(error) from error
    except DropforgeError as error:
        # As plain text: names from outside may look like markup.
        told = Text.assemble(("error:", "red"), f" {error.thing}: {_sentence(error.cause)}\n{_sentence(error.mend)}")
        Console(stderr=True).print(told)
        sys.exit(2)


def _of_s3(error: Exception) -> DropforgeError:
    where = os.environ.get("AWS_ENDPOINT_URL", "AWS")
    if isinstance(error, ClientError):
        mend = "Check the bucket, and what the credentials may do with it"
        return DropforgeError(f"S3 at {where}", str(error), mend)
    mend = (
        "See with `dropforge doctor` whether the stack runs, then give the command again: nothing half-uploaded starts"
    )
    return DropforgeError(f"S3 at {where}", f"it does not answer ({error})", mend)


def _of_a_file(error: OSError) -> DropforgeError:
    mends = {
        errno.ENOSPC: "Make room on its disk",
        errno.EDQUOT: "Make room within your quota",
        errno.EROFS: "Mount its disk for writing, or choose another folder",
    }
    mend = mends.get(error.errno or 0, "See that it is there, and that you may read and write it")
    return DropforgeError(f"file {os.fsdecode(error.filename)}", error.strerror or str(error), mend)


def _sentence(text: str) -> str:
    return text if text.endswith((".", "?", "!")) else f"{text}."
