"""Spark's masters, asked before Spark is: it waits a minute for one that is not there."""

from __future__ import annotations

import socket
import time

from relay.base.errors import RelayError

CONNECT_TIMEOUT_S = 5.0
DEFAULT_PORT = 7077
# A worker starts its executor in seconds; an application without one waits for ever.
EXECUTOR_TIMEOUT_S = 60.0
POLL_S = 0.2


def require_listening(master: str) -> None:
    """A standalone master, or one of several, takes connections. Other kinds are not asked.

    Errors: RelayError with the reason, after ``CONNECT_TIMEOUT_S`` an address at most.
    """
    if not master.startswith("spark://"):
        return
    reasons = []
    for address in master.removeprefix("spark://").split(","):
        host, _, port = address.rpartition(":") if ":" in address else (address, "", "")
        try:
            number = int(port or DEFAULT_PORT)
            socket.create_connection((host.strip("[]"), number), CONNECT_TIMEOUT_S).close()
        except ValueError:
            reasons.append(f"{address}: {port} is no port")
        except OSError as exc:
            reasons.append(f"{address}: {exc.strerror or exc}")
        else:
            return
    raise RelayError(
        f"no Spark master listens at {'; '.join(reasons)}",
        hint="see --master; without it the audit runs on this machine",
    )


def require_executor(context: object, master: str, timeout_s: float = EXECUTOR_TIMEOUT_S) -> None:
    """A worker of a standalone master has taken the run. Errors: RelayError when none does."""
    if not master.startswith("spark://"):
        return
    tracker = context._jsc.sc().statusTracker()  # type: ignore[attr-defined]
    deadline = time.monotonic() + timeout_s
    while len(tracker.getExecutorInfos()) < 2:  # the driver is one of them
        if time.monotonic() > deadline:
            raise RelayError(
                f"{master} has no worker that takes the run within {timeout_s:.0f} s",
                hint="start workers, or free memory and cores of theirs: see the master's page",
            )
        time.sleep(POLL_S)
