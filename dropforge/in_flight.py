"""Which drops have a run in flight: one small object each, from the sending of its event until the run has ended.

They only say of which runs Airflow is to be asked: an object that is left behind, or lost, costs a look, never a drop.
"""

from __future__ import annotations

from dropforge import layout, ledger
from dropforge.drop import parse_partition_key
from dropforge.errors import DropforgeError
from dropforge.store import Store


def enter(store: Store, family: str, drop_id: str) -> None:
    """A run of the drop is asked for."""
    store.put(layout.in_flight_key(family, drop_id), b"{}")


def leave(store: Store, family: str, drop_id: str) -> None:
    """The drop's run has ended."""
    store.delete(layout.in_flight_key(family, drop_id))


def run_ended(store: Store, partition_key: str | None, run: str) -> None:
    """The run that an event began has ended; nothing for one that none did, or that does not have the drop.

    :param partition_key: of the event. :param run: its id in Airflow.
    """
    if not partition_key:
        return
    try:
        named = parse_partition_key(partition_key)
    except DropforgeError:
        return
    if ledger.owner_of(store, named["family"], named["id"]) == run:
        leave(store, named["family"], named["id"])


def entries(store: Store) -> tuple[tuple[str, str], ...]:
    """(family, drop id) of each."""
    return tuple(layout.family_and_id(layout.IN_FLIGHT, info.key) for info in store.list(layout.IN_FLIGHT))
