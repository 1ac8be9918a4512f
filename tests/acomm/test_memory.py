"""What reading takes is bounded by what the file declares, whatever its bytes.

Declared are total_size and, of a compressed file, the uncompressed size of each section. Measured
is the peak that the interpreter's allocator hands out while a file is decoded, the file's own
bytes not counted; ROOM is what an empty store takes, most of it the state of one gunzip.
"""

from __future__ import annotations

import random
import tracemalloc
from collections.abc import Callable

import msgspec
import pytest

from relay.acomm import model, store_file
from relay.acomm.check import check
from relay.acomm.container import open_frame
from relay.acomm.sections import split
from relay.base.errors import FormatError
from tests.acomm.support import damaged, golden, message

pytestmark = pytest.mark.shows("engine 8.12")

MOST = 4
ROOM = 128 * 1024
COPIES = 10


def larger() -> model.StoreFile:
    """The golden store with its messages ten times over: so many bytes that ROOM says little."""
    store = golden()
    copies = [
        msgspec.structs.replace(one, id=one.id + 1000 * copy)
        for copy in range(COPIES)
        for one in store.messages
    ]
    return msgspec.structs.replace(store, messages=tuple(copies))


STORE = larger()
FILES = {"plain": store_file.encode(STORE, compress=False), "compressed": store_file.encode(STORE)}


def declared(data: bytes) -> int:
    """Bytes of the file, and of its sections as they come out of their envelopes."""
    header, table = open_frame(data, "it")
    sections = split(data, "it", header, table)
    return len(data) + (header.flags & 1) * sum(len(one.data) for one in sections.values())


def peak_of(work: Callable[[], object]) -> int:
    """The most that is held at once while ``work`` runs; a FormatError is an answer, too."""
    tracemalloc.start()
    try:
        work()
    except FormatError:
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    return peak


@pytest.mark.parametrize("name", FILES)
def test_a_whole_file_is_read_and_verified_within_its_bound(name: str) -> None:
    data = FILES[name]
    assert declared(data) > 300_000
    assert peak_of(lambda: store_file.decode(data, "it")) <= MOST * declared(data)
    assert peak_of(lambda: list(check(data, "it"))) <= MOST * declared(data) + ROOM


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("name", FILES)
def test_a_damaged_file_takes_no_more_than_a_whole_one(name: str, seed: int) -> None:
    """Sealed again after the damage, so that it reaches the records."""
    data = FILES[name]
    most = MOST * declared(data)
    dice = random.Random(seed)
    refused = 0
    for _ in range(25):
        refused += peak_and_verdict(damaged(data, dice, times=3), most)
    assert refused > 5


def peak_and_verdict(data: bytes, most: int) -> bool:
    """True when the file was refused; the peak is within ``most`` either way."""
    taken: list[model.StoreFile] = []
    assert peak_of(lambda: taken.append(store_file.decode(data, "it", warn=lambda _: None))) <= most
    return not taken


def test_messages_that_say_little_are_the_dearest() -> None:
    """Objects cost more than the smallest records: this is how much more, at most."""
    small = tuple(
        model.Message(2**40 + number, model.MessageType.TEXT, "", 0, b"", created_at=2**40 + number)
        for number in range(20_000)
    )
    data = store_file.encode(model.StoreFile(0, 0, messages=small), compress=False)
    assert peak_of(lambda: store_file.decode(data, "it")) < 7 * len(data)
    usual = tuple(message(2**40 + number, content=bytes(200)) for number in range(5_000))
    data = store_file.encode(model.StoreFile(0, 0, messages=usual), compress=False)
    assert peak_of(lambda: store_file.decode(data, "it")) < 3 * len(data)
