"""What the engine must keep and version 1 of the file has no field for: section 256.

    tag 1 COUNTERS    next channel id, next message id, next subscription id, sequence: 4 u64
    tag 2 DELIVERIES  count u64; each: message id u64, count u32, each: recipient str, state u8

``sequence`` counts the events of the store's whole life; a file covers the events up to its
own. A file without these blocks opens all the same. Table: docs/formats/acomm.md.
"""

from __future__ import annotations

from struct import Struct
from struct import error as StructError
from typing import NamedTuple

import msgspec

from relay.comm.model import DeliveryState, StoreFile
from relay.errors import FormatError

COUNTERS = 1
DELIVERIES = 2
_COUNTERS = Struct("<4Q")
assert _COUNTERS.size == 32
_COUNT = Struct("<Q")
_ENTRY = Struct("<QI")
_LENGTH = Struct("<I")
_STATES = tuple(DeliveryState)


class EngineState(NamedTuple):
    """Counters and the state of each live message's deliveries."""

    next_channel: int = 1
    next_message: int = 1
    next_subscription: int = 1
    sequence: int = 0
    deliveries: dict[int, dict[str, DeliveryState]] = {}  # noqa: RUF012 - never altered

    def encode(self) -> dict[int, bytes]:
        """The blocks by tag; same values, same bytes."""
        parts = [_COUNT.pack(len(self.deliveries))]
        for message_id, states in sorted(self.deliveries.items()):
            parts.append(_ENTRY.pack(message_id, len(states)))
            for recipient, state in states.items():
                name = recipient.encode()
                parts.append(_LENGTH.pack(len(name)) + name + bytes((state,)))
        return {COUNTERS: _COUNTERS.pack(*self[:4]), DELIVERIES: b"".join(parts)}

    @classmethod
    def decode(cls, blocks: dict[int, bytes]) -> EngineState:
        """The state in a file's blocks; what is missing has its default.

        Errors: FormatError when a block is cut short or names an unknown state.
        """
        try:
            channel, message, subscription, sequence = _COUNTERS.unpack(
                blocks.get(COUNTERS, _COUNTERS.pack(1, 1, 1, 0))
            )
            deliveries = _decode_deliveries(blocks.get(DELIVERIES, _COUNT.pack(0)))
        except (StructError, IndexError, UnicodeDecodeError) as exc:
            raise FormatError("section 256", 0, "whole blocks of ENGINE_STATE", exc) from exc
        return cls(channel, message, subscription, sequence, deliveries)


class Snapshot(NamedTuple):
    """A store at one instant, ready to be encoded in any thread."""

    values: StoreFile
    state: EngineState

    def file(self) -> StoreFile:
        """What goes into the file."""
        return msgspec.structs.replace(self.values, engine_state=self.state.encode())


def _decode_deliveries(data: bytes) -> dict[int, dict[str, DeliveryState]]:
    (count,) = _COUNT.unpack_from(data)
    at = _COUNT.size
    found: dict[int, dict[str, DeliveryState]] = {}
    for _ in range(count):
        message_id, recipients = _ENTRY.unpack_from(data, at)
        at += _ENTRY.size
        states = found[message_id] = {}
        for _ in range(recipients):
            (length,) = _LENGTH.unpack_from(data, at)
            at += _LENGTH.size + length
            states[data[at - length : at].decode()] = _STATES[data[at]]
            at += 1
    if at != len(data):
        raise FormatError("section 256", at, "the end of DELIVERIES", f"{len(data) - at} bytes")
    return found
