"""Runs the operator's command when something new waits for a person (``attention.command``).

`relay attention` knows what waits: it is run when the ledger or a session has changed, and every
five minutes, at most once a minute, in a process of its own. That process also runs the command and
remembers what it told of; killed before that, it tells of it again.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable

from relay.base.home import LEDGER
from relay.base.logs import LogCall

LOOK_S = 2.0
PAUSE_S = 60.0  # between two commands
AGAIN_PAUSES = 5  # until it looks without a change: time alone makes an agent idle, or gone
TIMEOUT_S = 90.0
PLACES = (LEDGER, f"{LEDGER}-wal", "sessions")  # one of them changes when something new waits


class AttentionThread:
    """Owned by the daemon. ``command`` is the setting of now; while it is empty nothing is done."""

    def __init__(
        self,
        root: str,
        command: Callable[[], tuple[str, ...]],
        log: LogCall,
    ) -> None:
        self._root = root
        self._command = command
        self._log = log
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def begin(self) -> None:
        """Start the thread, if there is a command and it does not run."""
        if self._command() and self._thread is None:
            self._thread = threading.Thread(target=self._run, name="attention", daemon=True)
            self._thread.start()

    def end(self) -> None:
        """Stop the thread; a command that runs goes on."""
        self._ended.set()

    def _run(self) -> None:
        seen: object = None
        due = again = 0.0
        while not self._ended.wait(LOOK_S):
            now = time.monotonic()
            if not self._command() or now < due:
                continue
            state = self._state()
            if state == seen and now < again:
                continue
            due, again = now + PAUSE_S, now + AGAIN_PAUSES * PAUSE_S
            seen = state if self._tell() else None

    def _state(self) -> list[tuple[int, int]]:
        found = []
        for place in PLACES:
            with contextlib.suppress(OSError):
                status = os.stat(os.path.join(self._root, place))
                found.append((status.st_mtime_ns, status.st_size))
        return found

    def _tell(self) -> bool:
        """Run the command; False if it failed, and is to be tried again."""
        words = [sys.executable, "-P", "-m", "relay", "--home", self._root, "attention", "--notify"]
        nothing = subprocess.DEVNULL
        try:
            done = subprocess.run(
                words, stdin=nothing, stdout=nothing, stderr=subprocess.PIPE, timeout=TIMEOUT_S
            )
            why = done.stderr.decode(errors="replace").strip() if done.returncode else ""
        except (OSError, subprocess.TimeoutExpired) as exc:
            why = str(exc)
        if why:
            text = f"The operator was not told that something waits: {why[:500]}"
            self._log(text, action="attention", level="warning")
        return not why
