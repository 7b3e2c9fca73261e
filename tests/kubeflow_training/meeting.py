"""Shell lines with which the pods of a test's gang wait for one another."""

# A worker may start half a minute late: cluster DNS remembers for so long that its master's name was not there yet. A
# master waits for the worker's call. On one machine nobody is late, and a master that has ended is not called.
MEET = """
if [ "$MASTER_ADDR" != 127.0.0.1 ]; then
  if [ "$RANK" = 0 ]; then nc -l -p "$MASTER_PORT" </dev/null >/dev/null 2>&1; else
    until nc -w 1 "$MASTER_ADDR" "$MASTER_PORT" </dev/null >/dev/null 2>&1; do sleep 0.2; done; fi
fi
"""
