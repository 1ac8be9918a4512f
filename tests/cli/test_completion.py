"""Completion of commands and names, as bash and zsh ask for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pexpect
import pytest

from relay.cli.usage import SHELLS
from tests.procs import PATIENCE_S, environment, home_of, relay

BASH = """
eval "$(relay completion bash)"
while read -r -a COMP_WORDS; do
    [ "${COMP_WORDS[-1]}" != '""' ] || COMP_WORDS[-1]=
    COMP_CWORD=$((${#COMP_WORDS[@]} - 1))
    COMPREPLY=()
    _relay_completion relay
    echo "${COMPREPLY[@]}"
done
"""
COMPLETED = """\
relay se                     send search service
relay channel cre            create
relay send bob hi --ki       --kind
relay send b                 bob builder
relay send #                 #ci #team
relay inbox --as a           alice
relay channel show ""        ci team
relay thread release-        release-42 release-43
relay config set limits.b    limits.batch_files
relay --home /nowhere send b
"""
ORIGINALS = {
    "1700000000000000001-01": "TO: #ci\nTHREAD: release-42\n\nhi",
    "1700000000000000002-02": "TO: __orchestrator__\n\nACTION: channel.create\nCHANNEL: team\n",
    "1700000000000000003-03": "TO: bob\nTHREAD: release-43\n\nTO: nobody\n",
    "1700000000000000004-04": "TO: bob\n\nTHREAD: release-$(touch${IFS}x)\nTHREAD: release-`id`\n",
}


@pytest.fixture
def home(tmp_path: Path) -> Path:
    root = home_of(tmp_path / "home", "alice", "bob", "builder")
    folder = root / "archive" / "2026-11-20" / "alice"
    folder.mkdir(parents=True)
    for name, text in ORIGINALS.items():
        (folder / f"{name}.msg").write_text(text)
    return root


def shell_environment(home: Path, tmp_path: Path) -> dict[str, str]:
    """One in which `relay` is this code's."""
    program = tmp_path / "bin" / "relay"
    program.parent.mkdir(exist_ok=True)
    program.write_text(f'#!/bin/sh\nexec "{sys.executable}" -m relay "$@"\n')
    program.chmod(0o755)
    path = f"{program.parent}{os.pathsep}{os.environ['PATH']}"
    return environment(PATH=path, AGENT_RELAY_DIR=str(home), TERM="dumb")


def test_bash_completes_commands_options_and_names(home: Path, tmp_path: Path) -> None:
    lines = [line.partition("  ") for line in COMPLETED.splitlines()]
    done = subprocess.run(
        ["bash", "-c", BASH],
        env=shell_environment(home, tmp_path),
        input="".join(f"{words}\n" for words, _, _ in lines),
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stderr) == (0, ""), done
    assert done.stdout.splitlines() == [names.strip() for _, _, names in lines]


@pytest.mark.skipif(shutil.which("zsh") is None, reason="there is no zsh here")
def test_zsh_completes_a_name(home: Path, tmp_path: Path) -> None:
    with pexpect.spawn(
        "zsh",
        ["-f", "-i"],
        env=shell_environment(home, tmp_path),  # type: ignore[arg-type]
        encoding="utf-8",
        timeout=PATIENCE_S,
    ) as view:
        view.sendline(
            "PS1='> '; autoload -Uz compinit; compinit -u -D; eval \"$(relay completion zsh)\""
        )
        view.sendline("echo is-ready-$((1 + 1))")
        view.expect("is-ready-2")
        view.send("relay send al\t")
        view.expect("relay send alice ")


@pytest.mark.parametrize("shell", SHELLS)
def test_each_script_asks_this_command(shell: str, home: Path) -> None:
    done = relay("completion", shell, home=home)
    assert done.returncode == 0 and f"_RELAY_COMPLETE={shell}_complete" in done.stdout
