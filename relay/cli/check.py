"""``relay check`` and ``relay doctor``: whether files, or a whole home, are as they should be.

What a file is, its first bytes say; its name only where they do not. Each kind of file has one
check, in the room that writes it. Nothing is changed, except by ``relay doctor --repair``.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import click

from relay.acomm import check as acomm_check
from relay.acomm.container import OTHER_MAGIC
from relay.base import archive_pack, crypto, fsio
from relay.base.discovery import CONFIG
from relay.base.errors import EXIT_FINDINGS, RelayError
from relay.base.finding import Finding, Severity
from relay.base.home import Home, looks_like_home
from relay.cli.common import (
    NAMED_HOME,
    command,
    echo_json,
    given_home,
    name_home,
    open_home,
    plural,
    root_of,
    sanitize,
)
from relay.journal import check as journal_check
from relay.journal.format import SEGMENT_MAGIC
from relay.journal.manifest_format import CHUNK_MAGIC, SNAPSHOT_MAGIC
from relay.ledger import attachments
from relay.ledger import check as ledger_check
from relay.search import check as search_check
from relay.search.index import APPLICATION_ID

HOME, STREAM, MANIFEST = "home", "journal stream", "journal manifest"
STORE, SEGMENT, CHUNK, SNAPSHOT = "store", "journal segment", "manifest chunk", "catalog snapshot"
LEDGER, SEARCH, PACK, ATTACHMENT = "ledger", "search index", "packed day", "attachment"
_MAGICS = {
    OTHER_MAGIC: STORE,
    SEGMENT_MAGIC.to_bytes(8, "little"): SEGMENT,
    CHUNK_MAGIC.to_bytes(8, "little"): CHUNK,
    SNAPSHOT_MAGIC.to_bytes(8, "little"): SNAPSHOT,
}
_SUFFIXES = {  # of files without their magic, and of compressed ones
    ".acomm": STORE,
    ".seg": SEGMENT,
    ".seg.zst": SEGMENT,
    ".mlog": CHUNK,
    ".snap": SNAPSHOT,
    ".tar.zst": PACK,
    ".db": LEDGER,
}
_SQLITE = b"SQLite format 3\0"
_HEAD_BYTES = 100  # of a SQLite file; its application id is in the last third
_KNOWN = "name a home, a journal stream, or one of their files"
_ADVICE = "restore it from a backup; `relay doctor` says what the next start makes of it"
_DIGEST = re.compile("[0-9a-f]{64}")
_PUBLIC_KEY = re.compile("[0-9a-fA-F]{64}")
_MOST_PUB_BYTES = 100

key_option = click.option(
    "--key-file",
    type=click.Path(dir_okay=False),
    help="The key file of an encrypted store, to read its contents.",
)


@command(
    epilog="""\b
Examples:
  relay check
  relay check /backup/monday
  relay check store/relay.acomm journal/*/segments/*.seg ledger.db
  relay check store/relay.acomm --keys public-keys"""
)
@click.argument("files", metavar="[FILE]...", nargs=-1, type=click.Path(readable=False))
@click.option(
    "--keys",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Also check a store's signatures: DIR/NAME.pub is NAME's public key, 64 hex digits.",
)
@key_option
def check(
    ctx: click.Context,
    home: str | None,
    files: tuple[str, ...],
    keys: str | None,
    key_file: str | None,
    as_json: bool,
) -> int:
    """Check that files are whole: stores, journals, ledgers, packs, attachments, homes.

    Without FILE it checks the whole home, as `relay doctor --deep`. Prints for each FILE what it is
    and OK, or a line for each problem: where, what was expected, what to do. Exits 3 if there is
    one. An encrypted store needs its key only to check signatures. Changes nothing.
    """
    if not files:
        done: int = ctx.invoke(doctor, home=home, do_repair=False, deep=True, as_json=as_json)
        return done
    key = None if key_file is None else crypto.load_key(key_file)
    public_keys = _public_keys(keys)
    is_bad = False
    for path in files:
        _let_advice_name(ctx, path, home)
        kind, note, problems, warnings = _checked(path, key, public_keys)
        is_bad |= bool(problems)
        if as_json:
            row: dict[str, Any] = {"file": path, "kind": kind or None, "ok": not problems}
            echo_json({**row, "problems": problems, "warnings": warnings})
            continue
        for line in warnings:
            click.echo(sanitize(f"warning: {line}"), err=True)
        for line in problems or [f"{path}: OK, {note or kind}"]:
            click.echo(sanitize(line))
    return EXIT_FINDINGS if is_bad else 0


def _let_advice_name(ctx: click.Context, path: str, home: str | None) -> None:
    """Let the advice about a file name the home that the file is in, or else the one given."""
    ctx.meta[NAMED_HOME] = None
    folders = map(str, Path(path).absolute().parents)
    homes = (
        folder
        for folder in folders
        if all(os.path.lexists(os.path.join(folder, name)) for name in (CONFIG, "agents"))
    )
    root = next(homes, given_home(ctx, home))
    if root is not None:
        root_of(ctx, root)


def _checked(
    path: str, key: bytes | None, public_keys: dict[str, bytes]
) -> tuple[str, str, list[str], list[str]]:
    """(kind of a file, a note on its content, lines of problems, lines of warnings)."""
    kind, note, findings = "", "", list[Finding]()
    try:
        kind = kind_of(path)
        if kind == LEDGER:
            findings, content = ledger_check.check_file(path)
            note = f"{LEDGER}, {content}"
        else:
            findings = list(_findings(path, kind, key, public_keys))
    except RelayError as exc:
        findings = [Finding(kind, path, str(exc), exc.hint)]
    except OSError as exc:
        is_gone = isinstance(exc, FileNotFoundError)
        advice = "check the name" if is_gone else "`ls -ld` shows who may read it"
        findings = [Finding.of_error(kind, exc, path, advice)]
    lines: dict[bool, list[str]] = {True: [], False: []}
    for finding in findings:
        least = Severity.WARNING if kind in (HOME, SEARCH) else Severity.ERROR
        is_problem = finding.severity in (least, Severity.ERROR)
        text = str(finding) if kind == HOME else finding.text
        text = f"{path}: {text}" if kind == LEDGER and path not in text else text
        advice = finding.advice or (_ADVICE if is_problem else "")
        line = text if kind == HOME or not advice else f"{text}; {advice}"
        lines[is_problem].append(name_home(line))
    return kind, note, lines[True], lines[False]


def _findings(
    path: str, kind: str, key: bytes | None, public_keys: dict[str, bytes]
) -> Iterable[Finding]:
    """The findings of the check of this kind."""
    if kind == STORE:
        return acomm_check.check_file(path, key, public_keys)
    if kind == MANIFEST:
        return journal_check.check_manifest(os.path.dirname(os.path.abspath(path)))
    checks: dict[str, Callable[[str], Iterable[Finding]]] = {
        HOME: _of_home,
        SEARCH: lambda path: search_check.check(path, deep=True),
        PACK: archive_pack.check_file,
        ATTACHMENT: attachments.check_file,
    }
    return checks.get(kind, journal_check.check)(path)


def _of_home(path: str) -> Iterator[Finding]:
    from relay.daemon.home_backup import MANIFEST
    from relay.doctor import examine

    with open_home(click.get_current_context(), path) as home:
        if os.path.lexists(home.path(MANIFEST)):
            yield from _of_backup(home)
        yield from examine(home, deep=True)


def _of_backup(home: Home) -> Iterator[Finding]:
    """Compare every file of a backup with its list, as a restore does."""
    from relay.daemon.home_backup import read_backup

    advice = "the backup is damaged: restore another one"
    for entry in read_backup(home.root).files:
        path = home.path(entry.path)
        try:
            with open(fsio.open_read(path), "rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
        except (RelayError, OSError) as exc:
            yield Finding.of_error("backup", exc, path, advice)
            continue
        if found != entry.sha256:
            yield Finding("backup", path, found, advice, expected=f"SHA-256 {entry.sha256}")


def kind_of(path: str) -> str:
    """The kind of a file or directory. Errors: RelayError, OSError."""
    name, mode = os.path.basename(path), os.stat(path).st_mode
    if stat.S_ISDIR(mode):
        if looks_like_home(path):
            return HOME
        inside = {each.name for each in os.scandir(path) if each.is_dir()}
        if inside & {"segments", "manifest", "warm"}:
            return STREAM
        if os.path.basename(os.path.abspath(path)) == "manifest":
            return MANIFEST
        raise RelayError(f"{path}: neither a home nor a journal stream", hint=_KNOWN)
    if not stat.S_ISREG(mode):
        raise RelayError(f"{path}: not a regular file", hint=_KNOWN)
    with open(path, "rb") as file:
        head = file.read(_HEAD_BYTES)
    if _DIGEST.fullmatch(name):
        return ATTACHMENT
    if head.startswith(_SQLITE):
        return SEARCH if APPLICATION_ID.to_bytes(4) == head[68:72] else LEDGER
    by_magic = (kind for magic, kind in _MAGICS.items() if head.startswith(magic))
    by_name = (kind for suffix, kind in _SUFFIXES.items() if name.endswith(suffix))
    for kind in (*by_magic, *by_name):
        return kind
    found = f"its first bytes, {head[:8].hex()}, are of no file of a relay" if head else "empty"
    raise RelayError(f"{path}: {found}", hint=_KNOWN)


def _public_keys(folder: str | None) -> dict[str, bytes]:
    """Load the public keys by agent. Errors: RelayError for an invalid file."""
    found: dict[str, bytes] = {}
    for path in sorted(Path(folder).glob("*.pub")) if folder else ():
        text = path.read_bytes()[:_MOST_PUB_BYTES].decode("ascii", "replace").strip()
        if not _PUBLIC_KEY.fullmatch(text):
            raise RelayError(f"{path}: expected 64 hex digits", hint="a public key is 32 bytes")
        found[path.stem] = bytes.fromhex(text)
    return found


@command(
    epilog="\b\nExamples:\n  relay doctor\n  relay doctor --repair\n"
    "  relay doctor --json | jq -r .remedy"
)
@click.option("--repair", "do_repair", is_flag=True, help="Apply the safe repairs and report them.")
@click.option("--deep", is_flag=True, help="Also read every attachment and archive.")
def doctor(ctx: click.Context, home: str | None, do_repair: bool, deep: bool, as_json: bool) -> int:
    """Check the home for problems: settings, process, limits, files, store, journal, tiers,
    ledger, attachments.

    Prints one line per finding with what to do, then the number of problems, or OK. Of a very
    large home it checks a part, and says so. Exits 3 if there is a problem; notes do not count.
    The relay may be running. Without --repair no file is changed; --repair only restricts file
    modes and removes leftovers of crashes.
    """
    from relay.doctor import Severity, examine

    with open_home(ctx, home) as opened:
        if do_repair:
            _repair(opened, list(examine(opened, deep=deep)), as_json)
        problems, is_part = 0, False
        for finding in examine(opened, deep=deep):
            problems += finding.severity is not Severity.NOTE
            is_part |= finding.is_partial
            if as_json:
                echo_json(_facts(finding))
            else:
                click.echo(sanitize(name_home(str(finding))))
    if not as_json:
        well = "OK, as far as checked" if is_part else "OK"
        click.echo(f"{plural(problems, 'problem')} found" if problems else well)
    return EXIT_FINDINGS if problems else 0


def _repair(home: Home, findings: list[Finding], as_json: bool) -> None:
    from relay.doctor import repair

    for finding, error in repair(home, findings):
        if as_json:
            echo_json({"repair": finding.action, "path": finding.path, "error": error or None})
        else:
            done = f"{finding.action} {finding.path}"
            click.echo(sanitize(f"not {done}: {error}" if error else done), err=bool(error))


def _facts(finding: Finding) -> dict[str, Any]:
    return {
        "check": finding.what,
        "severity": str(finding.severity),
        "where": finding.where or None,
        "finding": finding.text,
        "remedy": name_home(finding.advice),
        "repairable": bool(finding.repairs),
    }
