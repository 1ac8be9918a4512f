"""A home of an earlier version: what was delivered or begun there is owed from the next start."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.procs import Relay, earlier_home, relay, until

pytestmark = pytest.mark.timeout(60)
BEGUN, UNREAD = "1795361487816804147-8ae41a23fc338fea", "1795361490215653927-c60f4c40b65b759a"


def test_M03_what_an_earlier_version_had_begun_is_owed(tmp_path: Path) -> None:
    home = earlier_home("killed", tmp_path)
    with Relay(home):
        until(lambda: BEGUN in relay("open", "--json", home=home).stdout)
        rows = relay("open", home=home).stdout.splitlines()
        assert any("8ae41a23" in row and "in progress" in row for row in rows)
        assert any("c60f4c40" in row and "read" in row for row in rows)
