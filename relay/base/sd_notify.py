"""Notifications to systemd: ready, reloading, stopping, and the watchdog's keep-alive.

The protocol is one datagram to the socket that ``NOTIFY_SOCKET`` names; without it nothing is sent.
See sd_notify(3).
"""

from __future__ import annotations

import os
import socket
import threading
from collections.abc import Callable, MutableMapping

from relay.base.clock import NS_PER_US

US_PER_S = 1_000_000


class SystemdNotifier:
    """Sends notifications to systemd; any thread may use it."""

    def __init__(self, environ: MutableMapping[str, str]) -> None:
        """Remove the variables from ``environ``, so that no child notifies for the relay."""
        address = environ.pop("NOTIFY_SOCKET", "")
        if address.startswith("@"):  # an abstract socket
            address = "\0" + address[1:]
        self._address = address if address[:1] in ("/", "\0") else ""
        watchdog_us = environ.pop("WATCHDOG_USEC", "")
        watchdog_pid = environ.pop("WATCHDOG_PID", "")
        is_ours = watchdog_pid in ("", str(os.getpid()))
        every_us = int(watchdog_us) if watchdog_us.isdigit() and is_ours else 0
        self.watchdog_s = every_us / US_PER_S if self._address else 0.0  # 0: no watchdog

    def say(self, *lines: str) -> None:
        """Send ``lines`` (``READY=1`` and the like); errors are ignored."""
        if not self._address:
            return
        try:
            with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
                sender.settimeout(1)
                sender.sendto("\n".join(lines).encode(), self._address)
        except OSError:
            return

    def reloading(self, monotonic_ns: int) -> None:
        """Announce that the configuration is being reread; ``READY=1`` follows."""
        self.say("RELOADING=1", f"MONOTONIC_USEC={monotonic_ns // NS_PER_US}")


class Watchdog:
    """Sends systemd a keep-alive, twice within its interval, while the loop is healthy.

    Without it systemd ends and restarts the process.
    """

    def __init__(self, notifier: SystemdNotifier, is_healthy: Callable[[], bool]) -> None:
        self._notifier = notifier
        self._is_healthy = is_healthy
        self._ended = threading.Event()

    def begin(self) -> None:
        """Start the thread if systemd has a watchdog for this process."""
        if self._notifier.watchdog_s:
            threading.Thread(target=self._run, name="watchdog", daemon=True).start()

    def end(self) -> None:
        """Stop the thread."""
        self._ended.set()

    def _run(self) -> None:
        while True:
            if self._is_healthy():
                self._notifier.say("WATCHDOG=1")
            if self._ended.wait(self._notifier.watchdog_s / 2):
                return
