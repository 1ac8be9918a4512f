"""Every setting of the relay, its default and the reason for it, in one literal.

``config.json`` in the home holds the same tree; what it leaves out has its default here.
An unknown key is an error, so that a typing mistake never passes for a setting.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from relay.errors import ConfigError

Positive = Annotated[int, msgspec.Meta(gt=0)]
NotNegative = Annotated[int, msgspec.Meta(ge=0)]


class Section(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration."""


class Detection(Section, frozen=True):
    """How files in outboxes are found."""

    watcher: str = "auto"  # auto, inotify or scan; auto takes inotify where it works
    scan_interval_s: Positive = 30  # inotify is an aid: what it misses is found within this
    poll_interval_ms: Positive = 100  # the scanning watcher's pace
    settle_ms: NotNegative = 100  # a file written in place is not read before this
    malformed_after_s: NotNegative = 5  # one that does not parse may still be growing
    orphan_after_s: Positive = 30  # a file in .pending this old has lost its writer


class Limits(Section, frozen=True):
    """What one message and one batch may be."""

    max_body_bytes: Positive = 1_048_576  # the engine's own limit for content
    batch_files: Positive = 256  # one ledger transaction; larger ones gain nothing
    batch_deliveries: Positive = 2000  # a broadcast to 1,000 agents must not starve the others


class Store(Section, frozen=True):
    """When the engine's store is written."""

    flush_messages: Positive = 100
    flush_ms: Positive = 5000
    # A flush rewrites the file: it starts no sooner than this many times the last one took,
    # so a large store costs 5 % of a core and not all of it.
    flush_pause_factor: NotNegative = 20
    compress: bool = True


class Retry(Section, frozen=True):
    """How work that failed for a passing reason is tried again."""

    first_s: Positive = 1
    most_s: Positive = 60

    def pause_s(self, attempts: int) -> int:
        """Seconds before the next try after ``attempts``: 1, 2, 4 … 60."""
        return min(self.first_s << min(max(attempts - 1, 0), 30), self.most_s)


class Ledger(Section, frozen=True):
    """The ledger's connection."""

    busy_timeout_ms: NotNegative = 5000


class Delivery(Section, frozen=True):
    """What holds where neither message nor channel says otherwise."""

    ack_timeout_s: Positive = 60


class Config(Section, frozen=True):
    """The whole configuration."""

    lead: str = ""  # the agent that `TO: Lead` means; empty: whoever has the role in meta.json
    log_level: str = "info"  # debug logs a line a message
    detection: Detection = Detection()
    limits: Limits = Limits()
    delivery: Delivery = Delivery()
    store: Store = Store()
    retry: Retry = Retry()
    ledger: Ledger = Ledger()


def decode(data: bytes, path: str = "config.json") -> Config:
    """The configuration in a file's bytes. Errors: ConfigError naming the key and the rule."""
    try:
        config = msgspec.json.decode(data, type=Config)
    except msgspec.DecodeError as exc:
        raise ConfigError(f"{path}: {exc}") from exc
    if config.detection.watcher not in ("auto", "inotify", "scan"):
        raise ConfigError(
            f"{path}: detection.watcher is {config.detection.watcher!r}, "
            "expected auto, inotify or scan"
        )
    return config


def encode(config: Config) -> bytes:
    """The file with every setting in it, for people to edit."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"
