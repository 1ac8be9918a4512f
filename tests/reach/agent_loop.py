"""An agent CLI: it runs commands, and hooks in forks of itself, which has loaded what they load."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import traceback

from relay.reach import hook


def run_hook(words: list[str], at: str, command: str, given: bytes) -> tuple[int, bytes, bytes]:
    """A hook in a fork; at that step a shell runs the command."""
    files = [tempfile.TemporaryFile() for _ in range(3)]
    files[0].write(given)
    files[0].seek(0)
    pid = os.fork()
    if pid == 0:
        try:
            for number, file in enumerate(files):
                os.dup2(file.fileno(), number)
            hook.step = lambda name: name == at and os.system(command)
            os._exit(hook.main(words))
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    printed = []
    for file in files[1:]:
        file.seek(0)
        printed.append(file.read())
        file.close()
    return code, printed[0], printed[1]


def run_command(argv: list[str], given: bytes) -> tuple[int, bytes, bytes]:
    """A command in a process of its own."""
    done = subprocess.run(argv, input=given, capture_output=True, check=False)
    return done.returncode, done.stdout, done.stderr


def main() -> None:
    """Answer each line of stdin with one: exit status, stdout and stderr."""
    os.chdir(sys.argv[1])
    for line in sys.stdin:
        call = json.loads(line)
        given = call.pop("stdin").encode("latin-1")
        code, out, err = (run_command if "argv" in call else run_hook)(*call.values(), given)
        print(json.dumps([code, out.decode(), err.decode()]), flush=True)
