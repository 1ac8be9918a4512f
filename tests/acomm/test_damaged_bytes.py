"""Damaged files at every depth: whatever the bytes, the answer is a store or a FormatError.

Most damage is sealed with a right checksum, for without it the SHA-256 would catch all of it.
"""

from __future__ import annotations

import random
import struct

import pytest

from relay.acomm import store_file
from relay.acomm.check import check
from relay.acomm.fields import Reader
from relay.acomm.model import Message
from relay.acomm.records import MESSAGE, read_messages
from relay.base.errors import FormatError, IntegrityError, ValidationFailed
from tests.acomm.support import damaged, messages_body, patch, reseal, small_store

PLAIN = store_file.encode(small_store(), compress=False)
COMPRESSED = store_file.encode(small_store())


def take(data: bytes) -> None:
    """Read it, or be refused in one line; what was read can be written and read again."""
    list(check(data, "it"))
    try:
        store = store_file.decode(data, "it", warn=lambda _: None)
    except FormatError as exc:
        assert str(exc).startswith("it at ")
        assert "\n" not in str(exc)
        return
    try:
        again = store_file.encode(store)
    except ValidationFailed:
        return  # above a limit that holds for writing
    assert store_file.encode(store_file.decode(again)) == again


OVERWRITTEN = {  # compressed, one other byte is as wrong as another
    **{f"plain-{value}": (PLAIN, value) for value in (0x00, 0x01, 0x7F, 0xFF)},
    **{f"compressed-{value}": (COMPRESSED, value) for value in (0x00, 0xFF)},
}


@pytest.mark.parametrize(("data", "value"), OVERWRITTEN.values(), ids=OVERWRITTEN)
def test_every_byte_of_a_file_overwritten(data: bytes, value: int) -> None:
    for at in range(len(data) - 40):
        take(patch(data, at, bytes([value])))


@pytest.mark.shows("engine 8.6")
@pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_a_flipped_bit_is_never_missed(data: bytes) -> None:
    for at in range(len(data)):
        damaged = data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :]
        with pytest.raises(FormatError) as caught:
            store_file.decode(damaged, "it")
        if 5 <= at < len(data) - 8:  # neither magic of another format nor the footer's
            assert isinstance(caught.value, IntegrityError)


@pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_a_file_cut_short_is_never_taken(data: bytes) -> None:
    for size in range(len(data)):
        with pytest.raises(FormatError):
            store_file.decode(data[:size], "it")
    for size in range(136, len(data)):  # sealed anew, with the size that it has now
        cut = reseal(data[:size])
        with pytest.raises(FormatError):
            store_file.decode(patch(cut, 64, struct.pack("<Q", size)), "it")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("data", [PLAIN, COMPRESSED], ids=["plain", "compressed"])
def test_random_damage(data: bytes, seed: int) -> None:
    dice = random.Random(seed)
    for _ in range(600):
        take(damaged(data, dice, times=8))


@pytest.mark.parametrize("seed", range(4))
def test_the_fast_way_and_the_strict_one_agree_on_any_bytes(seed: int) -> None:
    dice = random.Random(seed)
    whole = messages_body(*small_store().messages)[8:]
    for _ in range(3000):
        damaged = bytearray(whole)
        for _ in range(dice.randint(1, 3)):
            damaged[dice.randrange(len(damaged))] = dice.choice((0, 1, 2, 3, 4, 5, 9, 0xC3, 0xFF))
        data = bytes(damaged)
        # The reader ends before the bytes do, as a section does before the file.
        assert read_fast(data) == read_strictly(data)


def read_fast(data: bytes) -> str:
    reader = Reader(data, "it", 0, len(data) - 5)
    try:
        messages = read_messages(reader, 2)
    except FormatError as exc:
        return str(exc)
    return repr((messages, reader.pos))


def read_strictly(data: bytes) -> str:
    reader = Reader(data, "it", 0, len(data) - 5)
    try:
        messages: tuple[Message, ...] = (MESSAGE.read(reader, ""), MESSAGE.read(reader, ""))
    except FormatError as exc:
        return str(exc)
    return repr((messages, reader.pos))
