"""``relay key``: the keys that agents sign with."""

from __future__ import annotations

import contextlib
import json
import os
from typing import Any

import click

from relay.base import fsio
from relay.base.errors import LedgerError, NotFound
from relay.base.home import KEY, LEDGER, META, Home
from relay.base.names import OPERATOR, check_agent_name
from relay.cli.common import (
    command,
    complete_agents,
    name_home,
    open_home,
    read_agent_meta,
    say,
)
from relay.cli.request import control_options, send_command


@click.group(
    epilog="""\b
Examples:
  relay key make alice
  relay key show alice
  relay key trust alice 4f0c…   # 64 hex digits""",
)
def key() -> None:
    """Create and confirm the keys that agents sign with.

    An agent with a key signs its messages; the SDK and `relay send` do it automatically. The relay
    registers the first public key in an agent's meta.json and ignores others until confirmed.
    """


@command("make", of=key, epilog="\b\nExamples:\n  relay key make alice\n  relay key make operator")
@click.argument("name", shell_complete=complete_agents)
def make_key(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Create an agent's key, and write the public key to its meta.json.

    The private key is agents/NAME/key, mode 600; it is never replaced. To change the key, remove
    the file, create a new one and confirm it with `relay key trust`; until then all is refused.
    """
    from relay.base.crypto import create_key, load_key, public_key

    check_agent_name(name)
    with open_home(ctx, home) as opened:
        is_new = name not in opened.agent_names()
        opened.make_agent(name)
        path = opened.path("agents", name, KEY)
        private = load_key(path) if os.path.lexists(path) else create_key(path)
        public = public_key(private).hex()
        with opened.changing("agents", name):
            meta = read_agent_meta(opened, name)
            if meta.get("public_key") != public:
                data = json.dumps(meta | {"public_key": public}, indent=2).encode() + b"\n"
                fsio.write_atomic(opened.path("agents", name, META), data)
        if is_new:
            click.echo(f"relay: created agent {name} in {opened.root}", err=True)
        with contextlib.suppress(LedgerError):  # no relay has run yet, or not one of this version
            if _registered(opened, name) not in (None, public):
                click.echo(name_home(_to_confirm(name, public)), err=True)
    say(public, {"name": name, "public_key": public}, as_json)


@command("show", of=key, epilog="\b\nExample:\n  relay key show alice --json")
@click.argument("name", shell_complete=complete_agents)
def show_key(ctx: click.Context, home: str | None, name: str, as_json: bool) -> None:
    """Show the public key used to check an agent's signatures.

    If none is registered, the one in its meta.json, which is registered with its next message.
    """
    with open_home(ctx, home) as opened:
        public: object = _registered(opened, name)
        if public is None and name in opened.agent_inodes():
            public = read_agent_meta(opened, name).get("public_key")
    if not isinstance(public, str):
        raise NotFound(f"{name!a} has no key", hint=f"create one with `relay key make {name}`")
    say(public, {"name": name, "public_key": public}, as_json)


def _registered(home: Home, name: str) -> str | None:
    """Read the key that the relay checks signatures against. Errors: as ``open_current``."""
    from relay.ledger.file import open_current

    with contextlib.closing(open_current(home.path(LEDGER))) as db:
        row = db.execute("SELECT public_key FROM agents WHERE name = ?", (name,)).fetchone()
    return row["public_key"] if row else None


def _to_confirm(name: str, public: str) -> str:
    """Say how a key that is not the registered one becomes it."""
    told = (
        f"relay: another key is registered for {name}; what this one signs is refused until "
        f"`relay key trust {name} {public}`"
    )
    if name == OPERATOR:  # whose command it is
        told += f"; move agents/{OPERATOR}/{KEY} away while that runs, or it is refused, too"
    return told


@key.command(
    "trust", epilog="\b\nExamples:\n  relay key trust alice 4f0c…\n  relay key trust alice none"
)
@control_options
@click.argument("name", shell_complete=complete_agents)
@click.argument("public_key", metavar="HEX")
def trust_key(ctx: click.Context, /, name: str, public_key: str, **caller: Any) -> None:
    """Change the key used to check an agent's signatures.

    HEX is 64 hex digits as printed by `relay key show`, or none: then the key in its meta.json is
    registered with its next message. Only the operator and the lead may do this.
    """
    send_command(ctx, "agent.key", {"NAME": name, "KEY": public_key}, **caller)
