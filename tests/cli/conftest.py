"""A stream of the journal, for commands that look into one."""

from __future__ import annotations

from pathlib import Path

import pytest

from relay.journal.journal import Append, Journal
from relay.journal.segment import SegmentPolicy
from tests.fakes import FakeClock
from tests.journal.manifest_support import silent


@pytest.fixture
def stream(tmp_path: Path) -> Path:
    """Two sealed segments and an active one, its writer gone."""
    path = tmp_path / f"{1:020d}"
    journal = open_journal(path)
    for n in range(3):
        journal.append([Append(b"%d-%d" % (n, i)) for i in range(4)])
        journal.commit()
        if n < 2:
            journal.raise_ext_id(7)
            journal.seal()
    journal.close()
    return path


def open_journal(path: Path) -> Journal:
    policy = SegmentPolicy(segment_bytes=1 << 16, slice_bytes=1 << 12)
    return Journal.open(str(path), 1, FakeClock(), policy, silent)
