"""Every setting of the relay: its default, limits and description, in one place.

``config.json`` in the home holds the same tree; what it leaves out has its default here.
An unknown key is an error, so that a typing mistake never passes for a setting. The relay reads
the file when it starts and on SIGHUP, and follows every change without a restart.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Annotated, Any

import msgspec

from relay.base.clock import whole
from relay.base.discovery import CONFIG
from relay.base.errors import ConfigError
from relay.base.home import Home
from relay.base.names import is_agent_name
from relay.base.text import did_you_mean

Positive = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

RESTARTS = ("never", "on-failure", "always")
CHOICES = {
    "detection.watcher": ("auto", "inotify", "scan"),
    "log_level": ("debug", "info", "warning", "error"),
    "spawn.restart": RESTARTS,
}

_UNITS = {"ms": "ms", "s": "s", "days": "d"}  # by the end of a setting's name
JSON_TYPES = {
    "int": "a whole number",
    "str": "a text",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
}

# How each program is given its first instructions and left to work without a person.
PRESETS: dict[str, tuple[str, ...]] = {
    "claude": ("claude", "-p", "{guide}{prompt}"),
    "codex": ("codex", "exec", "{guide}{prompt}"),
    "gemini": ("gemini", "-p", "{guide}{prompt}"),
    "sh": ("sh", "-c", "{prompt}"),
    "python": ("python3", "-c", "{prompt}"),
}
_DENIED = "AGENT_RELAY_* BASH_ENV DYLD_* ENV IFS LD_* NODE_OPTIONS PATH PERL5* PYTHON* RUBY*"
ENV_DENY = (*_DENIED.split(), "SHELLOPTS")


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration.

    The text below a setting is its description in ``relay config show``. Its
    unit is the end of its name; a duration may also be a text such as "10m".
    """


class DetectionSettings(Settings, frozen=True):
    """Detection of files in outboxes."""

    watcher: str = "auto"
    """The way files are noticed; `auto` is inotify where it works, otherwise scan."""
    scan_interval_s: Positive = 30
    """Time between two scans of all outboxes, which find what inotify missed."""
    poll_interval_ms: Positive = 100
    """Time between two looks of the watcher `scan`."""
    settle_ms: NotNegative = 100
    """Age of a file written straight into an outbox before it is read."""
    malformed_after_s: NotNegative = 5
    """Age of a file that is not a valid message before it is refused: it may still be growing."""
    pending_warn_s: Positive = 30
    """Age of a file in .pending at which the log warns that it was not renamed."""
    orphan_after_s: Positive = 3600
    """Age of a file in .pending before a message is refused, and another file is removed."""


class LimitSettings(Settings, frozen=True):
    """Limits of one message and one batch."""

    max_body_bytes: Annotated[int, msgspec.Meta(gt=0, le=1_048_576)] = 1_048_576
    """Largest body of a message; not more than the engine's own limit."""
    max_attachment_mib: Positive = 1024
    """Largest attachment; a gigabyte is read in a second or two."""
    batch_files: Positive = 256
    """Most files in one batch, which is one transaction of the ledger."""
    reply_depth: Positive = 64
    """Most answers along RE within a minute: above what a conversation needs, below a loop."""
    batch_deliveries: Positive = 2000
    """Most deliveries in one batch, so that a broadcast does not hold up other messages."""


class StoreSettings(Settings, frozen=True):
    """Checkpoints of the engine's store, and its live messages."""

    checkpoint_messages: Positive = 25_000
    """New messages after which the store's file is written; a start replays those since then."""
    checkpoint_ms: Positive = 60_000
    """Time after which it is written, if that comes first."""
    checkpoint_pause_factor: NotNegative = 20
    """Least pause between two writes, in durations of the last one: 20 means 5 % of a core."""
    roll_after_s: Positive = 3600
    """Age at which a final message may move to store/archive; most answers have come by then."""
    roll_messages: Positive = 10_000
    """Final messages that move together; fewer wait for up to a day."""
    active_messages: Positive = 100_000
    """Most live messages; final ones move earlier from half of it on."""
    compress: bool = True
    """Compress the store's file, to about a third."""
    encrypt: bool = False
    """Encrypt store and journal, which cannot be undone; inboxes and archive/ stay plain."""
    key_file: str = "store.key"
    """Key file, in the home or by an absolute path; best not on the disk of the backups."""


class JournalSettings(Settings, frozen=True):
    """The journal and its tiers."""

    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, le=2**31 - 1)] = 64 << 20
    """Size at which a segment is sealed."""
    segment_age_s: Positive = 86_400
    """Age at which a segment is sealed, so that a quiet relay's history is archived as well."""
    compress_segments: bool = True
    """Compress sealed segments (Tier 1), to a fifth or a third."""
    compress_after_s: NotNegative = 600
    """Age of a sealed segment before it is compressed; a start after a crash reads the newest."""
    objects: str = ""
    """Object store for sealed segments (Tier 2): a directory or s3://bucket/prefix; empty: none."""
    local_mib: Positive = 2048
    """Size of the sealed segments kept on this disk when Tier 2 has them."""
    local_age_s: Positive = 30 * 86_400
    """Age of the sealed segments kept on this disk when Tier 2 has them."""
    keep_mib: NotNegative = 0
    """Size of the whole journal, above which the oldest segments are deleted; 0: never."""
    keep_age_s: NotNegative = 0
    """Age at which segments are deleted; 0: never."""


class RetrySettings(Settings, frozen=True):
    """Retries after temporary failures."""

    first_s: Positive = 1
    """Pause before the first retry, doubled with every attempt."""
    most_s: Positive = 60
    """Longest pause; a disk that has room again is noticed within it."""

    def pause_s(self, attempts: int) -> int:
        """Seconds before the next try after ``attempts``: 1, 2, 4 … 60."""
        return min(self.first_s << min(max(attempts - 1, 0), 30), self.most_s)

    def pause_after_s(self, elapsed_s: int) -> int:
        """Seconds before the next try, ``elapsed_s`` after the first: 1, 2, 4 … 60 as well."""
        return min(self.first_s + max(elapsed_s, 0), self.most_s)


class LedgerSettings(Settings, frozen=True):
    """The ledger's connection."""

    busy_timeout_ms: NotNegative = 5000
    """Longest wait for another process that writes the ledger."""
    wal_alert_mib: Positive = 64
    """Size of ledger.db-wal at which `relay status` warns of the reader that keeps it growing."""
    wal_most_mib: Positive = 1024
    """Size of ledger.db-wal at which no messages are accepted until that reader ends."""


class DeliverySettings(Settings, frozen=True):
    """Defaults where neither the message nor its channel has a value."""

    ack_timeout_s: Positive = 60
    """Time in which an answer is expected."""
    command_timeout_s: Positive = 1800
    """Time in which the answer to a command is expected; a model may need half an hour."""
    give_up_after_s: Positive = 86_400
    """Time for which a delivery that fails is retried."""


class LogSettings(Settings, frozen=True):
    """The relay's log, logs/relay.log."""

    max_mib: Positive = 16
    """Size at which the log is rotated; two days of a busy relay at level info."""
    keep_files: Positive = 5
    """Rotated files that are kept."""


class SpawnSettings(Settings, frozen=True):
    """Programs that may be started as agents, the agents that may start them, and supervision."""

    # No shell sees these words, unless it is the template's own first word.
    clis: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(PRESETS))
    """Command line of each program; {prompt}, {name}, {cwd} and {guide}, the page of `relay guide`,
    are replaced in a word."""
    allow_from: tuple[str, ...] = ("lead", "operator")
    """Agents that may start and stop others; `lead` is the agent of `TO: Lead`."""
    roots: tuple[str, ...] = ()
    """Folders in one of which an agent's working directory must be; empty: anywhere."""
    env_deny: tuple[str, ...] = ENV_DENY
    """Patterns of variables that a request may not set: they change the code or its identity."""
    restart: str = "never"
    """When an agent that has ended is started again, unless the request says so."""
    restart_first_s: Positive = 1
    """Pause before the first restart, doubled with every restart in the window."""
    restart_most_s: Positive = 60
    """Longest pause before a restart."""
    restart_times: Positive = 5
    """Restarts in one window, after which the relay gives up and reports it."""
    restart_window_s: Positive = 600
    """Length of that window; a crash an hour is not a loop."""
    grace_s: Positive = 10
    """Time between SIGTERM and SIGKILL."""
    idle_after_s: Positive = 60
    """Time without a message, a read or CPU after which an agent is shown as idle."""
    stuck_after_s: Positive = 900
    """Time without activity after which an agent that owes a read or an answer is stuck."""
    output_mib: Positive = 10
    """Size of logs/NAME.log, an agent's output, at which it is rotated."""
    output_files: Positive = 2
    """Rotated files that are kept of each agent."""


class AgentSettings(Settings, frozen=True):
    """Times after which a silent agent counts as inactive or terminated."""

    inactive_after_s: Positive = 7 * 86_400
    """Silence after which an agent receives no broadcasts; its mail still waits."""
    dead_after_s: Positive = 300
    """Time since the end of its registered process after which mail to an agent bounces."""


class ContinuitySettings(Settings, frozen=True):
    """State that agents save for their next run."""

    most_kib: Annotated[int, msgspec.Meta(gt=0, le=1000)] = 256
    """Largest saved state; it is loaded as one message."""
    keep_versions: Positive = 10
    """Saved states that are kept of each agent."""


class SecuritySettings(Settings, frozen=True):
    """Signatures, rates and quotas of agents."""

    require_signatures: bool = False
    """Refuse unsigned messages as well, not only wrong signatures."""
    rate_per_s: Positive = 200
    """Messages per second that an agent may send for long; more wait in its outbox."""
    rate_burst: Positive = 10_000
    """Messages that an agent may send at once."""
    outbox_files: Positive = 100_000
    """Files waiting in one outbox of which its agent is notified; each is taken in its turn."""
    outbox_mib: Positive = 1024
    """The same by the size of the files."""


class SearchSettings(Settings, frozen=True):
    """The index of `relay search`, search.db: about two bytes on disk for each byte of text."""

    index: bool = True
    """Keep one; without it a search reads the whole store."""
    sealed: bool = False
    """Keep one of an encrypted store, too. It is not encrypted: it has every text in the clear."""


class AdminSettings(Settings, frozen=True):
    """Health, metrics and status over HTTP: on admin.sock in the home, always."""

    listen: str = ""
    """Loopback address for them as well, 127.0.0.1:9464 or [::1]:9464; empty: the socket alone."""
    stall_after_s: Positive = 15
    """Time in one step after which the relay's loop counts as unhealthy."""


class DiskSettings(Settings, frozen=True):
    """The disk that the home is on."""

    alert_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 90
    """Used part of the disk at which the relay warns."""
    low_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 95
    """Used part of the disk at which the archive is compressed early."""
    floor_mib: NotNegative = 64
    """Free space below which no messages are accepted; 0: no such limit."""
    check_s: Positive = 5
    """Time between two measurements; a busy relay writes some 50 MB in that."""


class RetentionSettings(Settings, frozen=True):
    """Retention of files that are no longer needed; 0: unlimited."""

    archive_days: NotNegative = 90
    """Age of the originals in archive/."""
    archive_mib: NotNegative = 4096
    """Size of archive/."""
    read_days: NotNegative = 30
    """Age of read messages in inbox/.read; the archive has them as well."""
    read_mib: NotNegative = 1024
    """Size of inbox/.read of all agents together."""
    rejected_days: NotNegative = 30
    """Age of refused files."""
    output_days: NotNegative = 30
    """Age of the output of agents that no longer exist."""
    attachments_days: NotNegative = 30
    """Age of attachments, since the last message that names them."""
    attachments_mib: NotNegative = 0
    """Size of the attachments; 0: they are kept as long as their messages."""
    audit_days: NotNegative = 365
    """Age of rows in the ledger's audit_log and security_events."""
    every_s: Positive = 3600
    """Time between two runs, in the background."""


class Config(Settings, frozen=True):
    """Settings without a section, and the sections."""

    lead: str = ""
    """Agent that `TO: Lead` means; empty: the agent with that role (`relay register --role`)."""
    log_level: str = "info"
    """Least level of lines in the log; debug logs a line for each message."""
    detection: DetectionSettings = DetectionSettings()
    limits: LimitSettings = LimitSettings()
    delivery: DeliverySettings = DeliverySettings()
    store: StoreSettings = StoreSettings()
    journal: JournalSettings = JournalSettings()
    retry: RetrySettings = RetrySettings()
    ledger: LedgerSettings = LedgerSettings()
    log: LogSettings = LogSettings()
    search: SearchSettings = SearchSettings()
    spawn: SpawnSettings = SpawnSettings()
    agents: AgentSettings = AgentSettings()
    continuity: ContinuitySettings = ContinuitySettings()
    security: SecuritySettings = SecuritySettings()
    admin: AdminSettings = AdminSettings()
    disk: DiskSettings = DiskSettings()
    retention: RetentionSettings = RetentionSettings()


def load(home: Home) -> Config:
    """Read the configuration of a home. Errors: ConfigError, HomeMissing, OSError."""
    return decode(home.read_config(), home.path(CONFIG))


def decode(data: bytes, path: str = "config.json") -> Config:
    """The configuration in a file's bytes. Errors: ConfigError naming the key and the rule."""
    try:
        tree = json.loads(data, object_pairs_hook=_section)
        msgspec.json.decode(data)  # it knows no NaN, and no text that is not Unicode
        config = msgspec.convert(tree, type=Config)
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        raise ConfigError(f"{path}: {_fault(exc)}") from exc
    if config.lead and not is_agent_name(config.lead):
        raise ConfigError(
            f"{path}: lead is {config.lead!r}, expected the name of an agent, or none"
        )
    if not _is_place(config.journal.objects):
        raise ConfigError(
            f"{path}: journal.objects is {config.journal.objects!r}, expected a directory,"
            " or s3://bucket/prefix"
        )
    values = flatten(config)
    for key, known in CHOICES.items():
        if values[key] not in known:
            expected = ", ".join(known)
            raise ConfigError(f"{path}: {key} is {values[key]!r}, expected one of {expected}")
    try:
        listen_address(config.admin.listen)
    except ValueError as exc:
        raise ConfigError(f"{path}: admin.listen is {config.admin.listen!r}, {exc}") from exc
    for name, argv in config.spawn.clis.items():
        if not argv or not argv[0]:
            raise ConfigError(
                f"{path}: spawn.clis.{name} is {list(argv)}, expected a program first"
            )
    alert, most = config.ledger.wal_alert_mib, config.ledger.wal_most_mib
    if alert > most:
        raise ConfigError(
            f"{path}: ledger.wal_alert_mib is {alert}, expected no more than wal_most_mib, {most}"
        )
    return config


def _fault(exc: Exception) -> str:
    """Describe a fault of the file by its line and column, or else by its setting."""
    if isinstance(exc, json.JSONDecodeError):
        return f"line {exc.lineno}, column {exc.colno}: {exc.msg[:1].lower()}{exc.msg[1:]}"
    if isinstance(exc, UnicodeDecodeError):
        return f"line {exc.object[: exc.start].count(10) + 1}: expected UTF-8 text"
    if isinstance(exc, RecursionError):
        return "expected settings, got values nested too deeply"
    rule, _, place = (text := str(exc)).partition(" - at `")
    where = place.rstrip("`").removeprefix("$").lstrip(".")
    if found := re.search("unknown field `(.*)`", rule):
        name = f"{where}.{found[1]}" if where else found[1]
        meant = did_you_mean(name, {*Config.__struct_fields__, *flatten(Config())})
        return f"setting {name} does not exist{'; ' if meant else ''}{meant}"
    if where:
        plain = re.sub("`([^`]*)`", lambda found: JSON_TYPES.get(found[1], found[1]), rule)
        return f"{where}: {plain[:1].lower()}{plain[1:]}"
    return text.replace("`", "")


def _section(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. Errors: ValueError for a key given twice, or an invalid duration."""
    found = {name: _in_its_unit(name, value) for name, value in pairs}
    if len(found) < len(pairs):
        words = [word for word, _ in pairs]
        twice = next(word for word in words if words.count(word) > 1)
        raise ValueError(f"{twice!r} is given twice: keep one")
    return found


def _in_its_unit(name: str, value: Any) -> Any:
    unit = _UNITS.get(name.removesuffix("_per_s").rpartition("_")[2])
    if unit is None or not isinstance(value, str):
        return value
    try:
        return whole(value, unit)
    except ValueError as exc:
        raise ValueError(f"{name}: {exc}") from exc


def _is_place(url: str) -> bool:
    """True for a valid Tier 2: a path, or a bucket with a name."""
    scheme, mark, rest = url.partition("://")
    return not mark or (scheme in ("s3", "file") and rest.strip("/") != "")


def read_file(path: str) -> Config:
    """The configuration in a file; the defaults if it does not exist. Errors: ConfigError."""
    try:
        with open(path, "rb") as file:
            return decode(file.read(), path)
    except (FileNotFoundError, NotADirectoryError):
        return Config()
    except OSError as exc:
        raise ConfigError(f"{path}: {exc.strerror}") from exc


def listen_address(text: str) -> tuple[str, int] | None:
    """(address, port) of ``admin.listen``; None where it is empty.

    Errors: ValueError unless it is a loopback address: requests are not authenticated.
    """
    if not text:
        return None
    import ipaddress  # here: few name one

    rule = "expected 127.0.0.1:PORT or [::1]:PORT, a loopback address and a port from 1 to 65535"
    host, _, port = text.rpartition(":")
    host = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    try:
        is_loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        is_loopback = False
    is_port = port.isascii() and port.isdigit() and len(port) < 6 and 0 < int(port) < 1 << 16
    if not (is_loopback and is_port):
        raise ValueError(rule)
    return host, int(port)


def encode(config: Config) -> bytes:
    """The file with every setting in it, for people to edit."""
    return msgspec.json.format(msgspec.json.encode(config), indent=2) + b"\n"


def flatten(config: Config) -> dict[str, Any]:
    """Every setting by its full name, such as ``limits.batch_files``, and its value."""
    found: dict[str, Any] = {}
    for name in Config.__struct_fields__:
        value = getattr(config, name)
        if isinstance(value, Settings):
            found |= {f"{name}.{key}": getattr(value, key) for key in value.__struct_fields__}
        else:
            found[name] = value
    return found


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, as ``section.name: old -> new``."""
    new = flatten(after)
    return [
        f"{name}: {old!r} -> {new[name]!r}"
        for name, old in flatten(before).items()
        if old != new[name]
    ]


def digest(config: Config) -> str:
    """A short name of the values, to compare those of two processes."""
    data = msgspec.json.encode(config, order="deterministic")
    return hashlib.sha256(data).hexdigest()[:12]
