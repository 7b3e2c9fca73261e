"""How soon Airflow gives up a connection to a PostgreSQL whose host is gone, for `[database] sql_alchemy_connect_args`.

A host that is switched off, or whose network is, closes nothing: left alone, a request on such a connection waits for
an answer for 16 minutes (`tcp_retries2` of Linux's ip-sysctl), and one that only listens waits for two hours.
"""

from __future__ import annotations

from typing import Any, Final

CONNECT_ARGS: Final[dict[str, Any]] = {
    "connect_timeout": 30,
    "keepalives_idle": 20,  # seconds without a word, then a probe every ten
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 50_000,  # milliseconds until what was sent must have arrived
}
"""libpq's parameters (PostgreSQL's manual, Database Connection Control Functions)."""

CONNECT_ARGS_ASYNC: Final[dict[str, Any]] = {"timeout": 30, "command_timeout": 120}
"""asyncpg's, which has no keepalives: seconds for connecting, and for a statement's answer."""
