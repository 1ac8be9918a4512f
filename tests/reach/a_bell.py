"""A bell whose waits are told, and which may be killed in the middle of its work.

Its words: the pause after a ring that nobody answers, how long it waits for the word of Claude's
socket and for any event, the number of the call before which it is killed (0: none), and those of
``bell.serve``.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable
from typing import Any

from relay.reach import bell, ringing, rungs


def kill_before(number: int) -> None:
    """Be killed before that call of these."""
    left = number

    def killing(call: Callable[..., Any]) -> Callable[..., Any]:
        def killed(*args: Any, **options: Any) -> Any:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            return call(*args, **options)

        return killed

    for name in ("open", "pwrite", "ftruncate", "rename"):
        setattr(os, name, killing(getattr(os, name)))
    for name in ("_connect", "_answer"):
        setattr(rungs, name, killing(getattr(rungs, name)))


def main() -> None:
    """Ring until the session has ended."""
    pause_s, answer_s, look_s, number, *words = sys.argv[1:]
    ringing.PAUSES_S = (float(pause_s),)  # type: ignore[assignment]
    rungs.ANSWER_S, ringing.LOOK_S = float(answer_s), float(look_s)
    if int(number):
        kill_before(int(number))
    bell.serve(*words)


if __name__ == "__main__":
    main()
