"""``meta.json``: who runs as this agent now, so that a reused pid is not taken for it.

    pid              the process
    pid_start_ticks  when it started, clock ticks after boot (field 22 of /proc/PID/stat);
                     null where there is no /proc
    started_at       Unix nanoseconds at which it became this agent
    unregisters      false: it cannot take itself out when it ends (a shell with relay.sh)

Who leaves in good order takes pid and pid_start_ticks out again: a process that is registered and
gone has died, and the relay says so to who writes to it; but for one that cannot take itself out.
Other keys (``role``, ``public_key``) belong to others and stay. And the one setting of the relay
that a sender must know.
"""

from __future__ import annotations

import contextlib
import os

from agent_sdk.disk import install
from relay.base import fsio
from relay.base.errors import RelayError
from relay.base.home import META, Home
from relay.base.message import DEFAULT_MAX_BODY_BYTES

NO_LEAVING = "unregisters"


def register(home: Home, agent: str, now_ns: int) -> None:
    """Write this process into the agent's meta.json; the last one to come stands there.

    A file that is no JSON object is set aside as ``meta.json.bad``.
    """
    import json  # a tenth of the SDK's import time, and only needed here

    with home.dirs() as dirs:
        folder = dirs.get("agents", agent)
        data = home.read_meta(agent)
        try:
            meta = json.loads(data) if data is not None else {}
        except ValueError:
            meta = None
        if not isinstance(meta, dict):
            fsio.rename(META, folder, META + ".bad", folder)
            meta = {}
        meta.pop(NO_LEAVING, None)
        meta |= {"pid": os.getpid(), "pid_start_ticks": start_ticks(), "started_at": now_ns}
        _replace(meta, folder)


def unregister(home: Home, agent: str) -> None:
    """Take this process out of the agent's meta.json, unless another one stands there by now.

    Whoever cannot be taken out stays: then the relay finds out that the process has ended.
    """
    import json

    with contextlib.suppress(OSError, RelayError, ValueError), home.dirs() as dirs:
        folder = dirs.get("agents", agent)
        meta = json.loads(home.read_meta(agent) or b"{}")
        mine = {"pid": os.getpid(), "pid_start_ticks": start_ticks()}
        if isinstance(meta, dict) and mine.items() <= meta.items():
            _replace({name: value for name, value in meta.items() if name not in mine}, folder)


def _replace(meta: dict[str, object], folder: int) -> None:
    import json

    temp = f".{META}.{os.urandom(4).hex()}.tmp"
    install(json.dumps(meta, indent=2).encode() + b"\n", temp, folder, META, folder)
    fsio.sync_file(folder)


def start_ticks() -> int | None:
    """When this process started, in clock ticks after boot; None where there is no /proc."""
    try:
        with open("/proc/self/stat", "rb") as file:
            stat = file.read()
    except OSError:
        return None
    # The command's name stands in brackets and may hold anything; field 3 follows the last one.
    return int(stat[stat.rindex(b")") + 2 :].split()[22 - 3])


def max_body_bytes(home: Home) -> int:
    """The relay's limit for a body, as config.json has it; its default where that is unclear.

    A wrong value is for the relay to complain of, which reads the file with more care.
    """
    import json

    try:
        value = json.loads(home.read_config())["limits"]["max_body_bytes"]
    except (OSError, ValueError, LookupError, TypeError):
        return DEFAULT_MAX_BODY_BYTES
    return value if isinstance(value, int) else DEFAULT_MAX_BODY_BYTES
