"""Two programs in terminals of their own, and a person who types a line into the first.

    python terminals.py FOLDER WORDS SEEN DIRECTORY PROGRAM... -- DIRECTORY PROGRAM...

Types WORDS into the first once both are at their prompts. When its screen has shown SEEN and both
are at their prompts again, FOLDER/seen is made; when FOLDER/end is there, both are ended. What the
screens showed is in FOLDER/screen-1 and FOLDER/screen-2.
"""

from __future__ import annotations

import os
import pty
import select
import sys
import time
from pathlib import Path

PATIENCE_S = 300.0
PROMPT = b"> "


class Terminal:
    """A program in a pseudo-terminal; the first word is its directory."""

    def __init__(self, words: list[str], screen: Path) -> None:
        folder, *command = words
        self.shown = b""
        self.file = screen.open("wb", buffering=0)
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            os.execvp(command[0], command)

    @property
    def waits(self) -> bool:
        """True at the prompt."""
        return self.shown.endswith(PROMPT)

    def read(self) -> None:
        """Read what it writes."""
        data = os.read(self.fd, 65536)
        self.shown += data
        self.file.write(data)

    def type(self, text: str) -> None:
        """Type a line."""
        os.write(self.fd, text.encode() + b"\n")

    def close(self) -> None:
        """Press ^D at the prompt, and wait for its end."""
        os.write(self.fd, b"\x04")
        os.waitpid(self.pid, 0)
        os.close(self.fd)


def main(folder: str, words: str, seen: str, *commands: str) -> int:
    """Run both to their end; 1 if the first has not shown ``seen`` in time."""
    cut = commands.index("--")
    both = (list(commands[:cut]), list(commands[cut + 1 :]))
    one, two = (
        Terminal(command, Path(folder, f"screen-{number}"))
        for number, command in enumerate(both, 1)
    )
    until = time.monotonic() + PATIENCE_S
    has_typed = False
    while time.monotonic() < until:
        for fd in select.select([one.fd, two.fd], [], [], 0.2)[0]:
            (one if fd == one.fd else two).read()
        if one.waits and two.waits and not has_typed:
            one.type(words)
            has_typed = True
        if seen.encode() in one.shown and one.waits and two.waits:
            Path(folder, "seen").touch()
        if Path(folder, "end").exists():
            one.close()
            two.close()
            return 0
    print(f"{seen!r} was not seen in {PATIENCE_S:g} s", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
