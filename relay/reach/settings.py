"""Settings files of agent CLIs: our hooks go in, and exactly they come out again.

Entries of others, their order and unknown keys stay. A file that cannot be understood, is read-only
or belongs to somebody else is left alone. Before a change the file is copied, with the ending
``.before-relay``. A symbolic link stays one: the file that it names is replaced, by rename.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import stat
import time
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from relay.base.clock import elapsed
from relay.base.discovery import has_config
from relay.base.errors import ConfigError, RelayError
from relay.base.text import visible
from relay.reach.session import load_sessions
from relay.reach.vendors import REWAKE, REWAKE_TIMEOUT_S, TIMEOUT_S, VENDORS, Vendor

BACKUP = ".before-relay"
SERVER = "agent-relay"  # the name of the MCP server
MAX_BYTES = 16 << 20
_TOML_BEGIN, _TOML_END = "# >>> agent-relay >>>", "# <<< agent-relay <<<"
Settings = dict[str, Any]


class Changed(NamedTuple):
    """The change of one file by an installation or removal."""

    path: str
    before: str | None  # its text; None: there is none
    after: str | None  # None: it is removed

    @property
    def is_change(self) -> bool:
        """False if the file stays as it is."""
        return self.before != self.after


def hooks_path(vendor: Vendor, folder: str, *, user: bool) -> str:
    """The file with the hooks; ``folder``: the home directory of the user, or the project's."""
    return os.path.join(folder, vendor.hooks_file if user else vendor.project_file)


def mcp_path(vendor: Vendor, folder: str, *, user: bool) -> str:
    """The file with the MCP servers."""
    return os.path.join(folder, vendor.mcp_file if user else vendor.mcp_project_file)


def with_hooks(vendor: Vendor, path: str, command: list[str], options: list[str]) -> Changed:
    """The file with our hooks, in the places of those that are there. Errors: ConfigError."""
    text, settings = _read(path)
    _remove(vendor, settings, path)
    hooks = settings.setdefault("hooks", {})
    for event in vendor.events:
        words = [*command, "hook", vendor.name, event, *options]
        entries: list[Settings] = [_entry(words, TIMEOUT_S * vendor.second)]
        if (vendor.name, event) == REWAKE:
            waits = _entry([*command, "bell", "--rewake", *_home_of(options)], REWAKE_TIMEOUT_S)
            entries.append(waits | {"asyncRewake": True})
        hooks.setdefault(event, []).append({"hooks": entries})
    return _changed(path, text, settings)


def without_hooks(vendor: Vendor, path: str) -> Changed:
    """The file without our hooks. Errors: ConfigError."""
    text, settings = _read(path)
    if text is None or not _remove(vendor, settings, path):
        return Changed(path, text, text)
    return _changed(path, text, settings)


def installed_events(vendor: Vendor, path: str) -> list[str]:
    """The events with a hook of ours. Errors: ConfigError."""
    _, settings = _read(path)
    return [event for event, entry in _entries(settings, path) if _is_ours(vendor, entry)]


def with_server(path: str, command: list[str], options: list[str]) -> Changed:
    """The file with ``relay mcp`` among the MCP servers. Errors: ConfigError."""
    words = [*command, "mcp", *options]
    if path.endswith(".toml"):
        return _with_toml(path, words)
    text, settings = _read(path)
    servers = settings.setdefault("mcpServers", {})
    if not isinstance(servers, dict):
        raise _bad(path, "mcpServers", "an object", servers)
    servers[SERVER] = {"command": words[0], "args": words[1:]}
    return _changed(path, text, settings)


def without_server(path: str) -> Changed:
    """The file without it. Errors: ConfigError."""
    if path.endswith(".toml"):
        text = _text_of(path)
        return Changed(path, text, None if text is None else _without_toml(text) or None)
    text, settings = _read(path)
    servers = settings.get("mcpServers")
    if text is None or not isinstance(servers, dict) or SERVER not in servers:
        return Changed(path, text, text)
    del servers[SERVER]
    if not servers:
        del settings["mcpServers"]
    return _changed(path, text, settings)


class HookStatus(NamedTuple):
    """The hooks of one vendor in one settings file."""

    vendor: str
    scope: str  # user or project
    path: str
    events: tuple[str, ...]  # with a hook of ours
    fired_at: int | None  # Unix ns: the last hook of any session; None: never
    event: str  # which that was
    problem: str = ""  # why the file cannot be understood

    @property
    def text(self) -> str:
        """The state in words."""
        if self.problem:
            return self.problem
        if not self.events:
            return "not installed"
        missing = [one for one in VENDORS[self.vendor].events if one not in self.events]
        said = f"installed, without {', '.join(missing)}" if missing else "installed"
        if self.fired_at is None:
            advice = VENDORS[self.vendor].advice
            return f"{said} and never seen to fire" + (f": {advice}" if advice else "")
        return f"{said}, last fired {elapsed(time.time_ns() - self.fired_at)} ago ({self.event})"


def hook_states(root: str, project: str, names: tuple[str, ...] = ()) -> list[HookStatus]:
    """The state of each vendor's hooks, of the user and of a project."""
    sessions = load_sessions(root) if has_config(root) else []
    found = []
    for one in chosen(names):
        seen = [(s.seen_at, s.event) for s in sessions if s.harness == one.name and s.seen_at]
        fired_at, event = max(seen, default=(None, ""))
        for user in (True, False):
            folder = os.path.expanduser("~") if user else project
            path = hooks_path(one, folder, user=user)
            facts: dict[str, Any] = {"events": (), "problem": ""}
            try:
                facts["events"] = tuple(dict.fromkeys(installed_events(one, path)))
            except RelayError as exc:
                facts["problem"] = str(exc)
            scope = "user" if user else "project"
            found.append(HookStatus(one.name, scope, path, fired_at=fired_at, event=event, **facts))
    return found


def chosen(names: Iterable[str]) -> list[Vendor]:
    """The vendors of these names, each once; all of them without a name."""
    return [VENDORS[name] for name in dict.fromkeys(names or VENDORS)]


def write(change: Changed, *, keep: bool = True) -> None:
    """Carry a change out, and ``keep`` a copy of the file as it was.

    Errors: ConfigError for a file that is not to be written; OSError.
    """
    path = os.path.realpath(change.path)
    mode = 0o600
    if change.before is not None:
        status = os.stat(path)
        mode = stat.S_IMODE(status.st_mode)
        if status.st_uid != os.geteuid():
            raise ConfigError(f"{path} belongs to user {status.st_uid}; it was left as it is")
        if not mode & 0o200:
            hint = f"`chmod u+w {shlex.quote(path)}`, and try again"
            raise ConfigError(f"{path} is read-only; it was left as it is", hint=hint)
        if keep:
            _replace(path + BACKUP, change.before, mode)
    if change.after is None:
        os.unlink(path)
        return
    os.makedirs(os.path.dirname(path), exist_ok=True)
    _replace(path, change.after, mode)


def _replace(path: str, text: str, mode: int) -> None:
    temp = f"{path}.{os.getpid()}.tmp"
    fd = os.open(temp, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
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


def _text_of(path: str) -> str | None:
    """The text of a file; None if there is none. Errors: ConfigError."""
    try:
        with open(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
            if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
                raise ConfigError(f"{path} is not a regular file; it was left as it is")
            data = file.read(MAX_BYTES + 1)
        if len(data) > MAX_BYTES:
            raise ConfigError(f"{path} is larger than {MAX_BYTES} bytes; it was left as it is")
        return data.decode()
    except FileNotFoundError:
        return None
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigError(f"{path} cannot be read: {exc}; it was left as it is") from exc


def _read(path: str) -> tuple[str | None, Settings]:
    """The text of a settings file, and the object in it. Errors: ConfigError."""
    text = _text_of(path)
    if text is None or not text.strip():
        return text, {}
    try:
        settings = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise ConfigError(
            f"{path}: expected JSON without comments: {visible(str(exc))}; it was left as it is",
            hint="correct the file, and try again",
        ) from exc
    if not isinstance(settings, dict):
        raise _bad(path, "the file", "a JSON object", settings)
    return text, settings


def _unique(pairs: list[tuple[str, Any]]) -> Settings:
    """An object whose keys are there once: of two, one would be lost."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the key {twice!r} is there twice")
    return found


def _entries(settings: Settings, path: str) -> Iterator[tuple[str, Settings]]:
    """Yield the hooks of each event. Errors: ConfigError for settings of another form."""
    for event, groups in _object(settings, "hooks", path).items():
        if not isinstance(groups, list):
            raise _bad(path, f"hooks.{event}", "a list", groups)
        for number, group in enumerate(groups):
            where = f"hooks.{event}[{number}]"
            if not isinstance(group, dict) or not isinstance(group.get("hooks", []), list):
                raise _bad(path, where, "an object with a list `hooks`", group)
            for entry in group.get("hooks", []):
                if not isinstance(entry, dict):
                    raise _bad(path, f"{where}.hooks", "a list of objects", entry)
                yield event, entry


def _object(settings: Settings, name: str, path: str) -> Settings:
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise _bad(path, name, "an object", value)
    return value


def _remove(vendor: Vendor, settings: Settings, path: str) -> bool:
    """Take our hooks out, and what is empty without them; True if there were any."""
    ours = [id(entry) for _, entry in _entries(settings, path) if _is_ours(vendor, entry)]
    hooks = _object(settings, "hooks", path)
    for event, groups in list(hooks.items()) if ours else ():
        kept = []
        for group in groups:
            entries = group.get("hooks", [])
            left = [entry for entry in entries if id(entry) not in ours]
            if left or not entries:
                kept.append(group if len(left) == len(entries) else group | {"hooks": left})
        if kept:
            hooks[event] = kept
        elif groups:
            del hooks[event]
    if ours and not hooks:
        del settings["hooks"]
    return bool(ours)


def _is_ours(vendor: Vendor, entry: Settings) -> bool:
    """True for a hook that runs ``relay hook`` of this vendor, or ``relay bell --rewake``."""
    command = entry.get("command")
    try:
        words = shlex.split(command) if isinstance(command, str) else []
    except ValueError:
        return False
    for at, word in enumerate(words):
        is_relay = os.path.basename(word) == "relay"
        if is_relay and words[at + 1 : at + 3] in (["hook", vendor.name], ["bell", "--rewake"]):
            return True
    return False


def _entry(words: list[str], timeout: int) -> Settings:
    return {"type": "command", "command": shlex.join(words), "timeout": timeout}


def _home_of(options: list[str]) -> list[str]:
    at = options.index("--home") if "--home" in options else len(options)
    return options[at : at + 2]


def _changed(path: str, text: str | None, settings: Settings) -> Changed:
    """The new text, indented as the old one; a file with nothing in it is removed."""
    if not settings:
        return Changed(path, text, None)
    if text is not None and text.strip() and json.loads(text) == settings:
        return Changed(path, text, text)
    lines = (text or "").splitlines()
    second = lines[1] if len(lines) > 1 else "  "
    indent = second[: len(second) - len(second.lstrip())] or "  "
    after = json.dumps(settings, indent=indent, ensure_ascii=False) + "\n"
    return Changed(path, text, after)


def _with_toml(path: str, words: list[str]) -> Changed:
    """A table of our own at the end of a TOML file, between two comments."""
    text = _text_of(path)
    rest = _without_toml(text or "")
    name, words_text = f"mcp_servers.{SERVER}", json.dumps(words[1:])
    table = f"[{name}]\ncommand = {json.dumps(words[0])}\nargs = {words_text}\n"
    after = f"{rest}{_TOML_BEGIN}\n{table}{_TOML_END}\n"
    for one in (text or "", after):
        try:
            tomllib.loads(one)
        except tomllib.TOMLDecodeError as exc:
            raise ConfigError(
                f"{path}: expected TOML in which {name} can be added: {visible(str(exc))}; "
                "it was left as it is",
                hint="correct the file, and try again",
            ) from exc
    return Changed(path, text, after)


def _without_toml(text: str) -> str:
    """The text without our table."""
    begin, end = text.find(_TOML_BEGIN), text.find(_TOML_END)
    if begin < 0 or end < begin:
        return text if not text or text.endswith("\n") else text + "\n"
    return text[:begin] + text[end + len(_TOML_END) :].removeprefix("\n")


def _bad(path: str, where: str, expected: str, found: object) -> ConfigError:
    got = visible(json.dumps(found)[:40])
    return ConfigError(
        f"{path}: expected {where} to be {expected}, got {got}; it was left as it is",
        hint="correct the file, and try again",
    )
