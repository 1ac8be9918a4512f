"""The relay as a service of the system: a systemd user unit, or a launchd agent.

    Linux  $XDG_CONFIG_HOME/systemd/user/agent-relay.service  (~/.config where it is not set)
    macOS  ~/Library/LaunchAgents/local.agent-relay.plist

These are the names for ~/.agent-relay; another home's file has a short name of that home appended
to `agent-relay`. A file of an older version, when all homes used the same name, is recognized by
the home in it and stays. A file that names another home is neither replaced nor removed.

Only the file is written here; the commands that activate it are printed for a person to run. The
file names this Python and this home by absolute paths.
"""

from __future__ import annotations

import os
import plistlib
import re
import sys
from collections.abc import Mapping
from typing import NamedTuple
from xml.parsers.expat import ExpatError

from relay.base import fsio
from relay.base.errors import NotFound, RelayError
from relay.base.home import DEFAULT_HOME, tag_of

NAME = "agent-relay"
LABEL = "local.agent-relay"
UNIT = ".service"
PLIST = ".plist"
STOP_S = 30  # usually less than five; allows for a hanging disk
START_S = 600  # a start after a crash replays the journal
WATCHDOG_S = 60  # a loop stuck for this long is killed and restarted
HOME_IN_UNIT = re.compile(r'^ExecStart=.*"--home" "((?:[^"\\]|\\.)*)"$', re.MULTILINE)


class NoService(RelayError):
    """This system has neither systemd nor launchd, or the file cannot be as it must."""

    hint = "start the relay with `relay up`"


class Service(NamedTuple):
    """A file, its path, and the commands that activate and deactivate it."""

    home: str
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
            raise NoService(f"{path!r} is not an absolute path in printable characters")
    if platform == "darwin":
        folder = os.path.join(user_home, "Library", "LaunchAgents")
        return _launchd(
            home, python, _unit_path(home, user_home, os.path.join(folder, LABEL), PLIST)
        )
    if platform.startswith("linux"):
        config = environ.get("XDG_CONFIG_HOME") or os.path.join(user_home, ".config")
        folder = os.path.join(config, "systemd", "user")
        return _systemd(home, python, _unit_path(home, user_home, os.path.join(folder, NAME), UNIT))
    raise NoService(f"services are not supported on {platform}")


def _unit_path(home: str, user_home: str, stem: str, suffix: str) -> str:
    """Path of this home's file, existing or to be written."""
    plain, own = stem + suffix, f"{stem}-{tag_of(home)}{suffix}"
    named = home_in(plain)
    if named is not None and _is_same(named, home):
        return plain
    is_default = _is_same(home, os.path.join(user_home, os.path.basename(DEFAULT_HOME)))
    is_free = named is None and not os.path.lexists(own)
    return plain if is_default and is_free else own


def _is_same(one: str, other: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(other)


def home_in(path: str) -> str | None:
    """The home that a unit or a launchd agent starts the relay for; None where it names none."""
    try:
        with open(path, "rb") as file:
            data = file.read()
        if path.endswith(PLIST):
            words: list[object] = plistlib.loads(data).get("ProgramArguments") or []
            return str(words[-1]) if "--home" in words[-2:-1] else None
        found = HOME_IN_UNIT.search(data.decode())
    except (OSError, ValueError, AttributeError, ExpatError):
        return None
    if found is None:
        return None
    word = re.sub(r"\\(.)", r"\1", found[1])
    return word.replace("%%", "%").replace("$$", "$")


def install(service: Service) -> bool:
    """Write the file; True if it is new or changed.

    Errors: OSError; NoService for a link, and for a file of another home.
    """
    folder = os.path.dirname(service.path)
    os.makedirs(folder, exist_ok=True)
    _refuse_another(service)
    if os.path.islink(service.path):
        raise NoService(f"{service.path} is a link", hint="remove it, or repair its target")
    if read_installed(service) == service.text:
        return False
    fsio.write_atomic(service.path, service.text)
    return True


def uninstall(service: Service) -> None:
    """Remove the file.

    Errors: NotFound when there is none, with those of other homes; NoService for another home's.
    """
    _refuse_another(service)
    try:
        os.unlink(service.path)
    except FileNotFoundError as exc:
        others = ", ".join(
            f"{path} is that of {home}" for path, home in _units_of_other_homes(service)
        )
        raise NotFound(
            f"there is no {service.path}",
            hint=f"nothing was installed for {service.home}{'; ' if others else ''}{others}",
        ) from exc


def _refuse_another(service: Service) -> None:
    """Errors: NoService where the file in the service's place is another home's."""
    named = home_in(service.path)
    if named is not None and not _is_same(named, service.home):
        raise NoService(
            f"{service.path} is that of {named}, not of {service.home}",
            hint=f"`relay --home {named} service show` prints it; move it away if it is not needed",
        )


def _units_of_other_homes(service: Service) -> list[tuple[str, str]]:
    """The files of other homes beside this one's, each with its home."""
    folder, name = os.path.split(service.path)
    stem = LABEL if name.endswith(PLIST) else NAME
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    paths = [os.path.join(folder, one) for one in names if one.startswith(stem)]
    return [(path, home) for path in paths if (home := home_in(path)) is not None]


def read_installed(service: Service) -> bytes | None:
    """Content of the installed file; None if it does not exist."""
    try:
        with open(service.path, "rb") as file:
            return file.read()
    except FileNotFoundError:
        return None


def _systemd(home: str, python: str, path: str) -> Service:
    words = " ".join(_quoted(word) for word in (python, "-m", "relay.daemon", "--home", home))
    text = f"""\
# Written by `relay service install`; replaced by the next one.
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
# wrong command line or config.json, no home, another relay: a restart repairs none of these
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
    unit = os.path.basename(path)
    return Service(
        home,
        path,
        text.encode(),
        ("systemctl --user daemon-reload", f"systemctl --user enable --now {unit}"),
        (f"systemctl --user disable --now {unit}", "systemctl --user daemon-reload"),
    )


def _quoted(word: str) -> str:
    """A word of ExecStart as systemd.service(5) reads it: nothing in it is expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _launchd(home: str, python: str, path: str) -> Service:
    label = os.path.basename(path).removesuffix(PLIST)
    job = {
        "Label": label,
        "ProgramArguments": [python, "-m", "relay.daemon", "--home", home],
        "RunAtLoad": True,
        "KeepAlive": {"SuccessfulExit": False},
        "AbandonProcessGroup": True,  # agents that the relay started are left to run
        "ExitTimeOut": STOP_S,
        "StandardErrorPath": os.path.join(home, "logs", "relay.err"),
        "Umask": 0o077,
    }
    target = f"gui/{os.getuid()}"
    quoted = "'" + path.replace("'", "'\\''") + "'"
    return Service(
        home,
        path,
        plistlib.dumps(job),
        (f"launchctl bootstrap {target} {quoted}",),
        (f"launchctl bootout {target}/{label}",),
    )
