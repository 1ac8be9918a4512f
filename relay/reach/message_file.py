"""The file of a message, as far as a hook or a bell reads it: nothing of it is checked."""

from __future__ import annotations

import os
import re
import stat

_BLANK = re.compile(rb"\n\r?\n")


def read_message(path: str, most: int) -> tuple[list[tuple[str, str]], bytes | None, int] | None:
    """The header fields, what was read of the body, and the size of the file in bytes.

    ``most``: so many bytes are read. Names of fields are in upper case. The body is None where no
    blank line ends the header. None for what is gone, or no regular file.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        facts = os.fstat(fd)
        data = os.read(fd, most) if stat.S_ISREG(facts.st_mode) else None
    except OSError:
        return None
    finally:
        os.close(fd)
    if data is None:
        return None
    end = _BLANK.search(data)
    head = data[: end.start()] if end else data
    lines = [line.partition(":") for line in head.decode(errors="replace").split("\n")]
    fields = [(name.strip().upper(), value.strip()) for name, _, value in lines]
    return fields, data[end.end() :] if end else None, facts.st_size
