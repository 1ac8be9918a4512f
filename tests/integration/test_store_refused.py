"""Files that could not be written again: beyond a limit, of a later version, with more sections."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from msgspec.structs import replace

from relay.acomm import fields, store_file
from relay.acomm.model import (
    Channel,
    ChannelType,
    MatchMode,
    Message,
    MessageFilter,
    MessageStatus,
    MessageType,
    Participant,
    ParticipantRole,
    StoreFile,
    Subscription,
)
from relay.base.config import Config
from relay.base.errors import FormatError, StoreReadOnly, VersionError
from relay.base.home import STORE, Home
from relay.cli import cli
from relay.commstore import CommStore
from relay.daemon.opening import open_store, open_store_readonly
from tests.acomm.support import FIXTURES
from tests.fakes import FakeClock

MEMBERS = (Participant("a", ParticipantRole.OWNER), Participant("b"))
CHANNEL = Channel(1, "c", ChannelType.PUB_SUB, "a", MEMBERS)
MESSAGE = Message(1, MessageType.TEXT, "a", 1, b"hi", "t", created_at=5, status=MessageStatus.SENT)
SUBSCRIPTION = Subscription(1, 1, "b", "t", MatchMode.EXACT)
SOUND = StoreFile(1, 2, (CHANNEL,), (MESSAGE,), (SUBSCRIPTION,))


def with_channel(**changes: Any) -> StoreFile:
    return replace(SOUND, channels=(replace(CHANNEL, **changes),))


def with_message(**changes: Any) -> StoreFile:
    return replace(SOUND, messages=(replace(MESSAGE, **changes),))


def with_subscription(**changes: Any) -> StoreFile:
    one = replace(SUBSCRIPTION, **changes)
    return replace(SOUND, subscriptions=(one,))


UNOWNED = with_channel(channel_type=ChannelType.BROADCAST, participants=MEMBERS[1:])
# What is expected of a file -> the file, and what is found in it.
BEYOND = {
    "content of message 1 of at most 1048576 bytes": (
        with_message(content=b"x" * 1_048_577),
        "1048577 bytes",
    ),
    "sender of message 1 of at most 128 bytes": (with_message(sender="s" * 129), "129 bytes"),
    "topic of message 1 of at most 256 bytes": (with_message(topic="é" * 128 + "t"), "257 bytes"),
    "name of channel 1 of at most 128 bytes": (with_channel(name="n" * 129), "129 bytes"),
    "topic_pattern of subscription 1 of at most 256 bytes": (
        with_subscription(topic_pattern="p" * 257),
        "257 bytes",
    ),
    "one owner in broadcast channel 1": (replace(UNOWNED, subscriptions=()), "none"),
}


@pytest.fixture(params=BEYOND)
def beyond(
    request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> tuple[Path, str, str]:
    """A whole file, by a writer that keeps no limits; what is expected and found in it."""
    store, found = BEYOND[request.param]
    path = tmp_path / "beyond.acomm"
    with monkeypatch.context() as patched:
        patched.setattr(fields, "MAX_NAME_BYTES", 10**9)
        patched.setattr(fields, "MAX_TOPIC_BYTES", 10**9)
        patched.setattr("relay.acomm.sections.MAX_CONTENT_BYTES", 10**9)
        fields.name.cache_clear()
        fields.topic.cache_clear()
        store_file.write(str(path), store, compress=False)
    fields.name.cache_clear()
    fields.topic.cache_clear()
    return path, request.param, found


def run(*args: object) -> tuple[int, str]:
    done = CliRunner().invoke(cli, [str(one) for one in args], standalone_mode=False)
    return done.return_value or done.exit_code, done.output


@pytest.mark.shows("engine 6.6")
def test_a_value_beyond_its_limit_is_refused_for_writing(beyond: tuple[Path, str, str]) -> None:
    """Nor is it given up for the file before."""
    path, expected, found = beyond
    data = path.read_bytes()
    store_file.write(f"{path}.prev", SOUND)
    with pytest.raises(FormatError) as refused:
        CommStore.open(str(path))
    error = refused.value
    assert (error.path, error.expected, error.found) == (str(path), expected, found)
    assert 96 < error.offset < len(data)
    assert path.read_bytes() == data
    assert {one.name for one in path.parent.iterdir()} == {
        path.name + end for end in ("", ".lock", ".prev")
    }


@pytest.mark.shows("engine 6.6")
def test_check_names_each_and_dump_reads(beyond: tuple[Path, str, str]) -> None:
    path, expected, found = beyond
    code, said = run("check", path)
    assert code == 3
    assert f"expected {expected}, found {found}" in said
    assert said.startswith(f"{path} at ")
    assert said.count("\n") == 1
    code, said = run("dump", path)
    assert code == 0
    assert len(said.splitlines()) >= 3


# -- of a later version, or with sections that are not known ---------------------------------


@pytest.fixture(params=["version-2", "unknown-section"])
def foreign(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / f"{request.param}.acomm"
    shutil.copy(FIXTURES / path.name, path)
    return path


REASON = {
    "version-2": "a flush would lose version 2",
    "unknown-section": "a flush would lose the unknown sections 77, 9001",
}


@pytest.mark.shows("engine 6.7")
def test_what_a_flush_would_lose_is_opened_to_be_read_alone(foreign: Path) -> None:
    data = foreign.read_bytes()
    said: list[str] = []
    store = CommStore.open(str(foreign), warn=said.append)
    reason = REASON[foreign.stem]
    assert said == [f"{foreign} is opened for reading only: {reason}"]
    found = store.query_messages(MessageFilter(limit=1000, include_archived=True))
    assert found.total_count > 3
    channel = store.list_channels()[0]
    with pytest.raises(StoreReadOnly, match=reason):
        store.send_message(channel.id, channel.owner, MessageType.TEXT, "hi")
    with pytest.raises(StoreReadOnly, match=reason):
        store.create_channel("new", ChannelType.GROUP, "a")
    store.flush()
    store.tick()
    store.close()
    assert foreign.read_bytes() == data


@pytest.mark.shows("engine 6.7")
def test_a_relay_does_not_start_on_what_it_would_lose(foreign: Path, tmp_path: Path) -> None:
    with Home.create(str(tmp_path / "home"), b"{}\n") as home:
        shutil.copy(foreign, home.path(STORE))
        with pytest.raises(
            VersionError, match=REASON[foreign.stem].removeprefix("a flush ")
        ) as refused:
            open_store(home, Config(), FakeClock(), lambda _: None)
        assert refused.value.path == home.path(STORE)
        assert Path(home.path(STORE)).read_bytes() == foreign.read_bytes()
        assert open_store_readonly(
            home, FakeClock(), Config()
        ).channels.list_all()  # looking is not writing


# -- errors name the file --------------------------------------------------------------------


@pytest.mark.shows("engine 6.8")
def test_every_error_of_open_names_the_file(tmp_path: Path) -> None:
    path = tmp_path / "it.acomm"
    twice = replace(SOUND, messages=(MESSAGE, MESSAGE))
    lost = replace(SOUND, messages=(replace(MESSAGE, channel_id=9),))
    torn = replace(SOUND, engine_state={1: b"\1"})
    for store in (twice, lost, torn):
        store_file.write(str(path), store)
        with pytest.raises(FormatError) as refused:
            CommStore.open(str(path))
        assert refused.value.path == str(path)
        assert str(refused.value).startswith(f"{path} at ")
    (tmp_path / "json").write_text(json.dumps([]))
    with pytest.raises(FormatError, match=str(tmp_path / "json")):
        CommStore.open(str(tmp_path / "json"))
