"""``relay service``: install the relay as a service of the system."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import click

from relay.base.errors import EXIT_STATE
from relay.cli.common import echo_json, home_option, json_option, open_home, sanitize

if TYPE_CHECKING:
    from relay.daemon.service import Service


@click.group(epilog="\b\nExamples:\n  relay service install\n  relay service show")
def service() -> None:
    """Install the relay as a service: systemd or launchd.

    Writes a unit for your own user, one per home; root is not needed. The commands that activate
    it are printed, not run.
    """


@service.command(
    epilog="\b\nExamples:\n  relay service install\n  relay service install --print",
)
@home_option
@click.option("--print", "only_print", is_flag=True, help="Print the unit instead of writing it.")
@json_option
@click.pass_context
def install(ctx: click.Context, home: str | None, only_print: bool, as_json: bool) -> None:
    """Write the unit for this home and this Python; units of other homes stay."""
    from relay.daemon import service as services

    found = _of(ctx, home)
    if only_print:
        click.echo(found.text.decode(), nl=False)
        return
    is_new = services.install(found)
    if as_json:
        echo_json({"path": found.path, "changed": is_new, "commands": list(found.start)})
        return
    done = "wrote" if is_new else "unchanged:"
    click.echo("\n  ".join([f"{done} {found.path}; now run", *found.start]))


@service.command(epilog="\b\nExample:\n  relay service uninstall")
@home_option
@json_option
@click.pass_context
def uninstall(ctx: click.Context, home: str | None, as_json: bool) -> None:
    """Remove the unit of this home; a running relay keeps running."""
    from relay.daemon import service as services

    found = _of(ctx, home)
    services.uninstall(found)
    if as_json:
        echo_json({"path": found.path, "commands": list(found.stop)})
        return
    click.echo("\n  ".join([f"removed {found.path}. To stop the running service:", *found.stop]))


@service.command(epilog="\b\nExample:\n  relay service status")
@home_option
@json_option
@click.pass_context
def status(ctx: click.Context, home: str | None, as_json: bool) -> int:
    """Show whether the unit is installed and up to date. Exit code 5 if not."""
    from relay.daemon import service as services

    found = _of(ctx, home)
    there = services.read_installed(found)
    word = "missing" if there is None else "current" if there == found.text else "another"
    if as_json:
        echo_json({"path": found.path, "state": word})
    else:
        means = {
            "missing": "not installed; run `relay service install`",
            "current": "installed for this home and this Python",
            "another": "installed for another Python or version, or edited; "
            "run `relay service install` to replace it",
        }
        click.echo(f"{found.path}: {means[word]}")
    return 0 if word == "current" else EXIT_STATE


@service.command(epilog="\b\nExample:\n  relay service show")
@home_option
@click.pass_context
def show(ctx: click.Context, home: str | None) -> None:
    """Print the installed unit."""
    from relay.base.errors import NotFound
    from relay.daemon import service as services

    found = _of(ctx, home)
    there = services.read_installed(found)
    if there is None:
        raise NotFound(f"{found.path} is not installed", hint="`relay service install` writes it")
    click.echo(sanitize(there.decode(errors="replace"), lines=True), nl=False)


def _of(ctx: click.Context, home: str | None) -> Service:
    """Return the home's service on this system. Errors: HomeMissing, NoService."""
    from relay.daemon.service import service_of

    with open_home(ctx, home) as opened:
        return service_of(opened.root, os.environ)
