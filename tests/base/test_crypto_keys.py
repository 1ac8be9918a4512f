"""Key files: made once, private, and refused in one line when they are not what they must be."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from relay.base import crypto
from relay.base.errors import KeyFileError
from tests.disk import failing


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "store.key"


def refused(path: Path) -> str:
    with pytest.raises(KeyFileError) as caught:
        crypto.load_key(str(path))
    assert str(path) in str(caught.value)
    assert "\n" not in str(caught.value)
    return str(caught.value).removeprefix(f"key file {path}: ")


def test_a_key_is_made_once_and_read_again(path: Path) -> None:
    key = crypto.create_key(str(path))
    assert len(key) == 32
    assert crypto.load_key(str(path)) == key
    assert path.stat().st_mode & 0o7777 == 0o600
    assert os.listdir(path.parent) == ["store.key"]
    assert crypto.create_key(str(path.with_name("other.key"))) != key


def test_a_key_is_never_replaced(path: Path) -> None:
    key = crypto.create_key(str(path))
    with pytest.raises(KeyFileError, match="exists, and a key"):
        crypto.create_key(str(path))
    assert crypto.load_key(str(path)) == key
    assert os.listdir(path.parent) == ["store.key"]


def test_a_key_that_cannot_be_written_whole_is_not_there(path: Path) -> None:
    with failing("write"), pytest.raises(OSError, match="No space"):
        crypto.create_key(str(path))
    assert os.listdir(path.parent) == []


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o400, 0o700])
def test_another_mode_is_refused_and_left(path: Path, mode: int) -> None:
    crypto.create_key(str(path))
    path.chmod(mode)
    assert refused(path) == f"expected mode 0600, found {mode:04o}"
    assert path.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("size", [0, 31, 33, 1000])
def test_another_size_is_refused(path: Path, size: int) -> None:
    path.touch(0o600)
    path.write_bytes(bytes(size))
    assert refused(path) == f"expected 32 bytes, found {size}"


def test_what_is_no_regular_file_is_refused(path: Path, tmp_path: Path) -> None:
    assert refused(path) == "No such file or directory"
    crypto.create_key(str(tmp_path / "real"))
    path.symlink_to(tmp_path / "real")
    assert refused(path) == "a link"
    path.unlink()
    os.mkfifo(path, 0o600)
    assert refused(path) == "not a regular file"
    path.unlink()
    path.mkdir(0o600)
    assert refused(path) == "not a regular file"


def test_another_users_key_is_refused(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    crypto.create_key(str(path))
    owner = path.stat().st_uid
    monkeypatch.setattr(os, "geteuid", lambda: owner + 1)
    assert refused(path) == f"it belongs to user {owner}"
