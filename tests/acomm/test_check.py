"""What a file may be read with, and is wrong all the same."""

from __future__ import annotations

import struct

import pytest
from msgspec.structs import replace

from relay.acomm import store_file
from relay.acomm.check import check
from relay.acomm.model import ChannelType, Participant, ParticipantRole, StoreFile
from relay.acomm.records import encode_channel, encode_subscription
from relay.base.errors import FormatError
from relay.base.finding import Severity
from relay.engine.commstore import CommStore
from tests.acomm.support import assemble, message, messages_body, patch, small_store
from tests.fakes import FakeClock


def problems(data: bytes) -> tuple[str, ...]:
    return tuple(one.text for one in check(data, "it") if one.severity is Severity.ERROR)


def test_order_is_checked_in_every_section() -> None:
    two = messages_body(message(2), message(1))
    (channel,) = small_store().channels
    (subscription,) = small_store().subscriptions
    channels = struct.pack("<Q", 2) + encode_channel(channel) * 2
    subscriptions = struct.pack("<Q", 2) + encode_subscription(subscription) * 2
    sections = [(1, channels), (2, two), (3, subscriptions), (5, two), (6, two)]
    assert problems(assemble(sections, counts=(2, 4, 2, 2), flags=4)) == (
        "it: section 1: expected ascending ids, found 1 after 1",
        "it: section 3: expected ascending ids, found 1 after 1",
        *(
            f"it: section {number}: expected ascending created_at and id, "
            "found message 1 of 1 after message 2 of 2"
            for number in (2, 5, 6)
        ),
    )


def test_an_id_given_twice_and_keys_out_of_order_are_reported() -> None:
    twice = messages_body(message(1, created_at=1), message(1, created_at=2))
    assert problems(assemble([(2, twice)], counts=(0, 2, 0, 0))) == (
        "it: section 2: expected message 1 once, found it 2 times",
    )
    body = messages_body(message(1, metadata={"a": None, "b": None}))
    body = body.replace(b"\1\0\0\0a\4\1\0\0\0b\4", b"\1\0\0\0b\4\1\0\0\0a\4")
    assert problems(assemble([(2, body)], counts=(0, 1, 0, 0), flags=16)) == (
        "it: section 2: expected the metadata of message 1 in key order, found ['b', 'a']",
    )


def with_three(kind: ChannelType) -> StoreFile:
    """A small store with a second channel, of three owners."""
    store = small_store()
    three = tuple(Participant(name, ParticipantRole.OWNER) for name in ("a", "b", "c"))
    (one,) = store.channels
    more = replace(one, id=2, name="more", channel_type=kind, participants=three)
    return replace(store, channels=(one, more))


def misled(store: StoreFile) -> StoreFile:
    """Its subscription is to the channel of three, which has no topics."""
    (one,) = store.subscriptions
    return replace(store, subscriptions=(one, replace(one, id=2, channel_id=2)))


SMALL = small_store()
LOST = replace(message(7), channel_id=9)


@pytest.mark.shows("engine 6.12")
@pytest.mark.parametrize(
    ("store", "told"),
    [
        (
            replace(SMALL, archive=(*SMALL.archive, *SMALL.messages)),
            "message 1 once, found it 2 times",
        ),
        (replace(SMALL, messages=(*SMALL.messages, LOST)), "a channel for message 7, found none"),
        (with_three(ChannelType.DIRECT), "2 in direct channel 2, found 3"),
        (with_three(ChannelType.BROADCAST), "one owner in broadcast channel 2, found 3"),
        (misled(with_three(ChannelType.GROUP)), "a PubSub channel for subscription 2, found none"),
    ],
)
def test_what_a_store_would_not_be_opened_with_is_told(store: StoreFile, told: str) -> None:
    (line,) = problems(store_file.encode(store))
    assert line.startswith(f"it: it cannot be opened as a store: expected {told}")
    with pytest.raises(FormatError, match=f"expected {told}"):
        CommStore.load(FakeClock(), store)


@pytest.mark.parametrize(
    ("bit", "name"),
    [(2, "INDEXED"), (4, "HAS_DEAD_LETTERS"), (8, "HAS_SIGNATURES"), (16, "HAS_METADATA")],
)
def test_flags_must_tell_the_truth(bit: int, name: str) -> None:
    full = store_file.encode(small_store(), compress=False)
    assert full[10] == 30
    assert problems(patch(full, 10, bytes([30 - bit]))) == (
        f"it: flag {name}: expected 1, found 0",
    )
    assert problems(assemble([], flags=bit)) == (f"it: flag {name}: expected 0, found 1",)


def test_a_damaged_file_gives_its_fault_and_nothing_else() -> None:
    (damaged,) = check(b"ACOM", "it")
    assert damaged.text == (
        "it at 0: expected magic ACOMM001, found magic ACOM of another format, "
        "AgenticComm's own (ACOM)"
    )
    (skipped,) = check(assemble([(7, b"")]), "it")
    assert skipped.text == "it: section 7, 0 bytes, is not known: skipped"
    assert (damaged.severity, skipped.severity) == (Severity.ERROR, Severity.WARNING)
