"""What a refused batch leaves: its drops wait again, as two batches. One bad drop does not take the others with it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

from dropforge import intake_ledger
from dropforge.errors import DataError
from dropforge.store import Store

log = logging.getLogger(__name__)


@contextmanager
def divided(store: Store, family: str, drop_id: str, counter: int) -> Iterator[None]:
    """If the data are refused, divide the batch, and say so. :param counter: of the run's claim."""
    try:
        yield
    except DataError as error:
        told = divide(store, family, drop_id, counter, str(error))
        if not told:
            raise
        raise type(error)(error.thing, error.cause, f"{error.mend.rstrip('.')}. {told}") from error


def divide(store: Store, family: str, drop_id: str, counter: int, refusal: str) -> str:
    """Divide a batch that was refused; what became of its drops, empty if it is none of several."""
    if counter != 1:
        return ""  # a person asked for all of it again, and the drops had their turn
    sizes = intake_ledger.separate(store, family, drop_id, refusal)
    if not sizes:
        return ""
    told = f"The drops of this batch wait again as two batches, of {sizes[0]:,} and {sizes[1]:,}"
    log.warning("%s", told)
    return told
