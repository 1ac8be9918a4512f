"""docs/formats/acomm.md says what the Structs and the codec say."""

from __future__ import annotations

from struct import Struct

import pytest

from relay.acomm import model, records
from relay.acomm.columns import FIRST_METADATA_BLOCK, ColumnBlock
from relay.acomm.container import (
    FOOTER,
    FOOTER_MAGIC,
    HEADER,
    MAGIC,
    MAX_FILE_BYTES,
    SECTION,
    FileHeader,
    Flag,
    SectionEntry,
    SectionType,
)
from relay.acomm.indexes import IndexType
from relay.acomm.model import LabelledEnum
from tests.documents import fields_of, read_page, tables

DOCS = read_page("formats/acomm.md")


@pytest.mark.shows("engine 8.1")
@pytest.mark.parametrize(
    ("heading", "struct", "fields"),
    [
        ("Header", HEADER, ("magic", *FileHeader.__struct_fields__, "reserved")),
        ("Section table entry", SECTION, ("type", *SectionEntry.__struct_fields__[1:])),
        ("Footer", FOOTER, ("checksum", "magic")),
    ],
)
def test_a_table_is_its_struct(heading: str, struct: Struct, fields: tuple[str, ...]) -> None:
    assert fields_of(DOCS, heading, struct) == list(fields)
    assert all(row[4] for row in tables(DOCS, heading)[0])


def test_the_numbers_stand_in_the_tables() -> None:
    assert MAGIC.decode() in tables(DOCS, "Header")[0][0][4]
    assert FOOTER_MAGIC.decode() in tables(DOCS, "Footer")[0][1][4]
    flags = {row[1]: 1 << int(row[0]) for row in tables(DOCS, "Header")[1][:-1]}
    assert flags == {str(flag.name): flag.value for flag in Flag}
    sections = {row[1]: int(row[0]) for row in tables(DOCS, "Section table entry")[1] if row[1]}
    assert sections == {kind.name: kind.value for kind in SectionType}
    kinds = {row[1].upper(): int(row[0]) for row in tables(DOCS, "Indexes, section 4")[0]}
    assert kinds == {kind.name: kind.value for kind in IndexType}
    blocks = {row[1]: int(row[0]) for row in tables(DOCS, "Blocks of COLUMNS")[0][:-1]}
    assert blocks == {block.name: block.value for block in ColumnBlock}
    assert tables(DOCS, "Blocks of COLUMNS")[0][-1][0] == f"{FIRST_METADATA_BLOCK} and above"
    limits = {row[0]: row[1] for row in tables(DOCS, "Writing")[0]}
    assert limits["file"].startswith(f"{MAX_FILE_BYTES:,} bytes")
    assert limits["content of a message"] == f"{records.MAX_CONTENT_BYTES:,} bytes"


@pytest.mark.parametrize(
    ("heading", "cls", "smallest"),
    [
        ("Message", model.Message, records.MESSAGE.least),
        ("Channel", model.Channel, records.CHANNEL.least),
        ("Participant", model.Participant, records.PARTICIPANT.least),
        ("ChannelConfig", model.ChannelConfig, 27),
        ("Subscription", model.Subscription, records.SUBSCRIPTION.least),
        ("MessageFilter", model.MessageFilter, 29),
    ],
)
def test_a_record_has_the_fields_of_its_value(heading: str, cls: type, smallest: int) -> None:
    *rows, total = tables(DOCS, heading)[0]
    assert [row[2] for row in rows] == list(cls.__struct_fields__)  # type: ignore[attr-defined]
    assert sum(int(row[0].split()[0]) for row in rows) == smallest
    assert total == [f"{smallest} +", "", "", "total"]


@pytest.mark.parametrize(
    "enum",
    [
        model.MessageType,
        model.MessageStatus,
        model.Priority,
        model.ChannelType,
        model.ChannelState,
        model.ParticipantRole,
        model.MatchMode,
        model.DeliveryMode,
        model.SortField,
        model.SortOrder,
    ],
)
def test_an_enum_is_written_out(enum: type[LabelledEnum]) -> None:
    assert ", ".join(f"{member.value} {member.label}" for member in enum) in DOCS
