"""Checks of files: modes, owners, links, leftovers, mailboxes and attachments.

While the home itself has mode 700, a wide mode inside is a warning only. Large trees are checked
up to a limit, which a note reports.
"""

from __future__ import annotations

import contextlib
import os
import stat
import time
from collections.abc import Iterator

import msgspec

from relay.agents.roster import Meta
from relay.base import archive_pack
from relay.base.archive_pack import SUFFIX
from relay.base.errors import InvalidName
from relay.base.finding import Finding, Repair, Severity
from relay.base.home import AGENT_DIRS, META, PENDING, REJECTED
from relay.base.names import MSG_SUFFIX, check_agent_name, shown
from relay.base.text import plural
from relay.delivery.intake import PENDING_WARN_S
from relay.doctor.report import Target, list_dir, listed, partial_check, recheck
from relay.reach import report
from relay.reach.rungs import WAKE, BadWake, read_wake
from relay.reach.settings import hook_states
from relay.reach.vendors import VENDORS

MAX_ENTRIES = 50_000  # takes half a second
STAGED_S = 30  # a delivery in progress takes milliseconds
TEMP_AGE_S = 3600  # backing up or packing a large home takes minutes
TEMPS = ("", "store", "archive", "tmp", "sessions")  # folders with temporary files
UNTOUCHED = ("outbox",)  # written by agents; modes are restricted on reading


_ATTACHMENT_REFS = (
    "SELECT r.sha256, EXISTS (SELECT 1 FROM deliveries AS d WHERE d.message_id = r.message_id "
    "AND d.state IN ('held', 'staged', 'written')) FROM attachment_refs AS r"
)


def check_files(target: Target) -> Iterator[Finding]:
    """Check modes, owners, links and leftovers."""
    scan = EntryScan()
    for path, entry in _walk(target.home.root, "", scan):
        scan.take(path, entry)
    yield from scan.findings()
    if scan.is_cut:
        total = 1 + sum(
            len(folders) + len(files) for _, folders, files in os.walk(target.home.root)
        )
        yield partial_check("files", scan.count, total, "entries of the home, at modes and owners")
    yield from _mailboxes(target)
    yield from recheck(target, _pending)
    yield from _temps(target)
    if target.deep:
        yield from _packs(target)


def _walk(root: str, path: str, scan: EntryScan) -> Iterator[tuple[str, os.stat_result]]:
    """Yield every entry with its path in the home; links are not followed."""
    yield path, os.lstat(os.path.join(root, path))
    todo = [path]
    while todo:
        folder = todo.pop()
        try:
            entries = sorted(os.scandir(os.path.join(root, folder)), key=lambda entry: entry.name)
        except FileNotFoundError:
            continue  # just removed
        except OSError as exc:
            scan.unseen.append(f"{folder or '.'} ({exc.strerror})")
            continue
        for entry in entries:
            if scan.count >= MAX_ENTRIES:
                scan.is_cut = True
                return
            below = os.path.join(folder, entry.name)
            with contextlib.suppress(FileNotFoundError):
                yield below, entry.stat(follow_symlinks=False)
                if entry.is_dir(follow_symlinks=False):
                    todo.append(below)


class EntryScan:
    """Problems of the entries, by kind."""

    def __init__(self) -> None:
        self.count = 0
        self.is_cut = False
        self.unseen: list[str] = []
        self._open: list[str] = []
        self._repairs: list[Repair] = []
        self._links: list[str] = []
        self._foreign: list[str] = []

    def take(self, path: str, status: os.stat_result) -> None:
        """Check one entry."""
        self.count += 1
        parts = path.split("/")
        is_agents = parts[0] == "agents" and len(parts) > 3 and parts[2] in UNTOUCHED
        is_agents |= parts[0] == "archive" and REJECTED in parts  # refused files are kept unchanged
        mode = stat.S_IMODE(status.st_mode)
        if stat.S_ISLNK(status.st_mode):
            if not is_agents:
                self._links.append(path)
        elif status.st_uid != os.geteuid():
            self._foreign.append(path or ".")
        elif mode & 0o077 and not is_agents and path.partition("/")[2][-9:] != "meta.json":
            is_dir = stat.S_ISDIR(status.st_mode)
            if is_dir or stat.S_ISREG(status.st_mode):
                self._open.append(path or ".")
                self._repairs.append(Repair("chmod 700" if is_dir else "chmod 600", path or "."))

    def findings(self) -> Iterator[Finding]:
        """Yield one finding per kind."""
        yield from listed(
            "files",
            "accessible to other users",
            self._open,
            "`relay doctor --repair` sets directories to 700, files to 600",
            repairs=self._repairs,
        )
        found = "symbolic links, which the relay does not follow"
        advice = "replace them by their targets, or remove them"
        yield from listed("files", found, self._links, advice)
        found, error = "owned by another user", Severity.ERROR
        yield from listed("files", found, self._foreign, "`chown` them, as root", error)
        advice = "fix the disk or the permissions: their content was not checked"
        yield from listed("files", "cannot be read", self.unseen, advice, error)


def _mailboxes(target: Target) -> Iterator[Finding]:
    """Check for other files in place of an agent's directory, and for an invalid meta.json.

    Missing directories are created by the next start.
    """
    for agent in sorted(target.home.agent_names()):
        for part in AGENT_DIRS:
            path = f"agents/{agent}/{part}"
            with contextlib.suppress(OSError):
                mode = os.lstat(target.home.path(path)).st_mode
                if not stat.S_ISDIR(mode) and not stat.S_ISLNK(mode):
                    found = f"{path} is not a directory: the relay cannot use it"
                    yield Finding("files", path, found, "move it away: the next start creates it")
        meta = f"agents/{agent}/{META}"
        if os.path.lexists(target.home.path(meta)) and not _is_meta(target, agent):
            yield Finding(
                "files",
                meta,
                f"{meta} cannot be read, so {agent} has no role, process or key",
                f"fix or remove it: the SDK and `relay register {agent} --role` write a new one",
                Severity.WARNING,
            )


def _is_meta(target: Target, agent: str) -> bool:
    try:
        msgspec.json.decode(target.home.read_meta(agent) or b"", type=Meta)
    except (OSError, ValueError, RecursionError, msgspec.MsgspecError):
        return False
    return True


def _pending(target: Target) -> Iterator[Finding]:
    """Check for files left in ``.pending``."""
    detection = target.config.detection
    for agent in sorted(target.home.agent_names()):
        folder = f"agents/{agent}/outbox/{PENDING}"
        yield from _unsent(target, folder, PENDING_WARN_S, detection.orphan_after_s)
        if not target.is_running:
            continue  # the next start finishes or removes staged files
        folder, age_s = f"agents/{agent}/inbox/{PENDING}", STAGED_S + 2 * detection.scan_interval_s
        staged = [f"{folder}/{name}" for name in _older(target.home.path(folder), age_s)]
        found = f"staged for more than {age_s} s without being delivered"
        yield from listed("files", found, staged, "see logs/relay.log", where=folder)


def _unsent(target: Target, folder: str, warn_s: int, over_s: int) -> Iterator[Finding]:
    """Check for messages never renamed into the outbox, and orphaned temporary files."""
    path = target.home.path(folder)
    old = [name for name in _older(path, warn_s) if name.endswith(MSG_SUFFIX)]
    messages = [f"{folder}/{shown(name)}" for name in old]
    found = f"not sent, in .pending for more than {warn_s} s"
    advice = f"rename it into the outbox to send it; after {over_s} s a relay archives it and"
    yield from listed("files", found, messages, f"{advice} notifies its sender", where=folder)
    if target.is_running:
        return
    left = [f"{folder}/{name}" for name in _older(path, over_s) if not name.endswith(MSG_SUFFIX)]
    found = f"untouched for more than {over_s} s, writer is gone"
    yield from listed("files", found, left, "the next start removes it", repairs=_removals(left))


def _removals(paths: list[str]) -> list[Repair]:
    return [Repair("remove", path) for path in paths]


def _temps(target: Target) -> Iterator[Finding]:
    """Check for temporary files of copies, checkpoints, packs, hooks and keys that a crash left."""
    if target.is_running:
        return
    left: list[str] = []
    for folder in (*TEMPS, *[f"agents/{name}" for name in target.home.agent_names()]):
        for name in _older(target.home.path(folder), TEMP_AGE_S):
            if name.endswith((".tmp", ".tmp-journal", ".tmp-wal")) or folder == "tmp":
                left.append(f"{folder}/{name}" if folder else name)
    advice = "`relay doctor --repair` removes them"
    yield from listed("files", "left over by a crash", left, advice, repairs=_removals(left))


def _older(folder: str, age_s: int) -> Iterator[str]:
    """Yield the regular files in a folder that are older than ``age_s``."""
    oldest = time.time() - age_s
    for name in list_dir(folder):
        with contextlib.suppress(FileNotFoundError):
            status = os.lstat(os.path.join(folder, name))
            if stat.S_ISREG(status.st_mode) and status.st_mtime < oldest:
                yield name


def _packs(target: Target) -> Iterator[Finding]:
    """Check that packed days of the archive can be read."""
    for name in list_dir(target.home.path("archive")):
        if name.endswith(SUFFIX):
            yield from archive_pack.check_file(target.home.path("archive", name))


def check_agents(target: Target) -> Iterator[Finding]:
    """Check outboxes of invalid agent names, outbox files that are not messages, and the lead.

    The relay ignores such files silently, since a shell's temporary file may be one.
    """
    lead = target.config.lead
    if lead and lead not in target.home.agent_inodes():
        yield Finding(
            "config",
            "config.json",
            f"the lead {lead} is not an agent: mail to Lead bounces",
            f"choose an existing agent (`relay agents`), or `relay register {lead}`",
            Severity.WARNING,
        )
    for name in list_dir(target.home.path("agents")):
        folder = f"agents/{name}/outbox"
        try:
            check_agent_name(name)
        except InvalidName as exc:
            waiting = [
                item for item in list_dir(target.home.path(folder)) if item.endswith(MSG_SUFFIX)
            ]
            if waiting:
                count = plural(len(waiting), "message")
                found = f"{exc}: {count} in {shown(folder)} cannot be sent"
                advice = f"move them to the outbox of a valid name: {exc.hint}"
                yield Finding("files", shown(folder), found, advice, Severity.WARNING)
        else:
            yield from _ignored_files(target, folder)
            yield from _wake_file(target, name)


def check_hooks(target: Target) -> Iterator[Finding]:
    """Check the hooks of agent CLIs: of the user, and of the project that has this home."""
    for state in hook_states(target.home.root, os.path.dirname(target.home.root)):
        if state.problem:
            yield Finding("hooks", state.path, state.problem, "correct the file", Severity.NOTE)
        elif state.events and state.fired_at is None:
            advice = VENDORS[state.vendor].advice or f"start a new session of {state.vendor}"
            found = f"the hooks of {state.vendor} in {state.path} were never seen to fire"
            yield Finding("hooks", state.path, found, advice, Severity.NOTE)
        for fault in state.faults:
            found = f"the hooks of {state.vendor} in {state.path}: {fault}"
            advice = "`relay hooks status` shows all of them"
            yield Finding("hooks", state.path, found, advice, Severity.WARNING)


def _wake_file(target: Target, name: str) -> Iterator[Finding]:
    """Check the file that says how an agent is rung."""
    try:
        read_wake(target.home.root, name)
    except BadWake as exc:
        advice = "fix or remove it: until then the agent is not rung when messages wait"
        yield Finding("files", f"agents/{name}/{WAKE}", str(exc), advice, Severity.WARNING)


def _ignored_files(target: Target, folder: str) -> Iterator[Finding]:
    """Check for old outbox files whose names do not end in .msg."""
    oldest = time.time() - target.config.detection.orphan_after_s
    left = []
    for name in list_dir(target.home.path(folder)):
        if name.endswith((MSG_SUFFIX, report.SUFFIX)) or name.startswith("."):
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(target.home.path(folder, name)).st_mtime < oldest:
                left.append(shown(f"{folder}/{name}"))
    found = "ignored, because their names are not message names"
    advice = "to send them, rename them to {10-20 digits}-{hex}.msg, in lower case"
    yield from listed("files", found, left, advice)
