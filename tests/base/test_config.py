"""config.json: every default goes out and comes back, every mistake is named in one line."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from relay.base.config import (
    FORMER,
    Config,
    DetectionSettings,
    LimitSettings,
    Settings,
    changes,
    decode,
)
from relay.base.errors import EXIT_USAGE, ConfigError
from relay.delivery.retry import pause_after

SECTIONS: dict[str, Settings] = {
    name: value
    for name in Config.__struct_fields__
    if isinstance(value := getattr(Config(), name), Settings)
}
SETTINGS = [("", name) for name in Config.__struct_fields__ if name not in SECTIONS] + [
    (section, name) for section, value in SECTIONS.items() for name in value.__struct_fields__
]


def key(section: str, name: str) -> str:
    return f"{section}.{name}" if section else name


def with_value(section: str, name: str, value: Any) -> bytes:
    return json.dumps({section: {name: value}} if section else {name: value}).encode()


def refused(data: bytes) -> str:
    with pytest.raises(ConfigError) as caught:
        decode(data, "/home/x/config.json")
    text = str(caught.value)
    assert text.startswith("/home/x/config.json: ")
    assert "\n" not in text
    assert caught.value.exit_code == EXIT_USAGE
    return text


def test_what_is_written_reads_back() -> None:
    assert decode(msgspec.json.encode(Config())) == Config()
    changed = Config(
        lead="ann",
        detection=DetectionSettings(watcher="scan", orphan_after_s=1),
        limits=LimitSettings(batch_files=1),
    )
    assert decode(msgspec.json.encode(changed)) == changed


def test_a_former_setting_is_ignored_unless_it_was_changed() -> None:
    """A home of before has all settings in its file."""
    for name, value in FORMER.items():
        assert decode(with_value(*name.split("."), value)) == Config()
    assert decode(b'{"retry": {}}') == Config()
    text = refused(with_value("retry", "first_s", 5))
    assert "retry.first_s is always 1, and no setting any more: remove it" in text


def test_what_the_file_leaves_out_has_its_default() -> None:
    assert decode(b"{}") == Config()
    assert decode(b'{"limits": {"batch_files": 7}}') == Config(limits=LimitSettings(batch_files=7))


@pytest.mark.parametrize("section", ["", *SECTIONS])
def test_a_key_that_is_none_is_named(section: str) -> None:
    text = refused(with_value(section, "settle_msec", 1))
    assert f"setting {key(section, 'settle_msec')} does not exist" in text


def test_a_value_of_another_type_is_named() -> None:
    for section, name in SETTINGS:
        is_list = isinstance(getattr(SECTIONS.get(section, Config()), name), tuple)
        assert key(section, name) in refused(with_value(section, name, {} if is_list else []))
        assert key(section, name) in refused(with_value(section, name, None))


def test_a_number_below_its_least_or_beyond_32_bits_is_named() -> None:
    may_be_0 = {"checkpoint_pause_factor", "compress_after_s", "floor_mib"}
    may_be_0 |= {"keep_age_s", "keep_mib"}
    may_be_0 |= {n for n in SECTIONS["retention"].__struct_fields__ if n != "every_s"}
    for section, name in [one for one in SETTINGS if one[0]]:
        for number in (-1, 2**31, *([] if name in may_be_0 else [0])):
            assert key(section, name) in refused(with_value(section, name, number))
        if name in may_be_0:
            decode(with_value(section, name, 0))


WORDS = {
    ("", "log_level"): ("debug", "info", "warning", "error"),
    ("", "lead"): ("operator",),
    ("detection", "watcher"): ("auto", "inotify", "scan"),
    ("admin", "listen"): ("", "127.0.0.1:9464", "127.9.9.9:1", "[::1]:65535", "::1:80"),
    ("journal", "objects"): ("", "/mnt/tier2", "tier2", "file:///mnt/x", "s3://bucket"),
}


def test_the_words_that_a_setting_takes() -> None:
    for (section, name), words in WORDS.items():
        for word in words:
            read = decode(with_value(section, name, word))
            assert getattr(getattr(read, section) if section else read, name) == word


def test_a_word_that_is_none_of_them_is_shown_with_those_there_are() -> None:
    text = refused(with_value("detection", "watcher", "polling"))
    assert "detection.watcher is 'polling', expected one of auto, inotify, scan" in text
    text = refused(with_value("", "log_level", "INFO"))
    assert "log_level is 'INFO', expected one of debug, info, warning, error" in text


@pytest.mark.parametrize(
    "listen",
    [
        *("0.0.0.0:9464", "192.168.1.2:9464", "[::]:9464", "example.com:80", "localhost:9464"),
        *("9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:0", "127.0.0.1:65536"),
        *("127.0.0.1:x", "127.0.0.1:-1", "127.0.0.1:٣", "127.0.0.1:99999999999", " 127.0.0.1:1"),
    ],
)
def test_nothing_but_loopback_is_listened_on(listen: str) -> None:
    text = refused(with_value("admin", "listen", listen))
    assert f"admin.listen is {listen!r}, expected 127.0.0.1:PORT or [::1]:PORT" in text


def test_what_changed_is_named() -> None:
    after = decode(b'{"lead": "ann", "disk": {"floor_mib": 1, "low_percent": 95}}')
    assert changes(Config(), after) == ["lead: '' -> 'ann'", "disk.floor_mib: 64 -> 1"]
    assert changes(after, after) == []


@pytest.mark.parametrize(
    "data", [b"", b"[]", b"{", b'{"lead": "\xff"}', b"null", b'"x"', b"{}x", b'{"lead": "\\ud800"}']
)
def test_what_is_no_json_object_is_refused(data: bytes) -> None:
    refused(data)


@pytest.mark.shows("ready 1.6")
@pytest.mark.parametrize(
    ("attempts", "pause_s"), [(0, 1), (1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (10**6, 60)]
)
def test_pauses_double_up_to_a_minute(attempts: int, pause_s: int) -> None:
    assert pause_after(attempts) == pause_s


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b'{"lead": "system"}', "lead is 'system', expected the name of an agent"),
        (b'{"lead": "no\\nname"}', r"lead is 'no\nname', expected the name of an agent"),
        (b'{"log_level": "debug", "log_level": "info"}', "log_level is given twice"),
        (b'{"log": {"max_mib": 1, "max_mib": 2}}', "log.max_mib is given twice"),
        (b'{"journal": {"objects": "ftp://host/x"}}', "expected a directory, or s3://bucket"),
        (b'{"journal": {"objects": "s3://"}}', "expected a directory, or s3://bucket"),
        (
            b'{"limits": {"max_body_bytes": 1048577}}',
            "limits.max_body_bytes: expected a whole number <= 1048576, got 1048577",
        ),
        (b'{"delivery": {"ack_timeout_s": "x"}}', "delivery.ack_timeout_s: 'x' is not a duration"),
        (
            b'{"retention": {"archive_days": "36h"}}',
            "retention.archive_days: '36h' is not a whole number of days",
        ),
        (
            b'{"disk": {"floor_mib": 1e400}}',
            "disk.floor_mib: expected a whole number, got a number with a fraction or exponent",
        ),
        (b'{"spawn": {"clis": {"x": "no"}}}', "spawn.clis.x: expected a list, got a text"),
        (
            b'{"spawn": {"clis": {"a": ["b"], "x": ["b", 5]}}}',
            "spawn.clis.x[1]: expected a text, got a whole number",
        ),
        (b"[]", "config.json: expected an object, {…}, got a list"),
        (
            b'{"ledger": {"wal_alert_mib": 2, "wal_most_mib": 1}}',
            "ledger.wal_alert_mib is 2, expected no more than wal_most_mib, 1",
        ),
    ],
)
def test_what_could_not_be_meant_is_refused(data: bytes, said: str) -> None:
    assert said in refused(data)
