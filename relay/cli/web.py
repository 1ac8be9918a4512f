"""``relay web``: the page for a browser, in a process of its own."""

from __future__ import annotations

import importlib.util
import os
import signal
import sys

import click

from relay.base.errors import RelayError
from relay.base.home import Home
from relay.cli.common import command, not_empty, root_of

NEEDED = ("starlette", "uvicorn", "jinja2")


@command(
    json=False,
    epilog="""\b
Examples:
  relay web
  relay web --port 8377
  relay web --uds ~/relay-web.sock --port 8377    # there: ssh -L 8377:relay-web.sock HOST""",
)
@click.option(
    "--port",
    type=click.IntRange(1024, 65535),
    metavar="N",
    help="The port [any that is free]; with --uds: that of the browser.",
)
@click.option(
    "--uds",
    metavar="PATH",
    callback=not_empty,
    help="Listen on a Unix socket instead, for `ssh -L`.",
)
def web(ctx: click.Context, home: str | None, port: int | None, uds: str | None) -> None:
    """Serve the page of this home to a browser on this machine, until ^C.

    Prints its address; what follows the `#` is the key, without which nothing is shown. It is good
    until this process ends. The page reads; what is done there is sent as the operator's message.
    Needs the extra `web`.
    """
    if missing := [name for name in NEEDED if importlib.util.find_spec(name) is None]:
        raise RelayError(
            f"the page needs the package {missing[0]}",
            hint="`pip install '.[web]'` in the source of agent-relay; the relay runs without",
        )
    if uds and port is None:
        raise click.UsageError("--uds needs --port: the browser's, as in ssh -L PORT:PATH", ctx)
    root = root_of(ctx, home)
    Home(root).close()
    words = ["--home", root, *(["--port", str(port)] if port else [])]
    words += ["--uds", os.path.abspath(uds)] if uds else []
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])  # ^C waits until the page can end
    os.execv(sys.executable, [sys.executable, "-P", "-m", "relay.web", *words])
