"""Errors of the job library; each names the thing, the cause and the mend."""

from __future__ import annotations

from typing import Final

STARTING_SECONDS: Final = 60.0
"""For how long an API server that has just started may deny rights that the account has."""


class JobError(Exception):
    """Something about a job that a person can mend.

    :param thing: what is wrong, by name ("job default/train-7").
    :param cause: why it is wrong.
    :param mend: what to do about it.
    """

    def __init__(self, thing: str, cause: str, mend: str) -> None:
        super().__init__(f"{thing}: {cause}. {mend}")
        self.thing, self.cause, self.mend = thing, cause, mend

    def __reduce__(self) -> tuple[type[JobError], tuple[str, str, str]]:
        return type(self), (self.thing, self.cause, self.mend)


class ManifestError(JobError):
    """A manifest that cannot work; trying again changes nothing."""


class JobRefusedError(JobError):
    """The backend said no for good (admission, rights, a malformed request); trying again changes nothing."""


class JobForbiddenError(JobRefusedError):
    """The account lacks a right, or the API server has just started and has not read the rights yet."""


class JobExistsError(JobError):
    """A job of that name exists; read it and compare uid and fingerprint, then adopt or fail."""


class BackendUnavailableError(JobError):
    """The backend cannot be reached or is too busy; trying again may work. Says nothing about the job."""


class BackendUnauthorizedError(BackendUnavailableError):
    """The credentials ran out: build a new client and try again. Not a failed job."""
