"""The message files of a made history."""

from __future__ import annotations

from pathlib import Path

from relay.base.home import Home
from scripts.history.originals import Originals


def test_a_day_may_begin_with_a_file_that_was_refused(tmp_path: Path) -> None:
    with Home.create(str(tmp_path / "home"), b"{}") as home:
        originals = Originals(home, "2026-01-31")
        for path in ("2026-01-31/eve/rejected/1-a.msg", "2026-01-31/eve/2-b.msg"):
            originals.put(f"archive/{path}", b"TO: bob\n\nx\n", 10**18)
            assert (tmp_path / "home" / "archive" / path).read_bytes().endswith(b"x\n")
        originals.close()
