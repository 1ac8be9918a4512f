"""Projects in which the hooks of agent CLIs are installed."""

from __future__ import annotations

import contextlib
import io
import sys
from pathlib import Path
from unittest import mock

from relay.cli import hooks, run


def install(root: Path, vendor: str, *words: str) -> Path:
    """A project with the hooks of ``relay hooks install``, whose session is bob."""
    project = root.parent / "project"
    project.mkdir()
    program = str(Path(sys.executable).with_name("relay"))
    command = ["hooks", "install", vendor, "--project", "--home", str(root), "--as", "bob", *words]
    with (
        contextlib.chdir(project),
        contextlib.redirect_stdout(io.StringIO()),
        mock.patch.object(hooks, "relay_command", lambda: [program]),
    ):
        assert run(command) == 0
    return project
