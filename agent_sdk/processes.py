"""A request for a process, as the relay reads it: fields as headers, the prompt as the body."""

from __future__ import annotations

import re
from collections.abc import Mapping

from relay.base.errors import MessageError

KEY = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
SPLIT = re.compile(r",\s*[A-Za-z_][A-Za-z0-9_]*=")  # where the relay would see another setting


def spawn_headers(
    name: str, cli: str, cwd: str | None, env: Mapping[str, str], restart: str | None
) -> dict[str, str]:
    """The headers of a spawn; what is None is left out.

    Errors: MessageError for an ENV that could not be read back; no value is in its text.
    """
    for key, value in env.items():
        if not KEY.fullmatch(key):
            raise MessageError(f"{key!r} is no name of a variable", header="ENV")
        if value != value.strip() or "\n" in value or SPLIT.search(value):
            raise MessageError(
                f"the value of {key} cannot be sent: it has a line break, blanks at an end, or "
                "`,NAME=` in it; put it into a file that the agent reads",
                header="ENV",
            )
    given = {
        "NAME": name,
        "CLI": cli,
        "CWD": cwd,
        "ENV": ",".join(f"{key}={value}" for key, value in env.items()),
        "RESTART": restart,
    }
    return {field: value for field, value in given.items() if value}
