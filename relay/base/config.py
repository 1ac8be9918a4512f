"""Every setting of the relay: its default, limits and description, in one place.

``config.json`` in the home holds the same tree; what it leaves out has its default here, and a new
home leaves out everything, so that a better default reaches it later. An unknown key is an error:
a typing mistake never passes for a setting. The relay reads the file when it starts and on SIGHUP,
and follows every change without a restart.
"""

import hashlib
import os
from typing import Annotated, Any

import msgspec

from relay.base import config_json
from relay.base.discovery import CONFIG
from relay.base.errors import ConfigError
from relay.base.home import Home
from relay.base.names import DEFAULT_MAX_ATTACHMENT_MIB, is_agent_name, listen_address

Positive = Annotated[int, msgspec.Meta(gt=0, le=2**31 - 1)]
NotNegative = Annotated[int, msgspec.Meta(ge=0, le=2**31 - 1)]
Percent = Annotated[int, msgspec.Meta(ge=1, le=100)]
Body = Annotated[int, msgspec.Meta(gt=0, le=1_048_576)]  # the engine's own limit

RESTARTS = ("never", "on-failure", "always")
CHOICES = {
    "detection.watcher": ("auto", "inotify", "scan"),
    "log_level": ("debug", "info", "warning", "error"),
    "spawn.restart": RESTARTS,
}

# Settings that nobody changed are constants; homes of before have them all in their files.
FORMER = {
    "detection.poll_interval_ms": 100,
    "detection.settle_ms": 100,
    "detection.malformed_after_s": 5,
    "detection.pending_warn_s": 30,
    "limits.batch_deliveries": 2000,
    "journal.segment_age_s": 86_400,
    "retry.first_s": 1,
    "retry.most_s": 60,
    "ledger.busy_timeout_ms": 5000,
    "spawn.restart_first_s": 1,
    "spawn.restart_most_s": 60,
    "spawn.output_files": 2,
    "security.outbox_files": 100_000,
    "security.outbox_mib": 1024,
    "disk.check_s": 5,
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


def about(text: str) -> msgspec.Meta:
    """The description of a setting in ``relay config show``."""
    return msgspec.Meta(description=text)


class Settings(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A part of the configuration: of each setting its limits, description and default.

    The unit is the end of its name; a duration may also be a text such as "10m".
    """


class DetectionSettings(Settings, frozen=True):
    """Detection of files in outboxes."""

    watcher: Annotated[
        str, about("The way files are noticed; `auto` is inotify where it works, otherwise scan.")
    ] = "auto"
    scan_interval_s: Annotated[
        Positive, about("Time between two scans of all outboxes, which find what inotify missed.")
    ] = 30
    orphan_after_s: Annotated[
        Positive, about("Age of a file in .pending before it is refused or removed.")
    ] = 3600


class LimitSettings(Settings, frozen=True):
    """Limits of one message and one batch."""

    max_body_bytes: Annotated[Body, about("Largest body of a message.")] = 1_048_576
    max_attachment_mib: Annotated[
        Positive, about("Largest attachment; a gigabyte is read in a second or two.")
    ] = DEFAULT_MAX_ATTACHMENT_MIB
    batch_files: Annotated[
        Positive, about("Most files in one batch, which is one transaction of the ledger.")
    ] = 256
    reply_depth: Annotated[
        Positive, about("Most answers along RE within a minute: more than that is a loop.")
    ] = 64


class StoreSettings(Settings, frozen=True):
    """Checkpoints of the engine's store, and its live messages."""

    checkpoint_messages: Annotated[
        Positive, about("New messages after which the store is written; a start replays the rest.")
    ] = 25_000
    checkpoint_ms: Annotated[
        Positive, about("Time after which it is written, if that comes first.")
    ] = 60_000
    checkpoint_pause_factor: Annotated[
        NotNegative,
        about("Least pause between two writes, in durations of one: 20 is 5 % of a core."),
    ] = 20
    roll_after_s: Annotated[
        Positive, about("Age at which a final message may move to store/archive.")
    ] = 3600
    roll_messages: Annotated[
        Positive, about("Final messages that move together; fewer wait for up to a day.")
    ] = 10_000
    active_messages: Annotated[
        Positive, about("Most live messages; final ones move earlier from half of it on.")
    ] = 100_000
    compress: Annotated[bool, about("Compress the store's file, to about a third.")] = True
    encrypt: Annotated[
        bool,
        about("Encrypt the store, and the journal from now on, for good; no other files."),
    ] = False
    key_file: Annotated[
        str, about("Key file, in the home or by an absolute path; not where the backups are.")
    ] = "store.key"


class JournalSettings(Settings, frozen=True):
    """The journal and its tiers."""

    segment_bytes: Annotated[
        int, msgspec.Meta(ge=4096, le=2**31 - 1), about("Size at which a segment is sealed.")
    ] = 64 << 20
    compress_segments: Annotated[
        bool, about("Compress sealed segments (Tier 1), to a fifth or a third.")
    ] = True
    compress_after_s: Annotated[
        NotNegative,
        about("Age of a sealed segment before it is compressed: a start reads the newest."),
    ] = 600
    objects: Annotated[
        str, about("Object store of sealed segments, a directory or s3://bucket/prefix.")
    ] = ""
    local_mib: Annotated[
        Positive, about("Size of the sealed segments kept on this disk when Tier 2 has them.")
    ] = 2048
    local_age_s: Annotated[
        Positive, about("Age of the sealed segments kept on this disk when Tier 2 has them.")
    ] = 30 * 86_400
    keep_mib: Annotated[
        NotNegative,
        about("Size of the journal above which the oldest segments are deleted; 0: never."),
    ] = 0
    keep_age_s: Annotated[NotNegative, about("Age at which segments are deleted; 0: never.")] = 0


class LedgerSettings(Settings, frozen=True):
    """The ledger's write-ahead log."""

    wal_alert_mib: Annotated[
        Positive, about("Size of ledger.db-wal at which `relay status` warns of a slow reader.")
    ] = 64
    wal_most_mib: Annotated[
        Positive, about("Size of ledger.db-wal at which no messages are accepted.")
    ] = 1024


class DeliverySettings(Settings, frozen=True):
    """Defaults where neither the message nor its channel has a value."""

    ack_timeout_s: Annotated[Positive, about("Time in which an answer is expected.")] = 60
    command_timeout_s: Annotated[
        Positive, about("Time in which a command is answered; a model may need half an hour.")
    ] = 1800
    give_up_after_s: Annotated[
        Positive, about("Time for which a delivery that fails is retried.")
    ] = 86_400


class AttentionSettings(Settings, frozen=True):
    """The reaction to something new that waits for a person."""

    command: Annotated[
        tuple[str, ...],
        about("Program, with its arguments, run when `relay attention` has something new."),
    ] = ()


class LogSettings(Settings, frozen=True):
    """The relay's log, logs/relay.log."""

    max_mib: Annotated[
        Positive, about("Size at which the log is rotated; two days of a busy relay at level info.")
    ] = 16
    keep_files: Annotated[Positive, about("Rotated files that are kept.")] = 5


class SpawnSettings(Settings, frozen=True):
    """Programs that may be started as agents, the agents that may start them, and supervision."""

    # No shell sees these words, unless it is the template's own first word.
    clis: Annotated[
        dict[str, tuple[str, ...]],
        about("Command line of each program, with {prompt}, {name}, {cwd} and {guide}."),
    ] = msgspec.field(default_factory=lambda: dict(PRESETS))
    allow_from: Annotated[
        tuple[str, ...],
        about("Agents that may start and stop others; `lead` is that of `TO: Lead`."),
    ] = ("lead", "operator")
    roots: Annotated[
        tuple[str, ...], about("Folders in one of which an agent must work; empty: anywhere.")
    ] = ()
    env_deny: Annotated[
        tuple[str, ...],
        about("Variables that a request may not set: they change code or identity."),
    ] = ENV_DENY
    restart: Annotated[
        str, about("When an agent that has ended is started again, unless the request says so.")
    ] = "never"
    restart_times: Annotated[
        Positive, about("Restarts in one window, after which the relay gives up and reports it.")
    ] = 5
    restart_window_s: Annotated[
        Positive, about("Length of that window; a crash an hour is not a loop.")
    ] = 600
    grace_s: Annotated[Positive, about("Time between SIGTERM and SIGKILL.")] = 10
    idle_after_s: Annotated[
        Positive, about("Time without a message, a read or CPU after which an agent is idle.")
    ] = 60
    stuck_after_s: Annotated[
        Positive, about("Time after which a silent agent that owes a read or an answer is stuck.")
    ] = 900
    output_mib: Annotated[
        Positive, about("Size of logs/NAME.log, an agent's output, at which it is rotated.")
    ] = 10


class AgentSettings(Settings, frozen=True):
    """Times after which a silent agent counts as inactive or terminated; agents in one checkout."""

    inactive_after_s: Annotated[
        Positive, about("Silence after which an agent gets no broadcasts; other mail still waits.")
    ] = 7 * 86_400
    dead_after_s: Annotated[
        Positive, about("Time since the end of an agent's process after which its mail bounces.")
    ] = 300
    shared_checkout: Annotated[
        bool, about("Tell sessions in one git work tree of each other; ask before git changes it.")
    ] = True


class ContinuitySettings(Settings, frozen=True):
    """State that agents save for their next run."""

    most_kib: Annotated[
        int, msgspec.Meta(gt=0, le=1000), about("Largest saved state; it is loaded as one message.")
    ] = 256
    keep_versions: Annotated[Positive, about("Saved states that are kept of each agent.")] = 10


class SecuritySettings(Settings, frozen=True):
    """Signatures and rates of agents."""

    require_signatures: Annotated[
        bool, about("Refuse unsigned messages as well, not only wrong signatures.")
    ] = False
    rate_per_s: Annotated[
        Positive, about("Messages per second that an agent may send for long; more wait.")
    ] = 200
    rate_burst: Annotated[Positive, about("Messages that an agent may send at once.")] = 10_000


class SearchSettings(Settings, frozen=True):
    """The index of `relay search`, search.db: about two bytes on disk for each byte of text."""

    index: Annotated[bool, about("Keep one; without it a search reads the whole store.")] = True
    sealed: Annotated[
        bool, about("Index an encrypted store, too: every text is in search.db in the clear.")
    ] = False


class AdminSettings(Settings, frozen=True):
    """Health, metrics and status over HTTP: on admin.sock in the home, always."""

    listen: Annotated[
        str, about("Loopback address as well, 127.0.0.1:9464 or [::1]:9464; empty: none.")
    ] = ""
    stall_after_s: Annotated[
        Positive, about("Time in one step after which the relay's loop counts as unhealthy.")
    ] = 15


class DiskSettings(Settings, frozen=True):
    """The disk that the home is on."""

    alert_percent: Annotated[Percent, about("Used part of the disk at which the relay warns.")] = 90
    low_percent: Annotated[
        Percent, about("Used part of the disk at which the archive is compressed early.")
    ] = 95
    floor_mib: Annotated[
        NotNegative, about("Free space below which no messages are accepted; 0: no such limit.")
    ] = 64


class RetentionSettings(Settings, frozen=True):
    """Retention of files that are no longer needed; 0: unlimited."""

    archive_days: Annotated[NotNegative, about("Age of the originals in archive/.")] = 90
    archive_mib: Annotated[NotNegative, about("Size of archive/.")] = 4096
    read_days: Annotated[
        NotNegative, about("Age of read messages in inbox/.read; the archive has them as well.")
    ] = 30
    read_mib: Annotated[NotNegative, about("Size of inbox/.read of all agents together.")] = 1024
    rejected_days: Annotated[NotNegative, about("Age of refused files.")] = 30
    output_days: Annotated[
        NotNegative, about("Age of the output of agents that no longer exist.")
    ] = 30
    attachments_days: Annotated[
        NotNegative, about("Age of attachments, since the last message that names them.")
    ] = 30
    attachments_mib: Annotated[
        NotNegative, about("Size of the attachments; 0: they are kept as long as their messages.")
    ] = 0
    audit_days: Annotated[
        NotNegative, about("Age of rows in the ledger's audit_log and security_events.")
    ] = 365
    every_s: Annotated[Positive, about("Time between two runs, in the background.")] = 3600


class Config(Settings, frozen=True):
    """Settings without a section, and the sections."""

    lead: Annotated[
        str, about("Agent that `TO: Lead` means; empty: the agent with the role lead.")
    ] = ""
    log_level: Annotated[
        str, about("Least level of lines in the log; debug logs a line for each message.")
    ] = "info"
    detection: DetectionSettings = DetectionSettings()
    limits: LimitSettings = LimitSettings()
    delivery: DeliverySettings = DeliverySettings()
    store: StoreSettings = StoreSettings()
    journal: JournalSettings = JournalSettings()
    ledger: LedgerSettings = LedgerSettings()
    attention: AttentionSettings = AttentionSettings()
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
    tree = None
    try:
        tree = config_json.parse(data)
        config = msgspec.convert(_without_former(tree), type=Config)
        msgspec.json.decode(data)  # it knows no text that is not Unicode
    except (msgspec.DecodeError, ValueError, RecursionError) as exc:
        settings = {*Config.__struct_fields__, *flatten(Config())}
        raise ConfigError(f"{path}: {config_json.fault(exc, tree, settings)}") from exc
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
    _check_programs(config, path)
    alert, most = config.ledger.wal_alert_mib, config.ledger.wal_most_mib
    if alert > most:
        raise ConfigError(
            f"{path}: ledger.wal_alert_mib is {alert}, expected no more than wal_most_mib, {most}"
        )
    return config


def _check_programs(config: Config, path: str) -> None:
    """Errors: ConfigError for a command without a program, and a root that none can be below."""
    commands = {f"spawn.clis.{name}": argv for name, argv in config.spawn.clis.items()}
    if config.attention.command:
        commands["attention.command"] = config.attention.command
    for name, argv in commands.items():
        if not argv or not argv[0]:
            raise ConfigError(f"{path}: {name} is {list(argv)}, expected a program first")
    for root in config.spawn.roots:
        if not os.path.isabs(root):  # the relay has no directory of its own, and no shell for `~`
            raise ConfigError(f"{path}: spawn.roots has {root!r}, expected absolute paths")


def _without_former(tree: Any) -> Any:
    """The values without those of former settings. Errors: ValueError for one that was changed."""
    for name, value in FORMER.items():
        section, _, key = name.partition(".")
        inner = tree.get(section) if isinstance(tree, dict) else None
        if isinstance(inner, dict) and key in inner:
            if inner.pop(key) != value:
                raise ValueError(f"{name} is always {value}, and no setting any more: remove it")
    if isinstance(tree, dict) and tree.get("retry") == {}:
        del tree["retry"]  # it had these settings only
    return tree


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
