"""What S3 refuses, or does not answer, as errors that name the mend."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from traceback import extract_tb

from boto3.exceptions import Boto3Error
from botocore.exceptions import BotoCoreError, ClientError

from dropforge.errors import DropforgeError
from dropforge.store import NO_S3


@contextmanager
def asking_s3() -> Iterator[None]:
    """Ask S3. :raises DropforgeError: instead of boto3's own exceptions."""
    try:
        yield
    except ClientError as error:
        mend = "Check the bucket, and what the credentials may do with it"
        raise DropforgeError(_address(), str(error), mend) from error
    except (BotoCoreError, Boto3Error) as error:
        mend = "See with `dropforge doctor` whether the stack runs, then try again: nothing half-uploaded starts a run"
        raise DropforgeError(_address(), f"it does not answer ({error})", mend) from error
    except RecursionError as error:
        # botocore follows a redirect by asking for the bucket's region, and each redirect of that too.
        if not any(frame.name == "redirect_from_error" for frame in extract_tb(error.__traceback__)):
            raise
        raise DropforgeError(_address(), "it sends each request elsewhere", NO_S3) from None


def _address() -> str:
    return f"S3 at {os.environ.get('AWS_ENDPOINT_URL', 'AWS')}"
