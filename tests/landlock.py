"""Run a program in a sandbox of Landlock, as agent CLIs do: ``landlock.py FOLDER PROGRAM …``.

It writes below FOLDER alone. Of the rights of Linux 5.13, as here, none lets a file be moved to
another directory; landlock(7).
"""

from __future__ import annotations

import ctypes
import os
import struct
import sys

CREATE_RULESET, ADD_RULE, RESTRICT_SELF = 444, 445, 446  # system calls
BENEATH = 1  # the type of a rule: of a path and what is below
NO_NEW_PRIVILEGES = 38
ALL = (1 << 13) - 1
READ = 1 << 0 | 1 << 2 | 1 << 3  # execute, read files and directories
MISSING = 77  # the exit status on a kernel without it


def main() -> None:
    """Restrict this process, and become the program."""
    system = ctypes.CDLL(None, use_errno=True)
    rules = system.syscall(CREATE_RULESET, struct.pack("Q", ALL), 8, 0)
    if rules < 0:
        sys.exit(MISSING)
    for path, rights in (("/", READ), ("/dev", ALL), (sys.argv[1], ALL)):
        rule = struct.pack("=Qi", rights, os.open(path, os.O_PATH))
        assert system.syscall(ADD_RULE, rules, BENEATH, rule, 0) == 0
    assert system.prctl(NO_NEW_PRIVILEGES, 1, 0, 0, 0) == 0
    assert system.syscall(RESTRICT_SELF, rules, 0) == 0
    os.execvp(sys.argv[2], sys.argv[2:])


if __name__ == "__main__":
    main()
