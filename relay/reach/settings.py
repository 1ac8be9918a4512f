"""Hooks in the settings of agent CLIs: how they get in, exactly out again, and whether they run.

A message must come once: hooks are refused beside those of the other scope, and beside a hook that
takes messages by itself. A file that is read-only or belongs to somebody else is left alone, and so
is a link that leads out of a project.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from relay.base.clock import elapsed
from relay.base.discovery import has_config
from relay.base.errors import SettingsError
from relay.reach.rungs import silence
from relay.reach.session import Session, load_sessions
from relay.reach.settings_file import (
    BACKUP,
    Change,
    Hook,
    JsonFile,
    TomlFile,
    check_writable,
    made_for,
    text_of,
)
from relay.reach.vendors import VENDORS, Vendor


class Scope:
    """The settings of one agent CLI, of the user or of a project.

    folder: the home directory of the user, or the project's.
    """

    def __init__(self, vendor: Vendor, folder: str, *, is_user: bool) -> None:
        self.vendor = vendor
        self.name = "user" if is_user else "project"
        self._folder = folder
        self._is_user = is_user
        self.hook_files = [os.path.join(folder, vendor.hooks_file)]  # to install into: the first
        self._mcp_file = os.path.join(folder, vendor.mcp_file)
        if not is_user:
            users = os.path.realpath(os.path.join(os.path.expanduser("~"), vendor.hooks_file))
            former = [os.path.join(folder, vendor.former_file)] if vendor.former_file else []
            former = [path for path in former if os.path.realpath(path) != users]
            self.hook_files = [os.path.join(folder, vendor.project_file), *former]
            self._mcp_file = os.path.join(folder, vendor.mcp_project_file)

    def installation(
        self, command: list[str], options: list[str], *, mcp: bool, ask_s: int = 0
    ) -> list[Change]:
        """The changes that install our hooks; those in other files of the scope are taken over.

        ``ask_s``: how long the operator is asked for a permission, or 0. Errors: SettingsError,
        also where another set-up gives the same messages to the same sessions.
        """
        self._refuse_rivals()
        first, *former = self.hook_files
        changes = []
        for path in dict.fromkeys([first, self._mcp_file] if mcp else [first]):
            before = text_of(path)
            file = self._file(path, before)
            # A file with hooks of ours has its copy already, from before them.
            keeps = True if before is not None and not file.has_ours() else None
            if isinstance(file, JsonFile) and path == first:
                file.add_hooks(command, options, ask_s)
            if mcp and path == self._mcp_file:
                file.add_server([*command, "mcp", *options])
            changes.append(Change(path, before, file.text(), keeps))
        taken_over = [self._removal(path) for path in former]
        return self._allowed([*changes, *(change for change in taken_over if change.is_change)])

    def removal(self) -> list[Change]:
        """The changes that remove our hooks and MCP server. Errors: SettingsError."""
        paths = dict.fromkeys([*self.hook_files, self._mcp_file])
        first, *others = [self._removal(path) for path in paths]
        return self._allowed([first, *(change for change in others if change.is_change)])

    def _removal(self, path: str) -> Change:
        """The file without ours: as it was before them, unless it was changed since."""
        text = text_of(path)
        file = self._file(path, text)
        if not file.has_ours():
            return Change(path, text, text)
        file.take_out()
        bare = file.text()
        with contextlib.suppress(SettingsError):  # a copy that is not one
            copy = text_of(os.path.realpath(path) + BACKUP)
            if copy is not None and file.says(copy):
                bare = copy
        return Change(path, text, bare, False)

    def _file(self, path: str, text: str | None) -> JsonFile | TomlFile:
        is_toml = path.endswith(".toml")
        return TomlFile(path, text) if is_toml else JsonFile(self.vendor, path, text)

    def _allowed(self, changes: list[Change]) -> list[Change]:
        """The changes, if each file is ours to write, and in its project. Errors: SettingsError."""
        base = os.path.realpath(self._folder)
        for change in (change for change in changes if change.is_change):
            real = os.path.realpath(change.path)
            if change.before is not None:
                check_writable(real)
            if not self._is_user and os.path.commonpath([real, base]) != base:
                raise SettingsError(
                    f"{change.path} is a link to {real}, outside of the project; "
                    "it was left as it is",
                    hint="--user changes the settings of the user; or put a file in place of the "
                    "link",
                )
        return [change._replace(made=made_for(change.path, self._folder)) for change in changes]

    def _refuse_rivals(self) -> None:
        """Refuse a second set-up: each message would come twice. Errors: SettingsError."""
        seen = set[str]()
        for scope in scopes(self.vendor, os.getcwd() if self._is_user else self._folder):
            for path in scope.hook_files:
                if (real := os.path.realpath(path)) in seen:
                    continue
                seen.add(real)
                try:
                    hooks = scope.hooks_in(path)
                except SettingsError:
                    if path in self.hook_files:
                        raise
                    continue  # the agent CLI reads none either
                for hook in hooks:
                    self._refuse(hook, path, scope)

    def _refuse(self, hook: Hook, path: str, scope: Scope) -> None:
        if hook.takes_messages:
            raise SettingsError(
                f"{path}: a hook of {hook.event} runs `relay inbox --take`, and with those of "
                "`relay hooks install` a message would come twice; nothing was installed",
                hint="remove that hook: ours do what it does; then try again",
            )
        if hook.is_ours and scope.name != self.name:
            raise SettingsError(
                f"the hooks are in {path} already, and would run twice; nothing was installed",
                hint=f"leave it at that, or `relay hooks remove {self.vendor.name} "
                f"--{scope.name}` first",
            )

    def hooks_in(self, path: str) -> list[Hook]:
        """Each hook of one of the files. Errors: SettingsError."""
        return list(JsonFile(self.vendor, path, text_of(path)).hooks())


def scopes(vendor: Vendor, project: str) -> tuple[Scope, Scope]:
    """The settings that a session in the project has: those of the user, and the project's."""
    user = os.path.expanduser("~")
    return Scope(vendor, user, is_user=True), Scope(vendor, project, is_user=False)


def chosen(names: Iterable[str]) -> list[Vendor]:
    """The vendors of these names, each once; all of them without a name."""
    return [VENDORS[name] for name in dict.fromkeys(names or VENDORS)]


# -- whether they run ---------------------------------------------------------------------------


class HookStatus(NamedTuple):
    """The hooks of one vendor in one settings file."""

    vendor: str
    scope: str  # user or project
    path: str
    events: tuple[str, ...]  # with a hook of ours
    fired_at: int | None  # Unix ns: the last hook of any session; None: never
    event: str  # which that was
    problem: str = ""  # why the file cannot be understood
    faults: tuple[str, ...] = ()  # what is wrong, each with its remedy

    @property
    def text(self) -> str:
        """The state in words."""
        if self.problem:
            return self.problem
        if not self.events:
            return "not installed"
        missing = [event for event in VENDORS[self.vendor].events if event not in self.events]
        text = f"installed, without {', '.join(missing)}" if missing else "installed"
        if self.fired_at is None:
            advice = VENDORS[self.vendor].advice
            return f"{text} and never seen to fire" + (f": {advice}" if advice else "")
        return f"{text}, last fired {elapsed(time.time_ns() - self.fired_at)} ago ({self.event})"


def hook_states(root: str, project: str, names: tuple[str, ...] = ()) -> list[HookStatus]:
    """The state of each vendor's hooks, of the user and of a project."""
    sessions = load_sessions(root) if has_config(root) else []
    found = []
    for vendor in chosen(names):
        own = [session for session in sessions if session.harness == vendor.name]
        takers = list[str]()
        states = [
            state for scope in scopes(vendor, project) for state in _states(scope, own, takers)
        ]
        users = os.path.realpath(states[0].path)  # the project's own in the home directory
        others = [state for state in states if os.path.realpath(state.path) != users]
        if states[0].events and any(state.events for state in others):
            takers.append(f"they are installed for the user, too, and run twice: {states[0].path}")
        silent = [f"{s.agent}: {why}" for s in own if s.is_live and (why := silence(root, s))]
        for state in states:
            faults = (*state.faults, *takers, *silent) if state.events else ()
            found.append(state._replace(faults=faults))
    return found


def _states(scope: Scope, sessions: list[Session], takers: list[str]) -> Iterator[HookStatus]:
    """The state in each file of a scope; of a former one only if it has a hook of ours.

    Adds to ``takers`` what is said of hooks that take messages by themselves.
    """
    fired_at, event = max(
        ((session.seen_at, session.event) for session in sessions), default=(0, "")
    )
    vendor = scope.vendor.name
    for number, path in enumerate(scope.hook_files):
        state = HookStatus(vendor, scope.name, path, (), fired_at or None, event)
        try:
            hooks = scope.hooks_in(path)
        except SettingsError as exc:
            yield state._replace(problem=str(exc))
            continue
        ours = [hook for hook in hooks if hook.is_ours]
        events = tuple(dict.fromkeys(hook.event for hook in ours))
        takers += [
            f"a hook of {hook.event} runs `relay inbox --take`, so a message comes twice: remove "
            f"it from {path}"
            for hook in hooks
            if hook.takes_messages
        ]
        old = f"an earlier version wrote them: `relay hooks install {vendor}"
        old += " --user` renews them" if scope.name == "user" else "` renews them"
        is_outdated = number > 0 or any(hook.is_old for hook in ours)
        if ours or not number:
            yield state._replace(events=events, faults=(old,) if ours and is_outdated else ())
