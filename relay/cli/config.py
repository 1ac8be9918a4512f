"""``relay config`` and ``relay where``: the settings, and the home that they belong to."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from relay.base import fsio
from relay.base.discovery import (
    CONFIG,
    DEFAULT,
    GIVEN,
    HOME_VARIABLE,
    PINNED,
    Choice,
    choose,
    default_home,
    has_config,
    search,
    two_homes,
)
from relay.base.errors import (
    EXIT_OK,
    EXIT_STATE,
    ConfigError,
    HomeMissing,
    KeyFileError,
    NotFound,
    SealedStore,
    UnsafePath,
)
from relay.base.home import Home, lock_holder
from relay.base.process_info import pid_text
from relay.base.text import did_you_mean
from relay.cli.common import (
    command,
    echo_json,
    given_home,
    name_home,
    open_home,
    print_rows,
    root_of,
    sanitize,
)
from relay.cli.tables import colour

if TYPE_CHECKING:
    from relay.base.config import Config

UNITS = {
    "_per_s": "per second",
    "_ms": "milliseconds",
    "_s": "seconds",
    "_days": "days",
    "_bytes": "bytes",
    "_kib": "KiB",
    "_mib": "MiB",
    "_percent": "percent",
}
TAKEN_S = 10.0  # a running relay takes over a change in a second, after the batch in hand
POLL_S = 0.05
MOST_SHOWN = 30  # characters of a value in a table


class Setting(NamedTuple):
    """A setting as people need it."""

    name: str  # with its section
    default: Any
    unit: str
    allowed: str
    meaning: str


def known_settings() -> dict[str, Setting]:
    """Every setting by its name, in the order of config.json."""
    from msgspec import inspect

    from relay.base.config import Config, flatten

    described: dict[str, Any] = {}
    for section in _fields(inspect.type_info(Config)):
        inner = {f"{section.name}.{field.name}": field.type for field in _fields(section.type)}
        described |= inner or {section.name: section.type}
    found: dict[str, Setting] = {}
    for name, default in flatten(Config()).items():
        kind = described[name]
        unit = next((unit for end, unit in UNITS.items() if name.endswith(end)), "")
        meaning = kind.extra_json_schema["description"]
        found[name] = Setting(name, default, unit, _allowed(name, kind.type), meaning)
    return found


def _fields(kind: Any) -> tuple[Any, ...]:
    """The fields of a section, as msgspec describes it; none for a setting."""
    return getattr(kind, "fields", ())


def _allowed(name: str, kind: Any) -> str:
    """Describe the values that a setting may have; ``kind`` is its type."""
    import msgspec

    from relay.base.config import CHOICES

    if isinstance(kind, msgspec.inspect.BoolType):
        return "true or false"
    if isinstance(kind, msgspec.inspect.IntType):
        least = kind.ge if kind.ge is not None else (kind.gt or 0) + 1
        is_bounded = kind.le is not None and kind.le < 2**31 - 1
        return f"{least} to {kind.le}" if is_bounded else f"{least} or more"
    if isinstance(kind, msgspec.inspect.VarTupleType):
        return "a list of texts"
    if isinstance(kind, msgspec.inspect.DictType):
        return "an object of lists of texts"
    return ", ".join(CHOICES.get(name, ())) or "a text"


def _complete_settings(ctx: click.Context, param: click.Parameter, incomplete: str) -> list[str]:
    from relay.base.config import Config, flatten

    return [name for name in flatten(Config()) if name.startswith(incomplete)]


@click.group(
    epilog="""\b
Examples:
  relay config show limits
  relay config set delivery.ack_timeout_s 2m
  relay config check"""
)
def config() -> None:
    """Show, check and change the settings in config.json.

    `relay config show` describes all settings. A running relay follows a change without a restart.
    """


@command(
    of=config,
    epilog="""\b
Examples:
  relay config show
  relay config show limits
  relay config show limits.batch_files""",
)
@click.argument("name", metavar="[SETTING]", required=False, shell_complete=_complete_settings)
def show(ctx: click.Context, home: str | None, name: str | None, as_json: bool) -> None:
    """Show settings: value, default, unit and meaning.

    SETTING is the name of a setting, or of a section. DEFAULT is shown where the value differs.
    """
    from relay.base.config import flatten, load

    with open_home(ctx, home) as opened:
        values = flatten(load(opened))
    settings = known_settings()
    wanted = [setting for setting in settings if name in (None, setting, setting.partition(".")[0])]
    if not wanted:
        raise _no_setting(str(name), settings)
    rows = [settings[setting]._asdict() | {"value": values[setting]} for setting in wanted]
    if wanted == [name] and not as_json:
        _show_one(rows[0])
        return
    header = ("SETTING", "VALUE", "DEFAULT", "UNIT", "MEANING")
    print_rows(rows, header, _cells, as_json=as_json, nothing="")


def _cells(row: dict[str, Any]) -> tuple[object, ...]:
    default = "" if row["value"] == row["default"] else _shown(row["default"])
    return row["name"], _shown(row["value"]), default, row["unit"], row["meaning"]


def _show_one(row: dict[str, Any]) -> None:
    unit = f" {row['unit']}" if row["unit"] else ""
    click.echo(colour(row["name"], bold=True))
    click.echo(f"  {row['meaning']}")
    click.echo(sanitize(f"  value    {json.dumps(row['value'], ensure_ascii=False)}{unit}"))
    click.echo(f"  default  {json.dumps(row['default'], ensure_ascii=False)}{unit}")
    click.echo(f"  allowed  {row['allowed']}")
    click.echo(name_home(f"  `relay config set {row['name']} VALUE` changes it at once"))


def _shown(value: Any) -> str | None:
    """Format a value for one cell: a text as it is, everything else as JSON."""
    is_plain = isinstance(value, str) and value
    text = value if is_plain else json.dumps(value, ensure_ascii=False)
    return sanitize(text, MOST_SHOWN)


def _no_setting(name: str, settings: dict[str, Setting]) -> NotFound:
    if any(setting.startswith(f"{name}.") for setting in settings):
        hint = f"`relay config show {name}` lists its settings"
        return NotFound(f"{name} is a section, and no setting", hint=hint)
    known = {*settings, *(setting.partition(".")[0] for setting in settings)}
    # half of a name is enough for a suggestion: `batch_file` for limits.batch_files
    last = {setting.rpartition(".")[2]: setting for setting in settings}
    meant = did_you_mean(name, known)
    if not meant and (found := did_you_mean(name, last)):
        word = found.removeprefix("did you mean ").rstrip("?")
        meant = f"did you mean {last[word]}?"
    hint = meant or "`relay config show` lists all settings"
    return NotFound(f"setting {name!a} does not exist", hint=hint)


@command(
    of=config,
    epilog="""\b
Examples:
  relay config check
  relay config check /tmp/new-config.json""",
)
@click.argument("path", metavar="[FILE]", required=False)
def check(ctx: click.Context, home: str | None, path: str | None, as_json: bool) -> None:
    """Check config.json of the home, or FILE, without changing anything.

    Exit code 2 if it is not valid. Warns when the lead is not an agent, and when the running relay
    uses other settings.
    """
    from relay.base.config import decode, load

    warnings: list[str] = []
    if path is not None:
        with open(path, "rb") as file:
            decode(file.read(), path)
    else:
        with open_home(ctx, home) as opened:
            found = load(opened)
            path = opened.path(CONFIG)
            if found.lead and found.lead not in opened.agent_inodes():
                meant = did_you_mean(found.lead, opened.agent_names())
                hint = meant or f"`relay register {found.lead}` creates it"
                warnings.append(f"lead: there is no agent {found.lead}; {hint}")
            warnings += _difference(opened, found)
    if as_json:
        echo_json({"file": path, "warnings": warnings})
        return
    for line in warnings:
        click.echo(sanitize(name_home(f"relay: {line}")), err=True)
    click.echo(f"{path}: OK")


def _difference(home: Home, config: Config) -> list[str]:
    """Warn of a running relay that uses other settings than these."""
    from relay.base.config import digest
    from relay.base.status_client import ask_status

    pid = lock_holder(home)
    status = None if pid is None else ask_status(home)
    if pid is None or not status or status.get("config") in (None, digest(config)):
        return []
    why = status.get("config_error") or "it has not read them yet: `kill -HUP` its pid"
    return [f"the running relay, {pid_text(pid)}, uses other settings: {why}"]


@command(
    "set",
    of=config,
    epilog="""\b
Examples:
  relay config set delivery.ack_timeout_s 2m
  relay config set spawn.roots '["/home/me/projects"]'
  relay config set spawn.clis.aider '["aider", "--message", "{prompt}"]'
  relay config set --unset delivery.ack_timeout_s""",
)
@click.argument("name", metavar="SETTING", shell_complete=_complete_settings)
@click.argument("text", metavar="[VALUE]", required=False)
@click.option("--unset", is_flag=True, help="Remove it from config.json: the default applies.")
def set_(
    ctx: click.Context, home: str | None, name: str, text: str | None, unset: bool, as_json: bool
) -> int:
    """Change a setting in config.json.

    VALUE is a number, a duration such as 10m, a text, true or false; a list or an object as JSON.
    The whole file is checked first, and the rest of it stays. A running relay takes the change over
    at once; exit code 5 if it does not.
    """
    from relay.base.config import flatten

    if unset == (text is not None):
        raise click.UsageError("expected either VALUE or --unset", ctx)
    with open_home(ctx, home) as opened:
        with opened.changing("agents", within_s=TAKEN_S):  # the home's own lock is the relay's
            before, after = _changed(opened, name, text)
        taken, note = _have_taken(opened, after, name)
    old, new = (_value_of(flatten(config), name) for config in (before, after))
    if as_json:
        echo_json({"setting": name, "old": old, "new": new, "taken": taken, "note": note})
    else:
        change = f"{_shown(old)} -> {_shown(new)}" if old != new else "unchanged"
        click.echo(f"{name}: {change}")
        click.echo(sanitize(name_home(note)), err=taken is False)
    return EXIT_STATE if taken is False else 0


def _changed(home: Home, name: str, text: str | None) -> tuple[Config, Config]:
    """Change a setting in the file. Returns the settings before and after. Errors: ConfigError."""
    from relay.base.config import decode

    path, data = home.path(CONFIG), home.read_config()
    before, tree = decode(data, path), json.loads(data)
    _change(tree, name, text)
    data = json.dumps(tree, indent=2, ensure_ascii=False).encode() + b"\n"
    try:
        after = decode(data, path)
    except ConfigError as exc:
        raise ConfigError(str(exc), hint="nothing was changed") from exc
    _check_encryption(home, before, after)
    fsio.write_atomic(path, data)
    return before, after


def _check_encryption(home: Home, before: Config, after: Config) -> None:
    """Errors: ConfigError for a change that no relay would start with."""
    from relay.base.clock import Clock
    from relay.daemon.opening import open_store_readonly, store_key

    old, new = before.store, after.store
    if (new.encrypt, new.key_file) == (old.encrypt, old.key_file):
        return
    path = home.path(CONFIG)
    if old.encrypt and not new.encrypt and store_key(home, before, make=False) is not None:
        text = f"{path}: store.encrypt: the store of this home is encrypted, for good"
        raise ConfigError(text, hint="nothing was changed; a new home may be plain")
    if not new.encrypt:
        return
    try:
        key = store_key(home, after, make=False)
        folder = os.path.dirname(home.path(new.key_file))
        if key is None and not os.path.isdir(folder):
            raise KeyFileError(f"key file {new.key_file}: {folder} is not a directory")
        open_store_readonly(home, Clock(), after, key)
    except (KeyFileError, SealedStore) as exc:
        text = f"{path}: no relay would start with it: {exc}"
        raise ConfigError(text, hint=f"nothing was changed; {exc.hint}") from exc


def _change(tree: dict[str, Any], name: str, text: str | None) -> None:
    """Set or remove one setting in the content of config.json."""
    setting, default = _setting_of(name), known_settings()[_setting_of(name)].default
    section, _, key = setting.rpartition(".")
    values = tree.setdefault(section, {}) if section else tree
    if setting != name:  # an entry of an object, which is whole in the file
        values[key] = values = dict(values.get(key, default))
        key = name.removeprefix(f"{setting}.")
    if text is None:
        values.pop(key, None)
    elif isinstance(default, str):
        values[key] = text
    else:
        try:
            values[key] = json.loads(text)
        except ValueError:
            values[key] = text  # the check of the file says what was expected
    if tree.get(section) == {}:
        del tree[section]


def _setting_of(name: str) -> str:
    """Return the setting that a name means: itself, or that of `spawn.clis.NAME`.

    Errors: NotFound.
    """
    settings = known_settings()
    for key, setting in settings.items():
        if name == key or (name.startswith(f"{key}.") and isinstance(setting.default, dict)):
            return key
    raise _no_setting(name, settings)


def _value_of(values: dict[str, Any], name: str) -> Any:
    """Return the value of a setting, or of an entry of one; None if there is no such entry."""
    setting = _setting_of(name)
    value = values[setting]
    return value if setting == name else value.get(name.removeprefix(f"{setting}."))


def _have_taken(home: Home, config: Config, name: str) -> tuple[bool | None, str]:
    """Have the running relay read config.json, where ``name`` was set, and wait until it uses it.

    Returns True, or False with the reason, or None without a relay.
    """
    from relay.base.config import digest, load
    from relay.base.status_client import ask_status

    pid = lock_holder(home)
    if pid is None:
        return None, "no relay is running; the next start uses it"
    status = ask_status(home)
    if status is None:
        return False, f"the relay, {pid_text(pid)}, does not answer; its next start uses it"
    if not status.get("reloads"):
        return False, f"the relay, {pid_text(pid)}, runs at a terminal; its next start uses it"
    if not pid:
        where = pid_text(pid)
        return False, f"the relay, {where}, gets no signal from here; its next start uses it"
    error_before, trouble_before = status.get("config_error"), status.get("admin_trouble")
    wanted = digest(config)
    starts = status["starts"] + (status.get("config") != wanted)  # a change needs a new session
    os.kill(pid, signal.SIGHUP)
    deadline = time.monotonic() + TAKEN_S
    while time.monotonic() < deadline:
        status = ask_status(home) or {}
        with contextlib.suppress(ConfigError):
            wanted = digest(load(home))  # as others have changed it since
        error = status.get("config_error")
        if error and error != error_before:
            break
        is_used = status.get("config") == wanted and status.get("starts", 0) >= starts
        if is_used and status.get("ready") and not error:
            trouble = status.get("admin_trouble")
            if trouble and (name == "admin.listen" or trouble != trouble_before):
                return False, f"the running relay, pid {pid}, has {trouble}"
            return True, f"the running relay, pid {pid}, uses it"
        time.sleep(POLL_S)
    why = status.get("config_error") or f"not within {TAKEN_S:g} s; `relay status` shows its state"
    return False, f"the running relay, pid {pid}, has not taken it over: {why}"


@command(epilog="\b\nExamples:\n  relay where\n  cd $(relay where --json | jq -r .home)")
def where(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Show the home, the rule that chose it, and other homes.

    The rules: --home, else $AGENT_RELAY_DIR, else the nearest .agent-relay in or above the working
    directory (below your own; for a linked git work tree also those of the main one), else
    ~/.agent-relay.

    Exit code 5 if it does not exist, or is refused: a home that was found above the working
    directory has to be this user's alone.
    """
    choice = choose(given_home(ctx, home))
    others = _other_homes(choice)
    how = choice.found.how if choice.found else choice.rule
    problem, pid = "", None
    try:
        with Home(root_of(ctx, home)) as opened:
            pid = lock_holder(opened)
    except (HomeMissing, UnsafePath) as exc:
        problem = f"{exc}; {exc.hint}"
    error = None if choice.rule == GIVEN else two_homes()
    if as_json:
        facts = {"home": choice.root, "chosen_by": choice.rule, "how": how, "pid": pid}
        others_json = [{"home": root, "how": text} for root, text in others]
        exists = os.path.lexists(os.path.join(choice.root, CONFIG))
        echo_json({**facts, "exists": exists, "problem": problem, "others": others_json})
        return EXIT_STATE if problem else EXIT_OK
    click.echo(sanitize(f"{choice.root}  ({how})"))
    state = "no relay is running" if pid is None else f"a relay is running, {pid_text(pid)}"
    click.echo(sanitize(name_home(problem or state)))
    for root, text in others:
        click.echo(sanitize(f"not used: {root}  ({text})"))
    if error:
        text = f"no messages are taken: {error}; {error.hint}"
        click.echo(sanitize(text), err=True)
    return EXIT_STATE if problem else EXIT_OK


def _other_homes(choice: Choice) -> list[tuple[str, str]]:
    """List the homes that exist and that the rules after the first would choose, and why."""
    found = search()
    named = [(os.environ.get(HOME_VARIABLE), PINNED), (default_home(), DEFAULT)]
    if found:
        how = f"{found.how}, {found.problem}" if found.problem else found.how
        named.insert(1, (found.root, how))
    seen, others = {os.path.realpath(choice.root)}, []
    for root, text in named:
        if root and os.path.realpath(root) not in seen and has_config(root):
            seen.add(os.path.realpath(root))
            others.append((os.path.abspath(root), text))
    return others
