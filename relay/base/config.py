"""Every setting of the relay, its default and the reason for it, in one literal.

``config.json`` in the home holds the same tree; what it leaves out has its default here.
An unknown key is an error, so that a typing mistake never passes for a setting.
"""

from __future__ import annotations

import json
from typing import Annotated, Any

import msgspec

from relay.base.errors import ConfigError
from relay.base.home import CONFIG, Home
from relay.base.names import is_agent_name

Positive = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]

LOG_LEVELS = ("debug", "info", "warning", "error")
WATCHERS = ("auto", "inotify", "scan")
RESTARTS = ("never", "on-failure", "always")

# How each program is given its first instructions and left to work without a person.
PRESETS: dict[str, tuple[str, ...]] = {
    "claude": ("claude", "-p", "{prompt}"),
    "codex": ("codex", "exec", "{prompt}"),
    "gemini": ("gemini", "-p", "{prompt}"),
    "sh": ("sh", "-c", "{prompt}"),
    "python": ("python3", "-c", "{prompt}"),
}
ENV_DENY = (
    "AGENT_RELAY_*",
    "BASH_ENV",
    "DYLD_*",
    "ENV",
    "IFS",
    "LD_*",
    "NODE_OPTIONS",
    "PATH",
    "PERL5*",
    "PYTHON*",
    "RUBY*",
    "SHELLOPTS",
)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration."""


class DetectionSettings(Settings, frozen=True):
    """Detection of files in outboxes."""

    watcher: str = "auto"  # auto, inotify or scan; auto takes inotify where it works
    scan_interval_s: Positive = 30  # inotify is an aid: what it misses is found within this
    poll_interval_ms: Positive = 100  # the scanning watcher's pace
    settle_ms: NotNegative = 100  # a file written in place is not read before this
    malformed_after_s: NotNegative = 5  # one that does not parse may still be growing
    pending_warn_s: Positive = 30  # untouched in .pending for so long: the rename was forgotten
    # After this a message left there is refused, and other files are removed. An hour, because a
    # writer that asks a person first needs minutes.
    orphan_after_s: Positive = 3600


class LimitSettings(Settings, frozen=True):
    """Limits of one message and one batch."""

    # Not more than the engine's own limit for content.
    max_body_bytes: Annotated[int, msgspec.Meta(gt=0, le=1_048_576)] = 1_048_576
    # A gigabyte is read in a second or two; a larger file is a disk image, not an attachment.
    max_attachment_mib: Positive = 1024
    batch_files: Positive = 256  # one ledger transaction; larger ones gain nothing
    # Answers along RE within a minute: above what a conversation needs, below a loop of thanks.
    reply_depth: Positive = 64
    batch_deliveries: Positive = 2000  # a broadcast to 1,000 agents must not starve the others


class StoreSettings(Settings, frozen=True):
    """Checkpoints of the engine's store, and its live messages."""

    # The journal has everything; a checkpoint spares the next start a replay and costs a syncfs.
    checkpoint_messages: Positive = 25_000  # replayed in a second or two
    checkpoint_ms: Positive = 60_000  # whichever of the two comes first
    # A flush rewrites the file: it starts no sooner than this many times the last one took,
    # so a large store costs 5 % of a core and not all of it.
    checkpoint_pause_factor: NotNegative = 20
    # Final messages move to store/archive: memory and start time depend on the live ones.
    roll_after_s: Positive = 3600  # most answers have come by then
    roll_messages: Positive = 10_000  # fewer wait, up to a day: small archives are many files
    active_messages: Positive = 100_000  # the guide's threshold; final messages from half of it on
    compress: bool = True  # a third of the size for 12 ms of CPU a megabyte
    encrypt: bool = False  # inbox and archive stay plain: agents read files
    key_file: str = "store.key"  # in the home, or an absolute path: best not on the backup's disk


class JournalSettings(Settings, frozen=True):
    """The journal and its tiers."""

    segment_bytes: Annotated[int, msgspec.Meta(ge=4096, le=2**31 - 1)] = 64 << 20  # a minute's scan
    segment_age_s: Positive = 86_400  # so that a quiet relay's history is archived as well
    # Sealed segments move to Tier 1 (compressed), to Tier 2 (an object store), and off the disk.
    compress_segments: bool = True  # a fifth to a third of the size, read in place
    compress_after_s: NotNegative = 600  # a start after a crash reads the newest segments
    objects: str = ""  # Tier 2: a directory, or s3://bucket/prefix; empty: none
    local_mib: Positive = 2048  # of sealed segments here: a disk shared with agents' work
    local_age_s: Positive = 30 * 86_400  # a month back is read now and then; older hardly
    keep_mib: NotNegative = 0  # of the whole journal; 0: nothing is ever deleted
    keep_age_s: NotNegative = 0  # the same by age


class RetrySettings(Settings, frozen=True):
    """Retries after temporary failures."""

    first_s: Positive = 1  # doubled with every attempt
    most_s: Positive = 60  # a disk that has room again is noticed within a minute

    def pause_s(self, attempts: int) -> int:
        """Seconds before the next try after ``attempts``: 1, 2, 4 … 60."""
        return min(self.first_s << min(max(attempts - 1, 0), 30), self.most_s)

    def pause_after_s(self, elapsed_s: int) -> int:
        """Seconds before the next try, ``elapsed_s`` after the first: 1, 2, 4 … 60 as well."""
        return min(self.first_s + max(elapsed_s, 0), self.most_s)


class LedgerSettings(Settings, frozen=True):
    """The ledger's connection."""

    busy_timeout_ms: NotNegative = 5000  # appendix B; only a second writer makes us wait
    wal_alert_mib: Positive = 64  # a reader that never ends keeps SQLite from resetting the WAL
    wal_most_mib: Positive = 1024  # intake pauses until that reader ends


class DeliverySettings(Settings, frozen=True):
    """Defaults where neither the message nor its channel has a value."""

    ack_timeout_s: Positive = 60  # a minute, unless AWAIT or the channel's ack_timeout is set
    command_timeout_s: Positive = 1800  # a model may need half an hour for a command
    give_up_after_s: Positive = 86_400  # a day: an agent away overnight still gets its mail


class LogSettings(Settings, frozen=True):
    """logs/relay.log, JSON lines."""

    max_mib: Positive = 16  # two days of a busy relay at info; then the file is rotated
    keep_files: Positive = 5  # rotated ones; the oldest goes


class SpawnSettings(Settings, frozen=True):
    """Programs that may be started as agents, the agents that may start them, and supervision."""

    # An argv each; {prompt}, {name} and {cwd} are replaced inside a word, and nothing else is.
    # No shell sees them, unless it is the template's own first word.
    clis: dict[str, tuple[str, ...]] = msgspec.field(default_factory=lambda: dict(PRESETS))
    allow_from: tuple[str, ...] = ("lead", "operator")  # `lead`: the agent of `TO: Lead`
    roots: tuple[str, ...] = ()  # WORKING_DIR must be below one of these; empty: anywhere
    # Patterns of names that ENV may not set: they would change the code that runs, or its identity.
    env_deny: tuple[str, ...] = ENV_DENY
    restart: str = "never"  # never, on-failure, always: where the message has no RESTART
    restart_first_s: Positive = 1  # doubled with every restart in the window
    restart_most_s: Positive = 60  # an agent that comes back within a minute is hardly missed
    restart_times: Positive = 5  # in one window; then the relay gives up and reports it
    restart_window_s: Positive = 600  # a crash an hour is not a loop
    grace_s: Positive = 10  # between SIGTERM and SIGKILL
    idle_after_s: Positive = 60  # without a message, a read or CPU
    stuck_after_s: Positive = 900  # owing a read or an answer: a model thinks for minutes
    output_mib: Positive = 10  # of logs/{agent}.log; then it is rotated
    output_files: Positive = 2  # rotated ones of each agent


class AgentSettings(Settings, frozen=True):
    """Times after which a silent agent counts as inactive or terminated."""

    inactive_after_s: Positive = 7 * 86_400  # silent for a week: no broadcasts, mail still waits
    # After the end of its registered process: long enough for a restart by hand.
    dead_after_s: Positive = 300


class ContinuitySettings(Settings, frozen=True):
    """State that agents save for their next run."""

    # Of one save: a summary, not a data store. The answer to `load` is one message.
    most_kib: Annotated[int, msgspec.Meta(gt=0, le=1000)] = 256
    keep_versions: Positive = 10  # of each agent; the oldest goes


class SecuritySettings(Settings, frozen=True):
    """Signatures, rates and quotas of agents."""

    require_signatures: bool = False  # true: unsigned messages are refused as well
    rate_per_s: Positive = 200  # messages an agent may send for long; more wait in its outbox
    rate_burst: Positive = 10_000  # and at once
    outbox_files: Positive = 100_000  # waiting in one outbox; the rest waits, with a notification
    outbox_mib: Positive = 1024  # the same in bytes


class AdminSettings(Settings, frozen=True):
    """Health, metrics and status over HTTP: on admin.sock in the home, always."""

    listen: str = ""  # 127.0.0.1:9464 or [::1]:9464, loopback alone; empty: the socket alone
    stall_after_s: Positive = 15  # a loop that stays in one stage longer is unhealthy


class DiskSettings(Settings, frozen=True):
    """The disk that the home is on."""

    alert_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 90  # used; the source document's
    low_percent: Annotated[int, msgspec.Meta(ge=1, le=100)] = 95  # used; the archive is compressed
    floor_mib: NotNegative = 64  # free; intake pauses below it; 0: no floor
    check_s: Positive = 5  # a busy relay writes some 50 MB in that


class RetentionSettings(Settings, frozen=True):
    """Retention of files that are no longer needed; 0: unlimited."""

    archive_days: NotNegative = 90  # a quarter, for questions about past conversations
    archive_mib: NotNegative = 4096  # a disk shared with agents' work
    read_days: NotNegative = 30  # inbox/.read; the archive has these files as well
    read_mib: NotNegative = 1024  # of all agents together
    rejected_days: NotNegative = 30  # the sender was told at once
    output_days: NotNegative = 30  # logs of agents whose directory is gone
    attachments_days: NotNegative = 30  # after the last message that names one
    attachments_mib: NotNegative = 0  # 0: attachments are kept as long as their messages
    audit_days: NotNegative = 365  # audit_log and security_events
    every_s: Positive = 3600  # in slices, in the background


class Config(Settings, frozen=True):
    """The whole configuration."""

    lead: str = ""  # the agent that `TO: Lead` means; empty: the agent with that role in meta.json
    log_level: str = "info"  # debug logs a line a message
    detection: DetectionSettings = DetectionSettings()
    limits: LimitSettings = LimitSettings()
    delivery: DeliverySettings = DeliverySettings()
    store: StoreSettings = StoreSettings()
    journal: JournalSettings = JournalSettings()
    retry: RetrySettings = RetrySettings()
    ledger: LedgerSettings = LedgerSettings()
    log: LogSettings = LogSettings()
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
        config = msgspec.json.decode(data, type=Config)
        json.loads(data, object_pairs_hook=_once)
    except (msgspec.DecodeError, ValueError) as exc:  # of the second: a word given twice
        raise ConfigError(f"{path}: {exc}") from exc
    if config.lead and not is_agent_name(config.lead):
        raise ConfigError(
            f"{path}: lead is {config.lead!r}, expected the name of an agent, or none"
        )
    if not _is_place(config.journal.objects):
        raise ConfigError(
            f"{path}: journal.objects is {config.journal.objects!r}, expected a directory,"
            " or s3://bucket/prefix"
        )
    for key, value, known in (
        ("detection.watcher", config.detection.watcher, WATCHERS),
        ("log_level", config.log_level, LOG_LEVELS),
        ("spawn.restart", config.spawn.restart, RESTARTS),
    ):
        if value not in known:
            raise ConfigError(f"{path}: {key} is {value!r}, expected one of {', '.join(known)}")
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


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of the file. Errors: ValueError for a duplicate key."""
    found = dict(pairs)
    if len(found) < len(pairs):
        words = [word for word, _ in pairs]
        twice = next(word for word in words if words.count(word) > 1)
        raise ValueError(f"{twice!r} is given twice: keep one")
    return found


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


def changes(before: Config, after: Config) -> list[str]:
    """The settings that differ, as ``section.name: old -> new``."""
    changed: list[str] = []
    for name in Config.__struct_fields__:
        old, new = getattr(before, name), getattr(after, name)
        if isinstance(old, Settings):
            changed += [
                f"{name}.{key}: {getattr(old, key)!r} -> {getattr(new, key)!r}"
                for key in type(old).__struct_fields__
                if getattr(old, key) != getattr(new, key)
            ]
        elif old != new:
            changed.append(f"{name}: {old!r} -> {new!r}")
    return changed
