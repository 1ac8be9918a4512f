"""What lies under ``agents/`` and is nobody's, and a lead that nobody is: mail that the relay will
never take, or cannot deliver.

It leaves such names alone, and says nothing: a shell's temporary file is one, too. So it is said
here, of what has lain for a while.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

from relay.base.errors import InvalidName
from relay.base.names import MSG_SUFFIX, check_agent_name, shown
from relay.doctor.finding import Finding, Severity, Target, list_dir, summarize


def examine(target: Target) -> Iterator[Finding]:
    """Outboxes of names that no agent may have, files in outboxes that are no messages, and the
    lead of config.json, where there is no such agent."""
    lead = target.config.lead
    if lead and lead not in target.home.agent_inodes():
        yield Finding(
            "config",
            f"lead is {lead}, and there is no such agent: mail to Lead bounces",
            f"name an agent that is there (`relay agents`), or `relay register {lead}`",
            Severity.WARNING,
            "config.json",
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
                found = f"{exc}: {len(waiting)} messages wait in {shown(folder)}, and nobody is it"
                remedy = f"move them into the outbox of a name that may be: {exc.hint}"
                yield Finding("files", found, remedy, Severity.WARNING, shown(folder))
        else:
            yield from _no_messages(target, folder)


def _no_messages(target: Target, folder: str) -> Iterator[Finding]:
    """What the relay leaves, for its name does not end as a message's does."""
    oldest = time.time() - target.config.detection.orphan_after_s
    left = []
    for name in list_dir(target.home.path(folder)):
        if name.endswith(MSG_SUFFIX) or name.startswith("."):
            continue
        with contextlib.suppress(FileNotFoundError):
            if os.lstat(target.home.path(folder, name)).st_mtime < oldest:
                left.append(shown(f"{folder}/{name}"))
    if left:
        yield Finding(
            "files",
            f"no messages, so that the relay leaves them: {summarize(left)}",
            "if they are to be sent, rename them: {10-20 digits}-{hex}.msg, small letters",
            Severity.WARNING,
            left[0],
        )
