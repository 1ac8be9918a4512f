"""Key files, private and never replaced; what is signed with Ed25519, and what verifies."""

from __future__ import annotations

import hashlib
import os
import struct
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from relay.acomm.check import check_signatures, is_signed_by
from relay.acomm.model import Message, StoreFile
from relay.base import crypto
from relay.base.errors import KeyFileError
from tests.acomm.support import message
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


def test_a_key_is_made_once_read_again_and_never_replaced(path: Path) -> None:
    key = crypto.create_key(str(path))
    assert len(key) == 32
    assert path.stat().st_mode & 0o7777 == 0o600
    with pytest.raises(KeyFileError, match="exists, and a key"):
        crypto.create_key(str(path))
    assert crypto.load_key(str(path)) == key
    assert os.listdir(path.parent) == ["store.key"]
    assert crypto.create_key(str(path.with_name("other.key"))) != key


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


# RFC 8032, 7.1, TEST 1
PRIVATE = bytes.fromhex("9d61b19deffd5a60ba844af492ec2cc44449c5697b326919703bac031cae7f60")
PUBLIC = bytes.fromhex("d75a980182b10ab7d54bfed3c964073a0ee172f3daa62325af021a68f707511a")
OTHER = crypto.public_key(bytes(32))
FIELDS = ("alice", "1700000000000000001-0000abcd", "#team", "grüße".encode())
GOLDEN = (
    "a76e15dd998ba55163a05d0ae4b7f80dedbe67071e372d417f27e8a2f4f67426"
    "bd7f2b93cccfe130fd33511e311828173b8f747c21af4ab68f15845a33613907"
)


@pytest.mark.shows("engine 6.15")
def test_what_is_signed_byte_for_byte() -> None:
    assert crypto.public_key(PRIVATE) == PUBLIC
    packed = b"".join(
        struct.pack("<I", len(field)) + field
        for field in (b"alice", b"1700000000000000001-0000abcd", b"#team", "grüße".encode())
    )
    digest = hashlib.sha256(packed).digest()
    assert crypto.signed_digest(*FIELDS) == digest
    signature = crypto.sign(PRIVATE, *FIELDS)
    assert signature == Ed25519PrivateKey.from_private_bytes(PRIVATE).sign(digest)
    assert signature.hex() == GOLDEN
    assert crypto.verify(PUBLIC, signature, *FIELDS)


def test_any_other_field_key_or_signature_does_not_verify() -> None:
    signature = crypto.sign(PRIVATE, *FIELDS)
    sender, relay_id, to, body = FIELDS
    for other in (
        ("alicf", relay_id, to, body),
        (sender, relay_id + "0", to, body),
        (sender, relay_id, "#teams", body),
        (sender, relay_id, to, body + b"\n"),
        (sender + relay_id[0], relay_id[1:], to, body),  # the same bytes, cut elsewhere
    ):
        assert not crypto.verify(PUBLIC, signature, *other)
    assert not crypto.verify(OTHER, signature, *FIELDS)
    for wrong in (b"", signature[:-1], signature + b"\0", bytes(64)):
        assert not crypto.verify(PUBLIC, wrong, *FIELDS)
    for no_key in (b"", PUBLIC[:31], b"\xff" * 32):
        assert not crypto.verify(no_key, signature, *FIELDS)


def test_a_key_has_a_name() -> None:
    assert crypto.key_id(PUBLIC) == "aid_" + hashlib.sha256(PUBLIC).hexdigest()[:32]
    assert len(crypto.key_id(PUBLIC)) == 36


def stored(content: bytes = b"deploy", **fields: object) -> Message:
    """A message as the relay keeps it, signed by alpha."""
    body = fields.pop("body", content)
    assert isinstance(body, bytes)
    signature = crypto.sign(PRIVATE, "alpha", "17-ab", "bob", body)
    metadata = {"relay_id": "17-ab", "to": "bob", "created_ns": 17}
    return message(content=content, metadata=metadata, signature=signature, **fields)


def test_a_stored_message_is_checked_by_itself() -> None:
    assert is_signed_by(stored(), PUBLIC)
    assert not is_signed_by(stored(), OTHER)
    assert not is_signed_by(stored(b"deploy", body=b"destroy"), PUBLIC)
    assert not is_signed_by(stored(sender="beta"), PUBLIC)
    for change in ({"signature": None}, {"metadata": None}, {"metadata": {"relay_id": 17}}):
        assert not is_signed_by(msgspec.structs.replace(stored(), **change), PUBLIC)


def test_an_acknowledgment_without_a_body_is_signed_without_one() -> None:
    assert is_signed_by(stored(b"received", body=b""), PUBLIC)
    assert is_signed_by(stored(b"received"), PUBLIC)
    assert not is_signed_by(stored(b"deploy", body=b""), PUBLIC)


def test_wrong_signatures_are_told_and_others_passed_over() -> None:
    wrong = stored(b"deploy", body=b"destroy")
    file = StoreFile(0, 0, messages=(stored(), wrong), dead_letters=(wrong,), archive=(message(),))
    assert [one.text for one in check_signatures(file, "it", {"alpha": PUBLIC, "beta": OTHER})] == [
        "it: messages: the signature of message 1 is not alpha's, or it was changed",
        "it: dead_letters: the signature of message 1 is not alpha's, or it was changed",
    ]
    assert list(check_signatures(file, "it", {"beta": OTHER})) == []
