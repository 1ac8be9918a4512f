"""Ownership of files, and hints about files of other users."""

from __future__ import annotations

import os

from relay.base.errors import ForeignOwner


def check_owner(name: str, fd: int) -> None:
    """Errors: ForeignOwner when the file open as ``fd`` belongs to another user."""
    status = os.fstat(fd)
    if status.st_uid != os.geteuid():
        raise foreign(name, status)


def foreign(name: str, status: os.stat_result) -> ForeignOwner:
    """The error for another user's file; its hint names the user."""
    text = f"{name} belongs to user {status.st_uid}, not to {os.geteuid()}"
    return ForeignOwner(text, hint=run_as(status.st_uid))


def run_as(uid: int) -> str:
    """The hint for a file that belongs to another user."""
    import pwd  # rarely needed

    try:
        name = pwd.getpwuid(uid).pw_name
    except KeyError:  # the user was removed or is from another machine
        name = str(uid)
    return f"run it as user {name}, or change the owner with `chown`"


def why_denied(path: str) -> str:
    """The hint for a file that this user may not read or write; empty if it may."""
    try:
        status = os.stat(path)
    except OSError:
        return ""
    if os.access(path, os.R_OK | os.W_OK, effective_ids=os.access in os.supports_effective_ids):
        return ""
    return f"`chmod 600 {path}`" if status.st_uid == os.geteuid() else run_as(status.st_uid)
