"""``relay service``: install the relay as a systemd user unit, or as a launchd agent.

    Linux  $XDG_CONFIG_HOME/systemd/user/agent-relay.service  (~/.config where it is not set)
    macOS  ~/Library/LaunchAgents/local.agent-relay.plist

These are the names for ~/.agent-relay; another home's file has a short name of that home appended
to `agent-relay`, so that homes leave each other's alone.

Only the file is written here; the commands that activate it are printed for a person to run. The
file names this Python and this home by absolute paths.
"""

from __future__ import annotations

import contextlib
import os
import plistlib
import sys
from collections.abc import Mapping
from typing import NamedTuple

import click

from relay.base import discovery, fsio
from relay.base.discovery import FOLDER
from relay.base.errors import EXIT_STATE, NotFound, RelayError
from relay.base.home import tag_of
from relay.cli.common import command, open_home, say

NAME = "agent-relay"
LABEL = "local.agent-relay"
UNIT = ".service"
PLIST = ".plist"
TARGET = "default.target"
STOP_S = 30  # usually less than five; allows for a hanging disk
START_S = 600  # a start after a crash replays the journal
WATCHDOG_S = 60  # a loop stuck for this long is killed and restarted


class NoService(RelayError):
    """This system has neither systemd nor launchd, or the file cannot be as it must."""

    hint = "start the relay with `relay up`"


class StillEnabled(RelayError):
    """The unit is enabled: systemd disables only a unit whose file is there."""

    exit_code = EXIT_STATE


class Service(NamedTuple):
    """A file, its path, and the commands that activate and deactivate it."""

    home: str
    path: str
    text: bytes
    start: tuple[str, ...]  # commands, for a person
    stop: tuple[str, ...]  # without the file
    disable: str = ""  # with it; empty where `stop` is enough


@click.group(epilog="\b\nExamples:\n  relay service install\n  relay service uninstall")
def service() -> None:
    """Install the relay as a service: systemd or launchd.

    Writes a unit for your own user, one per home; root is not needed. The commands that activate
    it are printed, not run.
    """


@command(
    of=service,
    epilog="""\b
Examples:
  relay service install
  relay service install --print""",
)
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of writing it.")
def install(ctx: click.Context, home: str | None, only_print: bool, as_json: bool) -> None:
    """Write the unit for this home and this Python; units of other homes stay."""
    found = _of(ctx, home)
    if only_print:
        click.echo(found.text.decode(), nl=False)
        return
    is_new = write_unit(found)
    done = "wrote" if is_new else "unchanged:"
    text = "\n  ".join([f"{done} {found.path}; now run", *found.start])
    say(text, {"path": found.path, "changed": is_new, "commands": list(found.start)}, as_json)


@command(of=service, epilog="\b\nExample:\n  relay service uninstall")
def uninstall(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Remove the unit of this home.

    While it is enabled, this prints the commands that stop and disable it, and exits 5.
    """
    found = _of(ctx, home)
    if is_enabled(found):
        raise StillEnabled(
            f"{os.path.basename(found.path)} is enabled",
            hint=f"first `{found.disable}`, then `relay service uninstall`",
        )
    remove_unit(found)
    text = "\n  ".join([f"removed {found.path}; if it is running, stop it with", *found.stop])
    say(text, {"path": found.path, "commands": list(found.stop)}, as_json)


def _of(ctx: click.Context, home: str | None) -> Service:
    """Return the home's service on this system. Errors: HomeMissing, NoService."""
    with open_home(ctx, home) as opened:
        return service_of(opened.root, os.environ)


def service_of(
    home: str, environ: Mapping[str, str], platform: str = sys.platform, python: str = ""
) -> Service:
    """The service of this system for the relay of ``home``.

    Errors: NoService elsewhere than on Linux and macOS, and for a path that no unit can have.
    """
    python = python or sys.executable
    user_home = environ.get("HOME") or discovery.user_home()
    for path in (home, python):
        if not os.path.isabs(path) or not path.isprintable():
            raise NoService(f"{path!r} is not an absolute path in printable characters")
    if platform == "darwin":
        folder = os.path.join(user_home, "Library", "LaunchAgents")
        return _launchd(
            home, python, _unit_path(home, user_home, os.path.join(folder, LABEL), PLIST)
        )
    if platform.startswith("linux"):
        config = environ.get("XDG_CONFIG_HOME", "")  # a relative one is to be ignored
        config = config if os.path.isabs(config) else os.path.join(user_home, ".config")
        folder = os.path.join(config, "systemd", "user")
        return _systemd(home, python, _unit_path(home, user_home, os.path.join(folder, NAME), UNIT))
    raise NoService(f"services are not supported on {platform}")


def _unit_path(home: str, user_home: str, stem: str, suffix: str) -> str:
    """Path of this home's file."""
    default = os.path.join(user_home, FOLDER)
    is_default = os.path.realpath(home) == os.path.realpath(default)
    return f"{stem}{suffix}" if is_default else f"{stem}-{tag_of(home)}{suffix}"


def write_unit(unit: Service) -> bool:
    """Write the file; True if it is new or changed. Errors: OSError; NoService for a link."""
    os.makedirs(os.path.dirname(unit.path), exist_ok=True)
    if os.path.islink(unit.path):
        raise NoService(f"{unit.path} is a link", hint="remove it, or repair its target")
    with contextlib.suppress(FileNotFoundError), open(fsio.open_read(unit.path), "rb") as file:
        if file.read() == unit.text:
            return False
    fsio.write_atomic(unit.path, unit.text)
    return True


def remove_unit(unit: Service) -> None:
    """Remove the file. Errors: NotFound when there is none."""
    try:
        os.unlink(unit.path)
    except FileNotFoundError as exc:
        hint = f"nothing was installed for {unit.home}"
        raise NotFound(f"there is no {unit.path}", hint=hint) from exc


def is_enabled(unit: Service) -> bool:
    """True if systemd starts the unit by itself: there is a link to it for `[Install]`."""
    folder, name = os.path.split(unit.path)
    return bool(unit.disable) and os.path.lexists(os.path.join(folder, f"{TARGET}.wants", name))


def _systemd(home: str, python: str, path: str) -> Service:
    words = " ".join(_quoted(word) for word in (python, "-P", "-m", "relay.daemon", "--home", home))
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
WantedBy={TARGET}
"""
    unit = os.path.basename(path)
    return Service(
        home,
        path,
        text.encode(),
        ("systemctl --user daemon-reload", f"systemctl --user enable --now {unit}"),
        (f"systemctl --user stop {unit}", "systemctl --user daemon-reload"),
        f"systemctl --user disable --now {unit}",
    )


def _quoted(word: str) -> str:
    """A word of ExecStart as systemd.service(5) reads it: nothing in it is expanded."""
    escaped = word.replace("\\", "\\\\").replace('"', '\\"').replace("%", "%%").replace("$", "$$")
    return f'"{escaped}"'


def _launchd(home: str, python: str, path: str) -> Service:
    label = os.path.basename(path).removesuffix(PLIST)
    job = {
        "Label": label,
        "ProgramArguments": [python, "-P", "-m", "relay.daemon", "--home", home],
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
