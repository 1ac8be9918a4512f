"""Section 256: counters and deliveries to bytes and back, and blocks that are broken."""

from __future__ import annotations

import struct

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relay.comm.engine_state import COUNTERS, DELIVERIES, EngineState
from relay.comm.model import DeliveryState
from relay.errors import FormatError

U64 = st.integers(0, 2**64 - 1)
STATES = st.builds(
    EngineState,
    U64,
    U64,
    U64,
    U64,
    st.dictionaries(
        U64,
        st.dictionaries(st.text(max_size=12), st.sampled_from(DeliveryState), max_size=4),
        max_size=5,
    ),
)
ONE = EngineState(
    3, 8, 2, 41, {7: {"bob": DeliveryState.DELIVERED, "é": DeliveryState.BOUNCED}, 2: {}}
)
ONE_BYTES = {
    1: struct.pack("<4Q", 3, 8, 2, 41),
    2: (
        struct.pack("<Q", 2)
        + struct.pack("<QI", 2, 0)
        + struct.pack("<QI", 7, 2)
        + struct.pack("<I", 3)
        + b"bob\x01"
        + struct.pack("<I", 2)
        + "é".encode()
        + b"\x03"
    ),
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


@given(STATES)
def test_what_is_encoded_decodes_and_in_the_same_order(state: EngineState) -> None:
    again = EngineState.decode(state.encode())
    assert again == state
    for number, recipients in state.deliveries.items():
        assert list(again.deliveries[number]) == list(recipients)
    assert again.encode() == state.encode()


@given(STATES)
def test_the_order_of_messages_changes_no_byte(state: EngineState) -> None:
    turned = dict(reversed(state.deliveries.items()))
    assert state._replace(deliveries=turned).encode() == state.encode()


def test_what_is_missing_has_its_default() -> None:
    assert EngineState.decode({}) == EngineState(1, 1, 1, 0, {})
    assert EngineState.decode({COUNTERS: ONE_BYTES[COUNTERS]}).deliveries == {}
    assert EngineState.decode({DELIVERIES: ONE_BYTES[DELIVERIES]}).next_message == 1


def test_unknown_blocks_are_skipped() -> None:
    assert EngineState.decode(ONE_BYTES | {99: b"later"}) == ONE


@pytest.mark.parametrize("size", [0, 1, 31, 33])
def test_counters_of_another_size(size: int) -> None:
    broken({COUNTERS: bytes(size)})


@pytest.mark.parametrize("size", range(len(ONE_BYTES[DELIVERIES])))
def test_deliveries_cut_short_anywhere(size: int) -> None:
    broken({DELIVERIES: ONE_BYTES[DELIVERIES][:size]})


def test_deliveries_with_bytes_left_over_say_where() -> None:
    data = ONE_BYTES[DELIVERIES]
    error = broken({DELIVERIES: data + b"\0"})
    assert (error.offset, error.found) == (len(data), "1 bytes")


def test_a_state_outside_the_enum() -> None:
    data = bytearray(ONE_BYTES[DELIVERIES])
    data[-1] = 4
    broken({DELIVERIES: bytes(data)})


def test_a_recipient_that_is_no_text() -> None:
    data = ONE_BYTES[DELIVERIES].replace(b"bob", b"b\xffb")
    broken({DELIVERIES: data})


def test_a_count_that_is_not_there_is_found_out_at_once() -> None:
    broken({DELIVERIES: struct.pack("<Q", 2**63)})
    broken({DELIVERIES: struct.pack("<QQI", 1, 7, 2**32 - 1)})
    broken({DELIVERIES: struct.pack("<QQII", 1, 7, 1, 2**32 - 1)})


@settings(max_examples=500)
@given(st.binary(max_size=80), st.binary(max_size=40))
def test_any_bytes_are_a_state_or_a_fault(deliveries: bytes, counters: bytes) -> None:
    for blocks in ({DELIVERIES: deliveries}, {COUNTERS: counters}):
        try:
            EngineState.decode(blocks)
        except FormatError:
            pass


@settings(max_examples=500)
@given(STATES, st.integers(0, 400), st.integers(1, 255))
def test_a_flipped_byte_is_another_state_or_a_fault(state: EngineState, at: int, flip: int) -> None:
    data = bytearray(state.encode()[DELIVERIES])
    data[at % len(data)] ^= flip
    try:
        again = EngineState.decode({DELIVERIES: bytes(data)})
    except FormatError:
        return
    assert again.deliveries != state.deliveries
