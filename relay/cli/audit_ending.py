"""How an audit's command ends when somebody ends it: with one line, and nothing of it left."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType

import click

RESEND_S = 0.05  # behind a finalizer that swallowed a signal
SIGNALS = (signal.SIGTERM, signal.SIGHUP)
EXIT_SIGNALLED = 128  # and the signal's number, as shells have it


class _Signalled(BaseException):
    """A signal came: its number."""


@contextlib.contextmanager
def exit_on_signal(line: str) -> Iterator[None]:
    """Ctrl-C, SIGTERM and a terminal that is closed end the block like any other failure.

    Spark is stopped and copies are removed, for the ledger's must not stay; ``line`` goes to
    stderr and the process exits with 130, 143 or 129. Who is told to ignore SIGHUP (nohup)
    goes on.
    """
    # py4j logs where it was interrupted, with a traceback, to whoever listens.
    deaf = logging.NullHandler()
    logging.getLogger().addHandler(deaf)
    heeded = [number for number in SIGNALS if signal.getsignal(number) != signal.SIG_IGN]
    before = {number: signal.signal(number, _end) for number in heeded}
    ended_by = None
    try:
        with _resend_swallowed_signals():
            yield
    except KeyboardInterrupt:
        ended_by = signal.SIGINT
    except _Signalled as exc:
        (ended_by,) = exc.args
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        logging.getLogger().removeHandler(deaf)
    if ended_by is not None:
        with contextlib.suppress(OSError):  # a terminal that is closed hears nothing any more
            click.echo(f"relay: {line}", err=True)
        sys.exit(EXIT_SIGNALLED + ended_by)


@contextlib.contextmanager
def _resend_swallowed_signals() -> Iterator[None]:
    """A signal that meets a finalizer, which Python lets raise nothing, comes once more.

    py4j's talk to the JVM, and wait for its answer: some of an audit's time is spent there.
    """
    usual = sys.unraisablehook

    def hook(unraisable: sys.UnraisableHookArgs) -> None:
        number = signal.SIGINT
        if isinstance(unraisable.exc_value, _Signalled):
            (number,) = unraisable.exc_value.args
        elif not isinstance(unraisable.exc_value, KeyboardInterrupt):
            usual(unraisable)
            return
        threading.Timer(RESEND_S, os.kill, (os.getpid(), number)).start()

    sys.unraisablehook = hook
    try:
        yield
    finally:
        sys.unraisablehook = usual


def _end(number: int, _: FrameType | None) -> None:
    raise _Signalled(number)
