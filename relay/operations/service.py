"""The file that has the system start the relay: a systemd user unit, or a launchd agent.

    Linux  $XDG_CONFIG_HOME/systemd/user/agent-relay.service  (~/.config where it is not set)
    macOS  ~/Library/LaunchAgents/local.agent-relay.plist

Text alone is made and written here; what the system is then asked for is printed, for a person to
run. Both name this Python and this home by absolute paths.
"""

from __future__ import annotations

import os
import plistlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

from relay import fsio
from relay.errors import NotFound, RelayError

NAME = "agent-relay"
LABEL = "local.agent-relay"
STOP_S = 30  # it takes less than five; a disk that hangs is waited for
START_S = 600  # a start behind a crash replays the journal
WATCHDOG_S = 60  # a loop that is stuck for so long is ended, and begun anew


class NoService(RelayError):
    """This system has neither systemd nor launchd, or the file cannot be as it must."""

    hint = "start the relay with `relay up`"


class Service(NamedTuple):
    """A file, its place, and what makes the system heed it."""

    path: str
    text: bytes
    start: tuple[str, ...]  # commands, for a person
    stop: tuple[str, ...]


def service_of(
    home: str, environ: Mapping[str, str], platform: str = sys.platform, python: str = ""
) -> Service:
    """The service of this system for the relay of ``home``.

    Errors: NoService elsewhere than on Linux and macOS, and for a path that no unit can have.
    """
    python = python or sys.executable
    user_home = environ.get("HOME") or os.path.expanduser("~")
    for path in (home, python):
        if not os.path.isabs(path) or not path.isprintable():
            raise NoService(f"{path!r} is no absolute path in printable characters")
    if platform == "darwin":
        return _launchd(home, python, user_home)
    if platform.startswith("linux"):
        config = environ.get("XDG_CONFIG_HOME") or os.path.join(user_home, ".config")
        return _systemd(home, python, config)
    raise NoService(f"there is no service for {platform}")


def install(service: Service) -> bool:
    """Write the file; True when it is new or another. Errors: OSError, NoService for a link."""
    folder = os.path.dirname(service.path)
    os.makedirs(folder, exist_ok=True)
    if os.path.islink(service.path):
        raise NoService(f"{service.path} is a link", hint="remove it, or mend what it leads to")
    if installed(service) == service.text:
        return False
    fsio.write_atomic(service.path, service.text)
    return True


def uninstall(service: Service) -> None:
    """Remove the file. Errors: NotFound when there is none."""
    try:
        os.unlink(service.path)
    except FileNotFoundError as exc:
        raise NotFound(f"there is no {service.path}", hint="nothing was installed") from exc


def installed(service: Service) -> bytes | None:
    """What stands in the file; None when there is none."""
    try:
        with open(service.path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _systemd(home: str, python: str, config: str) -> Service:
    words = " ".join(_quoted(word) for word in (python, "-m", "relay.daemon", "--home", home))
    text = f"""\
# Written by `relay service install`; written anew by the next one.
[Unit]
Description=agent-relay for {home.replace("%", "%%")}
Documentation=man:systemd.service(5)

[Service]
Type=notify
NotifyAccess=main
ExecStart={words}
ExecReload=/bin/kill -HUP $MAINPID
Restart=on-failure
RestartSec=2
# wrong command line or config.json, no home, another relay: starting again mends none of these
RestartPreventExitStatus=2 5
# agents that the relay started are left to run
KillMode=process
TimeoutStartSec={START_S}
TimeoutStopSec={STOP_S}
WatchdogSec={WATCHDOG_S}
UMask=0077

[Install]
WantedBy=default.target
"""
    unit = f"{NAME}.service"
    return Service(
        os.path.join(config, "systemd", "user", unit),
        text.encode(),
        ("systemctl --user daemon-reload", f"systemctl --user enable --now {unit}"),
        (f"systemctl --user disable --now {unit}", "systemctl --user daemon-reload"),
    )


def _quoted(word: str) -> str:
    """A word of ExecStart as systemd.service(5) reads it: nothing in it is expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _launchd(home: str, python: str, user_home: str) -> Service:
    job = {
        "Label": LABEL,
        "ProgramArguments": [python, "-m", "relay.daemon", "--home", home],
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "AbandonProcessGroup": True,  # agents that the relay started are left to run
        "ExitTimeOut": STOP_S,
        "StandardErrorPath": os.path.join(home, "logs", "relay.err"),
        "Umask": 0o077,
    }
    path = os.path.join(user_home, "Library", "LaunchAgents", f"{LABEL}.plist")
    target = f"gui/{os.getuid()}"
    quoted = "'" + path.replace("'", "'\\''") + "'"
    return Service(
        path,
        plistlib.dumps(job),
        (f"launchctl bootstrap {target} {quoted}",),
        (f"launchctl bootout {target}/{LABEL}",),
    )
