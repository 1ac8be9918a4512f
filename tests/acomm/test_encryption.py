"""Encrypted stores: what is sealed, who opens it, and what a wrong key leaves as it was."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from relay.acomm import model, store_file
from relay.acomm.check import check
from relay.acomm.container import Flag
from relay.acomm.store_file import decrypt, encrypt
from relay.base.errors import FormatError, SealedStore
from relay.commstore import ChannelType, CommStore, MessageType
from tests.acomm.support import FIXTURES, golden, message, small_store
from tests.fakes import FakeClock

pytestmark = pytest.mark.shows("engine 6.14")

SEALED = FIXTURES.parent / "sealed"
KEY = (SEALED / "key").read_bytes()
OTHER_KEY = bytes(32)


# The engine's own blocks are its business.
STORE = msgspec.structs.replace(small_store(), engine_state={})


def contents(file: model.StoreFile) -> list[bytes]:
    return [m.content for m in (*file.messages, *file.dead_letters, *file.archive)]


def test_the_golden_file_opens_and_is_written_byte_for_byte() -> None:
    data = (SEALED / "encrypted.acomm").read_bytes()
    file = store_file.decode(data)
    assert file.encrypted
    assert decrypt(file, KEY, "it") == golden()
    assert store_file.encode(encrypt(golden(), KEY), compress=False) == data
    assert list(check(data, "it")) == []  # without a key


def test_a_content_is_nonce_ciphertext_and_tag_bound_to_its_id() -> None:
    sealed = encrypt(model.StoreFile(0, 0, messages=(message(7, content=b"hello"),)), KEY)
    (content,) = contents(sealed)
    assert len(content) == 12 + 5 + 16
    assert AESGCM(KEY).decrypt(content[:12], content[12:], struct.pack("<Q", 7)) == b"hello"
    moved = msgspec.structs.replace(sealed, messages=(message(8, content=content),))
    with pytest.raises(SealedStore, match="message 8 cannot be decrypted with this key"):
        decrypt(moved, KEY, "it")


def test_a_nonce_is_never_used_for_two_contents() -> None:
    """Another id, another content or another key is another nonce; the same is the same."""
    messages = [message(number, content=text) for number in range(50) for text in (b"", b"a", b"b")]
    nonces = {
        content[:12]
        for key in (KEY, OTHER_KEY)
        for one in messages
        for content in contents(encrypt(model.StoreFile(0, 0, messages=(one,)), key))
    }
    assert len(nonces) == 2 * len(messages)


def test_no_word_of_a_content_is_in_the_file() -> None:
    data = store_file.encode(encrypt(small_store(), KEY), compress=False)
    assert b"hello" not in data
    assert b"alpha" in data  # who wrote is not hidden
    assert store_file.decode(data).encrypted
    assert data[10] & Flag.ENCRYPTED


def test_without_its_key_nothing_is_read() -> None:
    sealed = encrypt(small_store(), KEY)
    with pytest.raises(SealedStore, match="it is encrypted, and no key was given"):
        decrypt(sealed, None, "it")
    with pytest.raises(SealedStore, match="it: message 1 cannot be decrypted with this key"):
        decrypt(sealed, OTHER_KEY, "it")
    short = msgspec.structs.replace(sealed, messages=(message(content=bytes(27)),))
    with pytest.raises(FormatError, match="message 1 to have 28 bytes of content and more"):
        decrypt(short, KEY, "it")


def test_sealed_contents_are_never_taken_for_plain_ones() -> None:
    with pytest.raises(SealedStore, match="was not opened with its key"):
        CommStore.load(FakeClock(), encrypt(STORE, KEY))
    assert CommStore.load(FakeClock(), STORE).snapshot().values.messages == STORE.messages


def test_a_plain_store_needs_no_key_and_takes_any() -> None:
    assert decrypt(small_store(), None, "it") == small_store()
    assert decrypt(small_store(), KEY, "it") == small_store()
    assert encrypt(small_store(), None) == small_store()


def test_a_store_with_a_key_is_sealed_on_disk_and_plain_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    with CommStore.create(str(path), key=KEY) as store:
        assert store_file.read(str(path)).encrypted  # from the first byte on
        channel = store.create_channel("c", ChannelType.GROUP, "a")
        store.join_channel(channel.id, "b")
        store.send_message(channel.id, "a", MessageType.TEXT, "hello")
    assert contents(store_file.read(str(path))) != [b"hello"]
    with CommStore.open(str(path), key=KEY) as store:
        assert [m.content for m in store.receive_messages(None, "b")] == [b"hello"]
        assert store.search("hell")


@pytest.mark.parametrize("key", [None, OTHER_KEY], ids=["no key", "another"])
def test_a_store_without_its_key_is_left_as_it_is(tmp_path: Path, key: bytes | None) -> None:
    path = tmp_path / "s.acomm"
    store_file.write(str(path), encrypt(STORE, KEY))
    before = path.read_bytes()
    for _ in range(2):
        with pytest.raises(SealedStore):
            CommStore.open(str(path), key=key)
    assert path.read_bytes() == before
    CommStore.open(str(path), key=KEY).close()


def test_a_plain_store_is_sealed_by_its_next_flush(tmp_path: Path) -> None:
    path = tmp_path / "s.acomm"
    store_file.write(str(path), STORE)
    with CommStore.open(str(path), key=KEY) as store:
        assert not store_file.read(str(path)).encrypted  # nothing has changed yet
        store.join_channel(1, "zoe")
    assert decrypt(store_file.read(str(path)), KEY, "it").messages == STORE.messages
    with pytest.raises(SealedStore):
        CommStore.open(str(path))
