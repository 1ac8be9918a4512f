"""`relay acomm`: check, dump and build store files.

Needs neither a running relay nor a home. `check` and `dump` never write; `build` writes a new file
or, with --force, replaces a valid `.acomm`.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click

from relay.base.errors import EXIT_FINDINGS, NotFound, RelayError
from relay.cli.common import echo_findings, echo_json, findings_json, sanitize

# A copy of relay.acomm.jsonl.SECTIONS, so that `--help` need not import the codec.
SECTIONS = (
    "header",
    "channels",
    "messages",
    "subscriptions",
    "dead_letters",
    "archive",
    "engine_state",
)

CHECK_EXAMPLES = """\b
Examples:
  relay acomm check store/relay.acomm
  relay acomm check store/archive/*/*.acomm --json
  relay acomm check store/relay.acomm --keys public-keys"""

DUMP_EXAMPLES = """\b
Examples:
  relay acomm dump store/relay.acomm
  relay acomm dump store/relay.acomm --section messages | jq -r .status | sort | uniq -c"""

BUILD_EXAMPLES = """\b
Examples:
  relay acomm dump old.acomm | relay acomm build new.acomm
  relay acomm build new.acomm --from store.jsonl --no-compress"""

_PUBLIC_KEY = re.compile("[0-9a-fA-F]{64}")
_MOST_PUB_BYTES = 100
_FILE = click.Path(dir_okay=False)
_key_option = click.option(
    "--key-file", type=_FILE, help="Key file of an encrypted FILE, to read its contents."
)


@click.group(epilog="\b\nExample:\n  relay acomm check store/relay.acomm")
def acomm() -> None:
    """Check, dump and build `.acomm` store files."""


@acomm.command(epilog=CHECK_EXAMPLES)
@click.argument("files", metavar="FILE...", nargs=-1, required=True, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="One JSON object for programs.")
@click.option(
    "--keys",
    metavar="DIR",
    type=click.Path(exists=True, file_okay=False),
    help="Also check signatures: DIR/NAME.pub is NAME's public key, 64 hex digits.",
)
@_key_option
def check(files: tuple[str, ...], as_json: bool, keys: str | None, key_file: str | None) -> None:
    """Verify each FILE: checksum, records, counts, order, indexes; that the engine can open it.

    An encrypted FILE needs a key only to check its signatures or contents. Prints one line per
    problem, then their number, or OK. Exits 3 if there is a problem. No file is changed.
    """
    from relay.acomm.check import check_file

    key, public_keys = _key(key_file), _public_keys(keys)
    found = [(path, check_file(path, key, public_keys)) for path in files]
    if as_json:
        rows: list[dict[str, Any]] = []
        for path, findings in found:
            row = findings_json(findings)
            rows.append({"file": path, "ok": not row["problems"], **row})
        errors = sum(len(row["problems"]) for row in rows)
        echo_json({"errors": errors, "files": rows})
    else:
        errors = echo_findings(one for _, findings in found for one in findings)
    if errors:
        click.get_current_context().exit(EXIT_FINDINGS)


@acomm.command(epilog=DUMP_EXAMPLES)
@click.argument("file", type=_FILE)
@click.option("--section", type=click.Choice(SECTIONS), help="Only this section.")
@_key_option
def dump(file: str, section: str | None, key_file: str | None) -> None:
    """Print the contents of FILE as JSON lines: header, channels, messages, and so on.

    `relay acomm build` makes an equal file from them. Contents of an encrypted FILE stay encrypted
    without --key-file.
    """
    from relay.acomm import jsonl, store_file
    from relay.acomm.store_file import decrypt

    key = _key(key_file)
    with _disk(file):
        store = store_file.read(file, warn=_warn)
    if key is not None:
        store = decrypt(store, key, file)
    out = sys.stdout.buffer  # JSON lines are UTF-8 in every locale
    for line in jsonl.to_lines(store, section):
        out.write(line.encode() + b"\n")
    out.flush()


@acomm.command(epilog=BUILD_EXAMPLES)
@click.argument("file", type=_FILE)
@click.option(
    "--from",
    "source",
    metavar="JSONL",
    default="-",
    type=click.Path(dir_okay=False, allow_dash=True),
    help="JSON lines as printed by `dump`; - is standard input, the default.",
)
@click.option("--no-compress", is_flag=True, help="Do not compress the messages.")
@click.option("--force", is_flag=True, help="Replace FILE if it is a valid .acomm.")
def build(file: str, source: str, no_compress: bool, force: bool) -> None:
    """Write FILE from JSON lines: the header first, then records of any section.

    Indexes, counts and order are computed. An existing FILE is replaced only with --force, and
    never if it is damaged or not an `.acomm`.
    """
    from relay.acomm import jsonl, store_file

    _refuse_to_lose(file, force)
    store = jsonl.from_lines(_lines(source))
    with _disk(file):
        store_file.write(file, store, compress=not no_compress)
    click.echo(
        f"{file}: {len(store.channels)} channels, {len(store.messages)} messages, "
        f"{len(store.subscriptions)} subscriptions, {len(store.dead_letters)} dead letters, "
        f"{len(store.archive)} archived"
    )


def _key(path: str | None) -> bytes | None:
    """Load the key file, if given. Errors: KeyFileError."""
    from relay.base import crypto

    return None if path is None else crypto.load_key(path)


def _public_keys(folder: str | None) -> dict[str, bytes]:
    """Load the public keys by agent. Errors: RelayError for an invalid file."""
    found: dict[str, bytes] = {}
    for path in sorted(Path(folder).glob("*.pub")) if folder else ():
        with _disk(str(path)):
            text = path.read_bytes()[:_MOST_PUB_BYTES].decode("ascii", "replace").strip()
        if not _PUBLIC_KEY.fullmatch(text):
            raise RelayError(f"{path}: expected 64 hex digits", hint="a public key is 32 bytes")
        found[path.stem] = bytes.fromhex(text)
    return found


def _refuse_to_lose(path: str, force: bool) -> None:
    """Refuse to overwrite without --force, or what is not a valid file. Errors: RelayError."""
    from relay.acomm import store_file

    if not os.path.lexists(path):
        return
    if not force:
        raise RelayError(f"{path} already exists", hint="--force replaces a valid .acomm")
    with _disk(path):
        store_file.read(path, warn=_warn)


def _lines(source: str) -> Iterator[str]:
    """Yield the lines of a file or of standard input; invalid UTF-8 is reported by the parser."""
    with contextlib.ExitStack() as stack:
        stream = sys.stdin.buffer
        if source != "-":
            with _disk(source):
                stream = stack.enter_context(open(source, "rb"))
        for line in stream:
            yield line.decode("utf-8", "surrogateescape")


def _warn(line: str) -> None:
    click.echo(sanitize(f"warning: {line}"), err=True)


@contextlib.contextmanager
def _disk(path: str) -> Iterator[None]:
    """Turn an OSError into a RelayError that names the file."""
    try:
        yield
    except FileNotFoundError as exc:
        raise NotFound(f"{path}: {exc.strerror}", hint="check the name") from exc
    except OSError as exc:
        raise RelayError(f"{path}: {exc.strerror}") from exc
