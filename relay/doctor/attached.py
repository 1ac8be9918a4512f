"""Attachments beside the messages that name them."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator

from relay.base.home import LEDGER
from relay.doctor.finding import Finding, Severity, Target, list_dir, recheck, summarize
from relay.ledger import open_readonly
from relay.ledger.archive_pack import DAY_NS

_NAMED = (
    "SELECT r.sha256, EXISTS (SELECT 1 FROM deliveries AS d WHERE d.message_id = r.message_id "
    "AND d.state IN ('held', 'staged', 'written')) FROM attachment_refs AS r"
)


def examine(target: Target) -> Iterator[Finding]:
    """Missing for messages that somebody still reads; named by none; not what their name says."""
    yield from recheck(target, lambda: {f.where: f for f in _examine(target)})
    if target.deep:
        wrong = [path for path in _stored(target).values() if not _is_whole(target, path)]
        if wrong:
            yield Finding(
                "attachments",
                f"not what their names say: {summarize(wrong)}",
                "restore them from a backup, or ask the sender for them again",
                where=wrong[0],
            )


def _examine(target: Target) -> Iterator[Finding]:
    with contextlib.closing(open_readonly(target.home.path(LEDGER))) as db:
        if db.execute("PRAGMA user_version").fetchone()[0] < 2:
            return  # the next start makes the table
        live: dict[str, bool] = {}
        for digest, is_live in db.execute(_NAMED):
            live[digest] = live.get(digest, False) or bool(is_live)
    stored = _stored(target)
    missing = sorted(digest for digest, is_live in live.items() if is_live and digest not in stored)
    if missing:
        yield Finding(
            "attachments",
            f"messages that are not read yet name what is not there: {summarize(missing)}",
            "ask their senders to put them there again",
            where="attachments missing",
        )
    days = target.config.retention.attachments_days
    oldest_ns = target.clock.now_ns() - 2 * max(days, 1) * DAY_NS
    nobodys = [
        path
        for digest, path in stored.items()
        if live and digest not in live and _written_ns(target, path) < oldest_ns
    ]
    if nobodys:
        yield Finding(
            "attachments",
            f"named by no message: {summarize(nobodys)}",
            "`relay prune` removes them" if days else "retention.attachments_days keeps them",
            Severity.NOTE,
            "attachments unnamed",
        )


def _stored(target: Target) -> dict[str, str]:
    """digest -> path below the home."""
    return {
        name: f"attachments/{folder}/{name}"
        for folder in list_dir(target.home.path("attachments"))
        for name in list_dir(target.home.path("attachments", folder))
        if len(name) == 64 and name.startswith(folder)
    }


def _written_ns(target: Target, path: str) -> int:
    try:
        return os.lstat(target.home.path(path)).st_mtime_ns
    except FileNotFoundError:
        return target.clock.now_ns()


def _is_whole(target: Target, path: str) -> bool:
    try:
        with open(target.home.path(path), "rb") as file:
            found = hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return not os.path.lexists(target.home.path(path))  # collected meanwhile
    return found == os.path.basename(path)
