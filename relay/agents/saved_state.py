"""What agents keep for their next life: a few versions each, in files of their own.

    continuity/{agent}/{version, 8 digits}-{message id}.state

A save is on disk, whole and synced, when ``keep`` returns. The message id in its name makes keeping
it a second time harmless: after a crash it is the same version. The oldest beyond
``continuity.keep_versions`` go once a newer one stands.
"""

from __future__ import annotations

import os
import re
from typing import NamedTuple

from relay.base import fsio
from relay.base.config import ContinuitySettings
from relay.base.home import CONTINUITY, Home

NAME = re.compile(r"([0-9]{8,12})-([0-9]{10,20}-[0-9a-f]{0,32})\.state")
LEFT_OVER = ".tmp"  # a write that a crash cut short


class SavedState(NamedTuple):
    """One version of one agent."""

    version: int  # from 1, growing
    message_id: str  # of the message that saved it
    size: int  # bytes
    saved_at: int  # Unix nanoseconds

    @property
    def file_name(self) -> str:
        """Its name in the agent's folder."""
        return f"{self.version:08d}-{self.message_id}.state"


class StateStore:
    """The saves of all agents. Only the loop writes; names of agents are valid ones."""

    def __init__(self, home: Home, settings: ContinuitySettings) -> None:
        self.home = home
        self.settings = settings

    def versions(self, agent: str) -> list[SavedState]:
        """What there is of an agent, oldest first. Errors: OSError, UnsafePath."""
        try:
            with self.home.dirs() as dirs, os.scandir(dirs.get(CONTINUITY, agent)) as entries:
                found = [
                    SavedState(int(match[1]), match[2], status.st_size, status.st_mtime_ns)
                    for entry in entries
                    if (match := NAME.fullmatch(entry.name))
                    for status in (entry.stat(follow_symlinks=False),)
                ]
        except FileNotFoundError:
            return []
        return sorted(found)

    def save(self, agent: str, message_id: str, state: bytes) -> SavedState:
        """Keep a state as the newest version; the same message's again is the same version.

        Durable on return. Errors: OSError, UnsafePath; then nothing was kept or removed.
        """
        known = self.versions(agent)
        for save in known:
            if save.message_id == message_id:
                return save
        with self.home.dirs() as dirs:
            is_new = not known
            folder = dirs.ensure(CONTINUITY, agent)
            if is_new:  # its directory may have been made just now
                fsio.sync_dir(self.home.root)
                fsio.sync_dir(self.home.path(CONTINUITY))
            version = known[-1].version + 1 if known else 1
            save = SavedState(version, message_id, len(state), 0)
            fsio.write_atomic(self.home.path(CONTINUITY, agent, save.file_name), state)
            for old in (*known, save)[: -self.settings.keep_versions]:
                fsio.remove(old.file_name, folder)
            for name in os.listdir(folder):
                if name.endswith(LEFT_OVER):
                    fsio.remove(name, folder)
        return save

    def read(self, agent: str, save: SavedState) -> bytes:
        """The state, byte for byte. Errors: OSError, UnsafePath."""
        with self.home.dirs() as dirs:
            folder = dirs.get(CONTINUITY, agent)
            return fsio.read_regular(save.file_name, folder, max(save.size, 1))[0]
