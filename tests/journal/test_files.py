"""Files that are there whole or not at all, whatever the power does."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

from relay.journal.files import NewFile, remove
from tests.disk import hooked
from tests.power import Cut, Power


@pytest.fixture
def power(tmp_path: Path) -> Iterator[Power]:
    """Watches tmp_path/disk, where `old` is."""
    (tmp_path / "disk").mkdir()
    (tmp_path / "disk" / "old").write_bytes(b"what was there")
    watching = Power(tmp_path / "disk")
    with hooked(watching):
        yield watching
    watching.close()


@pytest.mark.parametrize("mode", Cut)
def test_committed_it_survives_a_power_cut(power: Power, tmp_path: Path, mode: Cut) -> None:
    for name in ("new", "old"):
        with NewFile(str(tmp_path / "disk" / name)) as file:
            file.write(b"x" * 5000)
            file.write(b"y" * 5000)
            file.commit()
    after = power.cut(tmp_path / "after", mode, random.Random(1))
    assert sorted(path.name for path in after.iterdir()) == ["new", "old"]
    for name in ("new", "old"):
        assert (after / name).read_bytes() == b"x" * 5000 + b"y" * 5000


@pytest.mark.parametrize("mode", Cut)
def test_removed_it_stays_away(power: Power, tmp_path: Path, mode: Cut) -> None:
    remove(str(tmp_path / "disk" / "old"))
    remove(str(tmp_path / "disk" / "old"))
    after = power.cut(tmp_path / "after", mode, random.Random(1))
    assert list(after.iterdir()) == []


def test_not_committed_it_leaves_nothing(tmp_path: Path) -> None:
    (tmp_path / "file.tmp").write_bytes(b"of a crash")
    with pytest.raises(ValueError, match="changed my mind"):
        with NewFile(str(tmp_path / "file")) as file:
            file.write(b"x")
            raise ValueError("changed my mind")
    with NewFile(str(tmp_path / "file")) as file:
        file.write(b"x")
    assert list(tmp_path.iterdir()) == []
