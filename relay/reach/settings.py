"""Settings files of agent CLIs: our hooks go in, and exactly they come out again.

Entries of others, their order and unknown keys stay. A file that cannot be understood, is read-only
or belongs to somebody else is left alone, and so is a link that leads out of a project.

A hook must not decide anything for the agent CLI by the way in which it fails: exit 2 would refuse
a prompt, or wake a session, and is also what a program says that does not know an option. So the
commands end with 0, and the one that wakes ends with 2 for ``WOKEN`` alone.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import tomllib
from collections.abc import Callable, Iterator
from typing import Any

from relay.base.errors import SettingsError
from relay.base.text import visible
from relay.reach.bell import WOKEN
from relay.reach.settings_file import BACKUP, Change, check_writable, made_for, text_of
from relay.reach.vendors import ASKED, FOR_TOOL, REWAKE, REWAKE_TIMEOUT_S, TIMEOUT_S, Vendor

SERVER = "agent-relay"  # the name of the MCP server
ENDS_WELL = " || exit 0"
WAKES = f" ; [ $? -eq {WOKEN} ] && exit 2 ; exit 0"
_TOML_BEGIN, _TOML_END = "# >>> agent-relay >>>", "# <<< agent-relay <<<"
_TOML_TABLE = re.compile(r"^\[mcp_servers\.agent-relay[\].].*\n(?:(?![\[#]).*\n)*", re.MULTILINE)
_TAKES = re.compile(r"\brelay\b[^|;&]*\binbox\b[^|;&]*--take\b")
Settings = dict[str, Any]
Edit = Callable[[str, str | None], str | None]  # path and text of a file -> its new text


def hook_files(vendor: Vendor, folder: str, *, user: bool) -> list[str]:
    """The files that have hooks, the one to install them in first.

    folder: the home directory of the user, or the project's.
    """
    if user:
        return [os.path.join(folder, vendor.hooks_file)]
    names = [name for name in (vendor.project_file, vendor.former_file) if name]
    users = os.path.realpath(os.path.join(os.path.expanduser("~"), vendor.hooks_file))
    paths = [os.path.join(folder, name) for name in names]
    return paths[:1] + [path for path in paths[1:] if os.path.realpath(path) != users]


def installation(
    vendor: Vendor,
    folder: str,
    command: list[str],
    options: list[str],
    *,
    user: bool,
    mcp: bool,
    ask_s: int = 0,
) -> list[Change]:
    """The changes that install our hooks; those in other files of the scope are taken over.

    ``ask_s``: how long the operator is asked for a permission, or 0. Errors: SettingsError, also
    where another set-up gives the same messages to the same sessions.
    """
    _refuse_rivals(vendor, folder, user=user)
    first, *former = hook_files(vendor, folder, user=user)
    edits: dict[str, list[Edit]] = {first: [_adding_hooks(vendor, command, options, ask_s)]}
    if mcp:
        edits.setdefault(_mcp_file(vendor, folder, user=user), []).append(
            _adding_server(command, options)
        )
    changes = []
    for path, steps in edits.items():
        before = after = text_of(path)
        bare = _without_ours(vendor, path, before)
        for step in steps:
            after = step(path, after)
        # A file with hooks of ours has its copy already, from before them.
        keeps = True if before is not None and _same(path, bare, before) else None
        changes.append(Change(path, before, after, keeps))
    taken_over = [_removal(vendor, path) for path in former]
    changes += [change for change in taken_over if change.is_change]
    return _allowed(changes, folder, user=user)


def removal(vendor: Vendor, folder: str, *, user: bool) -> list[Change]:
    """The changes that remove our hooks and MCP server. Errors: SettingsError."""
    paths = [*hook_files(vendor, folder, user=user), _mcp_file(vendor, folder, user=user)]
    first, *others = [_removal(vendor, path) for path in dict.fromkeys(paths)]
    changes = [first, *(change for change in others if change.is_change)]
    return _allowed(changes, folder, user=user)


def _removal(vendor: Vendor, path: str) -> Change:
    """The file without ours: as it was before them, unless it was changed since."""
    text = text_of(path)
    bare = _without_ours(vendor, path, text)
    if _same(path, bare, text):
        return Change(path, text, text)
    with contextlib.suppress(SettingsError):  # a copy that is not one
        copy = text_of(os.path.realpath(path) + BACKUP)
        if copy and _same(path, copy, bare):
            bare = copy
    return Change(path, text, bare, False)


def _allowed(changes: list[Change], folder: str, *, user: bool) -> list[Change]:
    """The changes, if each file is ours to write, and in its project. Errors: SettingsError."""
    base = os.path.realpath(folder)
    for change in (change for change in changes if change.is_change):
        real = os.path.realpath(change.path)
        if change.before is not None:
            check_writable(real)
        if not user and os.path.commonpath([real, base]) != base:
            raise SettingsError(
                f"{change.path} is a link to {real}, outside of the project; it was left as it is",
                hint="--user changes the settings of the user; or put a file in place of the link",
            )
    return [change._replace(made=made_for(change.path, folder)) for change in changes]


def _refuse_rivals(vendor: Vendor, folder: str, *, user: bool) -> None:
    """Refuse a second set-up: each message would come twice. Errors: SettingsError."""
    own, seen = hook_files(vendor, folder, user=user), set[str]()
    for path, is_users in setups(vendor, os.getcwd() if user else folder):
        if (real := os.path.realpath(path)) in seen:
            continue
        seen.add(real)
        try:
            entries = read_entries(vendor, path)
        except SettingsError:
            if path in own:
                raise
            continue  # the agent CLI reads none either
        for event, entry in entries:
            if takes_messages(entry):
                raise SettingsError(
                    f"{path}: a hook of {event} runs `relay inbox --take`, and with those of "
                    "`relay hooks install` a message would come twice; nothing was installed",
                    hint="remove that hook: ours do what it does; then try again",
                )
            if is_users != user and is_ours(vendor, entry):
                scope = "--user" if is_users else "--project"
                raise SettingsError(
                    f"the hooks are in {path} already, and would run twice; nothing was installed",
                    hint=f"leave it at that, or `relay hooks remove {vendor.name} {scope}` first",
                )


def setups(vendor: Vendor, project: str) -> list[tuple[str, bool]]:
    """All files whose hooks a session in the project runs, and whether each is the user's."""
    users = hook_files(vendor, os.path.expanduser("~"), user=True)
    theirs = hook_files(vendor, project, user=False)
    return [(path, True) for path in users] + [(path, False) for path in theirs]


def read_entries(vendor: Vendor, path: str) -> list[tuple[str, Settings]]:
    """Each hook of a file with its event. Errors: SettingsError."""
    entries = _entries_of_sets if vendor.has_sets else _entries
    return list(entries(_parsed(path, text_of(path)), path))


# -- hooks in JSON ------------------------------------------------------------------------------


def is_ours(vendor: Vendor, entry: Settings) -> bool:
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


def is_old(entry: Settings) -> bool:
    """True for a hook of ours as an earlier version wrote it: its failure may be taken for a 2."""
    return not str(entry.get("command")).endswith((ENDS_WELL, WAKES))


def takes_messages(entry: Settings) -> bool:
    """True for a hook that takes messages by itself, as ``relay inbox --take`` does."""
    arguments = entry.get("args")
    words = [entry.get("command"), *(arguments if isinstance(arguments, list) else [])]
    return _TAKES.search(" ".join(word for word in words if isinstance(word, str))) is not None


def _adding_hooks(vendor: Vendor, command: list[str], options: list[str], ask_s: int) -> Edit:
    """Put our hooks in, in the places of those that are there."""

    def add(path: str, text: str | None) -> str | None:
        settings = _parsed(path, text)
        _take_out(vendor, settings, path)
        hooks = settings.setdefault(SERVER if vendor.has_sets else "hooks", {})
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
        return _written(path, text, settings)

    return add


def _adding_server(command: list[str], options: list[str]) -> Edit:
    """Put ``relay mcp`` among the MCP servers."""
    words = [*command, "mcp", *options]

    def add(path: str, text: str | None) -> str | None:
        if path.endswith(".toml"):
            return _with_toml(path, text, words)
        settings = _parsed(path, text)
        servers = settings.setdefault("mcpServers", {})
        if not isinstance(servers, dict):
            raise _bad(path, "mcpServers", "an object", servers)
        if not _is_our_server(servers.get(SERVER, {})):
            raise SettingsError(
                f"{path} has an MCP server {SERVER} already; it was left as it is",
                hint="remove that server, or install without --mcp",
            )
        servers[SERVER] = {"command": words[0], "args": words[1:]}
        return _written(path, text, settings)

    return add


def _without_ours(vendor: Vendor, path: str, text: str | None) -> str | None:
    """The text of the file without our hooks and our MCP server. Errors: SettingsError."""
    if path.endswith(".toml"):
        return _without_toml(text) or None if text is not None else None
    settings = _parsed(path, text)
    _take_out(vendor, settings, path)
    servers = settings.get("mcpServers")
    if isinstance(servers, dict) and _is_our_server(servers.get(SERVER)):
        del servers[SERVER]
        if not servers:
            del settings["mcpServers"]
    return text if text is None else _written(path, text, settings)


def _is_our_server(server: object) -> bool:
    """True for a server as an installation writes it, and not as `claude mcp add --env` does."""
    if not isinstance(server, dict) or server.keys() - {"command", "args"}:
        return False
    args = server.get("args")
    is_relay = os.path.basename(str(server.get("command"))) == "relay"
    return not server or (is_relay and isinstance(args, list) and args[:1] == ["mcp"])


def _same(path: str, first: str | None, second: str | None) -> bool:
    """True if two texts of a file say the same."""
    if path.endswith(".toml"):
        return (first or "").strip() == (second or "").strip()
    return _filled(_parsed(path, first)) == _filled(_parsed(path, second))


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


def _entries(settings: Settings, path: str) -> Iterator[tuple[str, Settings]]:
    """Yield the hooks of each event. Errors: SettingsError for settings of another form."""
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


def _entries_of_sets(settings: Settings, path: str) -> Iterator[tuple[str, Settings]]:
    """Yield the hooks of each event of each set. Errors: SettingsError, as for ``_entries``."""
    for name in settings:
        for event, handlers in _object(settings, name, path).items():
            if event == "enabled":
                continue
            if not isinstance(handlers, list):
                raise _bad(path, f"{name}.{event}", "a list", handlers)
            for handler in handlers:
                for entry in (
                    handler.get("hooks", [handler]) if isinstance(handler, dict) else [handler]
                ):
                    if not isinstance(entry, dict):
                        raise _bad(path, f"{name}.{event}", "a list of objects", handler)
                    yield event, entry


def _object(settings: Settings, name: str, path: str) -> Settings:
    value = settings.get(name, {})
    if not isinstance(value, dict):
        raise _bad(path, name, "an object", value)
    return value


def _take_out(vendor: Vendor, settings: Settings, path: str) -> None:
    """Take our hooks out, and what is empty without them."""
    if vendor.has_sets:
        if os.path.basename(path) == os.path.basename(vendor.hooks_file):  # not its MCP servers
            _take_out_set(vendor, settings, path)
        return
    ours = [id(entry) for _, entry in _entries(settings, path) if is_ours(vendor, entry)]
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


def _take_out_set(vendor: Vendor, settings: Settings, path: str) -> None:
    list(_entries_of_sets(settings, path))  # a file of another form is left alone
    own = settings.get(SERVER, {})
    for event, handlers in list(own.items()):
        if event != "enabled":
            left = [handler for handler in handlers if not is_ours(vendor, handler)]
            if left:
                own[event] = left
            elif handlers:
                del own[event]
    if SERVER in settings and not own.keys() - {"enabled"}:
        del settings[SERVER]


def _entry(words: list[str], end: str, timeout: int) -> Settings:
    return {"type": "command", "command": shlex.join(words) + end, "timeout": timeout}


def _written(path: str, text: str | None, settings: Settings) -> str | None:
    """The settings as a text, indented as the old one; None for none at all."""
    if text is not None and text.strip() and json.loads(text) == settings:
        return text
    if not settings:
        return None
    lines = (text or "").splitlines()
    second = lines[1] if len(lines) > 1 else "  "
    indent = second[: len(second) - len(second.lstrip())] or "  "
    try:
        after = json.dumps(settings, indent=indent, ensure_ascii=False, allow_nan=False) + "\n"
    except (ValueError, RecursionError) as exc:  # 1e999, as which JSON has no infinity
        raise SettingsError(f"{path}: {exc}; it was left as it is") from exc
    return after.encode(errors="backslashreplace").decode()  # half of a pair is \ud800 in JSON, too


# -- the table in TOML --------------------------------------------------------------------------


def _with_toml(path: str, text: str | None, words: list[str]) -> str:
    """A table of our own at the end of a TOML file, between two comments."""
    rest = _without_toml(text or "")
    name, words_text = f"mcp_servers.{SERVER}", json.dumps(words[1:])
    table = f"[{name}]\ncommand = {json.dumps(words[0])}\nargs = {words_text}\n"
    after = f"{rest}{_TOML_BEGIN}\n{table}{_TOML_END}\n"
    for version in (text or "", after):
        try:
            tomllib.loads(version)
        except tomllib.TOMLDecodeError as exc:
            raise SettingsError(
                f"{path}: expected TOML in which {name} can be added: {visible(str(exc))}; "
                "it was left as it is"
            ) from exc
    return after


def _without_toml(text: str) -> str:
    """The text without our table and the two comments.

    What else is between them is kept: Codex puts new tables in front of the last comment.
    """
    begin, end = text.find(_TOML_BEGIN), text.find(_TOML_END)
    if begin < 0 or end < begin:
        return text if not text or text.endswith("\n") else text + "\n"
    inside = text[begin + len(_TOML_BEGIN) : end].removeprefix("\n")
    after = text[end + len(_TOML_END) :].removeprefix("\n")
    return text[:begin] + _TOML_TABLE.sub("", inside) + after


def _mcp_file(vendor: Vendor, folder: str, *, user: bool) -> str:
    return os.path.join(folder, vendor.mcp_file if user else vendor.mcp_project_file)


def _bad(path: str, where: str, expected: str, found: object) -> SettingsError:
    got = visible(json.dumps(found)[:40])
    return SettingsError(
        f"{path}: expected {where} to be {expected}, got {got}; it was left as it is"
    )
