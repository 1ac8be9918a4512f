"""Arbitrary bytes under arbitrary names: answered in a line, never lost, nobody else held up.

``scripts/fuzz --seconds N`` does the same for longer.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fuzzing import Fuzz


@pytest.mark.shows("ready 6.4")
@pytest.mark.parametrize("seed", [1, 2])
def test_whatever_is_put_into_an_outbox(tmp_path: Path, seed: int) -> None:
    fuzz = Fuzz(tmp_path / "home", seed)
    for _ in range(25):
        fuzz.step()
    assert fuzz.box.sql("PRAGMA integrity_check") == [("ok",)]
    assert fuzz.taken > 10 and fuzz.refused > 50  # both ways were gone
    fuzz.box.close()
