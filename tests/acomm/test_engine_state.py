"""Section 256: counters and deliveries to bytes and back, and blocks that are broken."""

from __future__ import annotations

import struct
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.acomm.engine_state import (
    ARCHIVES,
    COUNTERS,
    DEAD,
    DELIVERIES,
    DOWNTIMES,
    DUPLICATES,
    EVICTING,
    HELD,
    OWED,
    SETTINGS,
    DeadLetterInfo,
    Downtime,
    EngineState,
    JournalPosition,
)
from relay.acomm.model import (
    FLUSH_MODES,
    ArchiveInfo,
    ChannelSettings,
    Delivery,
    DeliveryState,
    Obligation,
)
from relay.base.errors import FormatError
from tests.acomm.support import U32, U64, many, opt

WORDS = st.text(max_size=9)


def kept(values: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    """By the number of a message or a channel."""
    return st.dictionaries(U64, values, max_size=4)


def by_recipient(values: st.SearchStrategy[Any], least: int = 0) -> st.SearchStrategy[Any]:
    return kept(st.dictionaries(WORDS, values, min_size=least, max_size=4))


DELIVERED = st.builds(
    Delivery, st.sampled_from(DeliveryState), st.integers(1, 9), U64, st.booleans(), U32
)
MODES = st.builds(ChannelSettings, opt(st.integers(1, 2**64 - 1)), st.sampled_from(FLUSH_MODES))
STATES = st.builds(
    EngineState,
    *[U64] * 4,
    by_recipient(DELIVERED),
    kept(st.builds(DeadLetterInfo, U64, WORDS, many(WORDS))),
    st.dictionaries(st.tuples(WORDS, U64, WORDS), U64, max_size=3),
    kept(MODES),
    many(U64),
    many(st.builds(ArchiveInfo, WORDS, *[U64] * 7)),
    many(U64),
    opt(st.builds(JournalPosition, U64, U64, WORDS)),
    by_recipient(st.builds(Obligation, U64, U32, WORDS, U64), least=1),
    many(st.builds(Downtime, U64, st.integers(-(2**63), 2**63 - 1))),
)
ONE = EngineState(
    3,
    8,
    2,
    41,
    {
        7: {
            "bob": Delivery(DeliveryState.DELIVERED, 6, 9, True, 4),
            "é": Delivery(DeliveryState.BOUNCED),
        },
        2: {},
    },
    {7: DeadLetterInfo(5, "why", ("bob",))},
    {("c", 7, "bob"): 10},
    {2: ChannelSettings(5, "immediate"), 1: ChannelSettings(None, "manual")},
    (7, 9),
    (ArchiveInfo("d/000001.acomm", 2, 3, 4, 50, 60, 1, 700),),
    (3,),
    JournalPosition(1, 4096, "boot"),
    {7: {"bob": Obligation(9, 1, "received", 8)}},
    (Downtime(50, -60),),
)


def text(value: str) -> bytes:
    return struct.pack("<I", len(value.encode())) + value.encode()


ONE_BYTES = {
    1: struct.pack("<4Q", 3, 8, 2, 41),
    2: (
        struct.pack("<QQQII", 2, 2, 7, 0, 1)
        + struct.pack("<III", 2, 0, 2)
        + text("bob")
        + struct.pack("<BIQBI", 3, 6, 9, True, 4)
        + text("é")
        + struct.pack("<BIQBI", 6, 1, 0, False, 0)
    ),
    3: struct.pack("<QQQ", 1, 7, 5) + text("why") + struct.pack("<I", 1) + text("bob"),
    4: struct.pack("<Q", 1)
    + text("c")
    + struct.pack("<Q", 7)
    + text("bob")
    + struct.pack("<Q", 10),
    5: struct.pack("<Q", 2) + struct.pack("<QQB", 1, 0, 3) + struct.pack("<QQB", 2, 5, 1),
    6: struct.pack("<3Q", 2, 7, 9),
    7: struct.pack("<Q", 1) + text("d/000001.acomm") + struct.pack("<7Q", 2, 3, 4, 50, 60, 1, 700),
    8: struct.pack("<2Q", 1, 3),
    10: struct.pack("<2Q", 1, 4096) + text("boot"),
    11: struct.pack("<2Q", 1, 7)
    + text("bob")
    + struct.pack("<QI", 9, 1)
    + text("received")
    + struct.pack("<Q", 8),
    12: struct.pack("<QQq", 1, 50, -60),
}


def broken(blocks: dict[int, bytes]) -> FormatError:
    with pytest.raises(FormatError) as caught:
        EngineState.decode(blocks)
    assert str(caught.value).startswith("section 256 at ")
    assert "\n" not in str(caught.value)
    return caught.value


def test_the_bytes_one_by_one() -> None:
    assert ONE.encode() == ONE_BYTES
    assert EngineState.decode(ONE_BYTES) == ONE


@settings(max_examples=50)
@given(STATES, st.integers(1, 255))
def test_what_is_encoded_decodes_and_in_the_same_order(state: EngineState, flip: int) -> None:
    """Whatever the order of messages; a flipped byte is another state, or a fault."""
    blocks = state.encode()
    again = EngineState.decode(blocks)
    assert again == state
    for number, recipients in state.deliveries.items():
        assert list(again.deliveries[number]) == list(recipients)
    assert again.encode() == blocks
    turned = dict(reversed(state.deliveries.items()))
    assert state._replace(deliveries=turned).encode() == blocks
    for at in range(len(blocks[DELIVERIES])):
        data = bytearray(blocks[DELIVERIES])
        data[at] ^= flip
        try:
            other = EngineState.decode({DELIVERIES: bytes(data)})
        except FormatError:
            continue
        assert in_order(other) != in_order(again)


def in_order(state: EngineState) -> list[tuple[int, list[tuple[str, Delivery]]]]:
    return [(number, list(records.items())) for number, records in state.deliveries.items()]


def test_what_is_missing_has_its_default_and_what_is_unknown_is_skipped() -> None:
    assert EngineState.decode({}) == EngineState(1, 1, 1, 0, {})
    assert EngineState.decode({COUNTERS: ONE_BYTES[COUNTERS]}).deliveries == {}
    assert EngineState.decode({DELIVERIES: ONE_BYTES[DELIVERIES]}).next_message == 1
    assert EngineState.decode(ONE_BYTES | {99: b"later"}) == ONE


@pytest.mark.parametrize(
    "tag", [DELIVERIES, DEAD, DUPLICATES, SETTINGS, HELD, ARCHIVES, EVICTING, OWED, DOWNTIMES]
)
def test_a_block_cut_short_anywhere(tag: int) -> None:
    for size in range(len(ONE_BYTES[tag])):
        broken({tag: ONE_BYTES[tag][:size]})


def test_a_block_that_does_not_add_up_is_a_fault() -> None:
    data = ONE_BYTES[DELIVERIES]
    error = broken({DELIVERIES: data + b"\0"})
    assert (error.offset, error.found) == (len(data), "1 more bytes")
    for tag, block in (
        *((COUNTERS, bytes(size)) for size in (0, 1, 31, 33)),
        (DELIVERIES, data[:-18] + b"\t" + data[-17:]),  # a state outside the enum
        (DELIVERIES, data.replace(b"bob", b"b\xffb")),  # a recipient that is no text
        (DELIVERIES, struct.pack("<Q", 2**63)),  # counts that are not there
        (DELIVERIES, struct.pack("<QQII", 1, 7, 0, 2**32 - 1)),
        (DELIVERIES, struct.pack("<QQIII", 1, 7, 0, 1, 2**32 - 1)),
        (DELIVERIES, struct.pack("<QQIII", 1, 7, 1, 1, 0)),  # a message without its list
        (SETTINGS, struct.pack("<QQQB", 1, 1, 0, 4)),  # a flush mode that is none
    ):
        broken({tag: block})


def test_messages_that_stand_alike_share_one_list() -> None:
    alike = {number: {"bob": Delivery(DeliveryState.DELIVERED)} for number in range(1000)}
    data = EngineState(deliveries=alike).encode()[DELIVERIES]
    assert len(data) == 8 + 1000 * 12 + 4 + 4 + len(text("bob")) + 18
    again = EngineState.decode({DELIVERIES: data}).deliveries
    assert again == alike
    assert again[0] is again[999]


@settings(max_examples=300)
@given(st.integers(0, 60), st.integers(0, 9) | st.just(1000), st.binary(max_size=24))
def test_any_bytes_are_a_state_or_a_fault(at: int, removed: int, put: bytes) -> None:
    """In the place of others in a good block, behind it, or of all of it."""
    for tag, good in ONE_BYTES.items():
        try:
            state = EngineState.decode({tag: good[:at] + put + good[at + removed :]})
        except FormatError:
            continue
        assert EngineState.decode(state.encode()) == state
