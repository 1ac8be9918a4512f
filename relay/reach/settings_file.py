"""One settings file of an agent CLI: our part of it, and its change.

Entries of others, their order and unknown keys stay. A file that cannot be understood is left
alone. It is replaced by rename, and only if it still is what the change was made from; where it is
a symbolic link, the file that it names is. The file as it was before the first installation is kept
beside it, with the ending ``.before-relay``, until a removal puts it back. If there was none, in a
directory that was empty, ``NO_FILE`` is kept instead, which no parser of settings accepts.

A hook must not decide anything for the agent CLI by the way in which it fails: exit 2 would refuse
a prompt, or wake a session, and is also what a program says that does not know an option. So the
commands end with 0, and the one that wakes ends with 2 for ``WOKEN`` alone.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import shlex
import stat
import tomllib
from collections.abc import Iterator
from typing import Any, NamedTuple

from relay.base.errors import SettingsError
from relay.base.text import visible
from relay.reach.bell import WOKEN
from relay.reach.vendors import ASKED, FOR_TOOL, REWAKE, REWAKE_TIMEOUT_S, TIMEOUT_S, Vendor

BACKUP = ".before-relay"
NO_FILE = "there was no file here before `relay hooks install`\n"
MAX_BYTES = 16 << 20
SERVER = "agent-relay"  # the name of the MCP server
ENDS_WELL = " || exit 0"
WAKES = f" ; [ $? -eq {WOKEN} ] && exit 2 ; exit 0"
_TOML_BEGIN, _TOML_END = "# >>> agent-relay >>>", "# <<< agent-relay <<<"
_TOML_TABLE = re.compile(r"^\[mcp_servers\.agent-relay[\].].*\n(?:(?![\[#]).*\n)*", re.MULTILINE)
_TAKES = re.compile(r"\brelay\b[^|;&]*\binbox\b[^|;&]*--take\b")
Settings = dict[str, Any]


class Hook:
    """One hook of an event in a settings file."""

    def __init__(self, vendor: Vendor, event: str, entry: Settings) -> None:
        self.event = event
        self.entry = entry
        self._vendor = vendor

    @property
    def is_ours(self) -> bool:
        """True if it runs ``relay hook`` of this vendor, or ``relay bell --rewake``."""
        command = self.entry.get("command")
        try:
            words = shlex.split(command) if isinstance(command, str) else []
        except ValueError:
            return False
        programs = (["hook", self._vendor.name], ["bell", "--rewake"])
        return any(
            os.path.basename(word) == "relay" and words[at + 1 : at + 3] in programs
            for at, word in enumerate(words)
        )

    @property
    def is_old(self) -> bool:
        """True for one as an earlier version wrote it: its failure may be taken for a 2."""
        return not str(self.entry.get("command")).endswith((ENDS_WELL, WAKES))

    @property
    def takes_messages(self) -> bool:
        """True if it takes messages by itself, as ``relay inbox --take`` does."""
        arguments = self.entry.get("args")
        words = [self.entry.get("command"), *(arguments if isinstance(arguments, list) else [])]
        return _TAKES.search(" ".join(word for word in words if isinstance(word, str))) is not None


class JsonFile:
    """A file with hooks of an agent CLI, its MCP servers, or both.

    text: None without a file. Errors of each method: SettingsError for settings of another
    form.
    """

    def __init__(self, vendor: Vendor, path: str, text: str | None) -> None:
        self.path = path
        self._vendor = vendor
        self._before = text
        self._settings = _parsed(path, text)
        is_hooks = os.path.basename(path) == os.path.basename(vendor.hooks_file)
        self._has_sets = vendor.has_sets and is_hooks  # and not its MCP servers
        self._place = SERVER if self._has_sets else "hooks"  # the key of our hooks

    def hooks(self) -> Iterator[Hook]:
        """Yield the hooks of each event."""
        for place in self._settings if self._has_sets else ("hooks",):
            for event, groups in self._lists(place).items():
                if not isinstance(groups, list):
                    raise _bad(self.path, f"{place}.{event}", "a list", groups)
                for number, group in enumerate(groups):
                    where = f"{place}.{event}[{number}]"
                    entries = self._entries(group) if isinstance(group, dict) else None
                    if not isinstance(entries, list):
                        raise _bad(self.path, where, "an object with a list `hooks`", group)
                    for entry in entries:
                        if not isinstance(entry, dict):
                            raise _bad(self.path, f"{where}.hooks", "a list of objects", entry)
                        yield Hook(self._vendor, event, entry)

    def has_ours(self) -> bool:
        """True if a hook or the MCP server of an installation is in it."""
        return any(hook.is_ours for hook in self.hooks()) or self._is_served()

    def take_out(self) -> None:
        """Take our hooks and our MCP server out, and what is empty without them."""
        self._take_hooks_out()
        if self._is_served():
            del self._settings["mcpServers"][SERVER]
            if not self._settings["mcpServers"]:
                del self._settings["mcpServers"]

    def add_hooks(self, command: list[str], options: list[str], ask_s: int) -> None:
        """Put our hooks in, in the places of those that are there."""
        vendor = self._vendor
        self._take_hooks_out()
        hooks = self._settings.setdefault(self._place, {})
        for event in vendor.events:
            words = [*command, "hook", vendor.name, event, *options]
            entries = [_entry(words, ENDS_WELL, TIMEOUT_S * vendor.second)]
            if (vendor.name, event) == REWAKE:
                own_home = options[:2] if "--home" in options else []  # it is first
                words = [*command, "bell", "--rewake", *own_home]
                entries.append(_entry(words, WAKES, REWAKE_TIMEOUT_S) | {"asyncRewake": True})
            if event == ASKED and ask_s:
                words = [*words, "--ask", str(ask_s)]
                entries.append(_entry(words, ENDS_WELL, (ask_s + TIMEOUT_S) * vendor.second))
            only = {"matcher": FOR_TOOL[event]} if event in FOR_TOOL else {}
            added = entries if vendor.has_sets else [only | {"hooks": entries}]
            hooks.setdefault(event, []).extend(added)

    def add_server(self, words: list[str]) -> None:
        """Put our MCP server in, in the place of the one that is there."""
        servers = _object(self._settings, "mcpServers", self.path)
        if servers.get(SERVER, {}) != {} and not self._is_served():
            raise SettingsError(
                f"{self.path} has an MCP server {SERVER} already; it was left as it is",
                hint="remove that server, or install without --mcp",
            )
        servers[SERVER] = {"command": words[0], "args": words[1:]}
        self._settings["mcpServers"] = servers

    def says(self, text: str) -> bool:
        """True if another text of the file says the same as it does now."""
        return _filled(_parsed(self.path, text)) == _filled(self._settings)

    def text(self) -> str | None:
        """The settings as a text, indented as the old one; None for none at all."""
        before, settings = self._before, self._settings
        if before is not None and before.strip() and json.loads(before) == settings:
            return before
        if not settings:
            return None
        lines = (before or "").splitlines()
        second = lines[1] if len(lines) > 1 else "  "
        indent = second[: len(second) - len(second.lstrip())] or "  "
        try:
            after = json.dumps(settings, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
        except (ValueError, RecursionError) as exc:  # 1e999 is read as infinity
            raise SettingsError(f"{self.path}: {exc}; it was left as it is") from exc
        # Half of a pair is \ud800 in JSON, too.
        return after.encode(errors="backslashreplace").decode()

    def _lists(self, place: str) -> Settings:
        """The list of each event below a key."""
        events = _object(self._settings, place, self.path)
        if not self._has_sets:
            return events
        return {event: value for event, value in events.items() if event != "enabled"}

    def _entries(self, group: Settings) -> Any:
        """The hooks of a group; in a set a hook may stand for itself."""
        return group.get("hooks", [group] if self._has_sets else [])

    def _is_served(self) -> bool:
        """True for our server as an installation writes it, not as `claude mcp add --env` does."""
        servers = self._settings.get("mcpServers")
        server = servers.get(SERVER) if isinstance(servers, dict) else None
        if not isinstance(server, dict) or server.keys() != {"command", "args"}:
            return False
        is_relay = os.path.basename(str(server["command"])) == "relay"
        return is_relay and isinstance(server["args"], list) and server["args"][:1] == ["mcp"]

    def _take_hooks_out(self) -> None:
        ours = [id(hook.entry) for hook in self.hooks() if hook.is_ours]
        events = self._settings.get(self._place, {})
        for event, groups in list(self._lists(self._place).items()) if ours else ():
            kept = []
            for group in groups:
                entries = self._entries(group)
                left = [entry for entry in entries if id(entry) not in ours]
                if left or not entries:
                    kept.append(group if len(left) == len(entries) else group | {"hooks": left})
            if kept:
                events[event] = kept
            elif groups:
                del events[event]
        if ours and not self._lists(self._place):
            self._settings.pop(self._place, None)


class TomlFile:
    """A file in TOML: our MCP server is a table at its end, between two comments."""

    def __init__(self, path: str, text: str | None) -> None:
        self.path = path
        self._text = text or ""

    def has_ours(self) -> bool:
        """True if our table is in it."""
        return 0 <= self._text.find(_TOML_BEGIN) < self._text.find(_TOML_END)

    def take_out(self) -> None:
        """Take our table and the two comments out.

        What else is between them is kept: Codex puts new tables in front of the last comment.
        """
        if self.has_ours():
            head, _, rest = self._text.partition(_TOML_BEGIN)
            inside, _, tail = rest.partition(_TOML_END)
            inside = _TOML_TABLE.sub("", inside.removeprefix("\n"))
            self._text = head + inside + tail.removeprefix("\n")

    def add_server(self, words: list[str]) -> None:
        """Put our table in, in the place of the one that is there. Errors: SettingsError."""
        before = self._text
        self.take_out()
        name, end = f"mcp_servers.{SERVER}", "" if self._text.endswith("\n") else "\n"
        table = f"[{name}]\ncommand = {json.dumps(words[0])}\nargs = {json.dumps(words[1:])}\n"
        self._text += f"{end if self._text else ''}{_TOML_BEGIN}\n{table}{_TOML_END}\n"
        for version in (before, self._text):
            try:
                tomllib.loads(version)
            except tomllib.TOMLDecodeError as exc:
                raise SettingsError(
                    f"{self.path}: expected TOML in which {name} can be added: "
                    f"{visible(str(exc))}; it was left as it is"
                ) from exc

    def says(self, text: str) -> bool:
        """True if another text of the file says the same as it does now."""
        return text.strip() == self._text.strip()

    def text(self) -> str | None:
        """The text; None for none at all."""
        return self._text or None


def _filled(settings: Settings) -> Settings:
    """The settings without empty places for hooks and servers: a removal takes them away."""
    kept = dict(settings)
    for place in ("hooks", "mcpServers", SERVER):
        if isinstance(inside := kept.pop(place, {}), dict):
            inside = {name: value for name, value in inside.items() if value}
        if inside:
            kept[place] = inside
    return kept


def _parsed(path: str, text: str | None) -> Settings:
    """The object in a settings file. Errors: SettingsError."""
    if text is None or not text.strip():
        return {}
    try:
        settings = json.loads(text, object_pairs_hook=_unique, parse_constant=_no_number)
    except (ValueError, RecursionError) as exc:
        raise SettingsError(
            f"{path}: expected JSON without comments: {visible(str(exc))}; it was left as it is"
        ) from exc
    if not isinstance(settings, dict):
        raise _bad(path, "the file", "a JSON object", settings)
    return settings


def _unique(pairs: list[tuple[str, Any]]) -> Settings:
    """An object whose keys are there once: of two, one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _no_number(name: str) -> float:
    raise ValueError(f"{name} is not a number")


def _object(settings: Settings, name: str, path: str) -> Settings:
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise _bad(path, name, "an object", value)
    return value


def _entry(words: list[str], end: str, timeout: int) -> Settings:
    return {"type": "command", "command": shlex.join(words) + end, "timeout": timeout}


def _bad(path: str, where: str, expected: str, found: object) -> SettingsError:
    got = visible(json.dumps(found)[:40])
    return SettingsError(
        f"{path}: expected {where} to be {expected}, got {got}; it was left as it is"
    )


# -- its change ---------------------------------------------------------------------------------


class Change(NamedTuple):
    """The change of one file by an installation or removal."""

    path: str
    before: str | None  # its text; None: there is none
    after: str | None  # None: it is removed
    keeps: bool | None = None  # a copy of the text before; False: the copy goes; None: as it is
    made: str = ""  # the directory that goes with the file, if it is empty

    @property
    def is_change(self) -> bool:
        """False if the file stays as it is."""
        return self.before != self.after


def check_writable(path: str) -> None:
    """Refuse a file of another user, or one that is read-only. Errors: SettingsError, OSError."""
    status = os.stat(path)
    if status.st_uid != os.geteuid():
        text = f"{path} belongs to user {status.st_uid}; it was left as it is"
        raise SettingsError(text, hint="run this as that user")
    if not status.st_mode & 0o200:
        hint = f"`chmod u+w {shlex.quote(path)}`, and try again"
        raise SettingsError(f"{path} is read-only; it was left as it is", hint=hint)


def write(change: Change) -> None:
    """Carry a change out. Errors: OSError; SettingsError if the file was changed meanwhile."""
    path = os.path.realpath(change.path)
    folder = os.path.dirname(path)
    is_empty = os.path.isdir(folder) and not os.listdir(folder)
    os.makedirs(folder, exist_ok=True)
    with _locked(folder):
        if text_of(path) != change.before:
            raise SettingsError(
                f"{path} was changed by another program; it was left as it is", hint="try again"
            )
        mode = 0o600 if change.before is None else stat.S_IMODE(os.stat(path).st_mode)
        if (change.keeps and change.before is not None) or (change.before is None and is_empty):
            _replace(path + BACKUP, NO_FILE if change.before is None else change.before, mode)
        if change.after is not None:
            _replace(path, change.after, mode)
        else:
            os.unlink(path)
        if change.keeps is False:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(path + BACKUP)
    if change.after is None and change.made:
        with contextlib.suppress(OSError):  # others have files there
            os.rmdir(change.made)


def made_for(path: str, folder: str) -> str:
    """The directory of a file if an installation made it; empty for ``folder`` and those in which a
    copy shows that they were there before.
    """
    parent = os.path.dirname(path)
    if parent == folder or not os.path.isdir(parent):
        return ""
    return "" if any(name.endswith(BACKUP) for name in os.listdir(parent)) else parent


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[None]:
    """Keep other installations out of the directory."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        yield
    finally:
        os.close(fd)


def _replace(path: str, text: str, mode: int) -> None:
    temp = f"{path}.relay-tmp"  # the next one writes over what a kill has left
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, mode)
    try:
        with open(fd, "w", encoding="utf-8") as file:
            os.fchmod(fd, mode)
            file.write(text)
            file.flush()
            os.fsync(fd)
        os.rename(temp, path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temp)
        raise


def text_of(path: str) -> str | None:
    """The text of a file; None if there is none. Errors: SettingsError."""
    try:
        if not stat.S_ISREG(os.stat(path).st_mode):
            raise SettingsError(
                f"{path} is not a regular file; it was left as it is",
                hint="move it away, and try again",
            )
        with open(path, "rb") as file:
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise SettingsError(f"{path} is larger than {MAX_BYTES} bytes; it was left as it is")
        return data.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else exc
        raise SettingsError(f"{path} cannot be read: {reason}; it was left as it is") from exc
