"""``relay service``: install the relay as a systemd user unit, or as a launchd agent.

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

import click

from relay.base import fsio
from relay.base.discovery import DEFAULT_HOME
from relay.base.errors import EXIT_STATE, NotFound, RelayError
from relay.base.home import tag_of
from relay.cli.common import echo_json, home_option, json_option, name_home, open_home, sanitize

NAME = "agent-relay"
LABEL = "local.agent-relay"
UNIT = ".service"
PLIST = ".plist"
TARGET = "default.target"
STOP_S = 30  # usually less than five; allows for a hanging disk
START_S = 600  # a start after a crash replays the journal
WATCHDOG_S = 60  # a loop stuck for this long is killed and restarted
HOME_IN_UNIT = re.compile(r'^ExecStart=.*"--home" "((?:[^"\\]|\\.)*)"$', re.MULTILINE)


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


@click.group(epilog="\b\nExamples:\n  relay service install\n  relay service show")
def service() -> None:
    """Install the relay as a service: systemd or launchd.

    Writes a unit for your own user, one per home; root is not needed. The commands that activate
    it are printed, not run.
    """


@service.command(
    epilog="\b\nExamples:\n  relay service install\n  relay service install --print",
)
@home_option
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of writing it.")
@json_option
@click.pass_context
def install(ctx: click.Context, home: str | None, only_print: bool, as_json: bool) -> None:
    """Write the unit for this home and this Python; units of other homes stay."""
    found = _of(ctx, home)
    if only_print:
        click.echo(found.text.decode(), nl=False)
        return
    is_new = write_unit(found)
    if as_json:
        echo_json({"path": found.path, "changed": is_new, "commands": list(found.start)})
        return
    done = "wrote" if is_new else "unchanged:"
    click.echo("\n  ".join([f"{done} {found.path}; now run", *found.start]))


@service.command(epilog="\b\nExample:\n  relay service uninstall")
@home_option
@json_option
@click.pass_context
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
    if as_json:
        echo_json({"path": found.path, "commands": list(found.stop)})
        return
    click.echo("\n  ".join([f"removed {found.path}; if it is running, stop it with", *found.stop]))


@service.command(epilog="\b\nExample:\n  relay service status")
@home_option
@json_option
@click.pass_context
def status(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Show whether the unit is installed and up to date. Exit code 5 if not."""
    found = _of(ctx, home)
    there = read_installed(found)
    word = "missing" if there is None else "current" if there == found.text else "another"
    if as_json:
        echo_json({"path": found.path, "state": word})
    else:
        means = {
            "missing": "not installed; run `relay service install`",
            "current": "installed for this home and this Python",
            "another": "installed for another Python or version, or edited; "
            "run `relay service install` to replace it",
        }
        click.echo(name_home(f"{found.path}: {means[word]}"))
    return 0 if word == "current" else EXIT_STATE


@service.command(epilog="\b\nExample:\n  relay service show")
@home_option
@click.pass_context
def show(ctx: click.Context, home: str | None) -> None:
    """Print the installed unit."""
    found = _of(ctx, home)
    there = read_installed(found)
    if there is None:
        raise NotFound(f"{found.path} is not installed", hint="`relay service install` writes it")
    click.echo(sanitize(there.decode(errors="replace"), lines=True), nl=False)


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


def write_unit(unit: Service) -> bool:
    """Write the file; True if it is new or changed.

    Errors: OSError; NoService for a link, and for a file of another home.
    """
    folder = os.path.dirname(unit.path)
    os.makedirs(folder, exist_ok=True)
    _refuse_another(unit)
    if os.path.islink(unit.path):
        raise NoService(f"{unit.path} is a link", hint="remove it, or repair its target")
    if read_installed(unit) == unit.text:
        return False
    fsio.write_atomic(unit.path, unit.text)
    return True


def remove_unit(unit: Service) -> None:
    """Remove the file.

    Errors: NotFound when there is none, with those of other homes; NoService for another home's.
    """
    _refuse_another(unit)
    try:
        os.unlink(unit.path)
    except FileNotFoundError as exc:
        others = ", ".join(
            f"{path} is that of {home}" for path, home in _units_of_other_homes(unit)
        )
        raise NotFound(
            f"there is no {unit.path}",
            hint=f"nothing was installed for {unit.home}{'; ' if others else ''}{others}",
        ) from exc


def is_enabled(unit: Service) -> bool:
    """True if systemd starts the unit by itself: there is a link to it for `[Install]`."""
    folder, name = os.path.split(unit.path)
    return bool(unit.disable) and os.path.lexists(os.path.join(folder, f"{TARGET}.wants", name))


def _refuse_another(unit: Service) -> None:
    """Errors: NoService where the file in the service's place is another home's."""
    named = home_in(unit.path)
    if named is not None and not _is_same(named, unit.home):
        raise NoService(
            f"{unit.path} is that of {named}, not of {unit.home}",
            hint=f"`relay --home {named} service show` prints it; move it away if it is not needed",
        )


def _units_of_other_homes(unit: Service) -> list[tuple[str, str]]:
    """The files of other homes beside this one's, each with its home."""
    folder, name = os.path.split(unit.path)
    stem = LABEL if name.endswith(PLIST) else NAME
    try:
        names = sorted(os.listdir(folder))
    except FileNotFoundError:
        return []
    paths = [os.path.join(folder, one) for one in names if one.startswith(stem)]
    return [(path, home) for path in paths if (home := home_in(path)) is not None]


def read_installed(unit: Service) -> bytes | None:
    """Content of the installed file; None if it does not exist."""
    try:
        with open(unit.path, "rb") as file:
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
