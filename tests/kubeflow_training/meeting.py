"""Shell lines with which the pods of a test's gang wait for one another."""


def _meet(rank: str, master: str) -> str:
    """:param rank, master: the variable of the rank, and what those of the master's place begin with."""
    return f"""
if [ "${master}_ADDR" != 127.0.0.1 ]; then
  if [ "${rank}" = 0 ]; then nc -l -p "${master}_PORT" </dev/null >/dev/null 2>&1; else
    until nc -w 1 "${master}_ADDR" "${master}_PORT" </dev/null >/dev/null 2>&1; do sleep 0.2; done; fi
fi
"""


# A worker may start half a minute late: cluster DNS remembers for so long that its master's name was not there yet. A
# master waits for the worker's call. On one machine nobody is late, and a master that has ended is not called.
MEET = _meet("RANK", "MASTER")
MEET_OF_ANY_KIND = _meet("PET_NODE_RANK", "PET_MASTER")  # which a TrainJob and an indexed Job give their pods too
