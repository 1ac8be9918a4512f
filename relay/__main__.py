"""The console script ``relay``, and ``python -m relay``.

Hooks run for each tool call of an agent, and a bell for each session: both start without the
command line's library.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run a hook, a bell or a command, and exit with its exit code."""
    try:
        _run(sys.argv[1:])
    except KeyboardInterrupt:  # during the imports: a command handles its own
        sys.exit(130)


def _run(words: list[str]) -> None:
    if words[:1] == ["hook"]:
        import gc
        import os

        gc.disable()  # a hook is over in a moment: 2 ms of its 27

        from relay.reach.hook import main as hook

        os._exit(hook(words[1:]))  # nothing is buffered; a third of the time of an orderly exit
    if words[:1] == ["bell"]:
        from relay.reach.bell import main as bell

        sys.exit(bell(words[1:]))
    from relay.cli import main as command

    command()


if __name__ == "__main__":
    main()
