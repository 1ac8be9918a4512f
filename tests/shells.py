"""The shells of this machine, each with relay.sh sourced."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

RELAY_SH = Path(__file__).parents[1] / "agent_sdk" / "relay.sh"
SHELLS = {
    name: [path, *rest]
    for name, *rest in (["dash"], ["bash"], ["busybox", "sh"], ["zsh"])
    if (path := shutil.which(name))
}


def environment_of(home: Path, name: str, **more: str) -> dict[str, str]:
    """What a script that sources relay.sh has, as this agent. It does not wait for the relay."""
    return {
        "PATH": os.environ["PATH"],
        "RELAY_SH": str(RELAY_SH),
        "AGENT_RELAY_NAME": name,
        "AGENT_RELAY_DIR": str(home),
        "RELAY_NO_WAIT": "1",
        **more,
    }


class Shell:
    """One shell, as the agent ``sh-1`` of a home."""

    def __init__(self, command: list[str], folder: Path, home: Path) -> None:
        self._command = command
        self.folder = folder
        self.home = home

    def run(
        self, script: str, *args: str, stdin: bytes = b"", **env: str
    ) -> subprocess.CompletedProcess[bytes]:
        """Source relay.sh, run ``script``, and return what came out."""
        return subprocess.run(
            [*self._command, "-c", f'. "$RELAY_SH"\n{script}', "a-script", *args],
            input=stdin,
            cwd=self.folder,
            capture_output=True,
            start_new_session=True,
            env=environment_of(self.home, "sh-1", **env),
        )

    def ok(self, script: str, *args: str, stdin: bytes = b"", **env: str) -> str:
        """Its output; it must succeed and say nothing on stderr."""
        done = self.run(script, *args, stdin=stdin, **env)
        assert (done.returncode, done.stderr) == (0, b"")
        return done.stdout.decode()
