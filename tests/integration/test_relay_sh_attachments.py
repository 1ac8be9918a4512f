"""relay.sh stores what is attached: whole, once, and what a file that grows had at first."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.base.names import sha256_hex
from tests.agent_sdk.support import HandRelay
from tests.shells import SHELLS, Shell


@pytest.fixture(params=list(SHELLS))
def sh(request: pytest.FixtureRequest, tmp_path: Path) -> Shell:
    return Shell(SHELLS[request.param], tmp_path, HandRelay(tmp_path / "the home").root)


@pytest.mark.parametrize("change", ["printf more >>f", "printf other >f"])
def test_of_a_file_that_grows_what_was_there_is_sent(sh: Shell, change: str) -> None:
    (sh.folder / "f").write_bytes(b"first")
    done = sh.run(f'_relay_stored() {{ {change}; printf "$home/at/$1"; }}; relay_send -a f bob x')
    found = [path.read_bytes() for path in (sh.home / "at").iterdir()]
    refused = b"relay: not sent: f changed while it was being attached\n"
    expected = ([b"first"], b"", 0) if ">>" in change else ([], refused, 1)
    assert (found, done.stderr, done.returncode) == expected


def test_an_attachment_that_is_wanted_again_is_young_again(sh: Shell) -> None:
    (sh.folder / "file").write_bytes(b"data")
    sh.ok("relay_send -a file bob x")
    stored = sh.home / "attachments" / sha256_hex(b"data")[:2] / sha256_hex(b"data")
    os.utime(stored, (0, 0))
    sh.ok("relay_send -a file bob x")
    assert stored.stat().st_mtime > 0
    stored.write_bytes(b"data, damaged")
    sh.ok("relay_send -a file bob x")
    assert stored.read_bytes() == b"data"
