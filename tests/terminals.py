"""A command in a terminal of its own: to its end, in a fork of a process that has loaded it, or as
a person uses it."""

from __future__ import annotations

import os
import pty
import sys
import termios
from collections.abc import Callable
from pathlib import Path

import pexpect
from pexpect.fdpexpect import fdspawn

from tests import forks
from tests.procs import PATIENCE_S, environment


def in_a_terminal(
    home: Path | str,
    *words: str,
    size: tuple[int, int] = (24, 100),
    meanwhile: Callable[[fdspawn[bytes]], object] = lambda view: None,
    **more: str,
) -> tuple[int, str]:
    """Its exit code, and what a terminal of so many lines and columns was given."""
    rows, columns = size
    ours, theirs = pty.openpty()
    termios.tcsetwinsize(theirs, size)
    env = environment(TERM="xterm", COLUMNS=str(columns), LINES=str(rows), **more)
    process = forks.start(forks.CLI, ["--home", str(home), *words], env, theirs, theirs, theirs)
    os.close(theirs)
    view = fdspawn(ours, timeout=PATIENCE_S)
    meanwhile(view)
    view.expect(pexpect.EOF)
    view.close()
    assert isinstance(view.before, bytes)
    return process.wait(PATIENCE_S), view.before.decode(errors="surrogateescape")


def lines_in_a_terminal(home: Path, columns: int, command: str) -> list[str]:
    """The lines that a command prints on a terminal so wide, without colours."""
    code, shown = in_a_terminal(home, *command.split(), size=(24, columns), NO_COLOR="1")
    assert code == 0, shown
    return shown.rstrip("\r\n").split("\r\n")


def terminal(home: Path, *words: str) -> pexpect.spawn[str]:
    """The command in a terminal of 100 columns, for a person who reads and types."""
    env = environment(TERM="xterm", NO_COLOR="1")
    for name in ("COLUMNS", "LINES"):  # they would be the width and the height
        env.pop(name, None)
    return pexpect.spawn(
        sys.executable,
        ["-m", "relay", "--home", str(home), *words],
        env=env,  # type: ignore[arg-type]
        dimensions=(24, 100),
        encoding="utf-8",
        timeout=PATIENCE_S,
    )
