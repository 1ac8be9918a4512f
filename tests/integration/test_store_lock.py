"""The lock of a store file where the kernel cannot give one: a clear refusal."""

from __future__ import annotations

import errno
import fcntl
import os
from pathlib import Path

import pytest

from relay.base.errors import StoreLocked
from relay.engine import CommStore


@pytest.mark.shows("engine 6.10")
@pytest.mark.parametrize("number", [errno.ENOLCK, errno.EOPNOTSUPP, errno.ENOSYS, errno.EINVAL])
def test_without_flock_a_store_is_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(StoreLocked, match="its file system does not support flock") as refused:
        CommStore.open(str(tmp_path / "s.acomm"))
    assert "local disk" in refused.value.hint


def test_any_other_failure_is_told_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def flock(fd: int, operation: int) -> None:
        raise OSError(errno.EIO, "input/output error")

    monkeypatch.setattr(fcntl, "flock", flock)
    with pytest.raises(OSError, match="input/output error"):
        CommStore.open(str(tmp_path / "s.acomm"))


def test_the_text_of_a_lock_is_read_within_bounds(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    with CommStore.open(str(path)):
        (tmp_path / "s.acomm.lock").write_bytes(b"\xff" * 10_000)
        with pytest.raises(StoreLocked) as refused:
            CommStore.open(str(path))
    assert len(str(refused.value)) < 4096 + 200
