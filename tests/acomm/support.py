"""What the tests of the `.acomm` codec share: fixtures, arbitrary stores, files taken apart."""

from __future__ import annotations

import hashlib
import random
import struct
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from relay.acomm import model, store_file
from relay.acomm.container import FOOTER, FOOTER_MAGIC, HEADER, MAGIC, SECTION, SectionEntry
from relay.acomm.records import encode_message
from relay.base.errors import FormatError

FIXTURES = Path(__file__).parent.parent / "fixtures" / "acomm"
GOOD = ("plain", "compressed", "empty", "unknown-section", "version-2")
BAD = sorted(path.stem for path in (FIXTURES / "bad").glob("*.acomm"))

# The same examples each time, and no clock in the verdict.
STEADY = settings(
    derandomize=True,
    deadline=None,
    max_examples=100,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)

U64 = st.integers(0, 2**64 - 1)
U32 = st.integers(0, 2**32 - 1)
NAME = st.text(max_size=24)
TEXT = st.text(max_size=40)


def opt(strategy: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.none() | strategy


def many(strategy: st.SearchStrategy[Any], most: int = 3) -> st.SearchStrategy[Any]:
    return st.lists(strategy, max_size=most).map(tuple)


METADATA = st.dictionaries(
    TEXT,
    TEXT
    | st.integers(-(2**63), 2**63 - 1)
    | st.floats(allow_nan=False)
    | st.booleans()
    | st.none(),
    max_size=5,
)
MESSAGES = st.builds(
    model.Message,
    U64,
    st.sampled_from(model.MessageType),
    NAME,
    U64,
    st.binary(max_size=60) | TEXT.map(str.encode),
    opt(TEXT),
    opt(TEXT),
    st.sampled_from(model.Priority),
    opt(METADATA),
    st.integers(0, 5) | U64,
    opt(U64),
    opt(U64),
    opt(U64),
    st.sampled_from(model.MessageStatus),
    U32,
    opt(st.binary(max_size=64)),
)
PARTICIPANTS = st.builds(
    model.Participant, NAME, st.sampled_from(model.ParticipantRole), U64, opt(TEXT)
)
RETENTIONS = st.just(model.Retention()) | st.builds(
    model.Retention, st.sampled_from(list(model.RetentionKind)[1:]), U64
)
CONFIGS = st.builds(
    model.ChannelConfig,
    st.sampled_from(model.DeliveryMode),
    U64,
    opt(U32),
    RETENTIONS,
    opt(U64),
    U32,
    U64,
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
CHANNELS = st.builds(
    model.Channel,
    U64,
    NAME,
    st.sampled_from(model.ChannelType),
    NAME,
    many(PARTICIPANTS),
    CONFIGS,
    st.sampled_from(model.ChannelState),
    U64,
    U64,
    U64,
    opt(st.text(min_size=1, max_size=40)),
    many(TEXT),
)
FILTERS = st.builds(
    model.MessageFilter,
    opt(many(U64)),
    opt(TEXT),
    opt(many(st.sampled_from(model.MessageType))),
    opt(TEXT),
    opt(U64),
    opt(U64),
    opt(many(st.sampled_from(model.MessageStatus))),
    opt(many(st.sampled_from(model.Priority))),
    opt(TEXT),
    opt(TEXT),
    U64,
    U64,
    st.sampled_from(model.SortField),
    st.sampled_from(model.SortOrder),
    st.booleans(),
)
SUBSCRIPTIONS = st.builds(
    model.Subscription,
    U64,
    U64,
    NAME,
    TEXT,
    st.sampled_from(model.MatchMode),
    U64,
    st.booleans(),
    opt(FILTERS),
)


def by_id(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(values, key=lambda value: value.id))


def by_time(values: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(sorted(values, key=lambda value: (value.created_at, value.id)))


# Stores in the order that the file keeps.
STORES = st.builds(
    model.StoreFile,
    U64,
    U64,
    many(CHANNELS).map(by_id),
    many(MESSAGES, 6).map(by_time),
    many(SUBSCRIPTIONS).map(by_id),
    many(MESSAGES).map(by_time),
    many(MESSAGES).map(by_time),
    st.dictionaries(U32, st.binary(max_size=40), max_size=3),
    st.booleans(),
)


def golden() -> model.StoreFile:
    """The store of the fixtures."""
    return store_file.read(str(FIXTURES / "plain.acomm"))


def message(ident: int = 1, **fields: Any) -> model.Message:
    """A small message."""
    values = {"sender": "alpha", "content": b"hello", "created_at": ident, **fields}
    return model.Message(id=ident, message_type=model.MessageType.TEXT, channel_id=1, **values)


def small_store() -> model.StoreFile:
    """A store of some hundred bytes with every kind of record in it."""
    metadata = {"f": 0.5, "i": -1, "n": None, "s": "text", "t": True}
    first = message(1, metadata=metadata, topic="a.b", correlation_id="c-1", ttl=60)
    second = message(2, delivered_at=3, acknowledged_at=4, signature=b"\1" * 8)
    wanted = model.MessageFilter(
        channel_ids=(1, 2),
        status=(model.MessageStatus.SENT,),
        after=7,
        sort_by=model.SortField.CREATED_AT,
        sort_order=model.SortOrder.DESCENDING,
    )
    channel = model.Channel(
        1,
        "team",
        model.ChannelType.PUB_SUB,
        "alpha",
        (model.Participant("alpha", model.ParticipantRole.OWNER, 5, "aid_1"),),
        model.ChannelConfig(retention=model.Retention(model.RetentionKind.COUNT, 9)),
        description="about",
        tags=("x", "y"),
    )
    return model.StoreFile(
        10,
        20,
        (channel,),
        (first, second),
        (model.Subscription(1, 1, "beta", "a.#", model.MatchMode.MULTI_LEVEL, filter=wanted),),
        (message(3, status=model.MessageStatus.DEAD_LETTER),),
        (message(4, status=model.MessageStatus.ARCHIVED),),
        {99: b"block"},
    )


def messages_body(*messages: model.Message) -> bytes:
    """Section 2 without an envelope."""
    return len(messages).to_bytes(8, "little") + b"".join(map(encode_message, messages))


def assemble(
    bodies: list[tuple[int, bytes]],
    *,
    counts: tuple[int, int, int, int] = (0, 0, 0, 0),
    flags: int = 0,
    version: int = 1,
    table: list[SectionEntry] | None = None,
) -> bytes:
    """A sealed file of these sections; ``table`` in the place of the one that fits them."""
    offset = HEADER.size + len(bodies) * SECTION.size
    sections = []
    for kind, body in bodies:
        sections.append(SectionEntry(kind, 0, offset, len(body)))
        offset += len(body)
    table = sections if table is None else table
    total = offset + FOOTER.size
    head = HEADER.pack(MAGIC, version, flags, len(table), *counts, 10, 20, total, b"")
    entries = b"".join(SECTION.pack(*msgspec.structs.astuple(entry)) for entry in table)
    return reseal(head + entries + b"".join(body for _, body in bodies) + bytes(FOOTER.size))


def reseal(data: bytes) -> bytes:
    """The file with its checksum made right again, so that what lies deeper is reached."""
    body = data[: -FOOTER.size]
    return body + FOOTER.pack(hashlib.sha256(body).digest(), FOOTER_MAGIC)


def patch(data: bytes, at: int, piece: bytes) -> bytes:
    """The file with ``piece`` written over it, sealed again."""
    return reseal(data[:at] + piece + data[at + len(piece) :])


def damaged(data: bytes, dice: random.Random, times: int) -> bytes:
    """Bytes of it overwritten, cut out or put in, up to so many times, some as if they were sizes.

    Sealed again, and most of them of the size that they say, so that what lies deeper is reached.
    """
    made = bytearray(data)
    sizes = (b"\xff" * 4, b"\xff" * 8, bytes(8), b"\0\0\0\x10", struct.pack("<I", len(data)))
    for _ in range(dice.randint(1, times)):
        at = dice.randrange(10, len(made) - 40)
        piece = dice.choice((dice.randbytes(1), dice.choice(sizes), dice.randbytes(9)))
        kind = dice.randrange(4)
        if kind < 2:
            made[at : at + len(piece)] = piece
        elif kind == 2:
            del made[at : at + len(piece)]
        else:
            made[at:at] = piece
        if len(made) < 200:
            break
    made[64:72] = struct.pack("<Q", len(made) + (dice.randrange(20) == 0))
    return reseal(bytes(made))


def refuse(data: bytes) -> FormatError:
    """What is said of bytes that are no store, in one line."""
    with pytest.raises(FormatError) as caught:
        store_file.decode(data, "it")
    assert "\n" not in str(caught.value)
    return caught.value
